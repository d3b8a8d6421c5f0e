"""The synthetic clients are what Sec. 5.1 of the group privacy paper says, and the committed file is them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.datasets.conftest import RECIPES, Recipe
from umbel.data import open_dataset

pytestmark = pytest.mark.rest

COMMITTED = RECIPES / "synthetic.json"


recipe = Recipe("synthetic")
synthetic = recipe.module


def explained_by(theta: tuple[float, float], x: NDArray[np.float64], y: NDArray[np.float64]) -> bool:
    """Say whether every residual ``y - x . theta`` is a noise in [0, 1), to the six decimals kept."""
    residual = y - x @ theta
    return bool(residual.min() > -1e-6 and residual.max() < 1 + 1e-6)


def test_the_committed_file_is_what_the_script_writes_and_its_manifest_that_of_the_paper(tmp_path: Path) -> None:
    recipe.made(out := tmp_path / "new" / "again.json")
    assert out.read_bytes() == COMMITTED.read_bytes()
    dataset = open_dataset(COMMITTED)
    manifest = dataset.manifest
    assert (manifest.name, manifest.model, manifest.loss) == ("synthetic", "linear", "mse")
    assert (manifest.split, manifest.truth) == ({"train": 100, "validation": 100}, [[5, 6], [4, -4.5]])
    assert (dataset.features.shape, set(np.diff(dataset.offsets))) == ((2000, 2), {10})
    sizes = ["--seed", "3", "--clients", "2", "--validation-clients", "1", "--samples", "4"]
    few = recipe.made(tmp_path / "few.json", *sizes)
    assert (few.manifest.split, few.offsets.tolist()) == ({"train": 2, "validation": 1}, [0, 4, 8, 12])
    one, again, other = ([list(y) for _, y in synthetic.make(seed=seed)[1].values()] for seed in (1, 1, 2))
    assert one == again != other


def test_each_client_follows_one_equation_by_its_group_and_either_is_drawn() -> None:
    manifest, clients = synthetic.make()
    follows = [[explained_by(theta, x, y) for theta in synthetic.OPTIMA] for x, y in clients.values()]
    assert all(sum(one) == 1 for one in follows)
    assert [one.index(True) for one in follows] == [*manifest.groups]
    # Of 200 fair draws, 100 come up on average with standard deviation sqrt(200)/2 = 7.1.
    assert abs(sum(one[0] for one in follows) - 100) < 4 * 7.1


def test_least_squares_recovers_the_optima_and_the_mean_of_the_noise() -> None:
    _, clients = synthetic.make()
    for theta in synthetic.OPTIMA:
        group = [(x, y) for x, y in clients.values() if explained_by(theta, x, y)]
        x, y = np.concatenate([x for x, _ in group]), np.concatenate([y for _, y in group])
        fit = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y)[0]
        # U[0, 1) has standard deviation sqrt(1/12), x ~ U[-1, 1] has sqrt(1/3): the standard error
        # is sqrt(1/12 / rows) for the intercept, sqrt(3) times that for theta.
        error = np.sqrt(1 / 12 / len(x))
        np.testing.assert_allclose(fit[:2], theta, atol=4 * np.sqrt(3) * error)
        np.testing.assert_allclose(fit[2], 0.5, atol=4 * error)
