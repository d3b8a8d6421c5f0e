"""What watches a run: when it is called, how it is named, and what it adds to the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import Field

import umbel.client.app
from tests.helpers.errors import raises
from tests.helpers.runs import AppRun, run_app
from umbel.protocol.errors import ConfigError
from umbel.protocol.plugins import NoOptions
from umbel.server.observer import Observer, Run, Section, load_observers
from umbel.server.observers import named
from umbel.server.run_folder import RunFolder
from umbel.server.setup import Setup
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import play

pytestmark = pytest.mark.usefixtures("blank_figures")

told: list[tuple[Any, ...]] = []
"""What the observers of this file have seen, each under its name."""


@dataclass(frozen=True)
class TellerOptions:
    """Two of them, each with a default."""

    name: str = "teller"
    stop_after: Annotated[int, Field(ge=0)] = 0


class Teller(Observer):
    """Tells when it is called."""

    Options: ClassVar[type] = TellerOptions

    def begin(self, run: Run) -> None:
        told.append((self.options.name, "begin", len(run.state.history)))

    def before_round(self, run: Run, number: int) -> None:
        told.append((self.options.name, "before", number, len(run.state.history)))

    def after_round(self, run: Run) -> None:
        entry = run.state.history[-1]
        told.append((self.options.name, "after", entry.number, entry.asked))
        if entry.number == self.options.stop_after:
            run.stop(f"{self.options.name} has seen enough")

    def at_end(self, run: Run) -> None:
        told.append((self.options.name, "end", run.state.stopped))

    def section(self) -> Section:
        return Section(f"What {self.options.name} saw", (f"<script>{len(told)}</script> & more",))


class Quiet(Observer):
    """Does nothing at all."""


class Picky(Observer):
    """Is not for every run."""

    def begin(self, run: Run) -> None:
        raise ConfigError("this run is not worth watching")


class Fragile(Observer):
    """Dies in round 3, once."""

    dead: ClassVar[bool] = False

    def after_round(self, run: Run) -> None:
        if run.state.history[-1].number == 3 and not Fragile.dead:
            Fragile.dead = True
            raise RuntimeError("the power went")


@pytest.fixture(autouse=True)
def begin() -> None:
    told.clear()
    Fragile.dead = False


TELLER, QUIET, PICKY, FRAGILE = (f"{__name__}:{kind}" for kind in ("Teller", "Quiet", "Picky", "Fragile"))


def run_in_process(config: dict[str, Any]) -> AppRun:
    return run_app(config, InProcessGrid(umbel.client.app.app, config))


# --- by name


def test_observers_are_named_one_after_the_other_each_with_its_options() -> None:
    observers = load_observers(f" {TELLER} name=one stop-after=3 ;{QUIET};  {TELLER} ; ")
    assert [type(observer).__name__ for observer in observers] == ["Teller", "Quiet", "Teller"]
    assert [observer.options for observer in observers] == [TellerOptions("one", 3), NoOptions(), TellerOptions()]
    assert load_observers("") == load_observers(" ; ") == ()


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [
        ("nowhere:Mine", "config.import", "'nowhere:Mine'"),
        ("umbel.server.history:Round", "config.not-built-on", "'umbel.server.history:Round'"),
        ("umbel.server.observer:load_observers", "config.not-built-on", "load_observers"),
        (f"{QUIET} x=1", "config.unknown-option", f"observers, {QUIET}"),
        (f"{TELLER} stop-after=-1", "config.option-value", "'-1'"),
        (f"{QUIET}, {TELLER}", "config.import", "'Quiet,'"),
    ],
)
def test_what_cannot_watch_is_named(text: str, code: str, part: str) -> None:
    for load in (load_observers, lambda text: named(Setup.parse({"observers": text}))):
        with raises(ConfigError, code, part):
            load(text)


# --- when


def test_every_observer_is_told_in_order(run_config: dict[str, Any]) -> None:
    play(run_config | {"rounds": 2, "restarts": 1, "observers": f"{TELLER} name=a; {TELLER} name=b"})
    each = [("begin", 0), ("before", 1, 0), ("after", 1, 7), ("before", 2, 1), ("after", 2, 7), ("after", 3, 0)]
    each.append(("end", "all 2 rounds done"))
    assert told == [(name, *call) for call in each for name in ("a", "b")]


def test_one_that_stops_the_run_ends_it_after_that_round_with_its_reason(run_config: dict[str, Any]) -> None:
    config = run_config | {"rounds": 9, "restarts": 1, "observers": f"{TELLER} name=first stop-after=2; {TELLER}"}
    run = run_in_process(config)
    assert len(run.history) == 2
    assert run.stopped == "first has seen enough"
    assert [call for call in told if call[1] == "end"] == [
        ("first", "end", "first has seen enough"),
        ("teller", "end", "first has seen enough"),
    ]
    report = (run.folder / "report.html").read_text()
    assert "first has seen enough" in report


def test_one_that_does_not_fit_says_so_before_the_first_round(run_config: dict[str, Any]) -> None:
    with raises(ConfigError, "config", "not worth watching"):
        play(run_config | {"rounds": 2, "restarts": 1, "observers": f"{PICKY}; {TELLER}"})
    assert told == []


# --- the report


def test_what_it_adds_stands_in_the_report_as_text(run_config: dict[str, Any]) -> None:
    config = run_config | {"rounds": 1, "restarts": 1, "observers": f"{TELLER} name=<b>; {QUIET}"}
    run = run_in_process(config)
    page = (run.folder / "report.html").read_text()
    assert "What &lt;b&gt; saw</h2>" in page
    assert "<p>&lt;script&gt;5&lt;/script&gt; &amp; more</p>" in page
    assert "<script" not in page
    assert "added-2" not in page, "the other adds nothing"
    assert RunFolder(run.folder).read_sections() == [Section("What <b> saw", ("<script>5</script> & more",))]


class Broken(Observer):
    """Fails when it is asked for its section."""

    def section(self) -> Section:
        raise RuntimeError("no section")


class Texting(Observer):
    """Returns a text in place of a section."""

    def section(self) -> Any:
        return "no section"


@pytest.mark.parametrize("kind", [Broken, Texting])
def test_a_section_that_fails_costs_the_run_nothing_else(
    kind: type[Observer], run_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config | {"rounds": 1, "restarts": 1, "observers": f"{__name__}:{kind.__name__}; {TELLER}"}
    run = run_in_process(config)
    assert "What teller saw" in (run.folder / "report.html").read_text()
    assert f"the report lacks the section of {kind.__name__}" in caplog.text


def test_one_text_is_one_paragraph() -> None:
    assert Section("Title", "text") == Section("Title", ("text",))  # type: ignore[arg-type]  # a missing comma


# --- a run that goes on


def test_after_a_crash_it_is_told_of_the_rounds_that_are_left(run_config: dict[str, Any], umbel_home: Path) -> None:
    """A round in which an observer fails is saved, since its clients have paid for it. It does not come again."""
    config = run_config | {"rounds": 4, "restarts": 1, "observers": f"{FRAGILE}; {TELLER}"}
    with pytest.raises(RuntimeError, match="the power went"):
        run_in_process(config)
    (folder,) = (umbel_home / "runs").iterdir()
    assert told[-1] == ("teller", "after", 3, 7)
    told.clear()
    config |= {"resume": folder.name}
    run = run_in_process(config)
    assert told[:3] == [("teller", "begin", 3), ("teller", "before", 4, 3), ("teller", "after", 4, 7)]
    assert [call[1:3] for call in told if call[1] == "after"] == [("after", 4), ("after", 5)]
    assert [entry["number"] for entry in run.history] == [1, 2, 3, 4, 5]
    whole = run_config | {"rounds": 4, "restarts": 1}
    expected = run_in_process(whole).arrays("latest")["weight"]
    assert run.arrays("latest")["weight"].tobytes() == expected.tobytes(), "who watches changes nothing"
    assert "What teller saw" in (run.folder / "report.html").read_text()
