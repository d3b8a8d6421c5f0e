"""umbel's own observers: the log, and the run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from logging import ERROR, INFO, WARNING
from typing import Self

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import FleetError, UmbelError
from umbel.protocol.home import LAST_ROOM, LEAST_ROOM, check_room
from umbel.protocol.log import log
from umbel.protocol.words import count_of, in_time
from umbel.server.history import State, collapsed, last_rounds
from umbel.server.observer import Observer, Run, load_observers
from umbel.server.report.alarms import why_collapsed
from umbel.server.setup import Setup
from umbel.server.status import RunState, status_of
from umbel.server.summary import Summary
from umbel.server.tracking import load_tracker

_FIRST = 3  # rounds; a node without a reply in a single round may only be slow
_LINES = 100
_COPIES = 3  # of the state, while the new one takes the place of the latest and of the best
_LARGE = 1 << 24  # bytes of hypotheses and strategy's state; writing fewer takes a few hundredths of a second


def named(setup: Setup) -> tuple[Observer, ...]:
    """Return the observers in a run config, its tracker, and the strategy if it is an observer too.

    Raises
    ------
    ConfigError
        If one of them cannot be made.
    """
    run, strategy = setup.config, setup.strategy
    observes = (strategy,) if isinstance(strategy, Observer) else ()
    return (*load_observers(run.observers), *load_tracker(run.track), *observes)


class Released(Observer):
    """Ends a run without releases, which would otherwise continue to its last round and look successful."""

    def after_round(self, run: Run) -> None:
        """Raise if nothing was released in the first rounds; at once if simulated nodes refuse, since they always
        will. Stop a later run that all sites refuse, as when their clients' budgets are used up."""
        if any(entry.releases for entry in run.state.history):  # usually the first entry
            roster = run.fleet.roster(run.grid)
            if not roster.simulated and roster.refuses(_FIRST):
                run.stop("every site refuses; each site's log says why")
            return
        trained = [entry for entry in run.state.history if entry.asked]
        if not trained:
            return
        roster = run.fleet.roster(run.grid)
        # Dead nodes are left out of the next round; nodes that refuse will refuse again.
        if roster.simulated and trained[-1].lost_nodes > len(roster.gone(trained[-1].number + 1)):
            raise FleetError("the simulated nodes refuse to train, so the run cannot learn", code="nodes.refused")
        if len(trained) >= _FIRST:
            raise FleetError(
                f"no client released anything in the first {_FIRST} rounds; in the last of them "
                f"{count_of(trained[-1].lost_nodes, 'node')} refused or did not reply; each site's log says why",
                code="nodes.no-releases",
            )


class Sites(Observer):
    """Saves which sites are there and how the run ends, for ``umbel server status``; nothing in simulation."""

    @contextmanager
    def until_end(self, run: Run) -> Iterator[None]:
        """Inside, the run begins and ends; then save how."""
        try:
            yield
        except BaseException as error:
            # Flower ends a stopped run by `SystemExit`. A status that cannot be saved hides no other error.
            with suppress(UmbelError, OSError):
                self._write(run, RunState.FAILED if isinstance(error, Exception) else RunState.STOPPED)
            raise
        over = run.state.history[-1].number >= run.setup.config.rounds
        self._write(run, RunState.COMPLETED if over else RunState.STOPPED)

    def begin(self, run: Run) -> None:
        """Save it: a run that is resumed may have failed before."""
        self._write(run)

    def in_pause(self, run: Run, number: int, since: float, ends: float) -> None:
        """Save it, with the pause."""
        self._write(run, paused=since, ends=ends)

    def after_round(self, run: Run) -> None:
        """Save it."""
        self._write(run)

    def _write(self, run: Run, state: RunState = RunState.RUNNING, paused: float = 0.0, ends: float = 0.0) -> None:
        roster, number = run.fleet.roster(run.grid), len(run.state.history) + 1
        if run.folder is not None and not roster.simulated:
            participations = run.fleet.participations
            run.folder.write_status(status_of(run.setup.config, roster, number, participations, paused, ends, state))


