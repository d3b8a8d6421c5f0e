"""A run in words: the line a round and the closing lines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umbel.data import Manifest
from umbel.models.model import Model
from umbel.privacy.accounting.guarantee import DELTA, amount, gap, guarantee, in_words
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.release import Release
from umbel.server.history import Round, State, diverged

_SHOWN_PARAMETERS = 3
DIVERGED = "Ask more clients a round, or try fewer hypotheses, less noise or a smaller step-size."
"""What to do where the rounds diverged."""


@dataclass(frozen=True)
class Summary:
    """Says what happens, in the units of the data.

    Attributes
    ----------
    model : Model
    manifest : Manifest or None
        Whose units and truth are used, if there is one.
    release : Release
        What a client gives away each time that it takes part.
    """

    model: Model
    manifest: Manifest | None
    release: Release

    def round_line(self, entry: Round, rounds: int) -> str:
        """Return the line that the log shows for a round."""
        line = f"round {entry.number:>{len(str(rounds))}}/{rounds}" if entry.asked else "after the last round"
        if entry.loss is not None and entry.metric is not None:
            line += f"  validation {self.loss(entry.loss)}"
            if self.model.metric.name != "rmse":
                line += f"  {self.model.metric.name} {entry.metric:.4f}"
            line += f"  best after {entry.best_round - 1} rounds"
        if entry.asked:
            groups = "+".join(map(str, entry.groups))
            line += f"  releases {entry.releases}/{entry.asked} ({groups})"
        if entry.lost_nodes:
            line += f"  {entry.lost_nodes} nodes lost"
        if entry.asked and not entry.moved:
            line += "  TOO FEW RELEASES: hypotheses unchanged"
        return line

    def closing_lines(self, state: State) -> list[str]:
        """Return the lines to print when the run is over."""
        trained = sum(1 for entry in state.history if entry.asked)
        lines = [f"The run is over after {trained} rounds: {state.stopped}."]
        if state.best_round:
            loss = self.loss(state.best_loss)
            lines.append(f"Best hypotheses: after {state.best_round - 1} rounds of training, validation {loss}.")
        if diverged(state.history):
            lines.append(f"Warning: the rounds diverged, and ended far from these. {DIVERGED}")
        vectors = flatten(state.best)
        if vectors.shape[1] <= _SHOWN_PARAMETERS:
            lines += [f"  hypothesis {j}: ({', '.join(f'{x:.3f}' for x in row)})" for j, row in enumerate(vectors)]
        lines += [
            f"  true parameters {where}: hypothesis {j} is {away:.3f} away" for where, j, away in self.found(state.best)
        ]
        last = state.history[-1]
        exact = max(entry.exact_reports for entry in state.history)
        return [*lines, *self.privacy_lines(last.median_participations, last.max_participations, exact)]

    def privacy_lines(self, median: float, maximum: int, exact: int = 0) -> list[str]:
        """Return what the clients have given away.

        `median` and `maximum` say how often the median and the busiest client released, and `exact` how many
        validation clients reported without noise.
        """
        if why := gap(self.release):
            lines = [f"Guaranteed to a client: nothing, since {why}."]
        else:
            both = [guarantee({self.release: math.ceil(times)}) for times in (median, maximum)]
            (pure, at_delta), (most_pure, most) = map(in_words, both)
            without = "no pure epsilon" if most_pure == "none" else f"pure epsilon {pure}, {most_pure}"
            lines = [
                "Guaranteed to a client, between any two of its data sets: "
                f"epsilon {at_delta} (median), {most} (maximum) at delta {DELTA:g}; {without}. "
                "What training clients report, where a site lets them, comes on top."
            ]
        if exact:
            lines.append(f"Outside the guarantee: {exact} validation clients, which reported exact losses.")
        if self.release.paper_cost is None:
            return [*lines, "Paper's budget, a heuristic: none; it counts vector Laplace noise alone."]
        paper = (amount(self.release.paper_spend(times)) for times in (median, maximum))
        return [*lines, "Paper's budget, a heuristic: n/nu a participation, {} (median), {} (maximum).".format(*paper)]

    def loss(self, value: float) -> str:
        """Return a loss with its name, and in the target's unit if it has one."""
        factor, unit = self.scale
        return f"{self.loss_name} {value * factor:,.1f} {unit}".rstrip() if factor else f"{self.loss_name} {value:.4f}"

    @property
    def loss_name(self) -> str:
        """What the loss is called when it is reported."""
        return "RMSE" if self.model.loss.name in ("mse", "rmse") else self.model.loss.name

    @property
    def scale(self) -> tuple[float, str]:
        """What a loss times is in the target's unit, and that unit; (0, "") for a loss without one."""
        target = self.manifest.units.get("target", {}) if self.manifest else {}
        if self.loss_name == "RMSE" and self.model.metric.name == "rmse" and "scale" in target:
            return float(target["scale"]), str(target.get("unit", ""))
        return 0.0, ""

    @property
    def factor(self) -> float:
        """What to multiply a loss by."""
        return self.scale[0] or 1.0

    @property
    def metric_factor(self) -> float:
        """What to multiply the metric by."""
        return self.factor if self.model.metric.name == "rmse" else 1.0

    @property
    def in_unit(self) -> str:
        """The loss's unit in brackets, to stand behind its name; empty where it has none."""
        return f" ({self.scale[1]})" if self.scale[1] else ""

    def truth(self, n: int) -> NDArray[np.float64]:
        """Return the true parameters (g, n) of the data; none where a model of n has no such thing."""
        # A run may learn another model than the one that the data were made from.
        if not (self.manifest and self.manifest.truth and all(len(row) == n for row in self.manifest.truth)):
            return np.zeros((0, n))
        return np.asarray(self.manifest.truth, np.float64)

    def found(self, best: Arrays) -> list[tuple[str, int, float]]:
        """Return for each of the true parameters their text, the nearest hypothesis, and how far it is."""
        vectors = flatten(best)
        found = []
        for row in self.truth(vectors.shape[1]):
            distances = np.linalg.norm(vectors - row, axis=1)
            found.append((f"({', '.join(f'{x:g}' for x in row)})", int(distances.argmin()), float(distances.min())))
        return found
