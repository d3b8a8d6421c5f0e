"""Local parameters are trained beside the shared ones and frozen ones stay as they are, under both learners alike.

The factor model's numbers are those of the PAC paper (PAC identifiability in federated personalization): Protocol 1
takes steps, Protocol 3 epochs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from tests.helpers.cohorts import (
    ENGINES,
    ByArrays,
    InOrder,
    Rows,
    cohort_of,
    draw_client,
    engines,
    generators,
    learner_of,
    sgd,
)
from tests.helpers.examples import examples
from tests.helpers.models import draw_hypotheses, headed
from umbel import models
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.models.factors import SLOPES

Matrix = NDArray[Any]

ITEMS = models.load("factors items=100 size=8").initial(0)["items"]

losses = pytest.mark.parametrize("loss", list(SLOPES))
# float32 has 7 digits, of which a few dozen steps cost one or two.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def labelled(*clients: tuple[list[int], list[int]]) -> Cohort:
    """Return a cohort of clients, each given as items' numbers and their labels."""
    return cohort_of(*[(np.array(items, np.float32)[:, None], labels) for items, labels in clients])


def steps(count: int, batch_size: int = 0, step_size: float = 0.25) -> LocalUpdate:
    """R minibatches (Protocol 1)."""
    return LocalUpdate(0, step_size, batch_size, local_steps=count)


def epochs(count: int, batch_size: int = 0, step_size: float = 0.25) -> LocalUpdate:
    """E epochs (Protocol 3)."""
    return LocalUpdate(count, step_size, batch_size)


def train(
    engine: str,
    items: Any,
    users: Any,
    cohort: Cohort,
    update: LocalUpdate,
    loss: str = "log",
    seed: int = 0,
    own: list[np.random.Generator] | None = None,
) -> tuple[Matrix, Matrix]:
    """Return the items and the users' vectors that clients have trained, each with its `own` generator."""
    items, users = np.asarray(items, np.float32), np.asarray(users, np.float32)
    learner = learner_of(engine, models.load(f"factors items={items.shape[0]} size={items.shape[1]}", loss))
    chosen = np.zeros(len(users), np.int64)
    own = own or generators(len(users), seed)
    shared, local = ByArrays(learner).train({"items": items[None]}, chosen, cohort, update, own, {"user": users})
    assert (list(shared), list(local)) == (["items"], ["user"])
    return shared["items"], local["user"]


# --- one step of the factor model, by hand

LIKES_ONE_OF_THREE = ([0, 2, 3], [-1, 1, -1])


@engines
@losses
def test_the_update_of_items_of_zeros_is_the_users_vector_and_leaves_it_alone(engine: str, loss: str) -> None:
    """What the attack lives on: Delta v_i = -alpha l'(0) y_i u, and by Eq. 1 no gradient for u."""
    user = np.array([1.0, -2.0])
    for update in (steps(1), epochs(1)):
        items, users = train(engine, np.zeros((4, 2)), [user], labelled(LIKES_ONE_OF_THREE), update, loss)
        labels = np.array([-1, 0, 1, -1])[:, None]
        slope = {"log": -0.5, "hinge": -1.0, "margin": -1.0}[loss]
        np.testing.assert_allclose(items, [-0.25 * slope * labels * user], rtol=1e-6)
        np.testing.assert_array_equal(users, [user])


@engines
def test_a_step_moves_items_by_the_sum_and_the_user_by_the_mean_both_from_where_they_were(engine: str) -> None:
    # Loss -y u.v, alpha 1/4: an item moves by y u / 4, u by the mean of y v / 4.
    items, users = train(engine, [[4, 0], [0, 8]], [[1, 2]], labelled(([0, 1], [1, -1])), steps(1), "margin")
    assert items.tolist() == [[[4.25, 0.5], [-0.25, 7.5]]]
    assert users.tolist() == [[1.5, 1]]


@engines
def test_without_steps_and_epochs_nothing_changes(engine: str) -> None:
    """R = 0 is how a server gives items to a client without an update."""
    cohort = labelled(LIKES_ONE_OF_THREE, ([1], [1]))
    for update in (steps(0, 2), steps(0)):
        items, users = train(engine, ITEMS[:4], ITEMS[:2], cohort, update)
        np.testing.assert_array_equal(items, [ITEMS[:4]] * 2)
        np.testing.assert_array_equal(users, ITEMS[:2])


# --- any steps, against the paper


def hinge_slope(z: float) -> float:
    """Of max(0, 1 - z); near its kink rounding alone would decide."""
    assume(abs(z - 1) > 1e-4)
    return -1.0 if z < 1 else 0.0


