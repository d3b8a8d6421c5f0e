"""umbel's own observers: early stopping, the log, what a run leaves behind, and the model's baselines beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from logging import INFO, WARNING

import numpy as np

from umbel.protocol.errors import FleetError
from umbel.protocol.flower import log
from umbel.server.history import collapsed, last_rounds
from umbel.server.observer import Observer, Run, Section, load_observers
from umbel.server.report.alarms import why_collapsed
from umbel.server.setup import Setup
from umbel.server.snapshots import Snapshots
from umbel.server.summary import Summary
from umbel.server.tracking import load_tracker

_FIRST = 3  # rounds; a node that keeps silent in one may only be slow
_LINES = 100


def named(setup: Setup) -> tuple[Observer, ...]:
    """Return the observers that a run config names, its tracker, and the strategy if it observes too.

    Raises
    ------
    ConfigError
        When one of them cannot be made.
    """
    run, strategy = setup.config, setup.strategy
    observes = (strategy,) if isinstance(strategy, Observer) else ()
    return (*load_observers(run.observers), *load_tracker(run.track, run.track_options), *observes)


class Patience(Observer):
    """Stops a run after so many validations without a better loss; never where `validations` is 0."""

    def __init__(self, validations: int) -> None:
        super().__init__()
        self._validations = validations

    def after_round(self, run: Run) -> None:
        """Stop the run when its patience is over."""
        if 0 < self._validations <= run.state.stale:
            run.stop(f"no better hypotheses in {self._validations} validations")


class Released(Observer):
    """Ends a run to which no client gives anything: it would go on to its last round and look like one that is done."""

    def after_round(self, run: Run) -> None:
        """Raise when nothing was released in the first rounds; at once where simulated nodes refuse, as they will."""
        if any(entry.releases for entry in run.state.history):  # the first, as a rule
            return
        trained = [entry for entry in run.state.history if entry.asked]
        if not trained:
            return
        roster = run.fleet.roster(run.grid)
        # Those that died are left out of the next round; others will refuse again.
        if roster.simulated and trained[-1].lost_nodes > roster.left_out(trained[-1].number + 1):
            raise FleetError("the simulated nodes refuse to train, so that nothing can be learnt", code="nodes.refused")
        if len(trained) >= _FIRST:
            raise FleetError(
                f"no client released anything in the first {_FIRST} rounds: {trained[-1].lost_nodes} nodes refused or "
                "kept silent in the last of them; each site's own log says why",
                code="nodes.no-releases",
            )


class Resumed(Observer):
    """Says, in the log and in the report, what a resumed simulation has forgotten.

    What a site keeps on its disk a simulated node keeps in memory, for as long as it runs.
    """

    def begin(self, run: Run) -> None:
        """Write it to the log, where nodes are simulated."""
        self._told: tuple[str, ...] = ()
        if not run.fleet.roster(run.grid).simulated:
            return
        done = len(run.state.history)
        self._told = (
            f"After round {done} the run goes on with new simulated nodes: "
            "what their own policy limits (UMBEL_MAX_PARTICIPATIONS, UMBEL_BUDGET, ...) they count anew, unless "
            "UMBEL_LEDGER_PATH names a ledger on disk. The run config's max-participations counts on.",
        )
        if run.setup.model.local_shapes:
            self._told += (
                f"After round {done} clients begin their local parameters anew, so that the result is another than "
                "that of a run that was never stopped.",
            )
        for text in self._told:
            log(WARNING, "%s", text)

    def section(self) -> Section | None:
        """Return the same for the report."""
        return Section("A simulation that was stopped", self._told) if self._told else None


class Log(Observer):
    """Writes to the log how a run goes, with the time that is left.

    A run of up to a hundred rounds gets a line a round. Of a longer one every so many rounds get one,
    about a hundred in all, and between two of them the first round that went wrong.

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
        # Where lines are few, those of rounds that were validated.
        self._every = every if every == 1 else -(-every // config.validate_every) * config.validate_every
        self._began = self._clock()
        self._first: tuple[int, float] | None = None
        self._told = self._collapsed = False

    def after_round(self, run: Run) -> None:
        """Write the round's line, if it gets one, and once when the hypotheses have collapsed into one."""
        self._line(run)
        history = run.state.history
        groups = history[-1].groups
        if not groups or max(groups) < sum(groups):
            return
        was, self._collapsed = self._collapsed, collapsed(history)
        if self._collapsed and not was:
            last = last_rounds(history)
            log(WARNING, "Since round %d nearly all releases have gone to hypothesis %d: the hypotheses have collapsed "
                "into one. %s", last[0].number, int(np.argmax(groups)), why_collapsed(last))  # fmt: skip

    def _line(self, run: Run) -> None:
        entry, rounds, now = run.state.history[-1], run.setup.config.rounds, self._clock()
        # Of the first round the nodes' start is a part, which does not come again.
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


def in_time(seconds: float) -> str:
    """Return a length of time for people, in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Checkpoints(Observer):
    """Saves a run after each round, so that one that was killed goes on.

    Parameters
    ----------
    snapshots : Snapshots
        Saved as well.
    """

    def __init__(self, snapshots: Snapshots) -> None:
        super().__init__()
        self._snapshots = snapshots

    def after_round(self, run: Run) -> None:
        """Save where the run stands."""
        if run.folder is not None:
            run.folder.write_nodes(run.fleet.roster(run.grid).nodes)
            self.at_end(run)
            if self._snapshots.add(run.state, run.outcome):
                run.folder.write_releases(self._snapshots.to_bytes())

    def at_end(self, run: Run) -> None:
        """Save where the run stands, and why it ended, which without validation is known only at its end."""
        if run.folder is not None:
            run.folder.write_round(run.state, run.fleet.participations, run.setup.release, run.strategy.state)


class Baselines(Observer):
    """Says at the end of a run, and in its report, what the model's baselines reach (`umbel.models.hooks.Hooks`).

    Only in simulation, where all clients' rows can be read, and only of models that declare baselines.
    """

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def at_end(self, run: Run) -> None:
        """Compare, where there is something to compare."""
        manifest, model = run.setup.manifest, run.setup.model
        if model.hooks.baselines is None or manifest is None or manifest.part:
            return
        if not (run.state.best_round and run.fleet.roster(run.grid).simulated):
            return
        dataset = run.setup.open_dataset()
        assert dataset is not None, "it has a manifest"
        if not (found := model.hooks.baselines(dataset, model.metric.name)):
            return
        scored = {entry.number: entry.metric for entry in run.state.history if entry.metric is not None}
        best, last = scored[run.state.best_round], scored[max(scored)]
        beside = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        self._text = (
            f"Validation {model.metric.name} of the best hypotheses {best:.4f}, of the last {last:.4f}. Baselines on "
            f"the same rows: {beside}."
        )
        log(INFO, self._text)

    def section(self) -> Section | None:
        """Return the comparison."""
        return Section("Beside baselines", (self._text,)) if self._text else None
