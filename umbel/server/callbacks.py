"""Callbacks of a run: the log, the run folder, and classes of a user.

A class on `umbel.Callback` is named in the run config: ``observers = "package.module:Class name=value;
another.module:Class"``. If it is a dataclass, its fields are its options.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from logging import ERROR, INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError, DiskError, FleetError, UmbelError
from umbel.protocol.home import LAST_ROOM, LEAST_ROOM, check_room
from umbel.protocol.log import log
from umbel.protocol.logs import Progress
from umbel.protocol.options import NoOptions, parse_options
from umbel.protocol.plugins import import_by_name, refuse_uncalled, unknown_name
from umbel.protocol.words import count_of, in_time
from umbel.server.history import State, collapsed, last_rounds
from umbel.server.report.alarms import why_collapsed
from umbel.server.run import Run
from umbel.server.setup import Setup
from umbel.server.status import RunState, status_of
from umbel.server.summary import Summary
from umbel.server.tracking import TRACKERS, load_tracker
from umbel.strategies import Callback

_FIRST = 3  # rounds; a node without a reply in a single round may only be slow
_LINES, _ENDED = 100, "The rounds have ended."
_COPIES = 3  # of the state, while the new one takes the place of the latest and of the best
_LARGE = 1 << 24  # bytes of hypotheses and strategy's state; writing fewer takes a few hundredths of a second


def named(setup: Setup) -> tuple[Callback, ...]:
    """Return the callbacks in a run config, and the strategy if it is a callback too.

    Raises
    ------
    ConfigError
        If one of them cannot be imported, is no callback, has other options, or has a public method that nothing calls.
    """
    run, strategy = setup.config, setup.strategy
    entries = [entry.strip() for entry in run.observers.split(";") if entry.strip()]
    itself = (strategy,) if isinstance(strategy, Callback) else ()
    return (*map(_load, entries), *itself)


def _load(entry: str) -> Callback:
    """Return the callback that ``package.module:Class name=value`` describes, or a tracker; errors as for `named`."""
    name, _, options = entry.partition(" ")
    if entry in TRACKERS:
        return load_tracker(entry)
    if ":" not in name:
        raise ConfigError(unknown_name("observers", name, TRACKERS), code="config.unknown-name")
    kind, key = import_by_name(name), f"observers, {name}"
    if not (isinstance(kind, type) and issubclass(kind, Callback)):
        raise ConfigError(f"observers: {name!r} is not a class built on umbel.Callback", code="config.not-built-on")
    refuse_uncalled("callback", kind, Callback)
    if "__dataclass_fields__" in vars(kind):
        return parse_options(kind, options, key)
    parse_options(NoOptions, options, key)
    return kind()


class Released(Callback):
    """Ends a run without releases, which would otherwise continue to its last round and look successful."""

    run: Run

    def after_exchange(self, round: int, stages: dict[str, float]) -> str | None:
        """Raise if nothing was released in the first rounds; at once if simulated nodes refuse, since they always
        will. Stop a later run that all sites refuse, as when their clients' budgets are used up."""
        roster, history = self.run.roster, self.run.state.history
        if any(entry.releases for entry in history):  # usually the first round
            refuses = not roster.simulated and roster.refuses(_FIRST)
            return "every site refuses; each site's log says why" if refuses else None
        trained = [entry for entry in history if entry.asked]
        if not trained:
            return None
        # Dead nodes are left out of the next round; nodes that refuse will refuse again.
        if roster.simulated and trained[-1].lost_nodes > len(roster.gone(trained[-1].number + 1)):
            raise FleetError("the simulated nodes refuse to train, so the run cannot learn", code="nodes.refused")
        if len(trained) >= _FIRST:
            raise FleetError(
                f"no client released anything in the first {_FIRST} rounds; in the last of them "
                f"{count_of(trained[-1].lost_nodes, 'node')} refused or did not reply; each site's log says why",
                code="nodes.no-releases",
            )
        return None


class Sites(Callback):
    """Saves which sites are there and how the run ends, for ``umbel server status``; nothing in simulation."""

    run: Run

    def begin(self) -> None:
        """Save it: a run that is resumed may have failed before."""
        self._write()

    def in_pause(self, round: int, since: float, ends: float) -> None:
        """Save it, with the pause."""
        self._write(paused=since, ends=ends)

    def after_exchange(self, round: int, stages: dict[str, float]) -> None:
        """Save it."""
        self._write()

    def at_end(self) -> None:
        """Save whether all rounds were done."""
        over = self.run.state.history[-1].number >= self.run.setup.config.rounds
        self._write(state=RunState.COMPLETED if over else RunState.STOPPED)

    def on_error(self, error: BaseException) -> None:
        """Save that the run failed, or that it was stopped; a status that cannot be saved hides no other error."""
        with suppress(UmbelError, OSError):  # Flower ends a stopped run by `SystemExit`
            self._write(state=RunState.FAILED if isinstance(error, Exception) else RunState.STOPPED)

    def _write(self, **more: Any) -> None:
        run, roster = self.run, self.run.roster
        if run.folder is not None and not roster.simulated:
            number = len(run.state.history)
            run.folder.write_status(status_of(run.setup.config, roster, number, run.fleet.participations, **more))


