"""DP-SGD: the sums are those of clipped gradients, the noise is as large as it says, and nothing else gets out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from tests.helpers.cohorts import ByArrays
from tests.helpers.errors import raises
from tests.helpers.examples import examples
from umbel import models
from umbel.client.batched import dense_layers
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.dp_sgd import AT_ONCE, _sums
from umbel.client.learner import Learner
from umbel.client.row_gradients import SLACK, Chained, Layered, RowByRow, RowGradients, gradients_of
from umbel.models.losses import LOSSES, METRICS
from umbel.models.model import Model
from umbel.models.optimizers import SGD, Descent, Momentum
from umbel.privacy.mechanisms.randomness import RowSource, row_sources
from umbel.privacy.mechanisms.sanitise import grid_step
from umbel.protocol.errors import ModelError
from umbel.protocol.release import RowPrivacy

CPU = torch.device("cpu")
C = 0.5
ALL = RowPrivacy(C, 1e-6, 1.0, 1.0, 1)
"""One step on all rows, and a fine grid: with no noise, what is left is the clipped sum."""


def gradients_by(engine: str, model: Model, shape: tuple[int, ...]) -> RowGradients:
    chain = dense_layers(model.module) if engine == "batched" else None
    return gradients_of(model, model.frozen_values, frozenset(model.shapes), shape, chain)


class NoNoise:
    """A source that draws nothing but zeros, so that every row is drawn, and no noise."""

    def bytes(self, length: int) -> bytes:
        return bytes(length)

    def random(self, size: int) -> NDArray[np.float64]:
        return np.zeros(size)

    def standard_normal(self, size: int) -> NDArray[np.float64]:
        return np.zeros(size)

    def standard_gamma(self, shape: float) -> float:
        return 0.0


SILENT = RowSource(NoNoise(), NoNoise())


def update(rows: RowPrivacy = ALL, step: float = 1.0, **changes: Any) -> LocalUpdate:
    return LocalUpdate(1, step, 0, rows=rows, **changes)


def trained(
    learner: Learner, cohort: Cohort, how: LocalUpdate, sources: list[RowSource] | None = None
) -> dict[str, NDArray[Any]]:
    """Return how far clients' parameters moved from the initial ones, (clients, *shape)."""
    start = {name: value[None] for name, value in learner.model.initial(0).items()}
    local = learner.model.initial_local([np.random.default_rng(c) for c in range(len(cohort))])
    chosen = np.zeros(len(cohort), np.int64)
    shared, _ = ByArrays(learner).train(start, chosen, cohort, how, sources or [SILENT] * len(cohort), local)
    return {name: value - start[name] for name, value in shared.items()}


class Sequence(nn.Module):
    """Tokens through an embedding, a normalised layer over places, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 4, padding_idx=0)
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 3)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.act(self.mix(self.norm(self.embed(tokens)))).mean(1))
        return found


class Images(nn.Module):
    """A convolution with group normalisation, and one over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.line = nn.Conv1d(4, 2, 3, dilation=2)
        self.head = nn.Linear(24, 2)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(rows.reshape(-1, 1, 8, 8)))).flatten(2)
        found: Tensor = self.head(self.line(hidden).flatten(1))
        return found


class Convolving(nn.Sequential):
    """Convolutions and a head, with an activation in place."""

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(4, 2, (3, 2), dilation=(1, 2)), nn.Flatten(), nn.Linear(8, 2),
        )  # fmt: skip


class Tied(nn.Module):
    """A weight that is used twice, which no formula of single layers covers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.head = nn.Linear(5, 2)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.first(torch.tanh(self.first(rows)))))
        return found


class Mixing(nn.Module):
    """Takes the mean of a batch off each row."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 2)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.head(rows - rows.mean(0))
        return found


