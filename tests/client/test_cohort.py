"""A cohort is scored and trained as its clients would be one by one; the loop over clients is the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

import client.cohort
import models
from client.cohort import (
    Cohort,
    LocalUpdate,
    _dense_layers,
    _forward,
    best_hypothesis,
    choose_engine,
    pick_device,
    score,
    shuffle,
    train,
)
from federation import Federation, Manifest, offsets_of, open_federation, write_federation
from models import LOSSES, METRICS, Loss, Model, Score
from privacy.randomness import streams
from protocol.arrays import Arrays

CPU = torch.device("cpu")
Rows = tuple[Any, Any]

engines = pytest.mark.parametrize("engine", ["loop", "batched"])
# float32 has 7 digits, of which a few dozen steps and sums in another order cost one or two.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def model_of(name: str, network: Callable[[], nn.Module], loss: Loss, metric: Score) -> Model:
    """Return a model whose network has been built once, as it is when `models.load` checks it."""
    model = Model(name, network, loss, metric)
    assert isinstance(model.module, nn.Module)
    return model


def tiny_cnn() -> nn.Module:
    """Return a convolution and a classifier for images of 6 x 6 and 3 classes."""
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))


TINY_CNN = model_of("tiny-cnn", tiny_cnn, LOSSES["cross-entropy"], METRICS["accuracy"])


def cohort_of(*clients: Rows) -> Cohort:
    """Return a cohort of clients, each given as its features and targets."""
    features = np.concatenate([np.asarray(x, np.float32) for x, _ in clients])
    targets = np.concatenate([np.asarray(y) for _, y in clients])
    targets = targets.astype(np.float32 if targets.dtype.kind == "f" else np.int64)
    return Cohort(torch.from_numpy(features), torch.from_numpy(targets), np.array([len(y) for _, y in clients]))


def draw_hypotheses(model: Model, k: int, seed: int = 0) -> Arrays:
    """Draw k hypotheses of a model."""
    drawn = [model.initial(seed + j) for j in range(k)]
    return {name: np.stack([one[name] for one in drawn]) for name in drawn[0]}


def linear(*thetas: Sequence[float]) -> Arrays:
    """Return hypotheses of the linear model."""
    return {"weight": np.array(thetas, np.float32)[:, None, :]}


def generators(count: int, seed: int = 0) -> list[np.random.Generator]:
    """Return a generator for each client."""
    return [np.random.default_rng([seed, c]) for c in range(count)]


def thetas(trained: Arrays) -> list[list[float]]:
    """Return what clients of the linear model have learnt."""
    rows: list[list[float]] = trained["weight"][:, 0].tolist()
    return rows


def assert_close(ours: Arrays, theirs: Arrays) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, **CLOSE)


def draw_client(model: Model, rows: int, generator: np.random.Generator) -> Rows:
    """Draw the rows of a client of one of the models below."""
    if model.loss.name == "cross-entropy":
        return generator.standard_normal((rows, 1, 6, 6)), generator.integers(0, 3, rows)
    inputs = 2 if model.name == "linear" else 3
    return generator.uniform(-1, 1, (rows, inputs)), generator.standard_normal(rows)


# --- by hand

# The residuals of theta (1, 2) are 1 - 3 = -2 and 4 - 2 = 2: mean square 4, root 2. The mean
# square has the gradient (2 (-2) (1, 0) + 2 (2) (0, 2)) / 2 = (-2, 4), its root (-2, 4) / (2 * 2).
TWO_ROWS: Rows = ([[1, 0], [0, 2]], [3.0, 2.0])


@engines
@pytest.mark.parametrize(("loss", "step_size", "theta"), [("mse", 0.25, [1.5, 1]), ("rmse", 0.5, [1.25, 1.5])])
def test_one_step_of_one_client(engine: str, loss: str, step_size: float, theta: list[float]) -> None:
    model = models.load("linear", loss)
    update = LocalUpdate(local_epochs=1, step_size=step_size, batch_size=0)
    trained = train(model, linear([1, 2]), np.array([0]), cohort_of(TWO_ROWS), update, generators(1), engine)
    assert thetas(trained) == [theta]
    assert trained["weight"].dtype == np.float32


@engines
def test_each_client_starts_from_the_hypothesis_it_chose(engine: str) -> None:
    # A row of zeros has no gradient, so a client ends where it started.
    still: Rows = ([[0, 0]], [0.0])
    trained = train(
        models.load("linear"),
        linear([1, 2], [3, 4]),
        np.array([1, 0, 1]),
        cohort_of(still, still, still),
        LocalUpdate(2, 0.1, 1),
        generators(3),
        engine,
    )
    assert thetas(trained) == [[3, 4], [1, 2], [3, 4]]


@engines
def test_hypotheses_are_left_as_they_are(engine: str) -> None:
    hypotheses = linear([1, 2])
    train(
        models.load("linear"),
        hypotheses,
        np.array([0]),
        cohort_of(TWO_ROWS),
        LocalUpdate(2, 0.1, 1),
        generators(1),
        engine,
    )
    assert hypotheses["weight"].tolist() == [[[1, 2]]]


@engines
def test_scores_are_those_of_every_hypothesis_on_every_client(engine: str) -> None:
    # (1, 2) leaves the residuals -2, 2 to the first client and 0 to the second; (3, 1) leaves 0, 0 and 1.
    hypotheses = linear([1, 2], [3, 1])
    cohort = cohort_of(TWO_ROWS, ([[1, 1]], [3.0]))
    losses, metrics = score(models.load("linear"), hypotheses, cohort, engine)
    assert losses.tolist() == [[2, 0], [0, 1]]
    assert metrics.tolist() == [[2, 0], [0, 1]], "the linear model's loss and metric are both RMSE"
    assert losses.dtype == np.float64


def test_a_model_may_be_scored_before_anything_else_is_asked_of_it() -> None:
    fresh = Model("fresh", lambda: nn.Linear(2, 1), LOSSES["mse"], METRICS["rmse"])
    hypotheses = {"weight": np.ones((1, 1, 2), np.float32), "bias": np.zeros((1, 1), np.float32)}
    losses, _ = score(fresh, hypotheses, cohort_of(([[1, 2]], [1.0])), "batched")
    assert losses.tolist() == [[2]]


@engines
def test_loss_and_metric_may_differ(engine: str) -> None:
    # Two classes from one feature; the logits of x are (w0 x, w1 x).
    model = model_of("logistic", lambda: nn.Linear(1, 2, bias=False), LOSSES["cross-entropy"], METRICS["accuracy"])
    log3 = float(np.log(3))
    hypotheses = {"weight": np.array([[[log3], [0]], [[0], [0]]], np.float32)}
    losses, metrics = score(model, hypotheses, cohort_of(([[1], [-1], [1], [1]], [0, 1, 0, 1])), engine)
    # Odds of three to one: right three times, wrong once. Even odds: class 0, right twice.
    np.testing.assert_allclose(losses, [[(3 * np.log(4 / 3) + np.log(4)) / 4], [np.log(2)]], rtol=1e-6)
    assert metrics.tolist() == [[0.75], [0.5]]


def test_the_lowest_loss_wins_and_ties_go_to_the_lowest_index() -> None:
    losses = np.array([[3.0, 1, 2, np.inf], [1, 1, 2, np.inf], [2, 1, 1, np.inf]])
    assert best_hypothesis(losses).tolist() == [1, 0, 2, 0]


def test_a_loss_that_is_no_number_never_wins() -> None:
    losses = np.array([[np.nan, 7, np.nan, np.nan], [9, np.nan, np.inf, np.nan]])
    assert best_hypothesis(losses).tolist() == [1, 0, 0, 0]


# --- both forms, and who else is there


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[Model, Arrays, NDArray[np.int64], list[Rows], LocalUpdate, int]:
    """Draw a ragged cohort and what it is asked.

    Hypothesis draws the sizes and a seed the numbers: at numbers in general position no ReLU and
    no root sits on its kink, where rounding alone decides which way the gradient goes.
    """
    seed = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    network = draw(st.sampled_from(["linear", "mlp", "tiny-cnn"]))
    model = TINY_CNN if network == "tiny-cnn" else models.load(network, draw(st.sampled_from(["mse", "rmse"])))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3 if model is TINY_CNN else 6))
    k = draw(st.integers(1, 3))
    chosen = generator.integers(0, k, len(lengths))
    update = LocalUpdate(draw(st.integers(0, 3)), 0.05, draw(st.integers(0, 7)), draw(st.integers(0, 3)))
    clients = [draw_client(model, rows, generator) for rows in lengths]
    return model, draw_hypotheses(model, k, seed), chosen, clients, update, seed


@settings(max_examples=150)
@given(cohorts())
def test_both_forms_give_the_same_numbers(
    case: tuple[Model, Arrays, NDArray[np.int64], list[Rows], LocalUpdate, int],
) -> None:
    model, hypotheses, chosen, clients, update, seed = case
    cohort = cohort_of(*clients)
    for batched, loop in zip(
        score(model, hypotheses, cohort, "batched"), score(model, hypotheses, cohort, "loop"), strict=True
    ):
        np.testing.assert_allclose(batched, loop, **CLOSE)
    batched, loop = (
        train(model, hypotheses, chosen, cohort, update, generators(len(clients), seed), engine)
        for engine in ("batched", "loop")
    )
    assert_close(batched, loop)


@given(cohorts())
def test_a_client_gets_the_same_result_alone(
    case: tuple[Model, Arrays, NDArray[np.int64], list[Rows], LocalUpdate, int],
) -> None:
    model, hypotheses, chosen, clients, update, seed = case
    cohort = cohort_of(*clients)
    for engine in ("loop", "batched"):
        together = train(model, hypotheses, chosen, cohort, update, generators(len(clients), seed), engine)
        for c, rows in enumerate(clients):
            own = [generators(len(clients), seed)[c]]
            alone = train(model, hypotheses, chosen[c : c + 1], cohort_of(rows), update, own, engine)
            mine = {name: value[c : c + 1] for name, value in together.items()}
            if engine == "loop":
                assert all(np.array_equal(mine[name], alone[name]) for name in alone), "bit by bit"
            else:
                assert_close(mine, alone)


@engines
def test_the_order_of_the_clients_is_of_no_consequence(engine: str) -> None:
    model = models.load("mlp")
    generator = np.random.default_rng(0)
    clients = [draw_client(model, rows, generator) for rows in (4, 1, 6)]
    hypotheses, chosen, update = draw_hypotheses(model, 2), np.array([1, 0, 1]), LocalUpdate(2, 0.1, 3)
    forward = train(model, hypotheses, chosen, cohort_of(*clients), update, generators(3), engine)
    backward = train(
        model, hypotheses, chosen[::-1].copy(), cohort_of(*clients[::-1]), update, generators(3)[::-1], engine
    )
    assert_close({name: value[::-1] for name, value in backward.items()}, forward)


@engines
@pytest.mark.parametrize("huge", [1e30, np.inf, np.nan])
@pytest.mark.parametrize("batch_size", [0, 2])
def test_a_client_never_sees_the_rows_of_another(engine: str, huge: float, batch_size: int) -> None:
    model = models.load("mlp")
    few: Rows = ([[0.1, 0.2, 0.3]], [0.5])
    many: Rows = (np.full((5, 3), huge), np.full(5, huge))
    hypotheses, update = draw_hypotheses(model, 2), LocalUpdate(2, 0.1, batch_size)
    alone = train(model, hypotheses, np.array([1]), cohort_of(few), update, generators(1), engine)
    together = train(model, hypotheses, np.array([0, 1, 0]), cohort_of(many, few, many), update, generators(3), engine)
    assert np.isfinite(alone["0.weight"]).all()
    assert_close({name: value[1:2] for name, value in together.items()}, alone)

    losses, metrics = score(model, hypotheses, cohort_of(many, few, many), engine)
    expected = score(model, hypotheses, cohort_of(few), engine)
    np.testing.assert_allclose(losses[:, 1:2], expected[0], **CLOSE)
    np.testing.assert_allclose(metrics[:, 1:2], expected[1], **CLOSE)


@pytest.mark.parametrize("batch_size", [0, 1, 2])
def test_padding_of_a_client_whose_loss_overflows_changes_nothing(batch_size: int) -> None:
    # The square of the first client's residual exceeds float32; its root then has no slope.
    overflowing: Rows = ([[1, 0]], [3e19])
    longer: Rows = ([[1, 0], [0, 1], [1, 1]], [3.0, 2.0, 1.0])
    cohort, update = cohort_of(overflowing, longer), LocalUpdate(2, 0.1, batch_size)
    loop, batched = (
        train(models.load("linear", "rmse"), linear([1, 2]), np.array([0, 0]), cohort, update, generators(2), engine)
        for engine in ("loop", "batched")
    )
    assert thetas(loop)[0] == [1, 2]
    assert_close(batched, loop)


# --- against plain PyTorch


def sgd(model: Model, hypothesis: Arrays, rows: Rows, update: LocalUpdate, criterion: nn.Module) -> Arrays:
    """Train one client as a PyTorch tutorial would, minibatches in the rows' own order."""
    network = model.network()
    network.load_state_dict({name: torch.from_numpy(value) for name, value in hypothesis.items()})
    optimiser = torch.optim.SGD(network.parameters(), lr=update.step_size)
    features, targets = torch.from_numpy(rows[0]).float(), torch.from_numpy(rows[1])
    if targets.is_floating_point():
        targets = targets.float().unsqueeze(1)
    batch_size = update.batch_size or len(targets)
    for _ in range(update.local_epochs):
        for x, y in zip(features.split(batch_size), targets.split(batch_size), strict=True):
            optimiser.zero_grad()
            criterion(network(x), y).backward()
            optimiser.step()
    return {name: value.numpy()[None] for name, value in network.state_dict().items()}


