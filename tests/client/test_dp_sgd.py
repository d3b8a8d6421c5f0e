"""DP-SGD: no row moves a sum by more than its clip norm, the noise is as large as it says, and nothing else gets out.

That the sums are those of rows' gradients, each clipped by itself, is in test_learner.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from tests.helpers.cohorts import CPU, ByArrays
from tests.helpers.errors import raises
from tests.helpers.examples import examples
from tests.helpers.models import Adapted, Convolving, own
from tests.helpers.noise import SILENT
from tests.helpers.strangers import Grouped, TiedAutoencoder, Words
from umbel import models
from umbel.client.batched import dense_layers
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.dp_sgd import AT_ONCE, _samples, _sums
from umbel.client.learner import Learner
from umbel.client.row_gradients import SLACK, Chained, Layered, RowByRow, RowGradients, gradients_of
from umbel.models.model import Model
from umbel.models.optimizers import SGD, Descent, Momentum
from umbel.privacy.mechanisms.randomness import RowSource, row_sources
from umbel.privacy.mechanisms.sanitise import grid_step
from umbel.protocol.errors import ModelError
from umbel.protocol.release import RowPrivacy

C = 0.5
ALL = RowPrivacy(C, 1e-6, 1.0, 1.0, 1)
"""One step on all rows, and a fine grid: with no noise, what is left is the clipped sum."""
MLP = models.load("mlp inputs=5 hidden=4,3 outputs=2")
LINEAR = models.load("linear inputs=1 outputs=1", "mse")


def gradients_by(engine: str, model: Model, shape: tuple[int, ...]) -> RowGradients:
    chain = dense_layers(model.module) if engine == "batched" else None
    return gradients_of(model, model.frozen_values, frozenset(model.shapes), shape, chain)


def update(rows: RowPrivacy = ALL, step: float = 1.0, **changes: Any) -> LocalUpdate:
    return LocalUpdate(1, step, 0, rows=rows, **changes)


def cohort_of(*lengths: int, inputs: int = 5) -> Cohort:
    generator, count = np.random.default_rng(7), sum(lengths)
    features = torch.from_numpy(generator.normal(scale=3.0, size=(count, inputs)).astype(np.float32))
    return Cohort(features, torch.from_numpy(generator.integers(0, 2, count)), np.array(lengths))


def numbers(features: Tensor, targets: list[float]) -> Cohort:
    return Cohort(features, torch.tensor(targets), np.array([len(targets)]))


def moved(
    model: Model, cohort: Cohort, how: LocalUpdate, sources: list[RowSource] | None = None, start: Any = None,
    engine: str = "loop",
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """Return how far clients' parameters moved from the start, by default the initial ones, (clients, *shape)."""
    start = {name: value[None] for name, value in model.initial(0).items()} if start is None else start
    chosen = np.zeros(len(cohort), np.int64)
    learner = ByArrays(Learner(model, CPU, engine))
    shared, _ = learner.train(start, chosen, cohort, how, sources or [SILENT] * len(cohort))
    return {name: value - start[name] for name, value in shared.items()}


def norm(found: dict[str, Any]) -> float:
    return math.sqrt(sum(float(np.square(np.asarray(value), dtype=np.float64).sum()) for value in found.values()))


# --- the sums


@pytest.mark.parametrize(
    ("network", "shape", "kind"),
    [
        (Convolving, (1, 8, 8), Layered),
        (Adapted, (8,), Layered),
        (lambda: nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 2)), (5,), Layered),
        (TiedAutoencoder, (6,), RowByRow),
        (Words, (6,), RowByRow),
        (Grouped, (3, 6, 6), RowByRow),
    ],
)
def test_dense_layers_and_convolutions_need_no_gradient_of_a_row(
    network: Callable[[], nn.Module], shape: tuple[int, ...], kind: type
) -> None:
    assert type(gradients_by("loop", own(network), shape)) is kind


def test_one_step_of_a_linear_model_by_hand() -> None:
    # From weights of 0 the gradient of (w x + b - y)^2 is -2 y (x, 1): here (-6, -6) and (0, 2), of norms 8.5 and 2.
    start = {"1.weight": np.zeros((1, 1, 1), np.float32), "1.bias": np.zeros((1, 1), np.float32)}
    cohort, rows = numbers(torch.tensor([[1.0], [0.0]]), [3.0, -1.0]), RowPrivacy(4.0, 1e-6, 1.0, 8.0, 1)
    found = moved(LINEAR, cohort, update(rows, 0.5), start=start)
    kept = 4 * (1 - SLACK) / math.sqrt(2)
    np.testing.assert_allclose(found["1.weight"].ravel(), [0.5 * kept / 8], rtol=1e-5)
    np.testing.assert_allclose(found["1.bias"].ravel(), [0.5 * (kept - 2) / 8], rtol=1e-5)


