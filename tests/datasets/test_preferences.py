"""Made-up preferences are what the recipe says, and the committed file is what it writes."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.datasets.conftest import RECIPES, Recipe
from tests.helpers.errors import raises
from umbel.data import find_dataset
from umbel.protocol.errors import DatasetError

pytestmark = pytest.mark.rest

recipe = Recipe("preferences")
draw, run, made, assert_refused = recipe.module.draw, recipe.run, recipe.made, recipe.assert_refused
COMMITTED = RECIPES / "preferences.json"


def by_client(offsets: NDArray[np.int64], *arrays: NDArray[Any]) -> list[list[NDArray[Any]]]:
    """Return the rows of each array client by client."""
    return [np.split(array, offsets[1:-1]) for array in arrays]


def chance_to_be_last(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability of each item to be last, when all are drawn one by one without replacement."""
    chances = np.zeros(len(weights))
    for order in permutations(range(len(weights))):
        drawn = weights[list(order)]
        chances[order[-1]] += np.prod(drawn / drawn[::-1].cumsum()[::-1])
    return chances


@pytest.mark.parametrize(("rows", "like_rate"), [(40, 0.05), (37, 0.2), (500, 0.45)])
def test_each_client_likes_that_share_of_its_items_and_those_of_the_highest_scores(rows: int, like_rate: float) -> None:
    features, targets, offsets, users, vectors = draw(clients=20, rows=rows, like_rate=like_rate)
    assert offsets.tolist() == list(range(0, 20 * rows + 1, rows))
    for items, labels, user in zip(*by_client(offsets, features[:, 0], targets), users, strict=True):
        assert (labels == 1).sum() == round(like_rate * rows)
        assert (labels == -1).sum() == rows - round(like_rate * rows)
        scores = vectors[items] @ user
        assert scores[labels == 1].min() > scores[labels == -1].max()


def test_the_seed_decides_and_a_client_is_the_same_however_many_there_are() -> None:
    few, many = draw(clients=3, skew=0.5, spread=0.5, seed=4), draw(clients=30, skew=0.5, spread=0.5, seed=4)
    rows = few[2][-1]
    for part, length in enumerate((rows, rows, 4, 3, len(few[4]))):
        np.testing.assert_array_equal(many[part][:length], few[part])
    one, again, other = draw(seed=1), draw(seed=1), draw(seed=2)
    for array, same in zip(one, again, strict=True):
        np.testing.assert_array_equal(array, same)
    assert not any(np.array_equal(one[part], other[part]) for part in (0, 1, 3, 4))
    assert len(np.unique(one[3], axis=0)) == 100, "clients differ"


def test_items_are_drawn_uniformly_or_by_rank() -> None:
    # Three of four items each: which one is left out tells how they are drawn.
    def left_out(skew: float) -> NDArray[np.float64]:
        features, _, _, _, _ = draw(clients=4000, items=4, factors=1, rows=3, like_rate=0.3, skew=skew)
        return 1 - np.bincount(features[:, 0], minlength=4) / 4000

    # Standard error of a share of 4000: at most sqrt(1/4/4000) = .008.
    np.testing.assert_allclose(left_out(0.0), [0.25] * 4, atol=4 * 0.008)
    np.testing.assert_allclose(left_out(1.0), chance_to_be_last(1 / np.arange(1, 5)), atol=4 * 0.008)


def test_rows_vary_with_spread_from_20_to_all_items() -> None:
    rows = np.diff(draw(clients=943, items=1682, rows=106, skew=1.0, spread=1.0)[2])
    # ml-100k: 106 rows on average, half of the users have 65 or fewer, the minimum 20, the maximum 737.
    assert abs(rows.mean() - 106) < 10
    assert abs(np.median(rows) - 65) < 10
    assert rows.min() == 20
    assert 500 < rows.max() <= 1682
    few = np.diff(draw(clients=50, items=30, rows=10, spread=2.0)[2])
    assert (few.min(), few.max()) == (10, 30)


def test_folder_and_json_are_a_dataset_of_what_is_drawn_and_the_committed_file_is_what_is_written(
    tmp_path: Path,
) -> None:
    options = ["--clients", "15", "--items", "80", "--factors", "4", "--rows", "30", "--seed", "3", "--name", "likes"]
    dataset, leaf = made(tmp_path / "out", *options), made(tmp_path / "out.json", *options)
    manifest = dataset.manifest
    assert (manifest.name, manifest.model, manifest.loss) == ("likes", "factors items=80 size=4", "")
    assert (manifest.split, manifest.units) == ({"train": 13, "validation": 2}, {"items": 80})
    assert (manifest.truth, manifest.groups) == ([], [])
    assert leaf.manifest == manifest
    for name, drawn in zip(("features", "targets", "offsets"), draw(15, 80, 4, 30, 0.2, 0.0, 3), strict=False):
        np.testing.assert_array_equal(getattr(dataset, name), drawn, strict=True)
        np.testing.assert_array_equal(getattr(leaf, name), drawn)
    assert (dataset.features.dtype, dataset.targets.dtype, leaf.targets.dtype.kind) == (np.int32, np.int8, "i")
    made(again := tmp_path / "again.json", "--clients", "67", "--items", "100")
    assert again.read_bytes() == COMMITTED.read_bytes()
    assert find_dataset("preferences") == COMMITTED


RATE, LARGE = "--like-rate", "--skew and --spread"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        *((["--like-rate", rate], RATE) for rate in ("0", "0.5", "nan")),
        (["--rows", "2", "--like-rate", "0.2"], "client 0 would like 0 of its 2 items"),
        (["--rows", "10", "--like-rate", "0.49"], "client 0 would like 5 of its 10 items"),
        (["--rows", "40", "--items", "39"], "40 rows a client exceed the 39 items"),
        *(([option, value], LARGE) for option, value in (("--skew", "nan"), ("--skew", "10.1"), ("--spread", "inf"))),
        *(([option, "0"], "") for option in ("--clients", "--items", "--factors", "--rows")),
    ],
)
def test_numbers_that_make_no_data_are_refused(tmp_path: Path, options: list[str], reason: str) -> None:
    result = run(tmp_path / "out", *options)
    if reason:
        assert_refused(result, tmp_path / "out", reason)
    else:
        assert (result.exit_code, options[0] in result.stderr) == (2, True)
        with raises(DatasetError, "data.options"):
            draw(**{options[0].removeprefix("--"): 0})
