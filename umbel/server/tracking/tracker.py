"""Shared parts of all trackers: the values that they log, and that a failing tracker never stops a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from logging import WARNING
from typing import Any, ClassVar

from umbel.privacy.accounting.guarantee import guarantee
from umbel.privacy.accounting.rows import row_guarantee
from umbel.protocol.errors import ConfigError
from umbel.protocol.flower import log
from umbel.server.history import Round
from umbel.server.observer import Observer, Run
from umbel.server.summary import Summary

Values = Mapping[str, float]

_EVERY_S = 1.0  # rounds may take milliseconds, and a message to a server takes longer


class Tracker(Observer):
    """Logs the server's view of a run to an experiment tracker: nothing beyond the run's folder.

    For a round these are ``validation_loss`` (in the target's unit if it has one) with ``_p10`` and
    ``_p90`` over clients, ``validation_`` and the metric's name, ``best_validation_loss``, ``asked``,
    ``releases``, ``lost_nodes``, ``seconds``, and for the client with the most participations
    ``max_participations``, ``epsilon`` of its releases so far at the run's delta if there is a guarantee,
    ``row_epsilon`` if noise in training hides rows, and ``paper_budget``, the heuristic, if it gives a bound.

    If a tracker fails after the start, umbel warns once and stops using it.
    """

    tool: ClassVar[str]
    """The tool's usual name."""
    clock: Callable[[], float] = staticmethod(time.monotonic)

    # --- methods of a tool

    def open(self, run: Run, told: Mapping[str, Any]) -> None:
        """Begin, or resume the earlier log of the run of this name; `told` are its settings."""
        raise NotImplementedError

    def send(self, rounds: Sequence[tuple[int, Values]]) -> None:
        """Log some rounds, each by its number."""
        raise NotImplementedError

    def close(self, stopped: str) -> None:
        """End, and log why the run ended."""
        raise NotImplementedError

    # --- methods of an observer

    def begin(self, run: Run) -> None:
        """Open the tool."""
        setup = run.setup
        self._summary = Summary.of(setup)
        told = {**setup.config.entries(), "parameters": setup.model.num_parameters}
        if unit := self._summary.scale[1]:
            told["validation_loss_unit"] = unit
        try:
            self.open(run, told)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"track: {self.tool} does not work: {_first_line(error)}; repair that, or leave track out",
                code="config.track-failed",
            ) from error
        self._waiting: list[tuple[int, Values]] = []
        self._failed, self._sent = False, self.clock()

    def after_round(self, run: Run) -> None:
        """Log the round, now or together with those that follow within a second."""
        entry = run.state.history[-1]
        self._waiting.append((entry.number, self._values(entry, run.state.best_loss)))
        if self.clock() - self._sent >= _EVERY_S:
            self._flush(entry)

    def at_end(self, run: Run) -> None:
        """Log the rest, and why the run ended."""
        self._flush(run.state.history[-1] if run.state.history else None)
        self._try(lambda: self.close(run.state.stopped))

    def _values(self, entry: Round, best: float) -> dict[str, float]:
        factor = self._summary.factor
        values: dict[str, float] = {"seconds": entry.seconds}
        if entry.loss is not None and entry.metric is not None:
            metric = self._summary.model.metric.name
            values |= {"validation_loss": entry.loss * factor, "best_validation_loss": best * factor}
            values[f"validation_{metric}"] = entry.metric * self._summary.metric_factor
        if spread := entry.loss_spread:
            values |= {"validation_loss_p10": spread[0] * factor, "validation_loss_p90": spread[-1] * factor}
        if entry.asked:
            values |= {"asked": entry.asked, "releases": entry.releases, "lost_nodes": entry.lost_nodes}
            values["max_participations"] = entry.max_participations
        return {name: value for name, value in values.items() if math.isfinite(value)}  # not every tool accepts others

    def _spent(self, entry: Round) -> dict[str, float]:
        """Return the busiest client's spending; composing it may take longer than a round."""
        release, times = self._summary.release, int(entry.max_participations)
        delta, made = self._summary.delta, {release: times}
        of_row = row_guarantee(made, delta) if release.by_rows else None
        known = {"epsilon": guarantee(made, delta), "row_epsilon": of_row}
        values = {name: float(one.epsilon) for name, one in known.items() if one and math.isfinite(one.epsilon)}
        return values | ({} if release.paper_cost is None else {"paper_budget": float(release.paper_spend(times))})

    def _flush(self, newest: Round | None) -> None:
        waiting, self._waiting, self._sent = self._waiting, [], self.clock()
        if waiting and newest is not None:
            number, values = waiting[-1]
            waiting[-1] = number, {**values, **self._spent(newest)}
            self._try(lambda: self.send(waiting))

    def _try(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # keep running: a tool must not stop the run
            self._failed = True
            log(WARNING, "track: %s failed, and the run continues without it: %s", self.tool, _first_line(error))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