class MixingInTraining(Mixing):
    """Does so in training alone."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) if self.training else self.head(rows)


class MixingLater(Mixing):
    """Does so by a weight that is 0 at first, as in a residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(5, 2, bias=False)
        nn.init.zeros_(self.branch.weight)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.head(rows) + self.branch(rows - rows.mean(0))
        return found


class MixingAndDropping(MixingInTraining):
    """The same, with dropout: a row's outputs differ each time anyway."""

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(rows), 0.5, self.training)


class Normal(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 2))


class Adapted(nn.Module):
    """A frozen layer with an adapter of rank one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 1, bias=False), nn.Linear(1, 4, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.base(rows) + self.up(self.down(rows))))
        return found


def model_of(network: type[nn.Module]) -> Model:
    return Model(network.__name__, network, LOSSES["cross-entropy"], METRICS["accuracy"])


MLP = models.load("mlp inputs=5 hidden=4,3 outputs=2")
SHAPES: dict[str, tuple[int, ...]] = {"Sequence": (6,), "Images": (64,), "Convolving": (64,)}


def cohort_of(model: Model, *lengths: int, scale: float = 3.0) -> Cohort:
    generator = np.random.default_rng(7)
    shape, count = SHAPES.get(model.name, (5,)), sum(lengths)
    features = torch.from_numpy(generator.normal(scale=scale, size=(count, *shape)).astype(np.float32))
    if model.name == "Sequence":
        features = (features > 0).long()
    return Cohort(features, torch.from_numpy(generator.integers(0, 2, count)), np.array(lengths))


def by_hand(model: Model, cohort: Cohort, clip_norm: float = C) -> dict[str, Tensor]:
    """Return the sum of one client's clipped gradients, row by row with autograd alone."""
    values = {name: torch.from_numpy(value).requires_grad_() for name, value in model.initial(0).items()}
    total = {name: torch.zeros_like(value) for name, value in values.items()}
    for row, target in zip(cohort.features, cohort.targets, strict=True):
        outputs = model.apply(model.frozen_values | values, row[None], training=True)
        loss = model.loss.of_rows(outputs, target[None]).sum()
        found = torch.autograd.grad(loss, list(values.values()), allow_unused=True)
        parts = [torch.zeros_like(v) if g is None else g for g, v in zip(found, values.values(), strict=True)]
        norm = math.sqrt(sum(float(part.square().sum()) for part in parts))
        for name, part in zip(values, parts, strict=True):
            total[name] += part * min(1.0, clip_norm * (1 - SLACK) / norm)
    return total


# --- the sums


@pytest.mark.parametrize("network", [Sequence, Images, Convolving, Tied, Adapted, None])
@pytest.mark.parametrize("clip_norm", [0.05, 100.0])
def test_the_sum_is_that_of_each_rows_gradient_clipped_by_itself(
    network: type[nn.Module] | None, clip_norm: float
) -> None:
    model = model_of(network) if network else MLP
    cohort = cohort_of(model, 7)
    expected = by_hand(model, cohort, clip_norm)
    for engine in ("loop", "batched"):
        moved = trained(Learner(model, CPU, engine), cohort, update(replace(ALL, clip_norm=clip_norm)))
        for name, value in expected.items():
            np.testing.assert_allclose(-moved[name][0], value, rtol=2e-4, atol=2e-6 + 1e-5 * clip_norm)


@pytest.mark.parametrize(
    ("network", "kind"),
    [
        (Convolving, Layered),
        (Adapted, Layered),
        (Dropping, Layered),
        (Tied, RowByRow),
        (Sequence, RowByRow),
        (Images, RowByRow),
    ],
)
def test_dense_layers_and_convolutions_need_no_gradient_of_a_row(network: type[nn.Module], kind: type) -> None:
    model = model_of(network)
    found = gradients_of(model, model.frozen_values, frozenset(model.shapes), SHAPES.get(model.name, (5,)))
    assert type(found) is kind


def test_a_dense_network_computes_all_clients_at_once() -> None:
    chosen = gradients_by("batched", MLP, (5,))
    assert type(chosen) is Chained


