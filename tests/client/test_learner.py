"""A cohort is scored and trained as its clients would be one by one, by each learner; the loop is the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

import umbel.client.learner
from tests.helpers.cohorts import (
    CLOSE,
    CPU,
    ByArrays,
    InOrder,
    Rows,
    all_engines,
    assert_close,
    cohort_of,
    draw_client,
    engines,
    generators,
    learner_of,
    linear,
    score,
    sgd,
    thetas,
    train,
)
from tests.helpers.errors import raises
from tests.helpers.examples import examples
from tests.helpers.models import TINY_CNN, draw_hypotheses, model_of
from umbel import models
from umbel.client.batched import Batched
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner, best_hypothesis, learner_for
from umbel.client.loop import Loop
from umbel.models import LOSSES, METRICS, Model
from umbel.models.losses import squared_error
from umbel.privacy.mechanisms.randomness import streams
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.errors import ConfigError, ModelError

# --- by hand

# The residuals of theta (1, 2) are 1 - 3 = -2 and 4 - 2 = 2: mean square 4, root 2. The mean
# square has the gradient (2 (-2) (1, 0) + 2 (2) (0, 2)) / 2 = (-2, 4), its root (-2, 4) / (2 * 2).
TWO_ROWS: Rows = ([[1, 0], [0, 2]], [3.0, 2.0])


@all_engines
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


@all_engines
def test_loss_and_metric_may_differ(engine: str) -> None:
    # Two classes from one feature; the logits of x are (w0 x, w1 x).
    model = model_of("logistic", lambda: nn.Linear(1, 2, bias=False), LOSSES["cross-entropy"], METRICS["accuracy"])
    log3 = float(np.log(3))
    hypotheses = {"weight": np.array([[[log3], [0]], [[0], [0]]], np.float32)}
    losses, metrics = score(model, hypotheses, cohort_of(([[1], [-1], [1], [1]], [0, 1, 0, 1])), engine)
    # Odds of three to one: right three times, wrong once. Even odds: class 0, right twice.
    np.testing.assert_allclose(losses, [[(3 * np.log(4 / 3) + np.log(4)) / 4], [np.log(2)]], rtol=1e-6)
    assert metrics.tolist() == [[0.75], [0.5]]


def test_the_lowest_loss_wins_ties_go_to_the_lowest_index_and_what_is_no_number_never_wins() -> None:
    losses = np.array([[3.0, 1, 2, np.inf], [1, 1, 2, np.inf], [2, 1, 1, np.inf]])
    assert best_hypothesis(losses).tolist() == [1, 0, 2, 0]
    losses = np.array([[np.nan, 7, np.nan, np.nan], [9, np.nan, np.inf, np.nan]])
    assert best_hypothesis(losses).tolist() == [1, 0, 0, 0]


# --- both forms, and who else is there


Case = tuple[Model, Arrays, NDArray[np.int64], list[Rows], LocalUpdate, int]


@st.composite
def cohorts(draw: st.DrawFn) -> Case:
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


@settings(max_examples=examples(30))
@given(cohorts())
def test_both_forms_give_the_same_numbers(case: Case) -> None:
    model, hypotheses, chosen, clients, update, seed = case
    cohort = cohort_of(*clients)
    scores = [score(model, hypotheses, cohort, engine) for engine in ("batched", "loop")]
    np.testing.assert_allclose(scores[0], scores[1], **CLOSE)
    batched, loop = (
        train(model, hypotheses, chosen, cohort, update, generators(len(clients), seed), engine)
        for engine in ("batched", "loop")
    )
    assert_close(batched, loop)


@settings(max_examples=examples(15))
@given(cohorts())
def test_a_client_gets_the_same_result_alone(case: Case) -> None:
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


@all_engines
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

    scores = np.stack(score(model, hypotheses, cohort_of(many, few, many), engine))
    np.testing.assert_allclose(scores[:, :, 1:2], score(model, hypotheses, cohort_of(few), engine), **CLOSE)


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


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_the_clients_whose_training_blows_up_are_the_same_in_both_forms(batch_size: int) -> None:
    model, update = models.load("mlp"), LocalUpdate(1, 0.1, batch_size)
    hypotheses, unharmed = draw_hypotheses(model, 1), []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        rows = []
        for length in rng.integers(1, 6, 4).tolist():
            # Some are so large that outputs, or gradients, exceed float32; padding repeats one of a client's rows.
            large = np.where(rng.random(length) < 0.5, 10 ** rng.uniform(17, 26), 1.0).astype(np.float32)
            features = rng.standard_normal((length, 3), np.float32) * large[:, None]
            rows.append((features, rng.standard_normal(length, np.float32) * large))
        loop, batched = (
            train(model, hypotheses, np.zeros(4, np.int64), cohort_of(*rows), update, generators(4), engine)
            for engine in ("loop", "batched")
        )
        finite = [np.isfinite(flatten(trained)).all(axis=1).tolist() for trained in (loop, batched)]
        assert finite[0] == finite[1], seed
        unharmed += finite[0]
    assert 0.5 < np.mean(unharmed) < 0.98


# --- against plain PyTorch


class Viewing(nn.Module):
    """A network written as in many a tutorial: it asks for a view of its convolution in the usual order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(32, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.conv(images).relu().view(len(images), -1))
        return logits


