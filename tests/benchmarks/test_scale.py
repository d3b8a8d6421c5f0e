"""What the benchmark of scale measures is a whole run on a dataset of the size it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import scale
from tests.benchmarks.conftest import invoked
from umbel.data import open_dataset

pytestmark = pytest.mark.rest


@pytest.mark.usefixtures("here")
def test_a_run_on_a_dataset_of_the_hospitals_shape_is_timed_round_by_round(tmp_path: Path) -> None:
    folder = tmp_path / "few"
    scale.write(folder, 1000)
    dataset = open_dataset(folder)
    assert dataset.manifest.split == {"train": 700, "validation": 300}
    assert dataset.features.shape[1:] == (3,)
    assert set(np.diff(dataset.offsets)) == {1, 2, 3, 4}
    run = scale.play(folder, 5)
    assert len(run.rounds) == len(run.cpu) == 3, "the first warms up, and the last has no next"
    assert all(cpu > 0 for cpu in run.cpu)
    assert 0 < run.mapped < run.memory
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "it leaves nothing"
    result = invoked(scale.main, "--sizes", "1000", "--rounds", "3", "--times", "1")
    assert result.exit_code == 0, result.output
    assert scale.tenths([3, 1, *[9] * 16, 4, 6]) == (2, 5), "the first and the last tenth of the rounds"