def test_one_step_of_a_linear_model_by_hand() -> None:
    model = replace(models.load("linear inputs=1 outputs=1"), loss=LOSSES["mse"])
    # From weights of 0 the gradient of (w x + b - y)^2 is -2 y (x, 1): here (-6, -6) and (0, 2), of norms 8.5 and 2.
    start = {"1.weight": np.zeros((1, 1, 1), np.float32), "1.bias": np.zeros((1, 1), np.float32)}
    cohort = Cohort(torch.tensor([[1.0], [0.0]]), torch.tensor([3.0, -1.0]), np.array([2]))
    rows = RowPrivacy(4.0, 1e-6, 1.0, 8.0, 1)
    moved, _ = ByArrays(Learner(model, CPU)).train(start, np.zeros(1, np.int64), cohort, update(rows, 0.5), [SILENT])
    kept = 4 * (1 - SLACK) / math.sqrt(2)
    np.testing.assert_allclose(moved["1.weight"].ravel(), [0.5 * kept / 8], rtol=1e-5)
    np.testing.assert_allclose(moved["1.bias"].ravel(), [0.5 * (kept - 2) / 8], rtol=1e-5)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_a_row_moves_the_sum_by_at_most_the_clip_norm(data: st.DataObject) -> None:
    numbers = st.floats(-1e4, 1e4, width=32) | st.sampled_from([math.inf, -math.inf, math.nan, 3e38])
    rows = data.draw(st.lists(st.lists(numbers, min_size=5, max_size=5), min_size=2, max_size=5))
    engine = data.draw(st.sampled_from(["loop", "batched"]))
    network = data.draw(st.sampled_from([None, Tied]))
    model = model_of(network) if network else MLP
    features = torch.tensor(rows)
    targets = torch.from_numpy(np.arange(len(rows)) % 2)
    sums = [
        trained(Learner(model, CPU, engine), Cohort(features[:n], targets[:n], np.array([n])), update())
        for n in (len(rows), len(rows) - 1)
    ]
    away = math.sqrt(sum(float(np.square(sums[0][name] - sums[1][name]).sum()) for name in sums[0]))
    assert away <= C


class Places(nn.Module):
    """A layer over two places without an offset, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(8, 8, bias=False), nn.Linear(16, 1, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.head(self.mix(rows.reshape(-1, 2, 8)).flatten(1))
        return found


class Twice(nn.Module):
    """Tokens at two places, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(2, 8), nn.Linear(16, 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.embed(tokens).flatten(1))
        return found


@pytest.mark.parametrize("network", [Places, Twice])
def test_places_whose_gradients_cancel_hide_no_norm(network: type[nn.Module]) -> None:
    """A server may choose parameters so that rounding swallows the difference of two large products."""
    model, generator = replace(model_of(network), loss=LOSSES["mse"]), np.random.default_rng(3)
    head = np.concatenate([one := generator.normal(size=8) * 1e4, -one * (1 + 1e-4)]).astype(np.float32)
    start = {name: np.zeros((1, *shape), np.float32) for name, shape in model.shapes.items()}
    start["head.weight"] = head[None, None]
    base = np.tile(generator.normal(size=8) * 1e3, 2)
    for _ in range(20):
        features = torch.from_numpy((base + generator.normal(size=16) * 1e-2).astype(np.float32))
        if network is Twice:
            start["head.weight"] = (head + generator.normal(size=16).astype(np.float32))[None, None]
            features = torch.tensor([1, 1])
        cohort = Cohort(features[None], torch.tensor([-0.5]), np.array([1]))
        found, _ = ByArrays(Learner(model, CPU)).train(start, np.zeros(1, np.int64), cohort, update(), [SILENT])
        assert math.sqrt(sum(float(np.square(found[name] - start[name]).sum(dtype=np.float64)) for name in found)) <= C


