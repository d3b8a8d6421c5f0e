"""umbel's own callbacks: the log, and what is saved after each round."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from tests.helpers.errors import raises
from tests.helpers.scripted import Scripted, run_of
from umbel.protocol.errors import DiskError
from umbel.protocol.words import in_time
from umbel.server import callbacks, run_folder
from umbel.server.callbacks import Checkpoints, Log, Released
from umbel.server.history import State
from umbel.server.run_folder import RunFolder
from umbel.server.setup import Setup
from umbel.server.summary import Summary
from umbel.strategies import Callback


def scripted(losses: list[float | None], *watching: Callback, **changes: Any) -> State:
    """Return how a run of written down losses ended."""
    run = run_of(Scripted(losses), *watching, **changes)
    run.do()
    return run.state


# --- releases


@pytest.mark.parametrize(("simulated", "refuses"), [(False, True), (False, False), (True, True)])
def test_a_run_that_every_site_refuses_ends(simulated: bool, refuses: bool) -> None:
    run = run_of(Scripted([9.0] * 6), Released())
    run.fleet.roster = lambda _: SimpleNamespace(  # type: ignore[method-assign,assignment,return-value]
        simulated=simulated, validation=1, refuses=lambda times: refuses and times <= run.state.history[-1].number
    )
    run.do()
    ends = refuses and not simulated
    assert run.state.history[-1].number == (3 if ends else 5)
    assert run.state.stopped.startswith("every site refuses") == ends


# --- the log


def test_a_collapse_is_told_once_in_one_line(run_config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    # All releases of `Scripted` go to hypothesis 0, two a round: ten rounds hold ten releases a hypothesis.
    lines = logged(caplog, run_config, Scripted([1.0] * 41), rounds=40)
    (at,) = (i for i, line in enumerate(lines) if "collapsed" in line)
    assert lines[at - 1].startswith("round  9/40"), "which was validated when round 10 trained"
    assert lines[at].startswith(
        "Since round 1 nearly all releases have gone to hypothesis 0: the hypotheses have collapsed into one. "
    )
    assert "\n" not in lines[at]


def logged(caplog: pytest.LogCaptureFixture, run_config: dict[str, Any], strategy: Scripted, **changes: Any) -> Any:
    """Return the lines of a scripted run whose rounds take a minute each, and its start four."""
    setup = Setup.parse(run_config)
    times = iter([0.0, *(240.0 + 60 * t for t in range(2000))])
    log = Log(Summary.of(setup), lambda: next(times))
    with caplog.at_level(logging.INFO, "flwr"):
        run_of(strategy, log, **changes).do()
    over = next((i for i, line in enumerate(caplog.messages) if line.startswith("The rounds have ended")), None)
    return caplog.messages[:over]


def test_each_round_gets_a_line_with_the_time_left_from_the_second_on(
    run_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    lines = list(logged(caplog, run_config, Scripted([9, 8, 7, 6, 5]), rounds=4))
    assert [line.split("  ")[0] for line in lines] == [f"round {number}/4" for number in range(5)]
    assert "validation RMSE 8.0000" in lines[1]
    assert "releases 2/3 (2+0)" in lines[1]
    assert [line.split("  ")[-1] for line in lines] == [
        "4 min 0 s", "5 min 0 s, about 2 min 0 s left", "6 min 0 s, about 1 min 0 s left", "7 min 0 s", "8 min 0 s",
    ]  # fmt: skip
    caplog.clear()
    patient = logged(caplog, run_config, Scripted([9, 8, 7, 6, 5]), rounds=4, patience=3)
    assert patient[1].endswith("5 min 0 s, at most 2 min 0 s left"), "it may end early"


def test_a_long_run_gets_a_hundred_lines_of_rounds_that_were_validated(
    run_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    losses = [1.0] * 1001
    lines = logged(caplog, run_config, Scripted(losses), rounds=1000, **{"validation": "every=5"})
    (warned,) = (line for line in lines if "collapsed" in line)
    lines.remove(warned)
    assert len(lines) == 102, "every tenth, and the first that lost a node"
    assert sum("validation" in line for line in lines) >= 100
    assert lines[2].startswith("round   10/1000")
    assert lines[2].endswith("14 min 0 s, about 16 h 29 min left")


def test_what_goes_wrong_is_told_at_once_and_not_again_before_the_next_line(
    run_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    strategy = Scripted([1.0] * 301, stuck={1, 2, 4, 200})
    strategy.lost = 0
    lines = logged(caplog, run_config, strategy, rounds=300)
    short = [line.split()[1].split("/")[0] for line in lines if "TOO FEW" in line]
    assert short == ["1", "4", "200"], "round 2 comes before the line of round 3"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (7500, "2 h 5 min")]
)
def test_time_is_told_in_its_two_largest_units(seconds: float, words: str) -> None:
    assert in_time(seconds) == words


# --- what is saved


class Looking(Callback):
    """Looks into the folder after each round."""

    def __init__(self, folder: RunFolder) -> None:
        self.seen: list[tuple[int, float, str]] = []
        self.folder = folder

    def after_exchange(self, round: int, stages: dict[str, float]) -> None:
        state, _, _ = self.folder.read({"weight": (1, 2)})
        self.seen.append((state.history[-1].number, float(state.hypotheses["weight"][0, 0, 0]), state.stopped))


def test_a_run_is_saved_after_each_round_and_at_its_end(tmp_path: Any) -> None:
    folder = RunFolder(tmp_path / "run")
    strategy = Scripted([9, 8, 7])
    strategy.state = {"steps": np.array(3)}
    looking = Looking(folder)
    run = run_of(strategy, Checkpoints(), looking, rounds=2)
    run.folder = folder
    run.do()
    assert looking.seen == [(1, 1.0, ""), (2, 2.0, ""), (2, 2.0, "all 2 rounds done")]
    state, spent, kept = folder.read({"weight": (1, 2)})
    assert state.stopped == "all 2 rounds done"
    assert spent == {0: 2, 1: 2}
    assert int(kept["steps"]) == 3


class Slow:
    """Has a write of the latest hypotheses wait until it is let go, and notes what was written."""

    def __init__(self, patch: pytest.MonkeyPatch, fails_at: int = 0) -> None:
        self.go, self.begun, self.rounds = Event(), Event(), list[int]()
        self._fails_at, self._write = fails_at, run_folder.write_atomically
        patch.setattr(run_folder, "write_atomically", self._written)
        patch.setattr(callbacks, "_LARGE", 0)

    def _written(self, path: Path, content: bytes, private: bool) -> None:
        if path.name != "latest.safetensors":
            self._write(path, content, private)
            return
        self.begun.set()
        assert self.go.wait(60), "the next round did not begin while this one was written"
        self.rounds.append(len(self.rounds) + 1)
        if self.rounds[-1] == self._fails_at:
            raise DiskError("the disk is full", code="disk.full")
        self._write(path, content, private)


class LettingGo(Callback):
    """Lets the write of a round go once the next has begun."""

    def __init__(self, slow: Slow, at: int = 2) -> None:
        self._slow, self._at = slow, at
        self.seen: list[int] = []

    def before_round(self, round: int, arrays: ArrayRecord) -> None:
        self.seen.append(round)
        if round == self._at:
            assert self._slow.begun.wait(60)
            self._slow.go.set()


def saved(folder: RunFolder, *watching: Callback, patch: pytest.MonkeyPatch, **changes: Any) -> dict[str, bytes]:
    """Return the files of a scripted run."""
    strategy = Scripted([9, 8, 7, 6])
    strategy.state = {"steps": np.zeros(2)}

    class Stepping(Callback):
        def before_round(self, round: int, arrays: ArrayRecord) -> None:
            strategy.state["steps"] += 1  # in place, as momentum is

    run = run_of(strategy, Stepping(), Checkpoints(), *watching, **({"rounds": 3} | changes))
    run.folder = folder
    run.do()
    seconds = re.compile(rb'"seconds": [^,]+|"stages": \{[^}]*\}')
    return {file.name: seconds.sub(b"", file.read_bytes()) for file in folder.path.iterdir()}


def test_a_large_model_is_written_while_the_next_round_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = saved(RunFolder(tmp_path / "small"), patch=monkeypatch)
    slow = Slow(monkeypatch)
    found = saved(RunFolder(tmp_path / "large"), LettingGo(slow), patch=monkeypatch)
    assert found == expected
    assert set(found) >= {"latest.safetensors", "hypotheses.safetensors", "history.jsonl", "outcome.json"}


def test_an_earlier_round_is_written_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategy changes its state in place, and the history grows, while round 1 is written."""
    folder, slow = RunFolder(tmp_path / "run"), Slow(monkeypatch, fails_at=2)
    with raises(DiskError, "disk.full"):
        saved(folder, LettingGo(slow), patch=monkeypatch)
    state, _, kept = folder.read({"weight": (1, 2)})
    assert (state.history[-1].number, float(state.hypotheses["weight"][0, 0, 0])) == (1, 1.0)
    np.testing.assert_array_equal(kept["steps"], [1, 1])


