"""An interrupted run: read from its folder, and checked as a whole before it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from flwr.serverapp import Grid

from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientInRun
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig, Validation
from umbel.protocol.tasks import Hosting
from umbel.server.history import State
from umbel.server.run_folder import RunFolder
from umbel.server.runs import opening, run_named
from umbel.server.setup import Setup

# Settings that may change when a run resumes.
_FREE = {
    "resume", "rounds", "patience", "observers", "min-releases", "device", "wait", "round-timeout", "quorum",
    "per-node",
}  # fmt: skip


class Saved(NamedTuple):
    """The content of a resumed run, after its last finished round."""

    setup: Setup  # of the run that resumes it
    folder: RunFolder
    state: State
    spent: dict[ClientInRun, int]  # releases of each client that released
    kept: Arrays  # state that the strategy keeps from round to round
    nodes: list[tuple[int, Hosting]]  # in the order in which their clients are numbered

    @classmethod
    def of(cls, setup: Setup) -> Saved:
        """Return the content of the run that a run config resumes; nothing is written.

        Raises
        ------
        ConfigError
            If there is no such run, it is damaged, it has no rounds left, or it was a different one.
        """
        path = run_named("resume", setup.config.resume)
        folder = RunFolder(path)
        with opening(path, "resume"):
            saved = folder.read_config()
            if not isinstance(saved.get("config"), dict):
                raise ValueError("config.toml has no table config")
            _check_the_same(setup, saved, path.name)
            state, spent, kept = folder.read(setup.model.shapes, setup.strategy.hypotheses)
            folder.check_releases(spent, state.history)
            nodes = folder.read_nodes()
            if not nodes:
                raise ValueError("nodes.json names no node")
            clients = sum(Hosting.from_record(hosting.to_record()).train for _, hosting in nodes)
            if spent and (last := max(spent)) >= clients:
                raise ValueError(f"participations.jsonl says that client {last} of {clients} released")
        # Entries after the last training round only evaluate, and are made again at the end.
        over = not state.history[-1].asked or not state.best_round
        while state.history and not state.history[-1].asked:
            again = state.history.pop()
            state.stale -= state.stale > 0 and again.loss is not None and again.number > state.best_round
        if len(state.history) > setup.config.rounds or (over and len(state.history) == setup.config.rounds):
            raise ConfigError(
                f"resume: the run has done its {len(state.history)} rounds; raise rounds to continue",
                code="config.resume-done",
            )
        state.stopped = ""
        return cls(setup, folder, state, spent, kept, nodes)

    def restore(self, grid: Grid) -> State:
        """Give nodes and strategy of the setup what they had, and return the state of the run."""
        self.setup.fleet.resume(grid, self.nodes, self.spent)
        self.setup.strategy.state = self.kept
        return self.state


def _check_the_same(setup: Setup, saved: Mapping[str, Any], name: str) -> None:
    """Raise unless the run has the same settings, rows and frozen parameters as before."""
    config, data = setup.config.entries(), saved.get("data", "")
    for key, value in RunConfig.current(saved["config"]).items():
        if key == "validation":  # how often may change
            value = str(replace(Validation.read(str(value), key), every=setup.config.validation.every))
        if key not in _FREE and config.get(key) != value:
            raise ConfigError(
                f"resume: {key} was {value!r} and is {config.get(key)!r}; restore the old value",
                code="config.resume-changed",
            )
    if data and (now := setup.digests["data"]) and now != data:
        raise ConfigError(
            f"resume: the rows of dataset {setup.config.dataset!r} differ from those at the start of the run; "
            f"restore them, or start a new run: start-from={name} seed={setup.config.seed + 1}",
            code="config.resume-data",
        )
    setup.model.check_frozen(saved, name)
