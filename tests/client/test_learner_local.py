"""What is each client's own is trained beside what is shared, and fitted by a client that is new.

The factor model's numbers are those of the PAC paper (PAC identifiability in federated personalization): Protocol 1
takes steps, Protocol 3 epochs. That training is plain PyTorch's is in test_learner.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from tests.client.test_learner import plain_pytorch, plain_scores
from tests.helpers.cohorts import ByArrays, Rows, cohort_of, draw_client, engines, generators, learner_of
from tests.helpers.models import draw_hypotheses, headed, own
from umbel import models
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.models.factors import SLOPES

losses = pytest.mark.parametrize("loss", list(SLOPES))
# float32 has 7 digits, of which a few dozen steps cost one or two.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def labelled(*clients: tuple[list[int], list[int]]) -> Cohort:
    return cohort_of(*[(np.array(items, np.float32)[:, None], labels) for items, labels in clients])


def train(
    engine: str, items: Any, users: Any, cohort: Cohort, update: LocalUpdate, loss: str, kind: str = "factors"
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the items and the users' vectors that clients of a factor model have trained."""
    items, users = np.asarray(items, np.float32), np.asarray(users, np.float32)
    size = items.shape[1] - (kind != "factors")
    learner, chosen = learner_of(engine, models.load(f"{kind} items={len(items)} size={size}", loss)), [0] * len(users)
    shared, local = ByArrays(learner).train(
        {"items": items[None]}, chosen, cohort, update, generators(len(users)), {"user": users}
    )
    assert (list(shared), list(local)) == (["items"], ["user"])
    return shared["items"], local["user"]


# --- one step of the factor model, by hand


@engines
@losses
def test_the_update_of_items_of_zeros_is_the_users_vector_and_leaves_it_alone(engine: str, loss: str) -> None:
    """What the attack lives on: Delta v_i = -alpha l'(0) y_i u, and by Eq. 1 no gradient for u."""
    user, cohort = np.array([1.0, -2.0]), labelled(([0, 2, 3], [-1, 1, -1]))
    for update in (LocalUpdate(0, 0.25, 0, local_steps=1), LocalUpdate(1, 0.25, 0)):
        items, users = train(engine, np.zeros((4, 2)), [user], cohort, update, loss)
        labels = np.array([-1, 0, 1, -1])[:, None]
        slope = {"log": -0.5, "hinge": -1.0, "margin": -1.0}[loss]
        np.testing.assert_allclose(items, [-0.25 * slope * labels * user], rtol=1e-6)
        np.testing.assert_array_equal(users, [user])


@engines
def test_a_step_moves_items_by_the_sum_and_the_user_by_the_mean_both_from_where_they_were(engine: str) -> None:
    # Loss -y u.v, alpha 1/4: an item moves by y u / 4, u by the mean of y v / 4.
    cohort, step = labelled(([0, 1], [1, -1])), LocalUpdate(0, 0.25, 0, local_steps=1)
    items, users = train(engine, [[4, 0], [0, 8]], [[1, 2]], cohort, step, "margin")
    assert items.tolist() == [[[4.25, 0.5], [-0.25, 7.5]]]
    assert users.tolist() == [[1.5, 1]]


@engines
@pytest.mark.parametrize("batch_size", [0, 2])
def test_a_prior_of_local_parameters_counts_once_over_a_clients_rows(engine: str, batch_size: int) -> None:
    """An item of zeros, of four, leaves the prior alone to move the vector: -s 5 u, and -s 1 c beside the residuals."""
    cohort, user = labelled(([0, 1, 2, 3], [1, -1, 1, 1]), ([2], [-1])), [[1, 2, 3]] * 2
    update = LocalUpdate(1, 0.01, batch_size)
    items, users = train(engine, np.zeros((4, 3)), user, cohort, update, "margin", "biased-factors")
    # In minibatches of two the second half of the prior is of what the first half left.
    left = 1 - 0.05 if batch_size == 0 else (1 - 0.025) ** 2
    np.testing.assert_allclose(users[0, :2], left * np.array([1, 2]), rtol=2e-2)
    np.testing.assert_allclose(users[1], [0.95, 1.9, 2.97 - 0.01], rtol=1e-5)
    # Of the margin loss the residual is the label: items move along the user's vector, their biases by the step.
    np.testing.assert_allclose(items[1, 2], [-0.01, -0.02, -0.01], rtol=1e-5)
    if batch_size == 0:
        np.testing.assert_allclose(users[0], [0.95, 1.9, 2.97 + 0.02], rtol=1e-5)
        np.testing.assert_allclose(items[0, :, 2], [0.01, -0.01, 0.01, 0.01], rtol=1e-5)