VIEWING = model_of("viewing", Viewing, LOSSES["cross-entropy"], METRICS["accuracy"])
NETWORKS = [models.load("linear", "mse"), models.load("mlp", "mse"), TINY_CNN, VIEWING]


@all_engines
@pytest.mark.parametrize("batch_size", [0, 1, 3])
@pytest.mark.parametrize("model", NETWORKS, ids=lambda m: m.name)
def test_two_epochs_are_those_of_plain_pytorch(engine: str, batch_size: int, model: Model) -> None:
    rows = draw_client(model, 7, np.random.default_rng(0))
    update = LocalUpdate(2, 0.1, batch_size)
    hypotheses = draw_hypotheses(model, 1)
    trained = train(model, hypotheses, np.array([0]), cohort_of(rows), update, [InOrder()], engine)
    expected = sgd(model, {name: value[0] for name, value in hypotheses.items()}, rows, update)
    assert_close(trained, {name: value[None] for name, value in expected.items()})
    assert any((trained[name] != hypotheses[name]).any() for name in trained), "something was learnt"


# --- minibatches


@all_engines
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
    kind = Loop if engine == "loop" else Batched
    original = kind.descend

    def spy(self: Any, start: Any, part: Cohort, *rest: Any) -> Any:
        parts.append(len(part))
        return original(self, start, part, *rest)

    monkeypatch.setattr(kind, "descend", spy)
    monkeypatch.setattr(umbel.client.learner, "CPU_CHUNK_BYTES", chunk_bytes)
    assert_close(train(model, hypotheses, chosen, cohort, update, generators(5), engine), whole)
    assert (len(parts), sum(parts)) == (chunks, 5)
    np.testing.assert_allclose(score(model, hypotheses, cohort, engine), whole_scores, **CLOSE)


@all_engines
@pytest.mark.parametrize(("bound", "used"), [(0, 2), (1 << 22, 1)])
def test_a_small_chunk_is_computed_by_one_thread_and_all_are_there_afterwards(
    engine: str, bound: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return squared_error(outputs, targets)

    model = model_of("seen", lambda: nn.Linear(2, 1), replace(LOSSES["mse"], per_sample=loss), METRICS["rmse"])
    monkeypatch.setattr(umbel.client.learner, "ONE_THREAD_BYTES", bound)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(
            model, draw_hypotheses(model, 1), np.zeros(6, np.int64), SIX, LocalUpdate(1, 0.1, 0), generators(6), engine
        )
        assert {*seen} == {used}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# --- memory that is not enough


class Short:
    """A loss that runs out of memory in the first tries, each time after so many that went well."""

    def __init__(self, tries: int, after: int) -> None:
        self.tries, self.after, self.computed = tries, after, 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.computed += 1
        if self.tries and self.computed > self.after:
            self.tries, self.computed = self.tries - 1, 0
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return squared_error(outputs, targets)


def short(loss: Short) -> Model:
    """Return a linear model of a loss that runs out of memory."""
    return model_of("short", lambda: nn.Linear(2, 1), replace(LOSSES["mse"], per_sample=loss), METRICS["rmse"])


LINEAR = models.load("linear")
SIX = cohort_of(*[draw_client(LINEAR, rows, np.random.default_rng(rows)) for rows in (4, 7, 3, 5, 1, 6)])


@all_engines
@pytest.mark.parametrize("tries", [1, 2])
def test_a_chunk_for_which_memory_is_not_enough_is_computed_again_in_halves(engine: str, tries: int) -> None:
    """And the shuffles of its clients are those that they would have been."""

    def done(tries: int, what: str) -> Any:
        # Of training, in the second epoch; a loop has been through the rows of its first clients by then.
        loss = Short(tries, 11 if what == "train" else 0)
        model = short(loss)
        learner, start = learner_of(engine, model), draw_hypotheses(model, 2)
        if what == "train":
            update, shuffles = LocalUpdate(4, 0.1, 2), streams(0, "shuffle", 1, range(6))
            found: Any = ByArrays(learner).train(start, np.arange(6) % 2, SIX, update, shuffles)[0]
        else:
            found = {what: np.asarray(getattr(ByArrays(learner), what)(start, SIX))}
        assert loss.tries == 0, "memory ran out as often as it should"
        return found

    for what in ("train", "score", "choose"):
        assert_close(done(tries, what), done(0, what))


def test_what_was_too_much_once_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []
    learner, cohort = Learner(LINEAR, CPU, "batched"), cohort_of(*[TWO_ROWS] * 8)

    def three_at_most(start: Any, part: Cohort, *_: Any) -> Any:
        parts.append(len(part))
        if len(part) > 3:
            raise torch.OutOfMemoryError
        return start

    monkeypatch.setattr(learner._batched, "descend", three_at_most)
    for _ in range(2):
        ByArrays(learner).train(linear([1, 2]), np.zeros(8, np.int64), cohort, LocalUpdate(1, 0.1, 0), generators(8))
    assert parts == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]