class Twofold(nn.Module):
    """A weight that is used twice, which no formula of single layers covers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 5, bias=False), nn.Linear(5, 2)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.first(torch.tanh(self.first(rows)))))
        return found


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_a_row_moves_the_sum_by_at_most_the_clip_norm(data: st.DataObject) -> None:
    wild = st.floats(-1e4, 1e4, width=32) | st.sampled_from([math.inf, -math.inf, math.nan, 3e38])
    features = torch.tensor(data.draw(st.lists(st.lists(wild, min_size=5, max_size=5), min_size=2, max_size=5)))
    engine, model = data.draw(st.sampled_from(["loop", "batched"])), data.draw(st.sampled_from([MLP, TWOFOLD]))
    targets, n = torch.arange(len(features)) % 2, len(features)
    with_it, without = (
        moved(model, Cohort(features[:most], targets[:most], np.array([most])), update(), engine=engine)
        for most in (n, n - 1)
    )
    assert norm({name: value - without[name] for name, value in with_it.items()}) <= C


TWOFOLD = own(Twofold)


def two_places() -> nn.Module:
    mix, head = nn.Linear(8, 8, bias=False), nn.Linear(16, 1, bias=False)
    return nn.Sequential(nn.Unflatten(1, (2, 8)), mix, nn.Flatten(), head)


def two_tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(2, 8), nn.Flatten(), nn.Linear(16, 1, bias=False))


@pytest.mark.parametrize("network", [two_places, two_tokens])
def test_places_whose_gradients_cancel_hide_no_norm(network: Callable[[], nn.Module]) -> None:
    """A server may choose parameters so that rounding swallows the difference of two large products."""
    model, generator = own(network, "mse"), np.random.default_rng(3)
    head = np.concatenate([one := generator.normal(size=8) * 1e4, -one * (1 + 1e-4)]).astype(np.float32)
    start = {name: np.zeros((1, *shape), np.float32) for name, shape in model.shapes.items()}
    last = [*start][-1]
    start[last] = head[None, None]
    base = np.tile(generator.normal(size=8) * 1e3, 2)
    for _ in range(20):
        features = torch.from_numpy((base + generator.normal(size=16) * 1e-2).astype(np.float32))
        if network is two_tokens:
            start[last] = (head + generator.normal(size=16).astype(np.float32))[None, None]
            features = torch.tensor([1, 1])
        assert norm(moved(model, numbers(features[None], [-0.5]), update(), start=start)) <= C


def test_a_row_moves_the_sum_of_many_rows_by_at_most_the_clip_norm() -> None:
    """All rows are alike, so that roundings add up."""
    n, gradients = 100_000, gradients_by("batched", LINEAR, (1,))
    cohort = numbers(torch.full((n, 1), 0.7), [-3.0] * n)
    zeros = {name: torch.zeros(1, *shape) for name, shape in LINEAR.shapes.items()}
    with_it, without = (
        _sums(gradients, zeros, some, [np.arange(some.lengths[0])], C)
        for some in (cohort, cohort.rows(np.arange(n) > 0))
    )
    assert 0.99 * C < norm({name: value.double() - without[name].double() for name, value in with_it.items()}) <= C


def one_weight() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1, bias=False))


def one_token() -> nn.Module:
    return nn.Sequential(nn.Embedding(2, 1), nn.Flatten())


WHOLE = (1 - SLACK) * (1 - 2.0**-12)
"""A gradient as long as the clip norm 1; a norm is rounded up."""


def at_a_power_of_two(n: int) -> tuple[list[float], list[float]]:
    """Return large and tiny gradients, n with one more of `WHOLE`.

    With that one, a sum is just above a power of 2, where each of the tiny ones rounds to nothing. Without it the sum
    is below, where numbers are half as far apart and each rounds to one step.
    """
    power = math.floor(math.log2(n / 2))
    apart, large = 2.0 ** (power - 23), [WHOLE] * int(2**power / WHOLE)
    together = np.cumsum(np.full(len(large), WHOLE, np.float32))[-1]
    return [*large, 2.0**power + 64 * apart - float(together) - WHOLE], [-0.4 * apart] * (n - len(large) - 2)


def summed(engine: str, network: Callable[[], nn.Module], gradients: list[float], places: int = 1) -> float:
    """Return the clipped sum of one parameter's gradients; a row's tiny one comes at several places."""
    model, tokens = own(network, "mse"), network is one_token
    (name,) = model.shapes
    clipped = gradients_by(engine, model, (places if tokens else 1,))
    assert type(clipped) is (Chained if engine == "batched" else RowByRow if tokens else Layered)
    rows = torch.tensor(gradients)[:, None].repeat(1, places if tokens else 1)
    rows[:, 1:] *= rows[:, 1:].abs() < 1e-3
    features = torch.zeros(rows.shape, dtype=torch.int64) if tokens else torch.ones(rows.shape)
    cohort = Cohort(features, -rows / 2, np.array([len(rows)]))
    found = _sums(clipped, {name: torch.zeros(1, *model.shapes[name])}, cohort, [np.arange(len(rows))], 1.0)
    return float(found[name].flatten()[0])


ENGINES = pytest.mark.parametrize(
    ("engine", "network"), [("batched", one_weight), ("loop", one_weight), ("loop", one_token)]
)


@ENGINES
@pytest.mark.parametrize("n", [4096, AT_ONCE])
def test_a_row_that_decides_how_sums_are_rounded_moves_them_by_at_most_the_clip_norm(
    engine: str, network: Callable[[], nn.Module], n: int
) -> None:
    large, tiny = at_a_power_of_two(n)
    with_it, without = (summed(engine, network, [*large, *one, *tiny], places=30) for one in ([WHOLE], []))
    assert 0.99 < with_it - without <= 1


@ENGINES
def test_a_row_that_decides_how_many_sums_are_rounded_moves_them_by_at_most_the_clip_norm(
    engine: str, network: Callable[[], nn.Module]
) -> None:
    """The row comes first, so that it moves all others by a place, in ten sums of as many rows as are added at once."""
    large, tiny = at_a_power_of_two(AT_ONCE)
    others = [*large, *tiny, WHOLE] * 10
    assert 0.99 < summed(engine, network, [1.0, *others]) - summed(engine, network, others) <= 1


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_the_norm_of_a_tiny_input_and_a_huge_gradient_is_that_of_their_product(engine: str) -> None:
    model = own(lambda: nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3))), "mse")
    weights = {"0.weight": 1e-23, "1.weight": 1e-25, "2.weight": 1e18}
    start = {name: np.full((1, 1, 1), value, np.float32) for name, value in weights.items()}
    rows = RowPrivacy(1e-6, 1e-12, 1.0, 1.0, 1)  # the gradient is 2e-5
    found = moved(model, numbers(torch.ones(1, 1), [-1.0]), update(rows), start=start, engine=engine)
    assert 0.5e-6 < abs(found["1.weight"]).item() <= 1e-6


@pytest.mark.parametrize("engine", ["loop", "batched", "site"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_row_whose_gradient_is_no_number_does_not_count(engine: str, bad: float) -> None:
    cohort = cohort_of(4)
    cohort.features[2] = bad
    three = cohort.rows(np.arange(4) != 2)
    with_it, without = (moved(MLP, one, update(), engine=engine) for one in (cohort, three))
    for name, value in without.items():
        np.testing.assert_allclose(with_it[name], value, rtol=1e-4, atol=1e-6)


# --- samples and noise


def test_noise_has_the_deviation_that_it_says_and_an_empty_sample_steps_too() -> None:
    model, sigma, batch = models.load("mlp inputs=5 hidden=40 outputs=10"), 3.0, 4.0
    rows = RowPrivacy(C, sigma, 1e-12, batch, 50)
    values = moved(model, cohort_of(6), update(rows, 0.25), row_sources(3, 1, [0])).values()
    found = np.concatenate([value.ravel() for value in values]) / (0.25 * sigma * C / batch * math.sqrt(50))
    # Two-sided test of a chi-squared variable: a right deviation fails with a chance of 1e-6.
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], len(found))
    assert low < np.square(found).sum() < high
    assert abs(found.mean()) < 5 / math.sqrt(len(found))


def test_a_sum_leaves_on_a_public_grid() -> None:
    """Its last digits would tell of its summands."""
    model, rows = models.load("linear inputs=5 outputs=1"), RowPrivacy(C, 3.0, 1.0, 1.0, 1)
    start = {name: np.zeros((1, *shape), np.float32) for name, shape in model.shapes.items()}
    for value in moved(model, cohort_of(6), update(rows), row_sources(3, 1, [0]), start).values():
        steps = value / grid_step(C * 3.0, 0.0)
        assert (steps == np.rint(steps)).all()


def test_rows_are_drawn_each_by_itself_at_the_rate() -> None:
    lengths, rate = np.array([400, 0, 30]), 0.2
    rows, sources = RowPrivacy(C, 1.0, rate, 1.0, 200), row_sources(5, 2, [4, 5, 6])
    drawn = list(_samples(lengths, rows, sources, most=400))
    counts = np.array([[len(own) for own in step] for step in drawn])
    assert (counts[:, 1] == 0).all()
    # Counts are binomial: mean and variance, each within 5 standard errors.
    mean, variance = 400 * rate, 400 * rate * (1 - rate)
    assert abs(counts[:, 0].mean() - mean) < 5 * math.sqrt(variance / 200)
    assert abs(counts[:, 0].var() / variance - 1) < 5 * math.sqrt(2 / 200)
    assert all(own.min(initial=400) >= 400 and own.max(initial=0) < 430 for _, _, own in drawn)


def test_sums_are_divided_by_the_public_batch_and_not_by_the_drawn_rows() -> None:
    cohort = cohort_of(3)
    twice = Cohort(cohort.features.repeat(2, 1), cohort.targets.repeat(2), np.array([6]))
    once, both = (moved(MLP, one, update(replace(ALL, batch=5.0))) for one in (cohort, twice))
    for name, value in once.items():
        np.testing.assert_allclose(both[name], 2 * value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("how", [SGD(), Momentum(proximal=0.1)])
def test_all_engines_draw_the_same_and_a_client_depends_on_no_other(how: Descent) -> None:
    cohort, rows = cohort_of(9, 0, 4), RowPrivacy(C, 0.5, 0.4, 3.0, 20)

    def of(engine: str, part: slice) -> dict[str, NDArray[Any]]:
        sources = row_sources(8, 1, list(range(3))[part])
        return moved(MLP, cohort.part(part), update(rows, descent=how), sources, engine=engine)

    reference, alone = of("loop", slice(0, 3)), of("loop", slice(2, 3))
    for engine in ("batched", "site"):
        for name, value in of(engine, slice(0, 3)).items():
            np.testing.assert_allclose(value, reference[name], rtol=1e-3, atol=1e-5)
    for name, value in of("site", slice(2, 3)).items():
        assert (value == of("site", slice(0, 3))[name][2:]).all(), "bit for bit"
        np.testing.assert_array_equal(alone[name][0], reference[name][2])


def test_steps_do_not_depend_on_the_number_of_rows() -> None:
    """A site's limit on computed rows leaves out passes of ordinary training, but no step here."""
    cohort, rows = cohort_of(50), replace(ALL, steps=4)
    free, limited = (moved(MLP, cohort, update(rows, max_examples=most)) for most in (math.inf, 60))
    for name, value in free.items():
        np.testing.assert_array_equal(limited[name], value)