@engines
def test_the_rows_of_one_client_do_not_reach_another_through_the_padding(engine: str) -> None:
    """A client of one row beside one whose numbers are beyond all bounds."""
    vectors = models.load("factors items=6 size=8").initial(0)["items"]
    items = np.concatenate([vectors[:2], np.full((4, 8), 1e38, np.float32)])
    few, many, step = ([1], [1]), ([2, 3, 4, 5], [1, -1, 1, -1]), LocalUpdate(0, 0.25, 0, local_steps=3)
    alone = train(engine, items, vectors[[3]], labelled(few), step, "margin")
    together = train(engine, items, vectors[[5, 3, 5]], labelled(many, few, many), step, "margin")
    for ours, theirs in zip(together, alone, strict=True):
        np.testing.assert_allclose(ours[1], theirs[0], **CLOSE)


# --- newcomers, without local parameters yet: the factors, which fit them their own way

# Liked items have the vector (1, 0), others (-1, 0): who knows the first four knows the fifth.
FIVE = np.array([[1, 0], [-1, 0], [1, 0], [-1, 0], [1, 0]], np.float32)


def newcomer(engine: str, items: list[int], labels: list[int], loss: str = "log") -> tuple[float, float]:
    learner = learner_of(engine, models.load("factors items=5 size=2", loss))
    fresh = learner.model.initial_local(generators(1))
    measured = ByArrays(learner).score_newcomers({"items": FIVE[None]}, labelled((items, labels)), fresh, 0.1)
    assert {part.shape for part in measured} == {(1, 1)}
    return measured[0].item(), measured[1].item()


@engines
@losses
def test_a_newcomer_is_told_what_it_likes_by_what_it_liked(engine: str, loss: str) -> None:
    known = [1, -1, 1, -1]
    assert [newcomer(engine, [*range(5)], [*known, fifth], loss)[1] for fifth in (1, -1)] == [1, 0]


@engines
def test_a_newcomer_is_scored_on_what_it_has_not_seen(engine: str) -> None:
    """Whatever the fifth label is, the score z of its item is the same: log(1 + e^-z) or log(1 + e^z)."""
    found = [newcomer(engine, [*range(5)], [1, -1, 1, -1, label])[0] for label in (1, -1)]
    z = found[1] - found[0]
    assert z > 1
    assert found == pytest.approx([np.log1p(np.exp(-z)), np.log1p(np.exp(z))])
    assert newcomer(engine, [0, 1, 2], [1, -1, 1])[1] == 1, "of few rows it is the last"
    assert newcomer(engine, [0], [1]) == (pytest.approx(np.log(2)), 0), "of one row u = 0, and every score is 0"


# --- a network with a head of each client's


