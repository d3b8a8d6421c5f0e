"""The measures of group fairness, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from umbel.data import Dataset, Manifest, offsets_of, write_dataset
from umbel.protocol.home import write_atomically
from umbel.simulation.in_process import run_config
from umbel.simulation.measured import Spec
from umbel.simulation.sweep import Result
from umbel_lab.experiments.fairness import Decisions, Grouping, group_fairness, of_decisions, of_losses

pytestmark = pytest.mark.rest


def test_losses_between_groups() -> None:
    # Group means 2 and 6; over clients mean 4, and sqrt((9 + 1 + 1 + 9) / 4) around it; 16^2 / (4 * 84) is Jain's.
    found = of_losses(np.array([1.0, 3.0, 5.0, 7.0]), np.array([0, 0, 2, 2]))
    assert (found.worst_group, found.gap) == (6, 4)
    assert found.spread == pytest.approx(5**0.5)
    assert found.jain == pytest.approx(256 / 336)


def test_decisions_between_groups() -> None:
    # By group: of 4 true ones 3 and 1 are found; of 4 true zeros 1 and 2 are taken for ones.
    true = np.array([1, 1, 1, 1, 0, 0, 0, 0] * 2)
    decided = np.array([1, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0])
    found = of_decisions(decided, true, np.repeat([0, 1], 8))
    assert found == Decisions(
        accuracy_parity=6 / 8 - 3 / 8,
        base_rates=0,
        demographic_parity=4 / 8 - 3 / 8,
        equal_opportunity=0.5,
        equalised_odds=0.5,
    )


def test_equalised_odds_also_look_at_those_wrongly_taken_for_ones() -> None:
    true = np.array([1, 0, 0, 1, 0, 0])
    found = of_decisions(np.array([1, 0, 0, 1, 1, 1]), true, np.repeat([0, 1], 3))
    assert (found.equal_opportunity, found.equalised_odds) == (0, 1)


def test_a_group_without_true_ones_has_no_share_of_them_that_are_found() -> None:
    found = of_decisions(np.array([1, 0, 1, 0]), np.array([1, 0, 0, 0]), np.repeat([0, 1], 2))
    assert np.isnan(found.equal_opportunity)
    assert (found.base_rates, found.demographic_parity) == (0.5, 0)
    assert found.equalised_odds == 0.5, "of the zeros 0 of 1 and 1 of 2 are taken for ones"


def test_of_several_classes_the_one_that_differs_most_is_told() -> None:
    # Class 2 is decided in group 1 alone, in half of its rows; and there it is always right.
    true = np.array([0, 1, 2, 2, 0, 1, 2, 2])
    decided = np.array([0, 1, 0, 1, 0, 1, 2, 2])
    found = of_decisions(decided, true, np.repeat([0, 1], 4))
    assert found == Decisions(0.5, 0, 0.5, 1, 1)


@pytest.fixture
def run(tmp_path: Path) -> Result:
    """Two training clients, then three of a group each and one of a single row; hypotheses y = x1 and y = x2."""
    first, second = [[2.0, 0.0], [3.0, 0.0]], [[0.0, 2.0], [0.0, 1.0]]
    x = np.array([*first, *second, *first, *second, *first, [1.0, 1.0]], np.float32)
    # The last of two rows counts: client 2 is right there, 3 is off by 2, and 4 by 1.
    y = np.array([0, 0, 0, 0, 2, 3, 2, 3, 2, 4, 9], np.float32)
    manifest = Manifest(
        name="few", clients=6, split={"train": 2, "validation": 4}, model="linear", groups=[0, 0, 0, 1, 1, 0]
    )
    path = tmp_path / "few"
    write_dataset(path, manifest, x, y, offsets_of([2, 2, 2, 2, 2, 1]))
    thetas = np.array([[[1.0, 0.0]], [[0.0, 1.0]]], np.float32)
    write_atomically(tmp_path / "latest.safetensors", safetensors.numpy.save({"weight": thetas}))
    return Result(Spec("few", run_config("synthetic", dataset=str(path))), {}, tmp_path)


def groups(dataset: Dataset) -> np.ndarray:
    return np.array(dataset.manifest.groups)


def test_the_table_tells_how_a_run_does_on_rows_that_clients_did_not_choose_by(run: Result) -> None:
    section = group_fairness({"mine": [run]}, Grouping(("one", "other"), groups, 2.0), "Two groups.", 1, scale=10)
    assert section.columns == (
        "who", "worst group", "gap", "spread", "Jain's index", "accuracy parity", "base rates", "demographic parity",
        "equal opportunity", "equalised odds",
    )  # fmt: skip
    # Predicted 3, 1 and 3 where 3, 3 and 4 are true: one of the second group's two is missed.
    assert section.rows == [["mine", "15.0", "15.0", "8.2", "0.60", "0.50", "0.00", "0.50", "0.50", "0.50"]]