@pytest.mark.parametrize(("at", "begun"), [(1, [1, 2]), (2, [1, 2, 3]), (3, [1, 2, 3]), (4, [1, 2, 3])])
def test_a_failure_to_write_ends_the_run(
    at: int, begun: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the round after, or at the end of the run, which waits for the last write."""
    slow = Slow(monkeypatch, fails_at=at)
    letting = LettingGo(slow)
    with raises(DiskError, "disk.full"):
        saved(RunFolder(tmp_path / "run"), letting, patch=monkeypatch)
    assert letting.seen == begun


def test_a_run_that_another_error_ends_is_written_and_tells_of_a_failure_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stopped(LettingGo):
        def before_round(self, round: int, arrays: ArrayRecord) -> None:
            super().before_round(round, arrays)
            if round == 2:
                raise KeyboardInterrupt

    for fails_at in (0, 1):
        with monkeypatch.context() as patch:
            folder, slow = RunFolder(tmp_path / str(fails_at)), Slow(patch, fails_at=fails_at)
            with pytest.raises(KeyboardInterrupt):
                saved(folder, Stopped(slow), patch=patch)
        if fails_at:
            assert "could not be saved: the disk is full" in caplog.text
        else:
            assert len(folder.read({"weight": (1, 2)})[0].history) == 2, "it waits for the write"
            assert "could not be saved" not in caplog.text


def test_a_run_without_a_folder_saves_nothing(umbel_home: Any) -> None:
    scripted([9, 8, 7], Checkpoints(), rounds=2)
    assert not umbel_home.exists()