@engines
@pytest.mark.parametrize("frozen", ["", "body.bias"])
def test_a_newcomer_fits_its_local_parameters_alone_and_is_scored_on_every_fifth_row(engine: str, frozen: str) -> None:
    model, generator = headed(frozen), np.random.default_rng(3)
    rows = [draw_client(model, n, generator) for n in (11, 5, 3, 1)]
    held_out = [[4, 9], [4], [2], [0]]
    hypotheses, fresh = draw_hypotheses(model, 2), model.initial_local(generators(4))
    copies = {name: value.copy() for name, value in (hypotheses | fresh).items()}
    measured = ByArrays(learner_of(engine, model)).score_newcomers(hypotheses, cohort_of(*rows), fresh, 0.2)
    for c, (x, y) in enumerate(rows):
        seen = np.setdiff1d(np.arange(len(y)), held_out[c])
        # Fifty passes over all rows at once; of a single row nothing is left to learn from.
        fitting = LocalUpdate(50 if len(seen) else 0, 0.2, 0)
        for j in range(2):
            start = {name: value[j] for name, value in hypotheses.items()} | {n: v[c] for n, v in fresh.items()}
            make = partial(torch.optim.SGD, lr=0.2)
            fitted = plain_pytorch(model, start, (x[seen], y[seen]), fitting, make, None, only="head")
            expected = plain_scores(model, fitted, (x[held_out[c]], y[held_out[c]]))
            assert (measured[0][j, c], measured[1][j, c]) == pytest.approx(expected, rel=1e-4)
    for name, value in (hypotheses | fresh).items():
        np.testing.assert_array_equal(value, copies[name], "what was handed over is left as it was")


# --- running statistics


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
        hidden = self.norm(self.body(rows))
        outputs: torch.Tensor = self.head(self.norm(3 * hidden) if self.twice else hidden)
        return self.flat(self.flat(outputs))


class Centred(Normed):
    """Reads in training what it keeps, so that passes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(rows - self.centre)
        if self.training:
            self.centre = 0.5 * self.centre + 0.5 * rows.mean(0)
        return outputs


def normed(local: tuple[str, ...] = (), network: Any = Normed, **options: Any) -> models.Model:
    """Return the model of a normalised layer."""
    return own(partial(network, **options), "mse", local=local)


def measured(engine: str, model: models.Model, *rows: Any) -> tuple[Any, int]:
    """Return what newcomers measure, from the statistics that a layer starts with, and by how many passes each."""
    clients: list[Rows] = [(np.array(x, np.float32), np.zeros((len(x), 1))) for x in rows]
    learner, cohort = learner_of(engine, model), cohort_of(*clients)
    learner._traits(cohort)  # which is tried in training too
    network: Any = model.module
    before, fresh = network.passes, model.initial_local(generators(len(rows)))
    found = ByArrays(learner).fit_local(draw_hypotheses(model, 1), cohort, fresh, 0.1)
    return found, (network.passes - before) // (len(rows) if engine == "loop" else 1)


SUMS = [[1, 2], [3, 4], [2, 0]]  # 3, 7, 2 have mean 4 and variance 7; differences -1, -1, 2 mean 0 and variance 3


@engines
@pytest.mark.parametrize("momentum", [0.1, 0.01])
def test_newcomers_measure_running_statistics_in_one_pass(engine: str, momentum: float) -> None:
    model = normed(momentum=momentum)
    found, passes = measured(engine, model, SUMS, [[0, 0], [1, 1], [2, 2]])
    np.testing.assert_allclose(found["norm.running_mean"], [[4, 0], [2, 0]], **CLOSE)
    np.testing.assert_allclose(found["norm.running_var"], [[7, 3], [4, 0]], **CLOSE)
    assert passes == 1
    assert cast(Any, model.module).norm.momentum == momentum


@pytest.mark.parametrize(
    "model",
    [normed(("head.*",)), normed(twice=True), normed(("centre",), Centred)],
    ids=["other parameters are local too", "a layer is used twice", "a buffer that training reads"],
)
def test_other_local_parameters_are_fitted_in_fifty_passes(model: models.Model) -> None:
    assert measured("loop", model, SUMS)[1] == 50


@pytest.mark.parametrize(("momentum", "mean"), [(0.0, 0), (None, 4)])
def test_statistics_that_never_move_stay_and_those_of_all_batches_are_of_the_one(momentum: Any, mean: float) -> None:
    found, _ = measured("loop", normed(momentum=momentum), SUMS)
    assert found["norm.running_mean"][0, 0] == pytest.approx(mean)
