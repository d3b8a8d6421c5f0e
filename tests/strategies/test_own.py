"""Strategies of one's own, run by their names without a change to the app: ten lines in a file, and one with state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbel.client.app
from tests.helpers.disk import Killed, kill_when
from tests.helpers.errors import raises
from tests.helpers.runs import AppRun, run_app
from umbel import strategies
from umbel.protocol.arrays import Matrix
from umbel.protocol.errors import ConfigError
from umbel.simulation.grid import InProcessGrid
from umbel.strategies import GroupPrivacy

FILE = Path(__file__).with_name("ten_lines.py")
TRIMMED: dict[str, Any] = {"strategy": "ten_lines:TrimmedMean", "rounds": 4, "noise-multiplier": 0.0, "restarts": 1}

pytestmark = pytest.mark.usefixtures("blank_figures")


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's on the path, with the strategy in it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(FILE, folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def play(config: dict[str, Any]) -> AppRun:
    return run_app(config, InProcessGrid(umbel.client.app.app, config))


# --- ten lines


def test_it_runs_with_an_option_of_its_own(run_config: dict[str, Any]) -> None:
    trimmed = play(run_config | TRIMMED | {"strategy": "ten_lines:TrimmedMean trim=2"}).arrays("latest")
    assert np.isfinite(trimmed["weight"]).all()
    mean = play(run_config | TRIMMED).arrays("latest")
    averaged = play(run_config | TRIMMED | {"strategy": "fedavg"}).arrays("latest")
    np.testing.assert_allclose(mean["weight"], averaged["weight"], rtol=1e-6)
    assert (trimmed["weight"] != mean["weight"]).all()


# --- what a strategy keeps comes back when a run resumes, once a round and bit for bit


class Counting(GroupPrivacy):
    """Momentum in float32, with as many more types and shapes as a strategy may think of."""

    def combine(self, group: Matrix, hypothesis: Matrix, index: int) -> Matrix:
        state = self.state
        state["means"] = state.get("means", np.zeros(len(hypothesis))) + group.mean(axis=0)
        state["times"] = np.add(state.get("times", np.zeros(self.hypotheses, np.int64)), np.arange(2) == index)
        state["steps"] = np.asarray(state.get("steps", 0) + 1)
        momentum = state.setdefault("momentum", np.zeros((self.hypotheses, len(hypothesis)), np.float32))
        momentum[index] = 0.8 * momentum[index] + super().combine(group, hypothesis, index) - hypothesis
        return hypothesis + momentum[index]


CONFIG: dict[str, Any] = {
    "strategy": "counting", "rounds": 3, "restarts": 1, "clients-per-round": 20,
}  # fmt: skip


@pytest.fixture
def config(run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(strategies.STRATEGIES, "counting", "Counting")
    monkeypatch.setattr(strategies, "Counting", Counting, raising=False)
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


@pytest.mark.parametrize("label", ["-1", "k", "0.5"])
def test_a_release_is_assigned_to_a_hypothesis_that_there_is(installed: Path, label: str) -> None:
    """Of releases that a strategy leaves out, one alike would be taken for the last hypothesis's."""
    (installed / "labels.py").write_text(
        "import numpy as np\nfrom umbel.strategies import GroupPrivacy\n\n"
        "class Wrong(GroupPrivacy):\n"
        "    def assign(self, releases, hypotheses, choices):\n"
        f"        k = len(hypotheses)\n        return np.full(len(releases), {label})\n"
    )
    with raises(ConfigError, "config.assign", "Wrong", "combine"):
        play({"strategy": "labels:Wrong", "rounds": 1, "restarts": 1})
