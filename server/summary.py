"""A run in words: the line a round, the closing lines, and the report."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from html import escape

import numpy as np

from federation import Manifest
from models.base import Model
from protocol import Arrays, flatten
from server.rounds import Round, State
from server.run_folder import spend

_SHOWN_PARAMETERS = 3
_MEANING = {
    "update": "n/nu a participation, within the norm of the client's own update: a heuristic, no guarantee",
    "public": "n/nu a participation, for updates one radius apart",
}


@dataclass(frozen=True)
class Narrator:
    """Tells what happens, in the units of the data.

    Attributes
    ----------
    model : Model
    manifest : Manifest or None
        Whose units and truth are used, if there is one.
    cost : Fraction or None
        What one participation costs.
    radius_mode : str
        ``update`` or ``public``: what the cost means.
    """

    model: Model
    manifest: Manifest | None
    cost: Fraction | None
    radius_mode: str

    def round_line(self, entry: Round, rounds: int) -> str:
        """Return the line that the log shows for a round."""
        line = f"round {entry.number:>{len(str(rounds))}}/{rounds}" if entry.asked else "after the last round"
        if entry.loss is not None and entry.metric is not None:
            line += f"  validation {self.loss(entry.loss)}"
            if self.model.metric.name != "rmse":
                line += f"  {self.model.metric.name} {entry.metric:.4f}"
            line += f"  best in round {entry.best_round}"
        if entry.asked:
            groups = "+".join(map(str, entry.groups))
            line += f"  releases {entry.releases}/{entry.asked} ({groups})  {entry.seconds:.2f} s"
        if entry.lost_nodes:
            line += f"  {entry.lost_nodes} nodes lost"
        if entry.asked and not entry.moved:
            line += "  TOO FEW RELEASES: hypotheses unchanged"
        return line

    def closing_lines(self, state: State) -> list[str]:
        """Return what to tell when the run is over."""
        trained = sum(1 for entry in state.history if entry.asked)
        lines = [f"The run is over after {trained} rounds: {state.stopped}."]
        if state.best_round:
            loss = self.loss(state.best_loss)
            lines.append(f"Best hypotheses: after {state.best_round - 1} rounds of training, validation {loss}.")
        vectors = flatten(state.best)
        if vectors.shape[1] <= _SHOWN_PARAMETERS:
            lines += [f"  hypothesis {j}: ({', '.join(f'{x:.3f}' for x in row)})" for j, row in enumerate(vectors)]
        lines += self._found(state.best)
        last = state.history[-1]
        median, most = (spend(times, self.cost) for times in (last.median_participations, last.max_participations))
        lines.append(f"Privacy spent a client: median {median:.4g}, most {most:.4g} ({_MEANING[self.radius_mode]}).")
        return lines

    def report(self, state: State, config: dict[str, object]) -> str:
        """Return the report as one HTML page."""
        head = "".join(f"<p>{escape(line)}</p>" for line in self.closing_lines(state))
        trained = sum(1 for entry in state.history if entry.asked)
        rows = "".join(f"<tr><td>{escape(self.round_line(entry, trained))}</td></tr>" for entry in state.history)
        settings = "".join(
            f"<tr><th>{escape(key)}</th><td>{escape(str(value))}</td></tr>" for key, value in config.items()
        )
        return (
            "<!doctype html><html lang='en'><meta charset='utf-8'><title>umbel run</title>"
            "<style>body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
            "th{text-align:left;padding-right:2rem;font-weight:normal}</style>"
            f"<h1>umbel run</h1>{head}<h2>Rounds</h2><table>{rows}</table>"
            f"<h2>Run config</h2><table>{settings}</table></html>\n"
        )

    def loss(self, value: float) -> str:
        """Return a loss with its name, and in the target's unit if it has one."""
        name = "RMSE" if self.model.loss.name in ("mse", "rmse") else self.model.loss.name
        target = self.manifest.units.get("target", {}) if self.manifest else {}
        if name == "RMSE" and self.model.metric.name == "rmse" and "scale" in target:
            return f"RMSE {value * target['scale']:,.1f} {target.get('unit', '')}".rstrip()
        return f"{name} {value:.4f}"

    def _found(self, best: Arrays) -> list[str]:
        """Compare with the truth, where the data are synthetic and it is known."""
        vectors = flatten(best)
        # A run may learn another model than the one that the data were made from.
        if not (self.manifest and all(len(truth) == vectors.shape[1] for truth in self.manifest.truth)):
            return []
        lines = []
        for truth in np.asarray(self.manifest.truth):
            distances = np.linalg.norm(vectors - truth, axis=1)
            where = ", ".join(f"{x:g}" for x in truth)
            lines.append(f"  true parameters ({where}): hypothesis {distances.argmin()} is {distances.min():.3f} away")
        return lines