def test_a_row_moves_the_sum_of_many_rows_by_at_most_the_clip_norm() -> None:
    """All rows are alike, so that roundings add up."""
    model, n = replace(models.load("linear inputs=1 outputs=1"), loss=LOSSES["mse"]), 100_000
    cohort = Cohort(torch.full((n, 1), 0.7), torch.full((n,), -3.0), np.array([n]))
    rows = cohort, cohort.rows(np.arange(n) > 0)
    start = {name: np.zeros((1, *shape), np.float32) for name, shape in model.shapes.items()}
    gradients = gradients_by("batched", model, (1,))
    zeros = {name: torch.from_numpy(value) for name, value in start.items()}
    sums = [_sums(gradients, zeros, some, [np.arange(some.lengths[0])], C) for some in rows]
    away = math.sqrt(sum(float((sums[0][name].double() - sums[1][name].double()).square().sum()) for name in start))
    assert 0.99 * C < away <= C


def one_weight() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1, bias=False))


def one_token() -> nn.Module:
    return nn.Sequential(nn.Embedding(2, 1), nn.Flatten())


TIMES = 30
"""How often each row has the token."""


@pytest.mark.parametrize("n", [4096, AT_ONCE])
@pytest.mark.parametrize(("engine", "network"), [("batched", one_weight), ("loop", one_weight), ("loop", one_token)])
def test_a_row_that_decides_how_sums_are_rounded_moves_them_by_at_most_the_clip_norm(
    engine: str, network: Callable[[], nn.Module], n: int
) -> None:
    """With the row, a sum is just above a power of 2, where each of many tiny gradients rounds to nothing. Without it
    the sum is below, where numbers are half as far apart and each rounds to one step."""
    power = math.floor(math.log2(n / 2))
    apart, whole = 2.0 ** (power - 23), (1 - SLACK) * (1 - 2.0**-12)  # a norm is rounded up
    large = [whole] * int(2**power / whole)
    together = np.cumsum(np.full(len(large), whole, np.float32))[-1]
    rest = 2.0**power + 64 * apart - float(together) - whole
    tiny = [-0.4 * apart] * (n - len(large) - 2)
    model = Model(network.__name__, network, LOSSES["mse"], METRICS["rmse"])
    (name,), tokens = model.shapes, network is one_token
    shape = (TIMES,) if tokens else (1,)
    clipped = gradients_by(engine, model, shape)
    assert type(clipped) is (Chained if engine == "batched" else RowByRow if tokens else Layered)
    sums = []
    for gradients in ([*large, rest, whole, *tiny], [*large, rest, *tiny]):
        rows = torch.tensor(gradients)[:, None].repeat(1, shape[0])
        rows[:, 1:] *= rows[:, 1:].abs() < 1e-3  # all others have one gradient
        features = torch.zeros(rows.shape, dtype=torch.int64) if tokens else torch.ones(rows.shape)
        cohort = Cohort(features, -rows / 2, np.array([len(rows)]))
        zeros = {name: torch.zeros(1, *model.shapes[name])}
        found = _sums(clipped, zeros, cohort, [np.arange(len(rows))], 1.0)
        sums.append(float(found[name].flatten()[0]))
    assert 0.99 < sums[0] - sums[1] <= 1


def in_blocks(blocks: int) -> list[float]:
    """Return so many times the rows of one sum in 32 bits, which rounds another way if its last row comes first."""
    power = math.floor(math.log2(AT_ONCE / 2))
    apart, whole = 2.0 ** (power - 23), (1 - SLACK) * (1 - 2.0**-12)
    large = [whole] * int(2**power / whole)
    together = np.cumsum(np.full(len(large), whole, np.float32))[-1]
    rest = 2.0**power + 64 * apart - float(together) - whole
    return [*large, rest, *[-0.4 * apart] * (AT_ONCE - len(large) - 2), whole] * blocks


