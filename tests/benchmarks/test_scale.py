"""What the benchmark of scale measures is a whole run on a dataset of the size it says."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from benchmarks import scale
from tests.benchmarks.conftest import invoked
from umbel.data import open_dataset

pytestmark = pytest.mark.rest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    scale.write(tmp_path / "few", 1000)
    return tmp_path / "few"


def test_the_dataset_is_of_the_hospitals_shape_and_comes_from_its_seed(folder: Path, tmp_path: Path) -> None:
    dataset = open_dataset(folder)
    assert dataset.manifest.split == {"train": 700, "validation": 300}
    assert dataset.features.shape[1:] == (3,)
    assert set(np.diff(dataset.offsets)) == {1, 2, 3, 4}
    scale.write(tmp_path / "again", 1000)
    np.testing.assert_array_equal(open_dataset(tmp_path / "again").features, dataset.features)


@pytest.mark.usefixtures("here")
def test_a_run_is_timed_round_by_round(folder: Path) -> None:
    run = scale.play(folder, 5)
    assert len(run.rounds) == len(run.cpu) == 3, "the first warms up, and the last has no next"
    assert all(cpu > 0 for cpu in run.cpu)
    assert run.opening > 0
    assert 0 < run.loss < 2
    assert 0 < run.mapped < run.memory
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "it leaves nothing"


def test_the_first_and_the_last_tenth_of_the_rounds_are_compared() -> None:
    assert scale.tenths([3, 1, *[9] * 16, 4, 6]) == (2, 5)
    assert scale.tenths([2, 9, 4]) == (2, 4)

    def took(rounds: list[float], cpu: list[float]) -> scale.Run:
        return scale.Run(opening=0, rounds=rounds, cpu=cpu, loss=0, memory=0, mapped=0)

    slower, once = took([2, 9, 5], [1, 1, 1.5]), took([7, 7, 7], [4, 4, 4])
    table = scale.ends({1000: [slower, once, slower]})
    (row,) = zip(*(column.cells for column in table.columns), strict=True)
    assert row == ("1,000", "2000.00", "5000.00", "2.50", "1000.00", "1500.00", "1.50")


def test_pages_count_as_mapped_when_they_were_read(tmp_path: Path) -> None:
    file = tmp_path / "own" / "array.npy"
    file.parent.mkdir()
    np.save(file, np.zeros(1 << 20, np.uint8))
    array = np.load(file, mmap_mode="r")
    assert scale.mapped(file.parent) < 1 << 20
    assert not array.any()
    assert scale.mapped(file.parent) == pytest.approx(1 << 20, abs=2 * mmap.PAGESIZE)
    assert scale.mapped(tmp_path / "other") == 0


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_command_prints_a_row_a_size() -> None:
    result = invoked(scale.main, "--sizes", "1000", "--rounds", "3", "--times", "1")
    assert result.exit_code == 0, result.output
    rows = [line.replace("  ", "")[:8] for line in result.output.splitlines()]
    assert [row for row in rows if row.startswith("│")] == ["│ 1,000 "] * 2