class InOrder(np.random.Generator):
    """A generator that shuffles nothing."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def permutation(self, x: Any, axis: int = 0) -> Any:
        """Return `x` as it is."""
        return x


@engines
@pytest.mark.parametrize("batch_size", [0, 1, 3, 7])
@pytest.mark.parametrize(
    ("model", "criterion"),
    [
        (models.load("linear", "mse"), nn.MSELoss()),
        (models.load("mlp", "mse"), nn.MSELoss()),
        (TINY_CNN, nn.CrossEntropyLoss()),
    ],
    ids=["linear", "mlp", "tiny-cnn"],
)
def test_two_epochs_are_those_of_plain_pytorch(
    engine: str, batch_size: int, model: Model, criterion: nn.Module
) -> None:
    rows = draw_client(model, 7, np.random.default_rng(0))
    update = LocalUpdate(2, 0.1, batch_size)
    hypotheses = draw_hypotheses(model, 1)
    trained = train(model, hypotheses, np.array([0]), cohort_of(rows), update, [InOrder()], engine)
    expected = sgd(model, {name: value[0] for name, value in hypotheses.items()}, rows, update, criterion)
    assert_close(trained, expected)
    assert any((trained[name] != hypotheses[name]).any() for name in trained), "something was learnt"


@engines
def test_a_client_of_images_learns_its_classes(engine: str) -> None:
    # Class c is a bright image in column c, which a tiny convolution can tell apart.
    images = np.zeros((6, 1, 6, 6))
    classes = np.array([0, 1, 2, 0, 1, 2])
    images[np.arange(6), 0, :, 2 * classes] = 1
    cohort = cohort_of((images, classes), (images[:2], classes[:2]))
    hypotheses = draw_hypotheses(TINY_CNN, 1, seed=3)
    trained = train(TINY_CNN, hypotheses, np.array([0, 0]), cohort, LocalUpdate(60, 0.3, 3), generators(2), engine)
    before, _ = score(TINY_CNN, hypotheses, cohort, engine)
    after, accuracy = score(TINY_CNN, trained, cohort, engine)
    assert after[0, 0] < before[0, 0] / 10
    assert accuracy[0, 0] == 1


# --- minibatches

# A linear model whose inputs are its rows, one-hot, and whose loss is its output: a step moves
# theta_i by -s / b when row i is one of the b rows of the minibatch. So theta tells which
# minibatches each row was in.
WHICH_ROWS = Loss("output", lambda outputs, _targets: outputs.squeeze(-1), lambda mean: mean, lambda mean: mean)


def shares(lengths: Sequence[int], update: LocalUpdate, engine: str, seed: int = 0) -> list[list[float]]:
    """Return, for each client and each of its rows, the sum of the row's shares in all minibatches."""
    widest = max(lengths)
    model = model_of("which-rows", lambda: nn.Linear(widest, 1, bias=False), WHICH_ROWS, METRICS["rmse"])
    cohort = cohort_of(*[(np.eye(rows, widest), np.zeros(rows)) for rows in lengths])
    start = {"weight": np.zeros((1, 1, widest), np.float32)}
    nowhere = np.zeros(len(lengths), np.int64)
    moved = train(model, start, nowhere, cohort, update, generators(len(lengths), seed), engine)["weight"][:, 0]
    np.testing.assert_array_equal([row[rows:].any() for row, rows in zip(moved, lengths, strict=True)], False)
    return [(-row[:rows] / update.step_size).tolist() for row, rows in zip(moved, lengths, strict=True)]