@pytest.mark.parametrize(("engine", "network"), [("batched", one_weight), ("loop", one_weight), ("loop", one_token)])
def test_a_row_that_decides_how_many_sums_are_rounded_moves_them_by_at_most_the_clip_norm(
    engine: str, network: Callable[[], nn.Module]
) -> None:
    """The row comes first, so that it moves all others by a place."""
    model, others = Model(network.__name__, network, LOSSES["mse"], METRICS["rmse"]), in_blocks(10)
    (name,) = model.shapes
    clipped, sums = gradients_by(engine, model, (1,)), []
    for gradients in ([1.0, *others], others):
        rows = torch.tensor(gradients)[:, None]
        features = torch.zeros(rows.shape, dtype=torch.int64) if network is one_token else torch.ones(rows.shape)
        cohort = Cohort(features, -rows / 2, np.array([len(rows)]))
        zeros = {name: torch.zeros(1, *model.shapes[name])}
        found = _sums(clipped, zeros, cohort, [np.arange(len(rows))], 1.0)
        sums.append(float(found[name].flatten()[0]))
    assert 0.99 < sums[0] - sums[1] <= 1


class Thin(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(1, 1, bias=False) for _ in range(3)))


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_the_norm_of_a_tiny_input_and_a_huge_gradient_is_that_of_their_product(engine: str) -> None:
    model = replace(model_of(Thin), loss=LOSSES["mse"])
    weights = {"0.weight": 1e-23, "1.weight": 1e-25, "2.weight": 1e18}
    start = {name: np.full((1, 1, 1), value, np.float32) for name, value in weights.items()}
    cohort = Cohort(torch.ones(1, 1), torch.tensor([-1.0]), np.array([1]))
    rows = RowPrivacy(1e-6, 1e-12, 1.0, 1.0, 1)  # the gradient is 2e-5
    found, _ = ByArrays(Learner(model, CPU, engine)).train(start, np.zeros(1, np.int64), cohort, update(rows), [SILENT])
    assert 0.5e-6 < abs(found["1.weight"] - start["1.weight"]).item() <= 1e-6