def client_update(
    items: Matrix, user: Matrix, rows: Rows, update: LocalUpdate, loss: str, generator: np.random.Generator
) -> tuple[Matrix, Matrix]:
    """CLIENTUPDATE as Protocols 1 and 3 have it, one item after the other, in float64."""
    slope: dict[str, Callable[[float], float]] = {
        "log": lambda z: -1 / (1 + np.exp(z)),
        "hinge": hinge_slope,
        "margin": lambda z: -1.0,
    }
    v, u = items.astype(float), user.astype(float)
    numbers, labels = rows
    size = min(update.batch_size or len(labels), len(labels))
    for _ in range(update.local_steps or update.local_epochs):
        order = np.arange(len(labels))
        if size < len(labels):
            order = generator.permutation(order)
        split = [order[begin : begin + size].tolist() for begin in range(0, len(labels), size)]
        for batch in split[:1] if update.local_steps else split:
            s = {row: slope[loss](labels[row] * u @ v[numbers[row]]) * labels[row] for row in batch}
            g = sum(s[row] * v[numbers[row]] for row in batch) / len(batch)
            for row in batch:
                v[numbers[row]] = v[numbers[row]] - update.step_size * s[row] * u
            u = u - update.step_size * g
    return v, u


@st.composite
def clients(draw: st.DrawFn, items: int = 12) -> list[Rows]:
    """Draw clients that have labelled different numbers of items."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = draw(st.lists(st.integers(1, items), min_size=1, max_size=5))
    return [
        (generator.choice(items, n, replace=False).tolist(), generator.choice([-1, 1], n).tolist()) for n in lengths
    ]


updates = st.builds(
    LocalUpdate,
    local_epochs=st.integers(0, 3),
    step_size=st.just(0.3),
    batch_size=st.integers(0, 13),
    local_steps=st.integers(0, 4),
)


@settings(max_examples=examples(25))
@given(clients(), updates, st.sampled_from(list(SLOPES)), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_training_is_the_papers_client_update(
    asked: list[Rows], update: LocalUpdate, loss: str, factors: int, seed: int
) -> None:
    drawn = np.random.default_rng(seed)
    items = drawn.standard_normal((12, factors)).astype(np.float32)
    users = drawn.standard_normal((len(asked), factors)).astype(np.float32)
    expected = [
        client_update(items, users[c], rows, update, loss, generator)
        for c, (rows, generator) in enumerate(zip(asked, generators(len(asked), seed), strict=True))
    ]
    for engine in ENGINES:
        moved, local = train(engine, items, users, labelled(*asked), update, loss, seed)
        for c, (v, u) in enumerate(expected):
            np.testing.assert_allclose(moved[c], v, **CLOSE)
            np.testing.assert_allclose(local[c], u, **CLOSE)


@settings(max_examples=examples(20))
@given(clients(), updates)
def test_a_client_gets_the_same_result_alone(asked: list[Rows], update: LocalUpdate) -> None:
    users = ITEMS[20 : 20 + len(asked)]
    together = {engine: train(engine, ITEMS[:12], users, labelled(*asked), update) for engine in ENGINES}
    for ours, theirs in zip(*together.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)
    for c, rows in enumerate(asked):
        own = [generators(len(asked))[c]]
        alone = train("batched", ITEMS[:12], users[c : c + 1], labelled(rows), update, own=own)
        for ours, theirs in zip(together["batched"], alone, strict=True):
            np.testing.assert_allclose(ours[c], theirs[0], **CLOSE)


@settings(max_examples=examples(20))
@given(clients(), updates)
def test_an_item_that_a_client_has_not_labelled_stays_as_it_was(asked: list[Rows], update: LocalUpdate) -> None:
    for engine in ENGINES:
        moved, _ = train(engine, ITEMS[:12], ITEMS[20 : 20 + len(asked)], labelled(*asked), update)
        for (numbers, _), own in zip(asked, moved, strict=True):
            others = np.setdiff1d(np.arange(12), numbers)
            np.testing.assert_array_equal(own[others], ITEMS[:12][others])


@engines
def test_the_rows_of_one_client_do_not_reach_another_through_the_padding(engine: str) -> None:
    """A client of one row beside one whose numbers are beyond all bounds."""
    items = np.concatenate([ITEMS[:2], np.full((4, 8), 1e38, np.float32)])
    few, many = ([1], [1]), ([2, 3, 4, 5], [1, -1, 1, -1])
    alone = train(engine, items, ITEMS[3:4], labelled(few), steps(3), "margin")
    together = train(engine, items, ITEMS[[9, 3, 9]], labelled(many, few, many), steps(3), "margin")
    for ours, theirs in zip(together, alone, strict=True):
        np.testing.assert_allclose(ours[1], theirs[0], **CLOSE)


@engines
def test_each_client_is_scored_with_its_own_vector(engine: str) -> None:
    # Scores u.v of the two items: 1 and -2 for the first client, 2 and 1 for the second.
    learner = learner_of(engine, models.load("factors items=2 size=2", "margin"))
    items = {"items": np.array([[[1, 0], [0, 1]], [[0, 0], [0, 0]]], np.float32)}
    users, cohort = {"user": np.array([[1, -2], [2, 1]], np.float32)}, labelled(([0, 1], [1, 1]), ([1], [1]))
    measured, metrics = ByArrays(learner).score(items, cohort, users)
    assert measured.tolist() == [[0.5, -1], [0, 0]]
    assert metrics.tolist() == [[0.5, 1], [0, 0]]
    assert ByArrays(learner).choose(items, cohort, users).tolist() == [1, 0]


# --- clients without local parameters yet: the factors, which fit them their own way

# Liked items have the vector (1, 0), others (-1, 0): who knows the first four knows the fifth.
FIVE = np.array([[1, 0], [-1, 0], [1, 0], [-1, 0], [1, 0]], np.float32)


def newcomers(engine: str, items: Any, *asked: Rows, loss: str = "log") -> tuple[list[float], list[float]]:
    """Return loss and metric of clients that have no vector yet."""
    array = np.asarray(items, np.float32)
    learner = learner_of(engine, models.load(f"factors items={len(array)} size={array.shape[1]}", loss))
    fresh = learner.model.initial_local(generators(len(asked)))
    measured, metrics = ByArrays(learner).score_newcomers({"items": array[None]}, labelled(*asked), fresh, 0.1)
    assert measured.shape == metrics.shape == (1, len(asked))
    return measured[0].tolist(), metrics[0].tolist()


@engines
@losses
def test_a_newcomer_is_told_what_it_likes_by_what_it_liked(engine: str, loss: str) -> None:
    labels = [1, -1, 1, -1, 1]
    assert newcomers(engine, FIVE, (list(range(5)), labels), loss=loss)[1] == [1]
    assert newcomers(engine, FIVE, (list(range(5)), [*labels[:4], -1]), loss=loss)[1] == [0]


@engines
def test_a_newcomer_is_scored_on_what_it_has_not_seen(engine: str) -> None:
    """Whatever the fifth label is, the score z of its item is the same: log(1 + e^-z) or log(1 + e^z)."""
    found = [newcomers(engine, FIVE, (list(range(5)), [1, -1, 1, -1, label]))[0][0] for label in (1, -1)]
    z = found[1] - found[0]
    assert z > 1
    assert found == pytest.approx([np.log1p(np.exp(-z)), np.log1p(np.exp(z))])


@engines
def test_a_newcomer_of_few_rows_is_scored_on_its_last(engine: str) -> None:
    assert newcomers(engine, FIVE, ([0, 1, 2], [1, -1, 1]))[1] == [1]
    # Of a single row nothing is left to learn from: u = 0, and every score is 0.
    assert newcomers(engine, FIVE, ([0], [1])) == ([pytest.approx(np.log(2))], [0])


@settings(max_examples=examples(15))
@given(clients())
def test_newcomers_are_scored_as_if_alone(asked: list[Rows]) -> None:
    together = newcomers("batched", ITEMS[:12], *asked)
    alone = [newcomers("loop", ITEMS[:12], rows) for rows in asked]
    assert together[0] == pytest.approx([own[0][0] for own in alone], rel=1e-6)
    assert together[1] == [own[1][0] for own in alone]


# --- a network of one's own with a head of each client's, and frozen layers


THREE_KINDS = pytest.mark.parametrize(
    ("frozen", "local"), [("", "head.*"), ("body.bias", "head.*"), ("head.*", ""), ("body.*", "head.bias")]
)


@engines
@THREE_KINDS
def test_shared_and_local_parameters_move_as_in_plain_pytorch_and_frozen_ones_stay(
    engine: str, frozen: str, local: str
) -> None:
    model = headed(frozen, local)
    generator = np.random.default_rng(0)
    rows = [draw_client(model, n, generator) for n in (7, 3, 4)]
    hypotheses, own = draw_hypotheses(model, 2), model.initial_local(generators(3))
    chosen, update = np.array([1, 0, 1]), LocalUpdate(2, 0.1, 3)
    before = {name: value.clone() for name, value in model.frozen_values.items()}
    shared, kept = ByArrays(learner_of(engine, model)).train(
        hypotheses, chosen, cohort_of(*rows), update, [InOrder()] * 3, own
    )
    assert (list(shared), list(kept)) == (list(model.shapes), list(model.local_shapes))
    for c, j in enumerate(chosen):
        start = {name: value[j] for name, value in hypotheses.items()} | {n: v[c] for n, v in own.items()}
        expected = sgd(model, start, rows[c], update)
        for name, value in (shared | kept).items():
            np.testing.assert_allclose(value[c], expected[name], rtol=1e-5, atol=1e-6)
            assert (value[c] != start[name]).any(), f"{name} has learnt something"
    for name, value in model.frozen_values.items():
        assert torch.equal(value, before[name])


@engines
def test_hypotheses_and_local_parameters_are_left_as_they_are(engine: str) -> None:
    model = headed()
    hypotheses, own = draw_hypotheses(model, 2), model.initial_local(generators(2))
    copies = [{name: value.copy() for name, value in arrays.items()} for arrays in (hypotheses, own)]
    cohort = cohort_of(*[draw_client(model, n, np.random.default_rng(n)) for n in (4, 6)])
    learner = learner_of(engine, model)
    ByArrays(learner).train(hypotheses, np.array([0, 1]), cohort, LocalUpdate(2, 0.1, 3), generators(2), own)
    ByArrays(learner).score(hypotheses, cohort, own)
    ByArrays(learner).score_newcomers(hypotheses, cohort, own, 0.1)
    for arrays, copy in zip((hypotheses, own), copies, strict=True):
        for name, value in arrays.items():
            np.testing.assert_array_equal(value, copy[name])


@engines
@pytest.mark.parametrize("frozen", ["", "body.bias"])
def test_a_newcomer_fits_its_local_parameters_alone_and_is_scored_on_every_fifth_row(engine: str, frozen: str) -> None:
    model = headed(frozen)
    generator = np.random.default_rng(3)
    rows = [draw_client(model, n, generator) for n in (11, 5, 3, 1)]
    held_out = [[4, 9], [4], [2], [0]]
    hypotheses, fresh = draw_hypotheses(model, 2), model.initial_local(generators(4))
    measured, metrics = ByArrays(learner_of(engine, model)).score_newcomers(hypotheses, cohort_of(*rows), fresh, 0.2)
    assert measured.shape == metrics.shape == (2, 4)
    for c, (x, y) in enumerate(rows):
        seen = np.setdiff1d(np.arange(len(y)), held_out[c])
        for j in range(2):
            start = {name: value[j] for name, value in hypotheses.items()} | {n: v[c] for n, v in fresh.items()}
            # Fifty passes over all rows at once; of a single row nothing is left to learn from.
            fitted = sgd(model, start, (x[seen], y[seen]), LocalUpdate(50 if len(seen) else 0, 0.2, 0), "head")
            parameters = {name: torch.from_numpy(value) for name, value in fitted.items()}
            outputs = model.apply(parameters, torch.from_numpy(x[held_out[c]]).float()).detach().numpy()[:, 0]
            rmse = np.sqrt(np.square(outputs - y[held_out[c]]).mean())
            assert measured[j, c] == pytest.approx(rmse, rel=1e-4)
            assert metrics[j, c] == pytest.approx(rmse, rel=1e-4)


class Normed(nn.Module):
    """Rows of two numbers, their sum and difference, normalised; with `twice`, by one layer in a row."""

    def __init__(self, twice: bool = False, **options: Any) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, **options), nn.Linear(2, 1)
        self.flat = nn.Identity()  # used twice, as layers without parameters often are
        self.twice, self.passes = twice, 0
        nn.init.ones_(self.body.weight)
        self.body.weight.data[1, 1] = -1

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        normed = self.norm(self.body(rows))
        outputs: torch.Tensor = self.head(self.norm(3 * normed) if self.twice else normed)
        return self.flat(self.flat(outputs))


def model_with_own_statistics() -> models.Model:
    """Return a model that reads in training what it keeps, so that passes differ."""

    class Centred(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(2))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(rows - self.centre)
            if self.training:
                self.centre = 0.5 * self.centre + 0.5 * rows.mean(0)
            return outputs

    return models.Model("centred", Centred, models.LOSSES["mse"], models.METRICS["rmse"], local=("centre",))


def normed(local: tuple[str, ...] = (), **options: Any) -> models.Model:
    """Return the model of a normalised layer."""
    network = partial(Normed, **options)
    return models.Model("normed", network, models.LOSSES["mse"], models.METRICS["rmse"], local=local)


def measured(engine: str, model: models.Model, *rows: Any) -> tuple[Any, int]:
    """Return what newcomers measure, from the statistics that a layer starts with, and by how many passes each."""
    cohort = cohort_of(*[(np.array(x, np.float32), np.zeros((len(x), 1))) for x in rows])
    learner, hypotheses = learner_of(engine, model), draw_hypotheses(model, 1)
    learner._traits(cohort)  # which is tried in training too
    network: Any = model.module
    before, fresh = network.passes, model.initial_local(generators(len(rows)))
    found = ByArrays(learner).fit_local(hypotheses, cohort, fresh, 0.1)
    return found, (network.passes - before) // (len(rows) if engine == "loop" else 1)


@engines
@pytest.mark.parametrize("momentum", [0.1, 0.01])
def test_newcomers_measure_running_statistics_in_one_pass(engine: str, momentum: float) -> None:
    """Sums 3, 7, 2 have mean 4 and variance 7; differences -1, -1, 2 mean 0 and variance 3."""
    model = normed(momentum=momentum)
    found, passes = measured(engine, model, [[1, 2], [3, 4], [2, 0]], [[0, 0], [1, 1], [2, 2]])
    np.testing.assert_allclose(found["norm.running_mean"], [[4, 0], [2, 0]], **CLOSE)
    np.testing.assert_allclose(found["norm.running_var"], [[7, 3], [4, 0]], **CLOSE)
    assert passes == 1
    assert cast(Any, model.module).norm.momentum == momentum


@engines
def test_fifty_passes_approach_what_newcomers_measure_in_one(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).normal(5, 3, (2, 9, 2)).tolist()
    found, _ = measured(engine, normed(), *rows)
    monkeypatch.setattr(models.Model, "local_statistics", False)
    slowly, passes = measured(engine, normed(), *rows)
    assert passes == 50
    for name, start in (("norm.running_mean", 0), ("norm.running_var", 1)):
        left = 0.9**50
        np.testing.assert_allclose(slowly[name], (1 - left) * found[name] + left * start, rtol=1e-4)


@pytest.mark.parametrize(
    "model",
    [normed(("head.*",)), normed(twice=True), model_with_own_statistics()],
    ids=["other parameters are local too", "a layer is used twice", "a buffer that training reads"],
)
def test_other_local_parameters_are_fitted_in_fifty_passes(model: models.Model) -> None:
    assert measured("loop", model, [[1, 2], [3, 4], [2, 0]])[1] == 50


@pytest.mark.parametrize(("momentum", "mean"), [(0.0, 0), (None, 4)])
def test_statistics_that_never_move_stay_and_those_of_all_batches_are_of_the_one(momentum: Any, mean: float) -> None:
    found, _ = measured("loop", normed(momentum=momentum), [[1, 2], [3, 4], [2, 0]])
    assert found["norm.running_mean"][0, 0] == pytest.approx(mean)


# --- priors


@engines
@pytest.mark.parametrize("batch_size", [0, 2])
def test_a_prior_of_local_parameters_counts_once_over_a_clients_rows(engine: str, batch_size: int) -> None:
    """An item of zeros, of four, leaves the prior alone to move the vector: -s 5 u, and -s 1 c beside the residuals."""
    learner = learner_of(engine, models.load("biased-factors items=4 size=2", "margin"))
    cohort, user = labelled([[0, 1, 2, 3], [1, -1, 1, 1]], [[2], [-1]]), np.array([[1, 2, 3], [1, 2, 3]], np.float32)
    update, chosen = LocalUpdate(1, 0.01, batch_size), np.zeros(2, np.int64)
    shared, local = ByArrays(learner).train(
        {"items": np.zeros((1, 4, 3), np.float32)}, chosen, cohort, update, generators(2, 0), {"user": user}
    )
    # In minibatches of two the second half of the prior is of what the first half left.
    left = 1 - 0.05 if batch_size == 0 else (1 - 0.025) ** 2
    np.testing.assert_allclose(local["user"][0, :2], left * user[0, :2], rtol=2e-2)
    np.testing.assert_allclose(local["user"][1], [0.95, 1.9, 2.97 - 0.01], rtol=1e-5)
    # Of the margin loss the residual is the label: items move along the user's vector, their biases by the step.
    np.testing.assert_allclose(shared["items"][1, 2], [-0.01, -0.02, -0.01], rtol=1e-5)
    if batch_size == 0:
        np.testing.assert_allclose(local["user"][0], [0.95, 1.9, 2.97 + 0.02], rtol=1e-5)
        np.testing.assert_allclose(shared["items"][0, :, 2], [0.01, -0.01, 0.01, 0.01], rtol=1e-5)