@all_engines
def test_a_client_for_whom_alone_memory_is_not_enough_is_told(engine: str) -> None:
    model, update, chosen = short(Short(99, 0)), LocalUpdate(1, 0.1, 0), np.zeros(6, np.int64)
    learner, start = learner_of(engine, model), draw_hypotheses(model, 2)
    for compute in (
        lambda: ByArrays(learner).score(start, SIX),
        lambda: ByArrays(learner).choose(start, SIX),
        lambda: ByArrays(learner).train(start, chosen, SIX, update, generators(6)),
    ):
        with raises(ModelError, "model.memory", "'short'", "4 rows", "2 GiB", "batch-size", 'device = "cpu"'):
            compute()


# --- which learner


@pytest.mark.parametrize(
    ("name", "there", "picked"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_the_gpu_is_taken_if_there_is_one(name: str, there: bool, picked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    # Without frozen parameters nothing is sent to the device before there are rows.
    assert learner_for(LINEAR, name).device == torch.device(picked)
    if not there:
        with raises(ConfigError, "config.no-device", '"cuda"', "PyTorch", '"auto"'):
            learner_for(LINEAR, "cuda")


@pytest.mark.parametrize(
    ("model", "device", "kind"),
    [
        (LINEAR, "cpu", "batched"),
        (models.load("mlp"), "cuda", "batched"),
        (models.load("cnn"), "cpu", "loop"),
        (models.load("cnn"), "cuda", "batched"),
        (TINY_CNN, "cpu", "loop"),
    ],
)
def test_only_convolutions_on_the_cpu_are_computed_one_by_one(
    model: Model, device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    assert learner_for(model, device).engine == kind
    assert learner_for(model, "auto", "auto").engine == kind
    assert learner_for(model, "cpu", "loop").engine == "loop"
    assert learner_for(model, "cpu", "batched").engine == "batched"
    assert learner_for(LINEAR, "cpu") is learner_for(LINEAR, "cpu", "batched"), "one for each model"


def test_a_parameter_that_some_rows_do_not_use_stays_where_it_is() -> None:
    """As an expert that no row is sent to: a site would otherwise send noise alone, and a simulation would end."""

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all, self.some = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, rows: Tensor) -> Tensor:
            outputs: Tensor = self.all(rows)
            return outputs + self.some(rows) if rows.max() > 1 else outputs

    model = Model("own", Expert, LOSSES["mse"], METRICS["rmse"])
    learner, hypotheses = learner_for(model, "cpu", "loop"), draw_hypotheses(model, 1)
    cohort = cohort_of((np.full((2, 2), 0.5, np.float32), np.zeros(2, np.float32)))
    trained, _ = ByArrays(learner).train(
        hypotheses, np.zeros(1, np.int64), cohort, LocalUpdate(1, 0.1, 0), generators(1)
    )
    moved = {name for name, value in trained.items() if (value != hypotheses[name]).any()}
    assert moved == {"all.weight", "all.bias"}