class Rescaling(nn.Module):
    """Shrinks the vectors of the tokens that a row names, which no noise hides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 4, max_norm=0.1), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.embed(tokens).mean(1))
        return found


def test_a_network_that_changes_its_parameters_itself_is_refused() -> None:
    model = model_of(Rescaling)
    with raises(ModelError, "model.rows"):
        gradients_of(model, model.frozen_values, frozenset(model.shapes), (6,))


@pytest.mark.parametrize("engine", ["loop", "batched", "site"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_row_whose_gradient_is_no_number_does_not_count(engine: str, bad: float) -> None:
    cohort = cohort_of(MLP, 4)
    cohort.features[2] = bad
    three = Cohort(cohort.features[[0, 1, 3]], cohort.targets[[0, 1, 3]], np.array([3]))
    with_it, without = (trained(Learner(MLP, CPU, engine), one, update()) for one in (cohort, three))
    for name, value in without.items():
        np.testing.assert_allclose(with_it[name], value, rtol=1e-4, atol=1e-6)


# --- samples and noise


def test_noise_has_the_deviation_that_it_says_and_an_empty_sample_steps_too() -> None:
    model, sigma, batch = models.load("mlp inputs=5 hidden=40 outputs=10"), 3.0, 4.0
    rows = RowPrivacy(C, sigma, 1e-12, batch, 50)
    moved = trained(Learner(model, CPU), cohort_of(model, 6), update(rows, 0.25), row_sources(3, 1, [0]))
    found = np.concatenate([value.ravel() for value in moved.values()]) / (0.25 * sigma * C / batch * math.sqrt(50))
    # Two-sided test of a chi-squared variable: a right deviation fails with a chance of 1e-6.
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], len(found))
    assert low < np.square(found).sum() < high
    assert abs(found.mean()) < 5 / math.sqrt(len(found))


def test_a_sum_leaves_on_a_public_grid() -> None:
    """Its last digits would tell of its summands."""
    model, rows = models.load("linear inputs=5 outputs=1"), RowPrivacy(C, 3.0, 1.0, 1.0, 1)
    start, sources = {name: 0 * value[None] for name, value in model.initial(0).items()}, row_sources(3, 1, [0])
    how, cohort = update(rows, 1.0), cohort_of(model, 6)
    moved, _ = ByArrays(Learner(model, CPU)).train(start, np.zeros(1, np.int64), cohort, how, sources)
    for value in moved.values():
        steps = value / grid_step(C * 3.0, 0.0)
        assert (steps == np.rint(steps)).all()


def test_rows_are_drawn_each_by_itself_at_the_rate() -> None:
    from umbel.client.dp_sgd import _samples

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
    cohort = cohort_of(MLP, 3)
    twice = Cohort(cohort.features.repeat(2, 1), cohort.targets.repeat(2), np.array([6]))
    once, both = (trained(Learner(MLP, CPU), one, update(replace(ALL, batch=5.0))) for one in (cohort, twice))
    for name, value in once.items():
        np.testing.assert_allclose(both[name], 2 * value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("how", [SGD(), Momentum(proximal=0.1)])
def test_all_engines_draw_the_same_and_a_client_depends_on_no_other(how: Descent) -> None:
    cohort, rows = cohort_of(MLP, 9, 0, 4), RowPrivacy(C, 0.5, 0.4, 3.0, 20)

    def of(engine: str, part: slice) -> dict[str, NDArray[Any]]:
        clients = list(range(3))[part]
        return trained(
            Learner(MLP, CPU, engine), cohort.part(part), update(rows, descent=how), row_sources(8, 1, clients)
        )

    reference, alone = of("loop", slice(0, 3)), of("loop", slice(2, 3))
    for engine in ("batched", "site"):
        for name, value in of(engine, slice(0, 3)).items():
            np.testing.assert_allclose(value, reference[name], rtol=1e-3, atol=1e-5)
    for name, value in of("site", slice(2, 3)).items():
        assert (value == of("site", slice(0, 3))[name][2:]).all(), "bit for bit"
        np.testing.assert_array_equal(alone[name][0], reference[name][2])


def test_steps_do_not_depend_on_the_number_of_rows() -> None:
    """A site's limit on computed rows leaves out passes of ordinary training, but no step here."""
    cohort, rows = cohort_of(MLP, 50), replace(ALL, steps=4)
    free, limited = (trained(Learner(MLP, CPU), cohort, update(rows, max_examples=most)) for most in (math.inf, 60))
    for name, value in free.items():
        np.testing.assert_array_equal(limited[name], value)


# --- networks that cannot hide a row


@pytest.mark.parametrize("network", [Mixing, MixingInTraining, MixingLater, MixingAndDropping, Normal])
def test_a_network_that_mixes_rows_is_refused(network: type[nn.Module]) -> None:
    with raises(ModelError, "model.rows"):
        trained(Learner(model_of(network), CPU), cohort_of(model_of(network), 4), update())


def test_a_network_with_rules_of_its_own_is_refused() -> None:
    model = models.load("biased-factors items=5 size=2")
    with raises(ModelError, "model.rows"):
        gradients_of(model, {}, frozenset(model.shapes), (2,))


def test_dropout_draws_the_same_whoever_else_is_asked() -> None:
    model, rows = model_of(Dropping), RowPrivacy(C, 1e-6, 1.0, 1.0, 3)
    cohort = cohort_of(model, 5, 5)
    together = trained(Learner(model, CPU), cohort, update(rows), row_sources(1, 1, [0, 1]))
    alone = trained(Learner(model, CPU), cohort.part(slice(1, 2)), update(rows), row_sources(1, 1, [1]))
    for name, value in alone.items():
        np.testing.assert_array_equal(together[name][1], value[0])
