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
from umbel.server.run_folder import RunFolder
from umbel.server.setup import Setup
from umbel.server.summary import Summary
from umbel.strategies import Callback

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


def logged(caplog: pytest.LogCaptureFixture, run_config: dict[str, Any], strategy: Scripted, **changes: Any) -> Any:
    """Return the lines of a scripted run whose rounds take a minute each, and its start four."""
    caplog.clear()
    times = iter([0.0, *(240.0 + 60 * t for t in range(2000))])
    log = Log(Summary.of(Setup.parse(run_config)), lambda: next(times))
    with caplog.at_level(logging.INFO, "flwr"):
        run_of(strategy, log, **changes).do()
    over = next((i for i, line in enumerate(caplog.messages) if line.startswith("The rounds have ended")), None)
    return caplog.messages[:over]


def test_a_long_run_gets_a_hundred_lines_and_what_goes_wrong_is_told_once_and_at_once(
    run_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    lines = logged(caplog, run_config, Scripted([1.0] * 1001), rounds=1000, **{"validation": "every=5"})
    # All releases of `Scripted` go to hypothesis 0, two a round: ten rounds hold ten releases a hypothesis.
    (warned,) = (at for at, line in enumerate(lines) if "collapsed" in line)
    assert lines.pop(warned).startswith("Since round 1 nearly all releases have gone to hypothesis 0")
    assert len(lines) == 102, "every tenth, and the first that lost a node"
    assert sum("validation" in line for line in lines) >= 100
    # Rounds take a minute each from the second on; with patience the run may end early.
    assert lines[2].startswith("round   10/1000")
    assert lines[2].endswith("14 min 0 s, about 16 h 29 min left")
    patient = logged(caplog, run_config, Scripted([9, 8, 7, 6, 5]), rounds=4, patience=3)
    assert [line.split("  ")[-1] for line in patient[:2]] == ["4 min 0 s", "5 min 0 s, at most 2 min 0 s left"]
    assert [in_time(one) for one in (59.4, 59.6, 3599, 7500)] == ["59 s", "1 min 0 s", "59 min 59 s", "2 h 5 min"]
    strategy = Scripted([1.0] * 301, stuck={1, 2, 4, 200})
    strategy.lost = 0
    lines = logged(caplog, run_config, strategy, rounds=300)
    short = [line.split()[1].split("/")[0] for line in lines if "TOO FEW" in line]
    assert short == ["1", "4", "200"], "round 2 comes before the line of round 3"


# --- what is saved


def saved(path: Path, *watching: Callback, **changes: Any) -> tuple[RunFolder, dict[str, bytes]]:
    """Return the folder of a scripted run, which another error may end, and its files."""
    strategy, folder = Scripted([9, 8, 7, 6]), RunFolder(path)
    strategy.state = {"steps": np.zeros(2)}

    class Stepping(Callback):
        def before_round(self, round: int, arrays: ArrayRecord) -> None:
            strategy.state["steps"] += 1  # in place, as momentum is

    run = run_of(strategy, Stepping(), Checkpoints(), *watching, **({"rounds": 3} | changes))
    run.folder = folder
    run.do()
    seconds = re.compile(rb'"seconds": [^,]+|"stages": \{[^}]*\}')
    return folder, {file.name: seconds.sub(b"", file.read_bytes()) for file in path.iterdir()}


def test_a_run_is_saved_after_each_round_and_at_its_end(tmp_path: Path) -> None:
    seen: list[tuple[int, float, str]] = []

    class Looking(Callback):
        def after_exchange(self, round: int, stages: dict[str, float]) -> None:
            state, _, _ = RunFolder(tmp_path).read({"weight": (1, 2)})
            seen.append((state.history[-1].number, float(state.hypotheses["weight"][0, 0, 0]), state.stopped))

    folder, _ = saved(tmp_path, Looking(), rounds=2)
    assert seen == [(1, 1.0, ""), (2, 2.0, ""), (2, 2.0, "all 2 rounds done")]
    state, spent, kept = folder.read({"weight": (1, 2)})
    assert (state.stopped, spent, kept["steps"].tolist()) == ("all 2 rounds done", {0: 2, 1: 2}, [2, 2])


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


def test_a_large_model_is_written_while_the_next_round_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = saved(tmp_path / "small")
    _, found = saved(tmp_path / "large", LettingGo(Slow(monkeypatch)))
    assert found == expected
    assert set(found) >= {"latest.safetensors", "hypotheses.safetensors", "history.jsonl", "outcome.json"}


@pytest.mark.parametrize(("at", "begun"), [(1, [1, 2]), (2, [1, 2, 3]), (3, [1, 2, 3]), (4, [1, 2, 3])])
def test_a_failure_to_write_ends_the_run_and_earlier_rounds_are_as_they_were(
    at: int, begun: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the round after, or at the end of the run, which waits for the last write.

    The strategy changes its state in place, and the history grows, while a round is written.
    """
    letting = LettingGo(Slow(monkeypatch, fails_at=at))
    with raises(DiskError, "disk.full"):
        saved(tmp_path, letting)
    assert letting.seen == begun
    if at == 2:
        state, _, kept = RunFolder(tmp_path).read({"weight": (1, 2)})
        assert (state.history[-1].number, float(state.hypotheses["weight"][0, 0, 0])) == (1, 1.0)
        np.testing.assert_array_equal(kept["steps"], [1, 1])


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_run_that_another_error_ends_is_written_and_tells_of_a_failure_to_write(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stopped(LettingGo):
        def before_round(self, round: int, arrays: ArrayRecord) -> None:
            super().before_round(round, arrays)
            if round == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, Stopped(Slow(monkeypatch, fails_at=fails_at)))
    assert ("could not be saved: the disk is full" in caplog.text) == bool(fails_at)
    if not fails_at:
        assert len(RunFolder(tmp_path).read({"weight": (1, 2)})[0].history) == 2, "it waits for the write"


def test_a_run_without_a_folder_saves_nothing(umbel_home: Path) -> None:
    run_of(Scripted([9, 8, 7]), Checkpoints(), rounds=2).do()
    assert not umbel_home.exists()
