"""Whole runs of the app in one process: the ServerApp and the ClientApp as they are, and a grid between them."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.numpy
from flwr.app import Context, RecordDict
from numpy.typing import NDArray

import umbel.server.app
from umbel.protocol.home import umbel_home
from umbel.simulation.grid import InProcessGrid

_run_ids = count(1)


class AppRun(NamedTuple):
    """A run of the app: what it left behind, and the nodes it ran on."""

    folder: Path
    grid: InProcessGrid

    def arrays(self, name: str) -> dict[str, NDArray[Any]]:
        return safetensors.numpy.load_file(self.folder / f"{name}.safetensors")

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rounds, without the time they took."""
        rounds = [json.loads(line) for line in (self.folder / "history.jsonl").read_text().splitlines()]
        return [{key: value for key, value in entry.items() if key not in ("seconds", "stages")} for entry in rounds]

    @property
    def trained(self) -> list[dict[str, Any]]:
        """The rounds that trained."""
        return [entry for entry in self.history if entry["asked"]]

    @property
    def ledger(self) -> dict[int, tuple[int, float]]:
        """Participations and the paper's budget, by client."""
        rows = csv.DictReader((self.folder / "ledger.csv").read_text().splitlines())
        return {
            int(row["client"]): (int(row["participations"]), float(row["paper_budget"].replace("none", "inf")))
            for row in rows
        }

    @property
    def stopped(self) -> str:
        """Why it ended."""
        return str(json.loads((self.folder / "outcome.json").read_text())["stopped"])


def run_app(config: Mapping[str, Any], grid: InProcessGrid) -> AppRun:
    """Run the app on the nodes of a grid."""
    runs = umbel_home() / "runs"
    before = set(runs.glob("*"))
    umbel.server.app.app(grid, Context(next(_run_ids), 1, {}, RecordDict(), dict(config)))
    (folder,) = set(runs.glob("*")) - before or {runs / config["resume"]}
    return AppRun(folder, grid)
