"""What trackers tell of a run, and that a tool which fails ends none."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.errors import raises
from umbel.protocol.errors import ConfigError
from umbel.server.observer import Run
from umbel.server.observers import named
from umbel.server.setup import Setup
from umbel.server.tracking import TRACKERS, Tracker
from umbel.simulation.in_process import play


class Diary(Tracker):
    """Writes down what it is told."""

    tool = "a diary"

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.fails, self.told, self.pages, self.stopped, self.calls = fails, {}, [], "", 0

    def _maybe(self, what: str) -> None:
        self.calls += 1
        if self.fails == what:
            raise OSError("the pen is dry.\nTraceback")

    def open(self, run: Run, told: Mapping[str, Any]) -> None:
        self._maybe("open")
        self.told = dict(told)

    def send(self, rounds: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        self._maybe("send")
        self.pages += rounds

    def close(self, stopped: str) -> None:
        self._maybe("close")
        self.stopped = stopped


def tracked(run_config: dict[str, Any], diary: Diary, **changes: Any) -> Run:
    config = run_config | {"rounds": 3, "restarts": 1} | {key.replace("_", "-"): v for key, v in changes.items()}
    return play(config, observers=[diary])


# --- what is told


def test_it_is_told_what_a_run_folder_holds_and_no_more(run_config: dict[str, Any]) -> None:
    diary = Diary()
    run = tracked(run_config, diary, validate_every=2)
    history = run.state.history
    assert [number for number, _ in diary.pages] == [1, 2, 3, 4]
    first, second, _, last = (values for _, values in diary.pages)
    assert first == {
        "seconds": history[0].seconds,
        "validation_loss": history[0].loss, "best_validation_loss": history[0].loss,
        "validation_rmse": history[0].metric,
        "validation_loss_p10": history[0].loss_spread[0], "validation_loss_p90": history[0].loss_spread[-1],
        "asked": 7, "releases": 7, "lost_nodes": 0, "max_participations": history[0].max_participations,
    }  # fmt: skip
    assert not any("loss" in name for name in second), "round 2 is not validated"
    assert "asked" not in last
    assert diary.told["strategy"] == "group-privacy"
    assert diary.told["parameters"] == 2
    assert diary.stopped == "all 3 rounds done"


def test_the_guarantee_and_the_heuristic_have_names_of_their_own(run_config: dict[str, Any]) -> None:
    """Two parameters at nu = 5: 2/5 a participation, and with a public radius 4/5 and the choice on top."""
    paper, formal = Diary(), Diary()
    times = tracked(run_config, paper).state.history[-1].max_participations
    last = paper.pages[-1][1]
    assert last["paper_budget"] == pytest.approx(0.4 * times)
    assert "epsilon" not in last, "nothing is guaranteed"
    tracked(run_config, formal, clipping="public", choice_epsilon=0.2)
    last = formal.pages[-1][1]
    assert last["epsilon"] <= 1.0 * times + 1e-9
    assert last["paper_budget"] == pytest.approx(0.4 * times)


def test_quick_rounds_are_told_together(run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    diary, now = Diary(), iter(0.4 * t for t in range(100))
    monkeypatch.setattr(diary, "clock", lambda: next(now))
    tracked(run_config, diary, rounds=12)
    assert [number for number, _ in diary.pages] == list(range(1, 14))
    assert diary.calls < 10


def test_what_is_no_number_is_left_out(run_config: dict[str, Any]) -> None:
    diary = Diary()
    run = tracked(run_config, diary, rounds=1)
    broken = replace(run.state.history[0], loss=math.inf, metric=math.nan)
    assert not {"validation_loss", "validation_rmse"} & set(diary._values(broken, math.inf))


# --- a tool that fails


def test_a_tool_that_cannot_be_opened_ends_the_run_before_its_first_round(run_config: dict[str, Any]) -> None:
    with raises(ConfigError, "config.track-failed", "track"):
        tracked(run_config, Diary("open"))


@pytest.mark.parametrize("what", ["send", "close"])
def test_a_tool_that_fails_later_is_left_alone_with_one_warning(
    what: str, run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    diary, now = Diary(what), iter(range(0, 1000, 2))
    monkeypatch.setattr(diary, "clock", lambda: float(next(now)))
    with caplog.at_level(logging.WARNING, "flwr"):
        run = tracked(run_config, diary)
    assert run.state.stopped == "all 3 rounds done"
    warnings = [line for line in caplog.messages if line.startswith("track:")]
    assert warnings == ["track: a diary failed, and the run continues without it: the pen is dry"]


# --- by name


@pytest.mark.parametrize(
    ("name", "options", "code", "part"),
    [
        ("mlfow", "", "config.unknown-name", "mlflow?"),
        ("tensorboard", "dir=x", "config.unknown-option", "track"),
    ],
)
def test_what_cannot_track_is_named(name: str, options: str, code: str, part: str) -> None:
    with raises(ConfigError, code, part):
        named(Setup.parse({"track": f"{name} {options}".strip()}))


@pytest.mark.parametrize("name", TRACKERS)
def test_a_library_that_is_missing_is_named_with_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.server.tracking.find_spec", lambda name: None)
    with raises(ConfigError, "config.missing-library", name, name, "track"):
        named(Setup.parse({"track": name}))