@engines
def test_an_epoch_takes_every_row_once_and_the_last_minibatch_may_be_smaller(engine: str) -> None:
    five, two, one = shares([5, 2, 1], LocalUpdate(1, 1.0, 2), engine)
    assert sorted(five) == [0.5, 0.5, 0.5, 0.5, 1], "two pairs and a single row"
    assert two == [0.5, 0.5]
    assert one == [1]


@engines
def test_a_batch_size_of_zero_takes_all_rows_at_once(engine: str) -> None:
    assert shares([4, 2, 1], LocalUpdate(1, 1.0, 0), engine) == [[0.25] * 4, [0.5] * 2, [1]]


@engines
def test_a_batch_larger_than_all_is_all_rows(engine: str) -> None:
    assert shares([4, 2], LocalUpdate(1, 1.0, 99), engine) == [[0.25] * 4, [0.5] * 2]


@engines
@pytest.mark.parametrize("batch_size", range(8))
def test_every_epoch_takes_every_row_once(engine: str, batch_size: int) -> None:
    lengths, epochs = [7, 3, 1, 6], 3
    for rows, mine in zip(lengths, shares(lengths, LocalUpdate(epochs, 1.0, batch_size), engine), strict=True):
        size = min(batch_size or rows, rows)
        smaller = rows % size
        # Each epoch some rows, the last minibatch, count 1 / smaller, all others 1 / size.
        total = epochs * (rows // size + bool(smaller))
        assert sum(mine) == pytest.approx(total, rel=1e-5)
        least = epochs / size
        extra = (1 / smaller - 1 / size) if smaller else 1.0
        times_last = (np.array(mine) - least) / extra
        np.testing.assert_allclose(times_last, times_last.round(), atol=1e-4)
        assert times_last.round().sum() == epochs * smaller


@engines
def test_any_row_may_be_the_last(engine: str) -> None:
    last = {int(np.argmax(shares([5], LocalUpdate(1, 1.0, 2), engine, seed)[0])) for seed in range(60)}
    assert last == {0, 1, 2, 3, 4}


@engines
def test_each_epoch_is_shuffled_anew(engine: str) -> None:
    # Were one order kept, one row would be alone in its minibatch three times.
    alone = [max(shares([5], LocalUpdate(3, 1.0, 2), engine, seed)[0]) for seed in range(20)]
    assert min(alone) == pytest.approx(1 + 0.5 + 0.5)


@engines
@pytest.mark.parametrize(("steps", "size", "batch_size"), [(1, 3, 3), (4, 3, 3), (1, 7, 7), (3, 7, 0), (3, 7, 99)])
def test_a_step_takes_one_minibatch_of_different_rows(engine: str, steps: int, size: int, batch_size: int) -> None:
    """And however short a client is, it takes as many steps as the others."""
    lengths = [7, 3, 1]
    update = LocalUpdate(5, 1.0, batch_size, local_steps=steps)  # the epochs play no part
    for rows, mine in zip(lengths, shares(lengths, update, engine), strict=True):
        own = min(size, rows)
        times = np.array(mine) * own
        np.testing.assert_allclose(times, times.round(), atol=1e-4)
        assert times.round().sum() == steps * own
        assert times.round().max() <= steps, "no row twice in a minibatch"


@engines
def test_each_step_draws_from_all_rows_again(engine: str) -> None:
    """In three epochs' worth of steps most rows come up more or less often than three times."""
    often = [np.round(2 * np.array(shares([6], LocalUpdate(0, 1.0, 2, 9), engine, seed)[0])) for seed in range(40)]
    assert any((times != 3).any() for times in often)
    # Each row is in a minibatch of 2 out of 6 with probability 1/3: of 40 * 9 minibatches in 120, give or
    # take sqrt(360 * 2 / 9) = 9. False-alarm rate below 6 * 6e-7, five deviations.
    assert np.abs(np.sum(often, axis=0) - 120).max() < 45


@engines
def test_neither_steps_nor_epochs_leave_a_client_where_it_started(engine: str) -> None:
    cohort = cohort_of(TWO_ROWS, ([[1, 1]], [9.0]))
    for batch_size in (0, 1):
        trained = train(
            models.load("linear"),
            linear([1, 2], [3, 4]),
            np.array([1, 0]),
            cohort,
            LocalUpdate(0, 0.1, batch_size),
            generators(2),
            engine,
        )
        assert thetas(trained) == [[3, 4], [1, 2]]


def test_a_pass_is_a_step_or_an_epoch() -> None:
    epochs, steps = LocalUpdate(2, 0.1, 3), LocalUpdate(2, 0.1, 3, local_steps=5)
    assert (epochs.passes, steps.passes) == (2, 5)
    assert [list(epochs.batches(rows)) for rows in (2, 3, 7)] == [[0], [0], [0, 3, 6]]
    assert [list(steps.batches(rows)) for rows in (2, 3, 7)] == [[0], [0], [0]]
    assert [epochs.size(rows) for rows in (2, 3, 7)] == [2, 3, 3]
    assert LocalUpdate(1, 0.1, 0).size(7) == 7


@engines
def test_only_a_client_with_more_rows_than_a_batch_draws(engine: str) -> None:
    lengths = [4, 3, 5, 1]
    ours, fresh = generators(4), generators(4)
    cohort = cohort_of(*[(np.ones((rows, 2)), np.ones(rows)) for rows in lengths])
    chosen = np.zeros(4, np.int64)
    model = models.load("linear")
    train(model, linear([0, 0]), chosen, cohort, LocalUpdate(2, 0.1, 3), ours, engine)
    drew = [mine.bit_generator.state != theirs.bit_generator.state for mine, theirs in zip(ours, fresh, strict=True)]
    assert drew == [True, False, True, False]

    ours = generators(4)
    train(model, linear([0, 0]), chosen, cohort, LocalUpdate(2, 0.1, 0), ours, engine)
    assert [generator.bit_generator.state for generator in ours] == [g.bit_generator.state for g in fresh]


# --- chunks


@engines
@pytest.mark.parametrize(("chunk_bytes", "chunks"), [(1, 5), (900, 3)])
def test_chunks_do_not_change_the_numbers(
    engine: str, chunk_bytes: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.load("mlp")
    generator = np.random.default_rng(0)
    cohort = cohort_of(*[draw_client(model, rows, generator) for rows in (8, 1, 9, 3, 5)])
    hypotheses, chosen, update = draw_hypotheses(model, 2), np.array([0, 1, 1, 0, 1]), LocalUpdate(2, 0.1, 4)
    whole_scores = score(model, hypotheses, cohort, engine)
    whole = train(model, hypotheses, chosen, cohort, update, generators(5), engine)

    parts: list[int] = []
    form = f"_train_{engine}"
    original = getattr(client.cohort, form)

    def spy(model: Model, start: Any, part: Cohort, *rest: Any) -> Any:
        parts.append(len(part))
        return original(model, start, part, *rest)

    monkeypatch.setattr(client.cohort, form, spy)
    monkeypatch.setattr(client.cohort, "CPU_CHUNK_BYTES", chunk_bytes)
    assert_close(train(model, hypotheses, chosen, cohort, update, generators(5), engine), whole)
    assert (len(parts), sum(parts)) == (chunks, 5)
    for ours, theirs in zip(score(model, hypotheses, cohort, engine), whole_scores, strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)


def test_scoring_goes_by_whole_clients_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    # A row of the linear model holds two inputs and one output, 12 bytes: six rows fit in 72.
    parts: list[list[int]] = []
    original = client.cohort._score_rows

    def spy(model: Model, stacked: Any, part: Cohort) -> Any:
        parts.append(part.lengths.tolist())
        return original(model, stacked, part)

    monkeypatch.setattr(client.cohort, "_score_rows", spy)
    monkeypatch.setattr(client.cohort, "CPU_CHUNK_BYTES", 72)
    cohort = cohort_of(*[(np.ones((rows, 2)), np.full(rows, 3.0)) for rows in (2, 4, 1, 9, 3)])
    losses, _ = score(models.load("linear"), linear([1, 1]), cohort, "batched")
    assert parts == [[2, 4], [1], [9], [3]], "a client larger than a chunk is a chunk of its own"
    assert losses.tolist() == [[1] * 5]


# --- reading a federation

# Three clients with 2, 1 and 3 rows; row i holds (2 i, 2 i + 1) and the target 10 i.
FEDERATION = Federation(
    Manifest(name="small", clients=3, split={"train": 2, "validation": 1}),
    np.arange(12, dtype=np.float64).reshape(6, 2),
    np.arange(0, 60, 10, dtype=np.float64),
    offsets_of([2, 1, 3]),
)


def test_clients_are_gathered_in_the_order_asked() -> None:
    cohort = Cohort.gather(FEDERATION, [2, 0], CPU)
    assert len(cohort) == 2
    assert cohort.lengths.tolist() == [3, 2]
    assert cohort.starts.tolist() == [0, 3]
    assert cohort.features.tolist() == [[6, 7], [8, 9], [10, 11], [0, 1], [2, 3]]
    assert cohort.targets.tolist() == [30, 40, 50, 0, 10]
    assert (cohort.features.dtype, cohort.targets.dtype) == (torch.float32, torch.float32)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.data())
def test_a_gathered_client_has_the_federations_rows(lengths: list[int], data: st.DataObject) -> None:
    rows = np.arange(sum(lengths), dtype=np.float32)
    manifest = Manifest("drawn", len(lengths), {"train": len(lengths), "validation": 0})
    federation = Federation(manifest, rows[:, None], rows, offsets_of(lengths))
    asked = data.draw(st.permutations(range(len(lengths))).map(lambda order: order[: data.draw(st.integers(0, 8))]))
    cohort = Cohort.gather(federation, asked, CPU)
    assert len(cohort) == len(asked)
    for start, length, number in zip(cohort.starts, cohort.lengths, asked, strict=True):
        features, targets = federation.client(number)
        np.testing.assert_array_equal(cohort.features[start : start + length], features)
        np.testing.assert_array_equal(cohort.targets[start : start + length], targets)


def test_nobody_is_a_cohort_without_rows() -> None:
    cohort = Cohort.gather(FEDERATION, [], CPU)
    assert len(cohort) == 0
    assert cohort.features.shape == (0, 2)
    assert cohort.targets.shape == (0,)


def test_images_kept_as_bytes_are_scaled_and_classes_are_whole_numbers() -> None:
    manifest = Manifest("bytes", 2, {"train": 2, "validation": 0}, feature_scale=1 / 255)
    images = np.array([0, 51, 255], np.uint8).reshape(3, 1, 1)
    federation = Federation(manifest, images, np.array([7, 61, 0], np.uint8), offsets_of([1, 2]))
    cohort = Cohort.gather(federation, [1, 0], CPU)
    assert cohort.features.dtype == torch.float32
    np.testing.assert_allclose(cohort.features.flatten(), [0.2, 1, 0], rtol=1e-6)
    assert cohort.targets.dtype == torch.int64
    assert cohort.targets.tolist() == [61, 0, 7]


def test_a_folder_on_disk_is_gathered_into_memory_of_its_own(tmp_path: Path) -> None:
    write_federation(
        tmp_path / "small",
        FEDERATION.manifest,
        FEDERATION.features.astype(np.float32),
        FEDERATION.targets,
        FEDERATION.offsets,
    )
    federation = open_federation(tmp_path / "small")
    cohort = Cohort.gather(federation, [0, 1, 2], CPU)
    cohort.features[:] = -1
    assert federation.features[5].tolist() == [10, 11]


def test_no_rows_but_those_of_the_asked_are_read() -> None:
    class Watched:
        """An array that remembers which rows were read."""

        read: list[int]

        def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[Any]:
            self.read = rows.tolist()
            array: NDArray[Any] = FEDERATION.features[rows]
            return array

    watched: Any = Watched()
    Cohort.gather(Federation(FEDERATION.manifest, watched, FEDERATION.targets, FEDERATION.offsets), [2, 1], CPU)
    assert watched.read == [3, 4, 5, 2]


def test_a_part_is_a_run_of_clients() -> None:
    cohort = Cohort.gather(FEDERATION, [2, 0, 1], CPU).part(slice(1, 3))
    assert cohort.lengths.tolist() == [2, 1]
    assert cohort.starts.tolist() == [0, 2]
    assert cohort.targets.tolist() == [0, 10, 20]


# --- where and how


def test_an_unknown_device_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown device 'tpu'; choose from auto, cpu, cuda"):
        pick_device("tpu")


@pytest.mark.parametrize(
    ("name", "there", "picked"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_the_gpu_is_taken_if_there_is_one(name: str, there: bool, picked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert pick_device(name) == torch.device(picked)


def test_a_gpu_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match='device = "cuda" but PyTorch sees no GPU here; set device = "auto"'):
        pick_device("cuda")


@pytest.mark.parametrize(
    ("model", "device", "engine"),
    [
        (models.load("linear"), "cpu", "batched"),
        (models.load("mlp"), "cuda", "batched"),
        (models.load("cnn"), "cpu", "loop"),
        (models.load("cnn"), "cuda", "batched"),
        (TINY_CNN, "cpu", "loop"),
    ],
)
def test_only_convolutions_on_the_cpu_are_computed_one_by_one(model: Model, device: str, engine: str) -> None:
    assert choose_engine("auto", model, torch.device(device)) == engine


@engines
def test_an_engine_that_is_asked_for_is_taken(engine: str) -> None:
    assert choose_engine(engine, models.load("linear"), CPU) == engine
    assert choose_engine(engine, TINY_CNN, CPU) == engine


def test_an_unknown_engine_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown engine 'steam'; choose from auto, loop, batched"):
        choose_engine("steam", TINY_CNN, CPU)


# --- networks of dense layers are computed as stacked matrix products


@pytest.mark.parametrize(
    "network",
    [
        lambda: nn.Linear(3, 2),
        lambda: nn.Linear(3, 2, bias=False),
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2), nn.Sigmoid()), nn.Linear(2, 1)
        ),
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Identity(), nn.Linear(4, 4, bias=False)),
        lambda: nn.Sequential(nn.Linear(3, 4), relu := nn.ReLU(), nn.Linear(4, 4), relu, nn.Linear(4, 1)),
    ],
)
def test_a_chain_of_dense_layers_gives_what_each_network_gives_by_itself(network: Any) -> None:
    model = Model("dense", network, LOSSES["mse"], METRICS["rmse"])
    generator = torch.Generator().manual_seed(0)
    parameters = {name: torch.randn(5, *shape, generator=generator) for name, shape in model.shapes.items()}
    inputs = torch.randn(5, 7, 3, generator=generator)
    assert _dense_layers(model.module) is not None
    expected = [model.apply({n: v[c] for n, v in parameters.items()}, inputs[c]) for c in range(5)]
    torch.testing.assert_close(_forward(model, parameters, inputs), torch.stack(expected))


