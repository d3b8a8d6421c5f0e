"""An interrupted run: read from its folder, and checked as a whole before it resumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientInRun
from umbel.protocol.errors import ConfigError, ProtocolError
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import Hosting
from umbel.server.history import Round, State
from umbel.server.run_folder import RunFolder
from umbel.server.runs import DAMAGE, run_named
from umbel.server.setup import Setup, check_hypotheses

# Settings that may change when a run resumes.
_FREE = {
    "resume", "rounds", "patience", "validate-every", "observers", "min-releases", "device", "min-nodes",
    "node-wait", "round-timeout", "pause", "quorum", "per-node", "track",
}  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """The content of a resumed run, after its last finished round.

    Attributes
    ----------
    folder : RunFolder
    state : State
    spent : dict from ClientInRun to int
        Number of releases of each client that released.
    kept : dict of ndarray
        State that the strategy keeps from round to round.
    nodes : list of (int, Hosting)
        In the order in which their clients are numbered.
    """

    folder: RunFolder
    state: State
    spent: dict[ClientInRun, int]
    kept: Arrays
    nodes: list[tuple[int, Hosting]]

    @classmethod
    def of(cls, setup: Setup) -> Saved:
        """Return the run that the run config resumes; nothing is written.

        Raises
        ------
        ConfigError
            If there is no such run, it is damaged, it has no rounds left, or it was a different one.
        """
        path = run_named("resume", setup.config.resume)
        folder = RunFolder(path)
        with _told(path):
            saved = folder.read_config()
            if not isinstance(saved.get("config"), dict):
                raise ValueError("config.toml has no table config")
            _check_the_same(setup, saved, path.name)
        with _told(path):
            state, spent, kept = folder.read(list(setup.model.shapes))
            nodes = folder.read_nodes()
            check_hypotheses(state.hypotheses, setup.model.shapes, setup.strategy.hypotheses)
            check_hypotheses(state.best, setup.model.shapes, setup.strategy.hypotheses)
            newest = folder.read_history(len(state.history))[-1]
            _check_participations(spent, nodes, state.history, newest)
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
        return cls(folder, state, spent, kept, nodes)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Report errors in reading a run in one line."""
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(
            f"resume: {path} holds no run that finished a round: {error}", code="config.no-run"
        ) from error
    except (OSError, ProtocolError, *DAMAGE) as error:
        text = error.text if isinstance(error, ProtocolError) else str(error)
        what = f"{text} is missing" if isinstance(error, KeyError) else text
        raise ConfigError(
            f"resume: {path} is damaged: {' '.join(what.split())}; restore an intact copy, or start a new run",
            code="config.run-damaged",
        ) from error


def _check_the_same(setup: Setup, saved: Mapping[str, Any], name: str) -> None:
    """Raise unless the run has the same settings, rows and frozen parameters as before."""
    config, data = setup.config.entries(), saved.get("data", "")
    for key, value in RunConfig.current(saved["config"]).items():
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


def _check_participations(
    spent: Mapping[ClientInRun, int], nodes: Sequence[tuple[int, Hosting]], history: Sequence[Round], newest: Round
) -> None:
    """Raise `ValueError` unless participations fit these nodes and rounds; errors of nodes as `Hosting.from_record`.

    Parameters
    ----------
    spent : mapping from ClientInRun to int
    nodes : sequence of (int, Hosting)
    history : sequence of Round
        Up to the last finished round.
    newest : Round
        That round, or an unfinished one of a killed run, which the participations may include.
    """
    if not nodes:
        raise ValueError("nodes.json names no node")
    clients = sum(Hosting.from_record(hosting.to_record()).train for _, hosting in nodes)
    for client, times in spent.items():
        if not 0 <= client < clients or times < 1:
            raise ValueError(f"participations.jsonl says that client {client} of {clients} released {times} times")
    check_releases(spent, history, newest)


def check_releases(spent: Mapping[ClientInRun, int], history: Sequence[Round], newest: Round) -> None:
    """Raise `ValueError` unless participations fit the rounds: the guarantee follows from them; see above."""
    released, most = sum(entry.releases for entry in history), max(spent.values(), default=0)
    # A run that was killed twice in a round may have counted less the first time than the second time's history says.
    if sum(spent.values()) < released or not history[-1].max_participations <= most <= newest.max_participations:
        raise ValueError(
            f"participations.jsonl says that there were {sum(spent.values())} releases, {most} of one client, and "
            f"history.jsonl {released}, {history[-1].max_participations} of one client"
        )
