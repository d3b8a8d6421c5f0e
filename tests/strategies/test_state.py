"""What a strategy keeps from round to round comes back when a run goes on, once a round and bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbel.client.app
from tests.helpers.disk import Killed, kill_when
from tests.helpers.runs import AppRun, run_app
from umbel import strategies
from umbel.protocol.arrays import Matrix
from umbel.simulation.grid import InProcessGrid
from umbel.strategies import FedAdam

pytestmark = pytest.mark.usefixtures("blank_figures")


class Counting(FedAdam):
    """Adam, which keeps float32, with as many more types and shapes as a strategy may think of."""

    def combine(self, group: Matrix, hypothesis: Matrix, index: int) -> Matrix:
        state = self.state
        state["means"] = state.get("means", np.zeros(len(hypothesis))) + group.mean(axis=0)
        state["times"] = np.add(state.get("times", np.zeros(self.hypotheses, np.int64)), np.arange(2) == index)
        state["steps"] = np.asarray(state.get("steps", 0) + 1)
        return super().combine(group, hypothesis, index)


CONFIG: dict[str, Any] = {
    "strategy": "adam", "strategy-options": "rate=0.3 beta1=0.8", "rounds": 3, "restarts": 1, "clients-per-round": 20,
}  # fmt: skip


@pytest.fixture
def config(run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(strategies.STRATEGIES, "adam", Counting)
    return run_config | CONFIG


class Disk:
    """Files are written until there were so many; then the process ends, amid a line if it appends one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.written: list[str] = []
        self.most = 10**9
        kill_when(patch, self._full)

    def _full(self, path: Path) -> bool:
        if len(self.written) >= self.most:
            return True
        self.written.append(path.name)
        return False


def play(config: dict[str, Any]) -> AppRun:
    return run_app(config, InProcessGrid(umbel.client.app.app, config))


def left(run: AppRun) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return every array that a run left, with its type and shape."""
    arrays = {f"{file}:{name}": value for file in ("latest", "hypotheses") for name, value in run.arrays(file).items()}
    return {name: (str(value.dtype), value.shape, value.tobytes()) for name, value in arrays.items()}


def test_a_run_that_was_killed_between_any_two_files_goes_on_bit_for_bit(
    config: dict[str, Any], umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    whole = play(config)
    files, expected = list(disk.written), left(whole)
    assert expected["latest:strategy/steps"][:2] == ("int64", ()), "a number alone stays one"
    assert int(whole.arrays("latest")["strategy/times"].sum()) == int(whole.arrays("latest")["strategy/steps"])
    runs = umbel_home / "runs"
    # From the end of the first round to that of the evaluation after the last, when all is said.
    ends = [number for number, name in enumerate(files) if name == "latest.safetensors"]
    for most in range(ends[0] + 1, ends[3] + 1):
        disk.written, disk.most = [], most
        before = set(runs.iterdir())
        with pytest.raises(Killed):
            play(config)
        (broken,) = set(runs.iterdir()) - before
        disk.most = 10**9
        resumed = play(config | {"resume": broken.name})
        assert left(resumed) == expected, f"killed before {files[most]}, the file number {most}"
