"""What a run leaves behind: one folder, each file replaced whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import tomli_w
from numpy.typing import NDArray

from attacks.leak_meter import Leak
from protocol.arrays import Arrays
from protocol.home import write_atomically
from protocol.messages import Hosting
from server.rounds import Round, State

_PACKAGES = ("flwr", "torch", "numpy", "safetensors")


class RunFolder:
    """The folder of one run.

    ==========================  ==========================================================
    ``hypotheses.safetensors``  the best hypotheses so far, each array (k, \\*shape)
    ``latest.safetensors``      what the next round would have started from; metadata ``rounds``
    ``nodes.json``              the nodes in the order in which their clients are numbered
    ``history.jsonl``           a line a round (`server.rounds.Round`)
    ``outcome.json``            why the run ended, what its strategy remarks, and what the leak
                                meter found (`attacks.leak_meter.Leak`)
    ``findings.csv``            the strategy's own table, if it has one
    ``ledger.csv``              clients that released: participations and what they spent
    ``config.toml``             the run config and the versions it ran with
    ``releases.safetensors``    of a model of two parameters: what the first and the best round
                                released, ``first.releases`` (m, 2), the hypothesis each was
                                assigned to, ``first.groups`` (m,), and the hypotheses that the
                                round started from, ``first.hypotheses`` (k, 2); ``best.`` too;
                                metadata ``first.round`` and ``best.round``
    ``report.html``             the outcome for people
    ==========================  ==========================================================

    Parameters
    ----------
    path : Path
        Made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digests: dict[str, bytes] = {}
        path.mkdir(parents=True, exist_ok=True)

    @classmethod
    def make(cls, parent: Path, name: str) -> RunFolder:
        """Make a folder that no other run has, called `name` or with a number behind it."""
        parent.mkdir(parents=True, exist_ok=True)
        path, number = parent / name, 1
        while True:
            try:
                path.mkdir()
                return cls(path)
            except FileExistsError:
                number += 1
                path = parent / f"{name}-{number}"

    def write_config(self, run_config: Mapping[str, Any]) -> None:
        """Save the configuration of the run and the versions it runs with."""
        document = {"config": dict(run_config), "versions": versions()}
        write_atomically(self.path / "config.toml", tomli_w.dumps(document).encode())

    def write_round(self, state: State, participations: NDArray[np.int64], cost: Fraction | None) -> None:
        """Save where the run stands.

        Parameters
        ----------
        state : State
        participations : ndarray of int
            How often each training client released.
        cost : Fraction or None
            What one participation costs; None when nothing bounds it.
        """
        self._write_new("hypotheses.safetensors", _to_bytes(state.best))
        lines = "".join(entry.line + "\n" for entry in state.history)
        write_atomically(self.path / "history.jsonl", lines.encode())
        outcome = {"stopped": state.stopped, "remarks": state.remarks, "leaks": [asdict(leak) for leak in state.leaks]}
        write_atomically(self.path / "outcome.json", (json.dumps(outcome, indent=1) + "\n").encode())
        # Comparing first is what makes this quick where few of very many clients have released.
        clients = np.flatnonzero(participations != 0)
        often = participations[clients].tolist()
        spent = {times: f"{times},{spend(times, cost):.10g}" for times in set(often)}
        # One format for all rows, of which a long run has tens of thousands, takes half the time of one each.
        values: list[Any] = [None] * (2 * len(often))
        values[::2], values[1::2] = clients.tolist(), [spent[times] for times in often]
        rows = "%d,%s\n" * len(often) % tuple(values)
        write_atomically(self.path / "ledger.csv", f"client,participations,spent\n{rows}".encode())
        # Last, and with the number of rounds that it stands for: what it does not know of, a run
        # that was killed in between does again.
        latest = _to_bytes(state.hypotheses, {"rounds": str(len(state.history))})
        write_atomically(self.path / "latest.safetensors", latest)

    def write_releases(self, content: bytes) -> None:
        """Save the releases in the plane (`server.plane.Album`)."""
        write_atomically(self.path / "releases.safetensors", content)

    def write_findings(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Save a strategy's table as findings.csv."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.path / "findings.csv", text.getvalue().encode())

    def write_report(self, html: str) -> None:
        """Save the report."""
        write_atomically(self.path / "report.html", html.encode())

    def read(self) -> tuple[dict[str, Any], State, dict[int, int]]:
        """Return what `write_config` saved, the state, and how often each client that released did so.

        Raises
        ------
        FileNotFoundError
            When the folder holds no run that has finished a round.
        """
        saved = tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        with safetensors.safe_open(self._arrays("latest"), "numpy") as latest:
            rounds = int(latest.metadata()["rounds"])
        lines = (self.path / "history.jsonl").read_text(encoding="utf-8").splitlines()
        history = [Round(**json.loads(line)) for line in lines[:rounds]]
        best_round = history[-1].best_round
        outcome = json.loads((self.path / "outcome.json").read_text(encoding="utf-8"))
        losses = {entry.number: entry.loss for entry in history if entry.loss is not None}
        state = State(
            hypotheses=self._read_arrays("latest"),
            best=self._read_arrays("hypotheses"),
            best_loss=losses.get(best_round, math.inf),
            best_round=best_round,
            stale=sum(1 for number in losses if number > best_round),
            history=history,
            stopped=outcome["stopped"],
            remarks=outcome["remarks"],
            leaks=[leak for leak in map(_leak, outcome["leaks"]) if leak.round <= rounds],
        )
        with (self.path / "ledger.csv").open(encoding="utf-8") as file:
            spent = {int(row["client"]): int(row["participations"]) for row in csv.DictReader(file)}
        return saved, state, spent

    def write_nodes(self, nodes: Sequence[tuple[int, Hosting]]) -> None:
        """Save the nodes and what they host, in the order in which their clients are numbered."""
        rows = [{"node": node, **asdict(hosting)} for node, hosting in nodes]
        self._write_new("nodes.json", (json.dumps(rows) + "\n").encode())

    def read_nodes(self) -> list[tuple[int, Hosting]]:
        """Return what `write_nodes` saved."""
        rows = json.loads((self.path / "nodes.json").read_text(encoding="utf-8"))
        return [(row.pop("node"), Hosting(**row)) for row in rows]

    def _arrays(self, name: str) -> Path:
        path = self.path / f"{name}.safetensors"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing")
        return path

    def _read_arrays(self, name: str) -> Arrays:
        return safetensors.numpy.load_file(self._arrays(name))

    def _write_new(self, name: str, content: bytes) -> None:
        """Replace a file unless this object wrote it as it is: the disk takes longer than many a round."""
        digest = blake2b(content).digest()
        if self._digests.get(name) != digest:
            write_atomically(self.path / name, content)
            self._digests[name] = digest


def _to_bytes(arrays: Arrays, metadata: dict[str, str] | None = None) -> bytes:
    return safetensors.numpy.save({key: np.ascontiguousarray(value) for key, value in arrays.items()}, metadata)


def _leak(row: dict[str, Any]) -> Leak:
    return Leak(**row)


@lru_cache
def versions(packages: tuple[str, ...] = _PACKAGES) -> dict[str, str]:
    """Return the versions that a run depends on: of packages, and of Python."""
    return {package: version(package) for package in packages} | {"python": platform.python_version()}


def spend(participations: float, cost: Fraction | None) -> float:
    """Return what a number of participations costs; infinite for unsanitised releases."""
    if cost is None:
        return float("inf") if participations else 0.0
    return float(Fraction(participations) * cost)
