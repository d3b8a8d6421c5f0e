"""A run in words: the line for each round, the outcome, and the guarantee."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from umbel.data import Manifest
from umbel.models.model import Model
from umbel.privacy.accounting.guarantee import (
    DELTA,
    MEANINGFUL,
    Guarantee,
    gap,
    guarantee,
    stated,
    with_before,
)
from umbel.privacy.accounting.odometer import clients_to_date
from umbel.privacy.accounting.rows import row_gap, row_guarantee, rows_to_date
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.ranges import columns_in
from umbel.protocol.release import Release
from umbel.protocol.words import after_round, count_of
from umbel.server.history import Round, State, undecided
from umbel.server.worth import figure

if TYPE_CHECKING:
    from umbel.server.setup import Setup

_SMALLEST = 0.001
_FEW_TIMES = 10
_MORE = "If training clients also report losses, which their site must allow, that costs more."
_SQUARES, _NATS = ("mse", "rmse"), ("cross-entropy", "log")


@dataclass(frozen=True)
class Summary:
    """Describes a run in the units of the data."""

    model: Model
    manifest: Manifest | None  # the data's, for units and truth, if there is one
    release: Release  # a client's, in each participation
    rounds: int = 0  # that were planned; 0 if that is not known
    most: float = math.inf  # releases of a client, fixed before the run
    # Whether the run sets that maximum, which is then what its guarantee counts; otherwise clients are drawn at random,
    # and a maximum of all rounds says little.
    capped: bool = False
    delta: float = DELTA  # of the stated guarantee; 0 for a pure epsilon
    before: Release | None = None  # of each client, before the run, which the guarantee counts too

    @classmethod
    def of(cls, setup: Setup) -> Self:
        """Return the summary of a run's setup."""
        run = setup.config
        limits = run.rounds, run.most_participations, run.max_participations > 0
        return cls(setup.model, setup.manifest, setup.release, *limits, run.delta, run.before)

    def round_line(self, entry: Round, rounds: int) -> str:
        """Return the log's line for a round."""
        line = f"round {entry.number:>{len(str(rounds))}}/{rounds}"
        if score := self.score(entry):
            line += f"  validation {score}"
            if not entry.report_noise:  # otherwise a single round may be the lowest by chance
                line += f"  best {after_round(entry.best_round)}"
        if entry.asked:
            groups = "+".join(map(str, entry.groups))
            line += f"  releases {entry.releases}/{entry.asked} ({groups})"
        if entry.lost_nodes:
            line += f"  {count_of(entry.lost_nodes, 'node')} lost"
        if entry.asked and not entry.moved:
            line += f"  {'NOT FINITE' if entry.undefined else 'TOO FEW RELEASES'}: hypotheses unchanged"
        return line

    def score(self, entry: Round, joint: str = "  ") -> str:
        """Return a round's loss, and its metric if that is not the loss, with their noise; empty without validation."""
        if entry.loss is None or entry.metric is None:
            return ""
        metric = self.model.metric.name
        other = "" if metric == "rmse" else f"{joint}{metric} {decimals(entry.metric)}"
        return f"{self.loss(entry.loss)}{other}{self.noise_of(entry)}"

    def outcome_lines(self, state: State) -> list[str]:
        """Return the outcome of a run: the last round's hypotheses first, then the best round's."""
        ended = f"The run ended {after_round(state.history[-1].number)}: {state.stopped}."
        return [ended, *self._validated(state)] + [
            f"True parameters {where}: hypothesis {j} is {away:.3f} away."
            for where, j, away in self.nearest_to_truth(state.hypotheses)
        ]

    def _validated(self, state: State) -> Iterator[str]:
        """Yield the validation loss of the last validated hypotheses, and of the best."""
        scored = [entry for entry in state.history if entry.loss is not None]
        if state.best_loss == math.inf:
            return
        last, kept = scored[-1], after_round(state.best_round)
        apart = "" if last.report_noise else ", which did not train,"  # training clients may report with noise
        line = f"Validation clients{apart} had {self.score(last, ' and ')} on all their rows {after_round(last.number)}"
        if alike := undecided(scored, state.best_round):
            yield f"{line}. The noise does not tell the kept round, {kept}, from {count_of(alike, 'other', 'others')}."
        elif last.number == state.best_round:
            yield f"{line}, the lowest loss of all rounds."
        else:
            chose = "Their exact losses chose" if last.exact_reports else "They chose"
            yield f"{line}. {chose} the round that predictions use: {self.loss(state.best_loss)} {kept}."

    def left(self, history: Sequence[Round]) -> int:
        """Return how many of the planned rounds a run has not done."""
        return max(0, self.rounds - max((entry.number for entry in history if entry.asked), default=0))

    def guarantee_lines(self, maximum: int, exact: int = 0, left: int = 0) -> list[str]:
        """Return a run's guarantee to a client, and the clients outside it.

        `maximum` is the number of releases of the busiest client, and `exact` is the number of validation clients that
        reported without noise. The run ended with `left` rounds not done.
        """
        of_client, of_row = self.of_client(maximum, left), self.of_row(maximum, left)
        lines = []
        if of_client:
            lines = [f"Guarantee, between any two data sets of a client: {stated(of_client)}."]
            lines += ["That guarantee hides a client's whole data."] * self.release.by_rows
        if of_row:
            lines.append(f"Guarantee for a row of a client, added or removed: {stated(of_row)}.")
            lines.append("That guarantee hides each single row, and not what the rows of a client have in common.")
        if (of_client or of_row) and (why := self.why_counted(maximum, left)):
            lines.append(why)
        # The guarantee that exists comes first.
        if why := gap(self.release):
            lines.append(f"{'No guarantee for a client as a whole' if of_row else 'Guarantee: none'}, because {why}.")
        if self.release.by_rows and (why := row_gap(self.release)):
            lines.append(f"Guarantee for a row: none, because {why}.")
        if (of_client or of_row) and self.before and (cost := guarantee({self.before: 1}, self.delta)):
            lines.append(f"It counts the question about ranges before the run, which alone costs {stated(cost)}.")
        if exact and (of_client or of_row):
            reported = count_of(exact, "validation client")
            lines.append(f"Outside the guarantee: {reported}, which reported exact losses.")
        return lines

    def of_client(self, maximum: int, left: int = 0) -> Guarantee | None:
        """Return the guarantee to a client at the end of a run, for the arguments of `guarantee_lines`; None if there
        is none."""
        return self._held(guarantee, clients_to_date, maximum, left)

    def of_row(self, maximum: int, left: int = 0) -> Guarantee | None:
        """Return the guarantee to a row of a client; None without one, or without noise in training."""
        return self._held(row_guarantee, rows_to_date, maximum, left) if self.release.by_rows else None

    def _held(
        self,
        composed: Callable[[Mapping[Release, int], float], Guarantee | None],
        to_date: Callable[[Mapping[Release, int], float], float],
        maximum: int,
        left: int,
    ) -> Guarantee | None:
        """Return the guarantee that the run states.

        Numerical composition is proven for a number of releases that is fixed in advance: the maximum that the run
        sets, however many of its rounds were done. Without one the busiest client counts. If results may then have
        decided when the run ended, what counts is all the releases that could have followed, or the odometer, which
        holds at any time.
        """
        if self.capped:
            return composed(self._all(int(self.most)), self.delta)
        made = self._all(maximum)
        counted, planned = composed(made, self.delta), self._planned(maximum, left)
        if counted is None or planned <= maximum:
            return counted
        # For far more releases the odometer's figure is the smaller, and composition takes long.
        fixed = composed(self._all(planned), self.delta) if planned <= _FEW_TIMES * maximum else None
        least = min(fixed.epsilon if fixed else math.inf, to_date(made, self.delta))
        return replace(counted, epsilon=max(counted.epsilon, least))

    def _all(self, participations: int) -> dict[Release, int]:
        return with_before({self.release: participations}, self.before)

    def why_counted(self, maximum: int, left: int) -> str:
        """Return why a guarantee counts more than the releases of the busiest client; empty if it does not."""
        if self.capped or self._planned(maximum, left) <= maximum:
            return ""
        undone = f"{count_of(left, 'round')} of the run {'was' if left == 1 else 'were'} not done"
        return f"It also holds if results decided that {undone}, because the run sets no max-participations."

    def _planned(self, maximum: int, left: int) -> int:
        """Return a number of releases that no client exceeds, whichever of the `left` rounds are done."""
        return int(min(self.most, maximum + left))

    def privacy_lines(self, maximum: int, exact: int = 0, left: int = 0) -> list[str]:
        """Return `guarantee_lines` with a sentence that says what the first means, and what comes on top."""
        first, *others = self.guarantee_lines(maximum, exact, left)
        of_client, of_row = self.of_client(maximum, left), self.of_row(maximum, left)
        means = [meaning(of_client)] if of_client else []
        return [first, *means, *others, *([_MORE] if of_client or of_row else [])]

    def loss(self, value: float) -> str:
        """Return a loss with its name, and in the target's unit if it has one."""
        return f"{self.loss_name} {self.figure(value)} {self.scale[1]}".rstrip()

    def figure(self, value: float) -> str:
        """Return a loss as `loss` does, without its name and unit."""
        if not (factor := self.scale[0]):
            return decimals(value)
        value *= factor
        return f"{value:{',.1f' if abs(value) >= 10 else '.3g'}}"

    def noise_of(self, entry: Round) -> str:
        """Return the noise and the bound of a round's reports in brackets, in the loss's unit; empty for exact ones."""
        if not entry.report_noise:
            return ""
        clipped = f", clipped at {entry.report_bound * self.factor:,g}" if entry.report_bound else ""
        return f" (± {float(f'{entry.report_noise * self.factor:.2g}'):,g}{clipped})"

    @property
    def loss_name(self) -> str:
        """The loss's name in reports."""
        name = self.model.loss.name
        return "RMSE" if name in _SQUARES else f"{name} loss" if name in ("log", "hinge") else name

    @property
    def scale(self) -> tuple[float, str]:
        """The factor from a loss to the target's unit, and that unit; (0, "") for a loss without one."""
        return scale_of(self.model, self.manifest)

    @property
    def factor(self) -> float:
        """The factor for a loss."""
        return self.scale[0] or 1.0

    @property
    def metric_factor(self) -> float:
        """The factor for the metric."""
        return self.factor if self.model.metric.name == "rmse" else 1.0

    @property
    def in_unit(self) -> str:
        """The loss's unit in brackets, to follow its name; empty if it has none."""
        if self.model.loss.name not in _SQUARES:
            return " (nats)" if self.model.loss.name in _NATS else ""
        factor, unit = self.scale
        target = self.manifest.target if self.manifest else {}
        stored = " as stored" if "scale" in target and not factor else ""
        return f" ({unit or 'units of ' + str(target.get('name') or 'the target') + stored})"

    @property
    def validators(self) -> int | None:
        """Number of validation clients, if the server has the data."""
        if columns_in(self.model.name):
            return 0  # a question has none
        return self.manifest.split["validation"] if self.manifest else None

    def truth(self, n: int) -> NDArray[np.float64]:
        """Return the true parameters (g, n) of the data; none if there are none for a model of n."""
        # A run may use another model than the one that generated the data.
        if not (self.manifest and self.manifest.truth and all(len(row) == n for row in self.manifest.truth)):
            return np.zeros((0, n))
        return np.asarray(self.manifest.truth, np.float64)

    def nearest_to_truth(self, hypotheses: Arrays) -> list[tuple[str, int, float]]:
        """Return for each of the true parameters their text, the nearest hypothesis, and its distance."""
        nearest, truth = [], self.truth(_size(hypotheses))
        vectors = flatten(hypotheses) if len(truth) else np.empty((0, 0))
        for row in truth:
            distances = np.linalg.norm(vectors - row, axis=1)
            nearest.append((f"({', '.join(f'{x:g}' for x in row)})", int(distances.argmin()), float(distances.min())))
        return nearest


def meaning(of_client: Guarantee) -> str:
    """Return what a guarantee to a client says of its rows, in a sentence."""
    if of_client.epsilon > MEANINGFUL:
        return f"An epsilon above {MEANINGFUL} promises next to nothing."
    plus = "" if of_client.is_pure else f", plus {of_client.delta:g}"
    times = figure(math.exp(of_client.epsilon))
    return f"With any other rows of a client, the same releases would be at most {times} times as likely{plus}."


def _size(hypotheses: Arrays) -> int:
    return sum(value[0].size for value in hypotheses.values())


def scale_of(model: Model, manifest: Manifest | None) -> tuple[float, str]:
    """Return the factor from a model's loss to the target's unit, and that unit; (0, "") for a loss without one."""
    squares = model.loss.name in _SQUARES and model.metric.name == "rmse"
    if manifest and squares and "scale" in manifest.target:
        return manifest.error_scale, str(manifest.target.get("unit", ""))
    return 0.0, ""


def decimals(value: float) -> str:
    """Return a number with four decimals; a smaller one, of which these show nothing, with three digits."""
    return f"{value:.4f}" if value == 0 or abs(value) >= _SMALLEST else f"{value:.3g}"
