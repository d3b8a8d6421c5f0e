"""A user's callbacks: how they are named, and when they are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from flwr.app import ArrayRecord
from pydantic import Field

import umbel.client.app
from tests.helpers.errors import raises
from tests.helpers.runs import run_app
from umbel.protocol.errors import ConfigError
from umbel.server.callbacks import named
from umbel.server.setup import Setup
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import play
from umbel.strategies import Callback

pytestmark = pytest.mark.usefixtures("blank_figures")

told: list[tuple[Any, ...]] = []
"""What the callbacks of this file have seen, each under its name."""


@dataclass
class Teller(Callback):
    """Tells when it is called, and has two options, each with a default."""

    name: str = "teller"
    stop_after: Annotated[int, Field(ge=0)] = 0

    def begin(self) -> None:
        told.append((self.name, "begin", len(self.run.state.history)))

    def before_round(self, round: int, arrays: ArrayRecord) -> None:
        told.append((self.name, "before", round, len(self.run.state.history)))

    def after_exchange(self, round: int, stages: dict[str, float]) -> str | None:
        told.append((self.name, "after", round, self.run.state.history[-1].number))
        return f"{self.name} has seen enough" if round == self.stop_after else None

    def on_stop(self, reason: str) -> None:
        told.append((self.name, "stop", reason))

    def at_end(self) -> None:
        told.append((self.name, "end", self.run.state.stopped))


class Quiet(Callback):
    """Does nothing at all."""


TELLER, QUIET = (f"{__name__}:{kind}" for kind in ("Teller", "Quiet"))


# --- by name


def callbacks(text: str) -> tuple[Callback, ...]:
    return named(Setup.parse({"observers": text}))


def test_callbacks_are_named_one_after_the_other_each_with_its_options() -> None:
    first, second, third = callbacks(f" {TELLER} name=one stop-after=3 ;{QUIET};  {TELLER} ; ")
    assert (first, third) == (Teller("one", 3), Teller())
    assert type(second) is Quiet
    assert callbacks("") == callbacks(" ; ") == ()


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [
        ("umbel.server.history:Round", "config.not-built-on", "'umbel.server.history:Round'"),
        (f"{QUIET} x=1", "config.unknown-option", f"observers, {QUIET}"),
        (f"{TELLER} stop-after=-1", "config.option-value", "'-1'"),
        (f"{QUIET}, {TELLER}", "config.import", "'Quiet,'"),
    ],
)
def test_what_cannot_watch_is_named(text: str, code: str, part: str) -> None:
    with raises(ConfigError, code, part):
        callbacks(text)


# --- when


def test_every_callback_is_told_in_order(run_config: dict[str, Any]) -> None:
    told.clear()
    play(run_config | {"rounds": 2, "restarts": 1, "observers": f"{TELLER} name=a; {TELLER} name=b"})
    each = [("begin", 1), ("before", 1, 1), ("after", 1, 1), ("before", 2, 2), ("after", 2, 2), ("after", 3, 2)]
    each.append(("end", "all 2 rounds done"))
    assert told == [(name, *call) for call in each for name in ("a", "b")]


def test_one_that_stops_the_run_ends_it_after_that_round_with_its_reason(run_config: dict[str, Any]) -> None:
    told.clear()
    config = run_config | {"rounds": 9, "restarts": 1, "observers": f"{TELLER} name=first stop-after=2; {TELLER}"}
    run = run_app(config, InProcessGrid(umbel.client.app.app, config))
    assert len(run.trained) == 2
    assert run.stopped == "first has seen enough"
    ended = [(kind, name, run.stopped) for kind in ("stop", "end") for name in ("first", "teller")]
    assert [(kind, name, *rest) for name, kind, *rest in told if kind in ("stop", "end")] == ended
    assert run.stopped in (run.folder / "report.html").read_text()
