"""Observers watch a run: early stopping, checkpoints, the log, and classes of a user.

An observer is a class on `Observer`, named in the run config: ``observers = "package.module:Class
name=value; another.module:Class"``. The fields of a dataclass, `Options`, are its options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr.serverapp import Grid

from umbel.protocol.errors import ConfigError
from umbel.protocol.plugins import NoOptions, import_by_name, parse_options
from umbel.server.history import State
from umbel.server.nodes.fleet import Fleet
from umbel.server.run_folder import RunFolder, Section
from umbel.server.setup import Setup
from umbel.strategies import HypothesisStrategy
from umbel.strategies.base import Outcome

__all__ = ["Observer", "Run", "Section", "load_observers"]


@dataclass
class Run:
    """A run that goes on, as its observers see it.

    Attributes
    ----------
    setup : Setup
    grid : Grid
    state : State
        Where it stands.
    observers : sequence of Observer
    name : str
        The same when the run goes on after an interruption.
    folder : RunFolder or None
        What it leaves behind.
    outcome : Outcome or None
        What the last round gave; None where it only validated.
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
        """Have this round be the last; in the evaluation after all rounds there is nothing left to stop."""
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
        """Get ready, once the nodes are there; raise `ConfigError` where the run is not fit to be observed."""

    def before_round(self, run: Run, number: int) -> None:
        """Look at what round `number` will start from."""

    def after_round(self, run: Run) -> None:
        """Look at the round just done, the last of ``run.state.history``."""

    def at_end(self, run: Run) -> None:
        """Look at a run that is over."""

    def section(self) -> Section | None:
        """Return what to add to the report, at the end; None for nothing."""
        return None


def load_observers(text: str) -> tuple[Observer, ...]:
    """Return the observers that the run config names.

    Raises
    ------
    ConfigError
        When one cannot be imported, is none, or has other options.
    """
    observers = []
    for entry in filter(None, map(str.strip, text.split(";"))):
        name, _, options = entry.partition(" ")
        kind = import_by_name(name)
        if not (isinstance(kind, type) and issubclass(kind, Observer)):
            raise ConfigError(
                f"observers: {name!r} is no class built on umbel.server.observer.Observer", code="config.not-built-on"
            )
        observers.append(kind(parse_options(kind.Options, options, f"observers, {name}")))
    return tuple(observers)