class Log(Callback):
    """Logs the progress of a run, with the remaining time.

    A run of up to a hundred rounds gets a line for each. A longer one gets about a hundred lines at regular intervals,
    and between two of them one for the first round that went wrong. The `clock` returns the time in seconds.
    """

    run: Run

    def __init__(self, summary: Summary, clock: Callable[[], float] = time.monotonic) -> None:
        self._summary, self._clock = summary, clock

    def begin(self) -> None:
        """Start the clock."""
        config = self.run.setup.config
        every = -(-config.rounds // _LINES)
        # With fewer lines than rounds, choose rounds that were validated.
        self._every = every if every == 1 else -(-every // config.validation.every) * config.validation.every
        self._began = self._clock()
        self._first: tuple[int, float] | None = None
        self._told = self._collapsed = False

    def at_end(self) -> None:
        """Log the last round, and that it was."""
        self._lines()
        log(INFO, _ENDED, extra={"progress": Progress("measuring the result")})

    def on_error(self, error: BaseException) -> None:
        """Log that no further round follows."""
        log(INFO, _ENDED, extra={"progress": Progress("")})

    def after_exchange(self, round: int, stages: dict[str, float]) -> None:
        """Log complete rounds that get a line, and warn once if the hypotheses have collapsed into one."""
        self._lines()
        history = self.run.state.history
        groups = history[-1].groups
        if len(groups) < 2 or max(groups) < sum(groups):
            return
        was, self._collapsed = self._collapsed, collapsed(history)
        if self._collapsed and not was:
            last = last_rounds(history)
            log(WARNING, "Since round %d nearly all releases have gone to hypothesis %d: the hypotheses have collapsed "
                "into one. %s", last[0].number, int(np.argmax(groups)), why_collapsed(last))  # fmt: skip

    def _lines(self) -> None:
        state, config, now = self.run.state, self.run.setup.config, self._clock()
        rounds, done = config.rounds, state.history[-1].number
        # The first round includes the nodes' start, so it is excluded from the estimate.
        first, first_end = self._first = self._first or (done, now)
        time = in_time(now - self._began)
        if first < done < rounds and not state.stopped:
            most = "at most" if config.patience else "about"
            time += f", {most} {in_time((now - first_end) / (done - first) * (rounds - done))} left"
        for entry in self.run.complete:
            due = entry.number % self._every == 0 or entry.number >= rounds or bool(state.stopped)
            trouble = bool(entry.lost_nodes or (entry.asked and not entry.moved))
            if (due or (trouble and not self._told)) and (entry.number or entry.loss is not None):
                self._told = trouble
                short = f"round {entry.number} of {rounds}  {self._summary.score(entry)}  {time}"
                log(
                    INFO, "%s  %s", self._summary.round_line(entry, rounds), time,
                    extra={"progress": Progress(short, entry.number, rounds)},
                )  # fmt: skip


def _size(state: State, kept: Arrays) -> int:
    return sum(value.nbytes for value in [*state.hypotheses.values(), *kept.values()])


class Checkpoints(Callback):
    """Saves a run after each round, so that a killed run can resume.

    A thread writes a large model while the next round runs. The end of that round waits for the thread, and so does the
    end of the run. Both raise the error of a failed write.
    """

    run: Run
    _written: Future[None] | None = None

    def begin(self) -> None:
        """Stop a run whose sites wait because the server's disk has no room for their replies."""
        run = self.run
        if run.folder is not None and not run.roster.simulated:
            run.fleet.exchange_on(run.grid).watch = partial(check_room, run.folder.path, LAST_ROOM)

    def before_round(self, round: int, arrays: ArrayRecord) -> None:
        """Stop a run of real sites before a round that could not be saved: sites would be charged for nothing."""
        run = self.run
        if run.folder is not None and not run.roster.simulated:
            check_room(run.folder.path, LEAST_ROOM + _COPIES * _size(run.state, run.strategy.state))

    def after_exchange(self, round: int, stages: dict[str, float]) -> None:
        """Save the state of the run."""
        self.wait()
        run = self.run
        if (folder := run.folder) is None:
            return
        nodes = run.roster.nodes

        def write(state: State, participations: NDArray[np.int64], kept: Arrays) -> None:
            folder.write_nodes(nodes)
            folder.write_round(state, participations, release, kept)

        state, participations, release = run.state, run.fleet.participations, run.setup.release
        kept = run.strategy.state
        if _size(state, kept) < _LARGE:
            write(state, participations, kept)
            return
        # The next round changes these. Hypotheses are new arrays in each round.
        state = replace(state, history=list(state.history))
        kept = {name: value.copy() for name, value in kept.items()}
        thread = ThreadPoolExecutor(1)
        self._written = thread.submit(write, state, participations.copy(), kept)
        thread.shutdown(wait=False)  # it ends after this write

    def at_end(self) -> None:
        """Save the state, and why the run ended, which without validation is known only at its end."""
        self.wait()
        run = self.run
        if run.folder is not None:
            run.folder.write_round(run.state, run.fleet.participations, run.setup.release, run.strategy.state)

    def on_error(self, error: BaseException) -> None:
        """Wait for the last write, and say how to resume a run that was stopped or for which the disk has no room."""
        try:
            self.wait()
        except Exception as failure:
            log(ERROR, "the last round could not be saved: %s", failure)
        folder, name = self.run.folder, self.run.name
        if isinstance(error, KeyboardInterrupt) and folder is not None and name:
            if (folder.path / "latest.safetensors").is_file():
                log(INFO, "Stopped. The finished rounds are kept in %s", folder.path)
                log(INFO, "Resume it with: umbel run %s --resume", name)
            else:
                log(INFO, "Stopped before the first round was over; nothing is kept.")
        if isinstance(error, DiskError):
            log(ERROR, "%s", error)
            text = "The run ends with its last saved round. Resume it once there is room: resume=%r"
            log(ERROR, text, self.run.name)

    def wait(self) -> None:
        """Wait for the thread, and raise its error."""
        written, self._written = self._written, None
        if written is not None:
            written.result()
