"""What all trackers share: what is told of a run, and that a tool which fails ends no run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from logging import WARNING
from typing import Any, ClassVar

from umbel.privacy.accounting.guarantee import guarantee
from umbel.protocol.errors import ConfigError
from umbel.protocol.flower import log
from umbel.server.history import Round
from umbel.server.observer import Observer, Run
from umbel.server.summary import Summary

Values = Mapping[str, float]

_EVERY_S = 1.0  # rounds may take milliseconds, and a message to a server takes longer


class Tracker(Observer):
    """Tells a tool for experiments what the server sees of a run: no more than a run's folder holds.

    Of a round these are ``validation_loss`` (in the target's unit where it has one) with ``_p10`` and
    ``_p90`` over clients, ``validation_`` and the metric's name, ``best_validation_loss``, ``asked``,
    ``releases``, ``lost_nodes``, ``seconds``, and of the client that took part most often
    ``max_participations``, ``epsilon`` at `umbel.privacy.accounting.guarantee.DELTA` where something is guaranteed,
    and ``paper_budget``, the heuristic, where it counts.

    A tool that fails later than at the start is left alone from then on, with one warning.
    """

    tool: ClassVar[str]
    """As people call it."""
    clock: Callable[[], float] = staticmethod(time.monotonic)

    # --- what a tool does

    def open(self, run: Run, told: Mapping[str, Any]) -> None:
        """Begin, or go on with what was told of the run of this name before; `told` is what was set."""
        raise NotImplementedError

    def send(self, rounds: Sequence[tuple[int, Values]]) -> None:
        """Tell of some rounds, each by its number."""
        raise NotImplementedError

    def close(self, stopped: str) -> None:
        """End, and tell why the run did."""
        raise NotImplementedError

    # --- what a run does

    def begin(self, run: Run) -> None:
        """Open the tool."""
        setup = run.setup
        self._summary = Summary(setup.model, setup.manifest, setup.release)
        told = {**setup.config.entries(), "parameters": setup.model.num_parameters}
        if unit := self._summary.scale[1]:
            told["validation_loss_unit"] = unit
        try:
            self.open(run, told)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"track: {self.tool} does not work: {_first_line(error)}; see to it, or leave track out",
                code="config.track-failed",
            ) from error
        self._waiting: list[tuple[int, Values]] = []
        self._failed, self._sent = False, self.clock()

    def after_round(self, run: Run) -> None:
        """Tell of the round, now or together with those that follow within a second."""
        entry = run.state.history[-1]
        self._waiting.append((entry.number, self._values(entry, run.state.best_loss)))
        if self.clock() - self._sent >= _EVERY_S:
            self._flush(entry)

    def at_end(self, run: Run) -> None:
        """Tell of what is left, and why the run ended."""
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
        return {name: value for name, value in values.items() if math.isfinite(value)}  # not every tool takes others

    def _spent(self, entry: Round) -> dict[str, float]:
        """Return what the busiest client has spent, which takes longer to compose than a round may take."""
        release, times = self._summary.release, int(entry.max_participations)
        found = guarantee({release: times})
        values = {} if found is None else {"epsilon": float(found.epsilon)}
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
            log(WARNING, "track: %s failed, and the run goes on without it: %s", self.tool, _first_line(error))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