def test_other_networks_are_left_to_vmap() -> None:
    class Doubling(nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(inputs)

    class Doubled(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(inputs)

    hooked = nn.Linear(3, 1)
    hooked.register_forward_hook(lambda _module, _inputs, outputs: 2 * outputs)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 1))
    layered = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    for module in (Doubling(nn.Linear(3, 1)), Doubled(3, 1), hooked, normed, layered):
        assert _dense_layers(module) is None
    model = Model("doubling", lambda: Doubling(nn.Linear(3, 1)), LOSSES["mse"], METRICS["rmse"])
    parameters = {name: torch.ones(2, *shape) for name, shape in model.shapes.items()}
    torch.testing.assert_close(_forward(model, parameters, torch.ones(2, 1, 3)), torch.full((2, 1, 1), 8.0))


def test_each_epoch_has_an_order_of_its_own() -> None:
    order = shuffle(np.array([40, 3]), LocalUpdate(3, 0.1, 2), streams(1, "shuffle", 1, [0, 7]))
    assert order.shape == (3, 43)
    assert len({tuple(epoch[:40]) for epoch in order}) == 3
    for epoch in order:
        assert sorted(epoch[:40]) == list(range(40))
        assert sorted(epoch[40:]) == [40, 41, 42]
    # The orders of one client do not depend on who else is there.
    alone = shuffle(np.array([40]), LocalUpdate(3, 0.1, 2), streams(1, "shuffle", 1, [0]))
    np.testing.assert_array_equal(order[:, :40], alone)


