"""What validation clients get, on cohorts small enough to work out by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeCV

from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from umbel import models
from umbel.client.cohort import Cohort
from umbel.client.learner import learner_for
from umbel.data import Dataset, offsets_of
from umbel.privacy.site.policy import Personal
from umbel.protocol.errors import DatasetError
from umbel.protocol.run_config import RunConfig
from umbel.simulation.baselines import (
    PENALTIES,
    halves,
    local_only,
    measure,
    personalised,
    ridge,
    serve,
    worst_decile,
)

LINEAR = models.load("linear")
LEARNER = learner_for(LINEAR)
RUN = RunConfig(step_size=0.1)


def cohort(*clients: tuple[list[list[float]], list[float]]) -> Cohort:
    """Return a cohort of clients given as (x, y)."""
    x = torch.tensor([row for rows, _ in clients for row in rows])
    y = torch.tensor([value for _, values in clients for value in values])
    return Cohort(x, y, np.array([len(values) for _, values in clients]))


def hypotheses(*thetas: tuple[float, float]) -> dict[str, Any]:
    return {"weight": np.array(thetas, np.float32)[:, None, :]}


# y = x1 is the first client's law, y = x2 the second's.
FIRST = ([[1.0, 0.0], [3.0, 1.0], [2.0, 2.0], [4.0, 0.0]], [1.0, 3.0, 2.0, 4.0])
SECOND = ([[1.0, 0.0], [3.0, 1.0]], [0.0, 1.0])


def test_each_client_is_measured_under_the_hypothesis_that_fits_it_on_other_rows_than_those_that_chose() -> None:
    both = cohort(FIRST, SECOND)
    chosen, metrics = serve(LEARNER, hypotheses((1, 0), (0, 1)), both, both)
    np.testing.assert_array_equal(chosen, [0, 1])
    np.testing.assert_allclose(metrics, 0, atol=1e-6)
    # On its first row hypothesis 0 is right, and on its second it is 3 off; hypothesis 1 is 1 off and right.
    client = cohort(([[1.0, 0.0], [3.0, 0.0]], [1.0, 0.0]))
    found = {tuple(serve(LEARNER, hypotheses((1, 0), (0, 1)), *halves(client, seed))[1]) for seed in range(20)}
    assert found == {(3.0,), (1.0,)}, "the seed decides which row is held out"


def test_half_of_each_clients_rows_are_held_out_and_each_row_is_in_one_half() -> None:
    support, query = halves(cohort(([[1.0], [2.0], [3.0]], [1, 2, 3]), ([[4.0]], [4]), ([[5.0], [6.0]], [5, 6])), 0)
    assert sorted([*support.targets.tolist(), *query.targets.tolist()]) == [1, 2, 3, 5, 6]
    np.testing.assert_array_equal(support.lengths, [2, 1])
    np.testing.assert_array_equal(query.lengths, [1, 1])
    assert set(query.targets[:1].tolist()) <= {1, 2, 3}
    assert (support.features[:, 0] == support.targets).all(), "a row keeps its target"


def test_each_row_is_held_out_as_often_as_the_others() -> None:
    """Of 400 seeds each of four rows is out in 200 ± 50: five deviations, a false alarm in a million."""
    client = cohort(([[0.0]] * 4, [0.0, 1.0, 2.0, 3.0]))
    out = np.bincount([int(row) for seed in range(400) for row in halves(client, seed)[1].targets], minlength=4)
    assert (abs(out - 200) < 50).all()


def test_the_worst_decile_is_the_tenth_that_fares_worst() -> None:
    values = np.arange(1.0, 21.0)
    assert worst_decile(values, higher_is_better=False) == 19.5
    assert worst_decile(values, higher_is_better=True) == 1.5
    assert worst_decile(values[:11], higher_is_better=False) == 10.5, "rounded up to 2 of 11 clients"
    assert worst_decile(np.array([3.0]), higher_is_better=True) == 3.0


of_linear = partial(manifest, model="linear", loss="mse")


def dataset(**entries: Any) -> Dataset:
    """Two training clients that nobody looks at, then FIRST and SECOND as validation clients."""
    clients = [FIRST, FIRST, FIRST, SECOND]
    x = np.array([row for rows, _ in clients for row in rows], np.float32)
    y = np.array([value for _, values in clients for value in values], np.float32)
    return Dataset(of_linear(2, 2, **entries), x, y, offsets_of(len(values) for _, values in clients))


def test_hypotheses_are_measured_against_all_that_is_known_of_the_data() -> None:
    data = dataset(groups=[0, 0, 0, 1], truth=[[1.0, 0.0], [0.0, 5.0]])
    found = measure(LINEAR, data, hypotheses((0, 1), (1, 0)), RUN)
    assert found["chosen"] == [1, 1]
    assert found["rand_index"] == 1.0
    assert found["mean"] == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(found["to_truth"], [0, 4])
    assert (found["clients"], found["held_out"]["clients"]) == (2, 2)
    assert measure(LINEAR, data, hypotheses((1, 0)), RUN)["rand_index"] == 0.0, "one hypothesis for two groups"
    unknown = measure(LINEAR, dataset(), hypotheses((0, 1), (1, 0)), RUN)
    assert (unknown["rand_index"], unknown["to_truth"]) == (None, [])


def test_clients_of_a_single_row_have_nothing_to_hold_out() -> None:
    data = Dataset(of_linear(0, 2), np.eye(2, dtype=np.float32), np.array([1, 0], np.float32), offsets_of([1, 1]))
    found = measure(LINEAR, data, hypotheses((1, 0)), RUN)
    assert found["mean"] == pytest.approx(0, abs=1e-6)
    assert found["held_out"]["clients"] == 0
    with raises(DatasetError, "data.single-rows"):
        local_only(LINEAR, data, RunConfig())


def test_a_client_that_trains_by_itself_learns_from_half_of_its_rows() -> None:
    run = RunConfig(step_size=0.05)
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (40, 2)).astype(np.float32)
    y = (x @ np.array([[5.0, 6.0], [4.0, -4.5]], np.float32).T)[np.arange(40), np.arange(40) // 20]
    data = Dataset(of_linear(0, 2), x, y.astype(np.float32), offsets_of([20, 20]))
    alone = local_only(LINEAR, data, run)
    # 50 epochs of ten rows take each client most of the way from about 7 to 0, whatever the other holds.
    assert alone["mean"] < 1.5
    assert local_only(LINEAR, data, run) == alone, "the same seed gives the same result"
    # Rows that are held out play no part in training: other targets there leave the support's fit as it is.
    numbered = Cohort(torch.from_numpy(x), torch.arange(40), np.array([20, 20]))
    held_out = np.isin(np.arange(40), halves(numbered, run.seed)[1].targets)
    shifted = Dataset(data.manifest, x, np.where(held_out, y + 100, y).astype(np.float32), data.offsets)
    assert local_only(LINEAR, shifted, run)["mean"] == pytest.approx(100, rel=0.05)


def test_a_client_makes_the_hypothesis_its_own_on_half_of_its_rows() -> None:
    # y = 2 x; trained on three rows, where it goes half of the way to 2, measured on the others.
    x = np.tile(np.array([[1.0, 0.0]], np.float32), (6, 1))
    y = np.full(6, 2.0, np.float32)
    data = Dataset(of_linear(0, 1), x, y, offsets_of([6]))
    run = RunConfig(step_size=0.25, batch_size=0)
    start, wanted = hypotheses((1, 0), (-5, 0)), {Personal.NO: 1, Personal.FINE_TUNE: 0.5, Personal.INTERPOLATE: 0.5}
    for how, mean in wanted.items():
        assert personalised(LINEAR, data, start, run, how, epochs=1)["mean"] == pytest.approx(mean)


def likes(*clients: list[int]) -> Dataset:
    """Return validation clients who label the items 0 to 4, in this order."""
    own = manifest(0, len(clients), model="factors items=5 size=2")
    items = np.tile(np.arange(5, dtype=np.float32), len(clients))[:, None]
    return Dataset(own, items, np.concatenate(clients).astype(np.float32), offsets_of([5] * len(clients)))


def test_of_a_model_with_local_parameters_clients_are_measured_on_rows_they_did_not_fit() -> None:
    # Who likes items 0 and 1, and not 2 and 3, is predicted to like item 4.
    items = np.array([[1, 0], [1, 0], [-1, 0], [-1, 0], [1, 0]], np.float32)
    model, data = models.load("factors items=5 size=2"), likes([1, 1, -1, -1, 1], [1, 1, -1, -1, -1])
    found = measure(model, data, {"items": items[None]}, RunConfig(step_size=1.0))
    assert (found["mean"], found["worst_decile"], found["clients"]) == (0.5, 0.0, 2)
    assert found["held_out"]["clients"] == 0
    assert found["chosen"] == [2]


def test_a_client_that_trains_by_itself_trains_its_local_parameters_too() -> None:
    # All that tells the two clients' rows apart is in the layer that each has of its own.
    x = np.random.default_rng(1).uniform(0.5, 1, (40, 3)).astype(np.float32)
    y = np.where(np.arange(40) < 20, 3, -3).astype(np.float32)
    data = Dataset(manifest(0, 2, model="mlp", loss="rmse"), x, y, offsets_of([20, 20]))
    model = models.load("mlp", local="2.*")
    assert set(model.local_shapes) == {"2.weight", "2.bias"}
    assert local_only(model, data, RunConfig(step_size=0.1))["mean"] < 0.5


def test_a_client_alone_fits_the_ridge_regression_of_scikit_learn() -> None:
    """Whose penalty is that of the lowest leave-one-out error, here as there."""
    generator, found, expected = np.random.default_rng(3), [], []
    for rows in (1, 3, 8, 30):
        x = generator.normal(size=(rows + 5, 2)).round(3)
        y = (x @ [2.0, -1.0] + generator.normal(size=rows + 5) * rows / 10).round(3)
        known, asked = (cohort((x[part].tolist(), y[part].tolist())) for part in (slice(rows), slice(rows, None)))
        fitted_alone = ridge(LEARNER, known)
        assert fitted_alone is not None
        found.append(fitted_alone.score(LEARNER, asked)[1].item())
        if rows > 1:
            fitted = RidgeCV(alphas=PENALTIES, fit_intercept=False).fit(x[:rows], y[:rows])
            expected.append(np.sqrt(np.square(fitted.predict(x[rows:]) - y[rows:]).mean()))
    np.testing.assert_allclose(found[1:], expected, rtol=1e-3)
    assert np.isfinite(found).all()


def test_a_network_has_no_ridge_regression() -> None:
    one = cohort(FIRST)
    assert ridge(learner_for(models.load("mlp inputs=2 hidden=2 outputs=1")), one) is None
    assert ridge(learner_for(models.load("linear", "cross-entropy")), one) is None