class Log(Observer):
    """Logs the progress of a run, with the remaining time.

    A run of up to a hundred rounds gets a line for each. A longer one gets about a hundred lines at regular intervals,
    and between two of them one for the first round that went wrong.

    Parameters
    ----------
    summary : Summary
    clock : callable
        Returns the time in seconds.
    """

    def __init__(self, summary: Summary, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._summary, self._clock = summary, clock

    def begin(self, run: Run) -> None:
        """Start the clock."""
        config = run.setup.config
        every = -(-config.rounds // _LINES)
        # With fewer lines than rounds, choose rounds that were validated.
        self._every = every if every == 1 else -(-every // config.validate_every) * config.validate_every
        self._began = self._clock()
        self._first: tuple[int, float] | None = None
        self._told = self._collapsed = False

    def at_end(self, run: Run) -> None:
        """Log the outcome."""
        for line in self._summary.outcome_lines(run.state):
            log(INFO, "%s", line)

    def after_round(self, run: Run) -> None:
        """Log the round, if it gets a line, and warn once if the hypotheses have collapsed into one."""
        self._line(run)
        history = run.state.history
        groups = history[-1].groups
        if len(groups) < 2 or max(groups) < sum(groups):
            return
        was, self._collapsed = self._collapsed, collapsed(history)
        if self._collapsed and not was:
            last = last_rounds(history)
            log(WARNING, "Since round %d nearly all releases have gone to hypothesis %d: the hypotheses have collapsed "
                "into one. %s", last[0].number, int(np.argmax(groups)), why_collapsed(last))  # fmt: skip

    def _line(self, run: Run) -> None:
        entry, rounds, now = run.state.history[-1], run.setup.config.rounds, self._clock()
        # The first round includes the nodes' start, so it is excluded from the estimate.
        first, first_end = self._first = self._first or (entry.number, now)
        due = (entry.number - 1) % self._every == 0 or entry.number >= rounds or bool(run.state.stopped)
        trouble = bool(entry.lost_nodes or (entry.asked and not entry.moved))
        if not due and (self._told or not trouble):
            return
        self._told = trouble
        line = f"{self._summary.round_line(entry, rounds)}  {in_time(now - self._began)}"
        left = rounds - entry.number
        if entry.number > first and left > 0 and not run.state.stopped:
            most = "at most" if run.setup.config.patience else "about"
            line += f", {most} {in_time((now - first_end) / (entry.number - first) * left)} left"
        log(INFO, line)


def _size(state: State, kept: Arrays) -> int:
    return sum(value.nbytes for value in [*state.hypotheses.values(), *kept.values()])


class Checkpoints(Observer):
    """Saves a run after each round, so that a killed run can resume.

    A thread writes a large model while the next round runs. The end of that round waits for the thread, and so does the
    end of the run. Both raise the error of a failed write. Leaving the context waits too.
    """

    _written: Future[None] | None = None

    def __enter__(self) -> Self:
        """Return the observer."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Wait for the last write; if another error ends the run, log that of the write."""
        try:
            self.wait()
        except Exception as failure:
            if kind is None:
                raise
            log(ERROR, "the last round could not be saved: %s", failure)

    def begin(self, run: Run) -> None:
        """Stop a run whose sites wait because the server's disk has no room for their replies."""
        if run.folder is not None and not run.fleet.roster(run.grid).simulated:
            run.fleet.exchange_on(run.grid).watch = partial(check_room, run.folder.path, LAST_ROOM)

    def before_round(self, run: Run, number: int) -> None:
        """Stop a run of real sites before a round that could not be saved: sites would be charged for nothing."""
        if run.folder is not None and not run.fleet.roster(run.grid).simulated:
            check_room(run.folder.path, LEAST_ROOM + _COPIES * _size(run.state, run.strategy.state))

    def after_round(self, run: Run) -> None:
        """Save the state of the run."""
        self.wait()
        if (folder := run.folder) is None:
            return
        nodes = run.fleet.roster(run.grid).nodes

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

    def at_end(self, run: Run) -> None:
        """Save the state, and why the run ended, which without validation is known only at its end."""
        self.wait()
        if run.folder is not None:
            run.folder.write_round(run.state, run.fleet.participations, run.setup.release, run.strategy.state)

    def wait(self) -> None:
        """Wait for the thread, and raise its error."""
        written, self._written = self._written, None
        if written is not None:
            written.result()