def test_dropout_draws_the_same_whoever_else_is_asked() -> None:
    model = own(lambda: nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 2)))
    cohort, how = cohort_of(5, 5), update(RowPrivacy(C, 1e-6, 1.0, 1.0, 3))
    together = moved(model, cohort, how, row_sources(1, 1, [0, 1]))
    alone = moved(model, cohort.part(slice(1, 2)), how, row_sources(1, 1, [1]))
    for name, value in alone.items():
        np.testing.assert_array_equal(together[name][1], value[0])


# --- networks that cannot hide a row


class Mixing(nn.Module):
    """A layer on rows that a function mixes, and a branch of weights of 0 at first, as of a residual network."""

    def __init__(self, mix: Callable[[Mixing, Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.branch, self.mix = nn.Linear(5, 2), nn.Linear(5, 2, bias=False), mix
        nn.init.zeros_(self.branch.weight)

    def forward(self, rows: Tensor) -> Tensor:
        return self.mix(self, rows)


def centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(0)


MIXES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "always": lambda net, rows: net.head(centred(rows)) + net.branch(rows),
    "in training": lambda net, rows: net.head(centred(rows) if net.training else rows) + net.branch(rows),
    "beside dropout": lambda net, rows: nn.functional.dropout(MIXES["in training"](net, rows), 0.5, net.training),
    "by a weight that is 0 at first": lambda net, rows: net.head(rows) + net.branch(centred(rows)),
}


@pytest.mark.parametrize(
    "network",
    [*(partial(Mixing, mix) for mix in MIXES.values()), partial(nn.Sequential, nn.BatchNorm1d(5), nn.Linear(5, 2))],
    ids=[*MIXES, "batch normalisation"],
)
def test_a_network_that_mixes_rows_is_refused(network: Callable[[], nn.Module]) -> None:
    with raises(ModelError, "model.rows"):
        gradients_by("loop", own(network), (5,))


@pytest.mark.parametrize(
    "model",
    [
        # It shrinks the vectors of the tokens that a row names, which no noise hides.
        own(lambda: nn.Sequential(nn.Embedding(4, 4, max_norm=0.1), nn.Flatten(), nn.Linear(8, 2))),
        models.load("biased-factors items=5 size=2"),
    ],
    ids=["it changes its parameters itself", "it has rules of its own"],
)
def test_a_network_that_trains_otherwise_is_refused(model: Model) -> None:
    with raises(ModelError, "model.rows"):
        gradients_by("loop", model, (2,))