# --- how a loop lays convolutions out in memory


class Viewing(nn.Module):
    """A network written as in many a tutorial: it asks for a view of its convolution in the usual order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(32, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.conv(images).relu().view(len(images), -1))
        return logits


@pytest.mark.parametrize("network", [tiny_cnn, Viewing])
def test_a_loop_takes_any_convolution_and_agrees_with_the_batched_form(network: Callable[[], nn.Module]) -> None:
    model = model_of(network.__name__, network, LOSSES["cross-entropy"], METRICS["accuracy"])
    rng = np.random.default_rng(0)
    cohort = Cohort(
        torch.from_numpy(rng.standard_normal((9, 1, 6, 6), np.float32)), torch.arange(9) % 3, np.array([4, 5])
    )
    hypotheses = {name: np.stack([model.initial(seed)[name] for seed in (0, 1)]) for name in model.shapes}
    update, chosen = LocalUpdate(local_epochs=2, step_size=0.1, batch_size=2), np.array([1, 0])
    results = []
    for engine in ("loop", "batched"):
        trained = train(model, hypotheses, chosen, cohort, update, streams(0, "shuffle", 1, [0, 1]), engine)
        results.append({**trained, "losses": score(model, hypotheses, cohort, engine)[0]})
    for name in results[0]:
        np.testing.assert_allclose(results[0][name], results[1][name], **CLOSE)
