"""Contestants are compared turn by turn, what is printed is kept, and what is saved is compared with."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import typer

import benchmarks.__main__ as bench
from benchmarks.measure import Ratio, Reading, benchmark, console, interleave
from umbel.protocol.errors import ConfigError


def test_contestants_take_turns_and_the_first_turn_is_not_counted() -> None:
    went: list[str] = []

    def contestant(name: str) -> Reading:
        went.append(name)
        return Reading(len(went))

    readings = interleave({name: lambda name=name: contestant(name) for name in "ab"}, times=2)  # type: ignore[misc]
    assert went == ["a", "b"] * 3
    assert {name: [one.seconds for one in ones] for name, ones in readings.items()} == {"a": [3, 5], "b": [4, 6]}


def test_a_ratio_is_of_readings_in_the_same_turn() -> None:
    """2/1, 30/10 and 400/100: where the machine slows down, both do."""
    ratio = Ratio.of([Reading(2), Reading(30), Reading(400)], [Reading(1), Reading(10), Reading(100)])
    assert ratio == Ratio(3, 2, 4)
    assert str(ratio) == "3 (2 to 4)"
    assert ratio.turned == Ratio(1 / 3, 1 / 4, 1 / 2)


def test_what_is_printed_goes_to_the_file_with_the_command_also_of_a_benchmark_that_is_stopped(tmp_path: Path) -> None:
    console.print("of another benchmark")
    with benchmark(tmp_path / "out.txt", threads=3):
        console.print("12 ms")
    command, empty, *where, line = (tmp_path / "out.txt").read_text(encoding="utf-8").splitlines()
    assert command.startswith("$ python ")
    assert (empty, line) == ("", "12 ms")
    assert "3 threads of PyTorch" in " ".join(where)

    def stopped() -> None:
        with benchmark(tmp_path / "out.txt"):
            console.print("12 ms")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert (tmp_path / "out.txt").read_text(encoding="utf-8").splitlines()[-2:] == ["12 ms", "stopped before its end"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gone/out.txt", "its folder is missing"), ("", "is a folder"), ("out.txt", "Error: there are no data\n")],
)
def test_a_failure_is_one_line_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    """A file that cannot be is told before anything is measured."""
    began = []

    def works() -> None:
        with benchmark(tmp_path / name):
            began.append(name)
            raise ConfigError("there are no data")

    with pytest.raises(typer.Exit):
        works()
    assert began == ["out.txt"] * (name == "out.txt")
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out.txt").exists()


def test_a_signal_to_end_lets_what_was_started_be_ended() -> None:
    before, ended = signal.getsignal(signal.SIGTERM), []

    def works() -> None:
        with benchmark(None):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                ended.append("a process")

    with pytest.raises(SystemExit):
        works()
    assert ended
    assert signal.getsignal(signal.SIGTERM) == before


NOW = {"hospital": Ratio(2, 1.9, 2.1), "CNN": Ratio(0.5, 0.4, 0.6)}


def test_ratios_are_saved_and_compared_with_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SAVED", tmp_path / "ratios.json")
    monkeypatch.setattr(bench, "measured", lambda: NOW)
    bench.main(save=True)
    assert bench.read(tmp_path / "ratios.json") == NOW
    monkeypatch.setattr(bench, "measured", lambda: NOW | {"hospital": Ratio(3, 2.6, 3.2)})
    with pytest.raises(typer.Exit) as end:
        bench.main(out=tmp_path / "table.txt")
    assert end.value.exit_code == 1
    printed = (tmp_path / "table.txt").read_text(encoding="utf-8")
    assert "2 (1.9 to 2.1)" in printed
    assert "Slower than it was: hospital." in printed
    assert bench.read(tmp_path / "ratios.json") == NOW, "only --save writes"
    # Slower is what even its best turn shows.
    assert bench.worse({}, NOW) == []
    for now, slower in ((Ratio(3, 2.4, 4), []), (Ratio(3, 2.6, 4), ["hospital"]), (Ratio(1, 0.9, 1.1), [])):
        assert bench.worse(NOW, NOW | {"hospital": now}) == slower
    monkeypatch.undo()
    assert set(bench.read(bench.SAVED)) == {*bench.BARE, bench.FLOWER, bench.MANY, bench.LATE, bench.SITE}
