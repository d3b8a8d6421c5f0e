"""Observers watch a run: checkpoints, the log, and a user's classes.

An observer is a class on `Observer`, named in the run config: ``observers = "package.module:Class
name=value; another.module:Class"``. The fields of a dataclass, `Options`, are its options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr.serverapp import Grid

from umbel.nodes.fleet import Fleet
from umbel.protocol.errors import ConfigError
from umbel.protocol.plugins import NoOptions, import_by_name, parse_options, refuse_uncalled
from umbel.server.history import State
from umbel.server.run_folder import RunFolder, Section
from umbel.server.setup import Setup
from umbel.strategies import HypothesisStrategy
from umbel.strategies.base import Outcome

__all__ = ["Observer", "Run", "Section", "load_observers"]


@dataclass
class Run:
    """A run in progress, as its observers see it.

    Attributes
    ----------
    setup : Setup
    grid : Grid
    state : State
        The current state.
    observers : sequence of Observer
    name : str
        The same after the run resumes.
    folder : RunFolder or None
        Its folder.
    outcome : Outcome or None
        The result of the last round; None if it only validated.
    """

    setup: Setup
    grid: Grid
    state: State
    observers: Sequence[Observer] = ()
    name: str = ""
    folder: RunFolder | None = None
    outcome: Outcome | None = None

    @property
    def fleet(self) -> Fleet:
        """The clients."""
        return self.setup.fleet

    @property
    def strategy(self) -> HypothesisStrategy:
        """The strategy."""
        return self.setup.strategy

    def stop(self, reason: str) -> None:
        """Make this round the last; in the evaluation after all rounds it has no effect."""
        if not self.state.history or self.state.history[-1].asked:
            self.state.stopped = reason


class Observer:
    """Watches a run, and may stop it (`Run.stop`).

    Parameters
    ----------
    options : Options
    """

    Options: ClassVar[type] = NoOptions
    """A dataclass, whose fields the run config sets."""

    def __init__(self, options: Any = None) -> None:
        self.options = options if options is not None else self.Options()

    def begin(self, run: Run) -> None:
        """Prepare, once the nodes are connected; raise `ConfigError` if the run cannot be observed."""

    def before_round(self, run: Run, number: int) -> None:
        """Look at the hypotheses before round `number`."""

    def in_pause(self, run: Run, number: int, since: float, ends: float) -> None:
        """Notice that round `number` waits for sites.

        It is called now and then. The pause began at `since` and ends at `ends` at the latest, in seconds since 1970.
        """

    def after_round(self, run: Run) -> None:
        """Look at the finished round, the last of ``run.state.history``."""

    def at_end(self, run: Run) -> None:
        """Look at the finished run."""

    def section(self) -> Section | None:
        """Return a section for the report, at the end; None for nothing."""
        return None


def load_observers(text: str) -> tuple[Observer, ...]:
    """Return the observers in the run config.

    Raises
    ------
    ConfigError
        If one cannot be imported, is not an observer, has other options, or has a public method that nothing calls.
    """
    observers = []
    for entry in filter(None, map(str.strip, text.split(";"))):
        name, _, options = entry.partition(" ")
        kind = import_by_name(name)
        if not (isinstance(kind, type) and issubclass(kind, Observer)):
            raise ConfigError(
                f"observers: {name!r} is not a class built on umbel.server.observer.Observer",
                code="config.not-built-on",
            )
        refuse_uncalled("observer", kind, Observer)
        observers.append(kind(parse_options(kind.Options, options, f"observers, {name}")))
    return tuple(observers)
