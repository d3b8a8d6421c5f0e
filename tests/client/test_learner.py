"""Every learner equals plain PyTorch, whatever clients train and however.

Each row of a table is trained and scored by every engine, and client by client by the loop that any PyTorch tutorial
has. What else a learner promises follows: clients keep to themselves, and chunks, threads and memory change no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import umbel.client.learner
from tests.helpers.cohorts import (
    CLOSE,
    CPU,
    ENGINES,
    ByArrays,
    Kind,
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
    train,
)
from tests.helpers.errors import raises
from tests.helpers.examples import examples
from tests.helpers.models import TINY_CNN, Adapted, Convolving, draw_hypotheses, headed, own
from tests.helpers.noise import SILENT
from tests.helpers.strangers import Grouped, Recurrent, TiedAutoencoder, TiedWriter, Words, layered_mlp
from umbel import models
from umbel.client.batched import Batched
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import SITE, Learner, best_hypothesis, learner_for
from umbel.client.loop import Loop
from umbel.client.row_gradients import SLACK
from umbel.models import LOSSES, Model
from umbel.models.losses import squared_error
from umbel.models.optimizers import descent_of
from umbel.privacy.mechanisms.randomness import streams
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.errors import ConfigError, ModelError
from umbel.protocol.release import RowPrivacy

# --- plain PyTorch

CRITERIA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": lambda outputs, targets: F.mse_loss(outputs, targets) * outputs.shape[-1],
    "rmse": lambda outputs, targets: CRITERIA["mse"](outputs, targets).sqrt(),
    "cross-entropy": lambda outputs, targets: F.cross_entropy(outputs.flatten(0, -2), targets.flatten()),
    "log": F.soft_margin_loss,
    "hinge": lambda outputs, targets: (1 - outputs * targets).relu().mean(),
    "margin": lambda outputs, targets: -(outputs * targets).mean(),
}
REPORTED = CRITERIA | {"mse": CRITERIA["rmse"]}
MEASURED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rmse": CRITERIA["rmse"],
    "accuracy": lambda outputs, targets: (
        ((outputs.argmax(-1) == targets) if outputs.shape[-1] > 1 else outputs * targets > 0).float().mean()
    ),
}
Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Row:
    """What clients train, how, and PyTorch's optimizer for it; the engines that compute it."""

    kind: Kind
    update: LocalUpdate
    make: Make
    engines: tuple[str, ...] = (*ENGINES, SITE)


def tensors(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return a client's rows as tensors of 32 bits or tokens, with an axis for a single number to predict."""
    features, targets = (torch.from_numpy(np.asarray(part)) for part in rows)
    features, targets = (part.float() if part.is_floating_point() else part for part in (features, targets))
    return features, targets.unsqueeze(1) if targets.is_floating_point() and targets.ndim == 1 else targets


def network_of(model: Model, start: Arrays) -> nn.Module:
    network = model.network()
    begun = model.frozen_values | {name: torch.tensor(value) for name, value in start.items()}
    network.load_state_dict(begun, strict=False)  # of tied weights it has one
    return network


def minibatches(rows: int, update: LocalUpdate, shuffle: np.random.Generator) -> Iterator[list[int]]:
    """Epochs go through all rows in an order of their own; a step takes the first minibatch of one."""
    size = min(update.batch_size or rows, rows)
    for _ in range(update.local_steps or update.local_epochs):
        order = (shuffle.permutation(rows) if size < rows else np.arange(rows)).tolist()
        batches = [order[begin : begin + size] for begin in range(0, rows, size)]
        yield from batches[:1] if update.local_steps else batches


def plain_pytorch(
    model: Model, start: Arrays, rows: Rows, update: LocalUpdate, make: Make, shuffle: Any, only: str = ""
) -> Arrays:
    """Train one client; return all that it began with. Parameters whose names begin with `only` are trained.

    Items of factors move by the sum of their rows' gradients, and the user's vector by the mean (PAC paper, Protocol 1
    by steps, Protocol 3 by epochs). With biases the vector moves by the sum as well, and its prior counts once.
    """
    network, (features, targets) = network_of(model, start).train(), tensors(rows)
    trained = {name: value for name, value in network.named_parameters() if name in start and name.startswith(only)}
    anchor = {name: value.detach().clone() for name, value in trained.items()}
    criterion, optimizer, descent = CRITERIA[model.loss.name], make(trained.values()), update.descent
    batches = minibatches(len(targets), update, shuffle) if update.rows is None else [range(len(targets))]
    for batch in batches:
        if len(batch) == 1 and model.batch_dependent:
            continue  # a single row has no statistics
        optimizer.zero_grad()
        if update.rows is None:
            criterion(network(features[batch]), targets[batch]).backward()
        else:  # DP-SGD: the sum of rows' gradients, each clipped by itself, by a public number
            sums = [torch.zeros_like(value) for value in trained.values()]
            for row in batch:
                loss = criterion(network(features[row : row + 1]), targets[row : row + 1])
                slopes = torch.autograd.grad(loss, list(trained.values()), allow_unused=True, materialize_grads=True)
                norm = torch.cat([slope.flatten() for slope in slopes]).norm()
                short = (update.rows.clip_norm * (1 - SLACK) / norm).clamp(max=1.0)
                sums = [total + slope * short for total, slope in zip(sums, slopes, strict=True)]
            for value, total in zip(trained.values(), sums, strict=True):
                value.grad = total / update.rows.batch
        with torch.no_grad():
            for name, value in trained.items():
                if value.grad is None:
                    continue
                if name == "user" and model.decays:
                    value.grad += torch.from_numpy(model.decays[name]) * value / len(targets)
                value.grad *= len(batch) if name in model.summed else 1
                if name in model.shapes:
                    value.grad += descent.proximal * (value - anchor[name])
            if descent.clip_gradient:
                nn.utils.clip_grad_norm_(trained.values(), descent.clip_gradient)
            optimizer.step()
    state = network.state_dict()
    return {name: state[name].numpy() for name in start}


def plain_scores(model: Model, start: Arrays, rows: Rows) -> tuple[float, float]:
    """Return loss and metric of one network on a client's rows; a squared loss is reported as its root."""
    network, (features, targets) = network_of(model, start).eval(), tensors(rows)
    with torch.no_grad():
        outputs = network(features)
        loss, metric = REPORTED[model.loss.name](outputs, targets), MEASURED[model.metric.name](outputs, targets)
    return float(loss), float(metric)


# --- the table


class Viewing(nn.Module):
    """A network written as in many a tutorial: it asks for a view of its convolution in the usual order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(32, 3)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.conv(images).relu().view(len(images), -1))
        return logits


class Expert(nn.Module):
    """Some rows do not use a part of it. It stays: a site would send noise alone, and a simulation would end."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.all(rows)
        return outputs + self.some(rows) if rows.max() > 1e6 else outputs


class Doubling(nn.Sequential):
    """Looks like a chain of dense layers, and is none."""

    def forward(self, rows: Tensor) -> Tensor:
        return 2 * super().forward(rows)


def hooked() -> nn.Module:
    layer = nn.Linear(3, 1)
    layer.register_forward_hook(lambda _module, _inputs, outputs: 2 * outputs)
    return layer


def activated() -> nn.Module:
    twice = nn.Tanh()
    inner = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Sigmoid())
    return nn.Sequential(nn.Linear(3, 5), twice, inner, nn.Identity(), nn.Linear(5, 5), twice, nn.Linear(5, 4))


def row(
    model: Model,
    inputs: tuple[int, ...],
    targets: int | str = "numbers",
    optimizer: str = "sgd",
    make: Make = lambda trained: torch.optim.SGD(trained, 0.1),
    engines: tuple[str, ...] = (*ENGINES, SITE),
    tokens: int = 0,
    **update: Any,
) -> Row:
    """Return a row of the table: two epochs of minibatches of three rows, unless it says otherwise."""
    update = {"local_epochs": 2, "batch_size": 3, "step_size": 0.1} | update
    return Row(
        Kind(model, inputs, targets, tokens), LocalUpdate(descent=descent_of(optimizer), **update), make, engines
    )


def momentum(trained: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained, 0.1, momentum=0.9)


def each_row(model: Model, inputs: tuple[int, ...], targets: int | str, clip_norm: float, **more: Any) -> Row:
    """A step on all rows, each clipped by itself, with next to no noise and a fine grid."""
    return row(model, inputs, targets, rows=RowPrivacy(clip_norm, 1e-6, 1.0, 2.0, 1), **more)


LINEAR, MLP = models.load("linear", "mse"), models.load("mlp", "mse")
FACTORS = "factors items=12 size=3"
ROWED = models.load("mlp inputs=5 hidden=4,3 outputs=2")
ALONE = ("loop", SITE)
TABLE: dict[str, Row] = {
    # networks and losses
    "all rows at once": row(LINEAR, (2,), batch_size=0),
    "one row at a time": row(MLP, (3,), batch_size=1),
    "no epoch": row(MLP, (3,), local_epochs=0),
    "steps": row(MLP, (3,), local_steps=3),
    "the root of a mean square": row(models.load("linear", "rmse"), (2,)),
    "units": row(models.load("mlp inputs=3 hidden=9 outputs=1 offset=1,2,3 scale=4,5,6"), (3,)),
    "log loss": row(models.load("linear inputs=4 outputs=1", "log"), (4,), "labels"),
    "hinge loss": row(models.load("mlp inputs=4 hidden=3 outputs=1", "hinge"), (4,), "labels"),
    "softmax regression": row(models.load("softmax features=20 classes=10"), (20,), 10),
    "activations, one used twice": row(own(activated), (3,), 4),
    "a class that looks like a chain": row(own(lambda: Doubling(nn.Linear(3, 1)), "mse"), (3,)),
    "a layer with a hook": row(own(hooked, "mse"), (3,)),
    "a weight that is computed": row(own(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 1)), "mse"), (3,)),
    "layer normalisation": row(own(layered_mlp), (6,), 3),
    "a part that no row uses": row(own(Expert, "mse"), (2,), engines=ALONE),
    "a convolution": row(TINY_CNN, (1, 6, 6), 3),
    "a view of a convolution": row(own(Viewing), (1, 6, 6), 3),
    "group normalisation": row(own(Grouped), (3, 6, 6), 3),
    "a recurrent layer": row(own(lambda: Recurrent("LSTM")), (5, 2), 3, engines=ALONE),
    # In batches PyTorch would train the vector of the padding as well, and a trial picks the loop.
    "tokens": row(own(lambda: Words(dropout=0.0)), (6,), 3, tokens=11, engines=ALONE),
    "attention, with tied weights": row(own(TiedWriter), (6,), "next", tokens=11),
    "rows for rows by tied weights": row(own(TiedAutoencoder, "mse"), (6,), "rows"),
    "batch normalisation": row(
        own(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), "mse"), (2,), engines=ALONE
    ),
    # frozen and local parameters
    "a head of one's own": row(headed(), (2,)),
    "a frozen bias beside it": row(headed("body.bias"), (2,)),
    "a frozen head": row(headed("head.*", ""), (2,)),
    "a frozen body, a bias of one's own": row(headed("body.*", "head.bias"), (2,)),
    "an adapter": row(own(Adapted), (8,), 3),
    **{f"{loss} factors by steps": row(models.load(FACTORS, loss), (), "items", local_steps=3)
       for loss in ("log", "hinge", "margin")},
    "factors by epochs": row(models.load(FACTORS), (), "items"),
    "factors with biases and priors": row(models.load(f"biased-{FACTORS}"), (), "items", step_size=0.02,
                                          make=lambda trained: torch.optim.SGD(trained, 0.02)),
    # optimizers, which count each client's own steps
    "weight decay": row(MLP, (3,), optimizer="sgd weight-decay=0.1",
                        make=lambda trained: torch.optim.SGD(trained, 0.1, weight_decay=0.1)),
    "Nesterov's momentum": row(MLP, (3,), optimizer="sgd momentum=0.5 nesterov=true",
                               make=lambda trained: torch.optim.SGD(trained, 0.1, momentum=0.5, nesterov=True)),
    "momentum": row(MLP, (3,), optimizer="momentum", make=momentum),
    "clipped and held": row(MLP, (3,), optimizer="sgd clip-gradient=0.3 proximal=0.5"),
    "momentum, clipped and held, a head of one's own": row(
        headed(), (2,), optimizer="momentum clip-gradient=0.3 proximal=0.5", make=momentum),
    "Adam": row(MLP, (3,), optimizer="adam", make=lambda trained: torch.optim.Adam(trained, 0.1)),
    "Adam, with options": row(MLP, (3,), optimizer="adam beta1=0.5 epsilon=0.01",
                              make=lambda trained: torch.optim.Adam(trained, 0.1, (0.5, 0.999), 0.01)),
    "AdamW, clipped and held": row(MLP, (3,), optimizer="adamw clip-gradient=0.3 proximal=0.5",
                                   make=lambda trained: torch.optim.AdamW(trained, 0.1)),
}  # fmt: skip
PROTECTED: dict[str, Row] = {
    "dense": each_row(ROWED, (5,), 2, 0.05),
    "dense, hardly clipped": each_row(ROWED, (5,), 2, 100.0),
    "with a head of one's own": each_row(headed(), (2,), "numbers", 0.5),
    "convolutions": each_row(own(Convolving), (1, 8, 8), 2, 0.05),
    "tokens": each_row(own(lambda: Words(dropout=0.0)), (6,), 3, 0.05, tokens=11),
    "group normalisation": each_row(own(Grouped), (3, 6, 6), 3, 100.0),
    "tied weights": each_row(own(TiedAutoencoder, "mse"), (6,), "rows", 0.5),
    "an adapter": each_row(own(Adapted), (8,), 3, 0.05),
    "with momentum": each_row(ROWED, (5,), 2, 0.5, optimizer="momentum proximal=0.1", make=momentum),
}  # fmt: skip


def check(
    one: Row, engine: str, lengths: list[int], update: LocalUpdate, seed: int = 0, device: torch.device = CPU
) -> None:
    """Check all that an engine makes of clients of so many rows, two hypotheses and what is each client's own."""
    model, count = one.kind.model, len(lengths)
    clients = [one.kind.client(np.random.default_rng([seed, c]), rows) for c, rows in enumerate(lengths)]
    learner = ByArrays(learner_of(engine, model) if device == CPU else Learner(model, device, engine))
    cohort = cohort_of(*clients)
    cohort = replace(cohort, features=cohort.features.to(device), targets=cohort.targets.to(device))
    hypotheses, local = draw_hypotheses(model, 2, seed), model.initial_local(generators(count, seed))
    begun = [
        [{name: value[j] for name, value in hypotheses.items()} | {name: value[c] for name, value in local.items()}
         for c in range(count)] for j in range(2)
    ]  # fmt: skip
    copies = {name: value.copy() for name, value in (hypotheses | local).items()}

    expected = np.array([[plain_scores(model, begun[j][c], clients[c]) for c in range(count)] for j in range(2)])
    found = learner.score(hypotheses, cohort, local)
    np.testing.assert_allclose(found, expected.transpose(2, 0, 1), rtol=1e-4, atol=1e-6)
    assert learner.choose(hypotheses, cohort, local).tolist() == found[0].argmin(0).tolist()

    chosen, ours, theirs = np.arange(1, count + 1) % 2, generators(count, seed), generators(count, seed)
    sources: Any = [SILENT] * count if update.rows else ours
    shared, kept = learner.train(hypotheses, chosen, cohort, update, sources, local)
    assert (list(shared), list(kept)) == (list(model.shapes), list(model.local_shapes))
    for c, j in enumerate(chosen):
        trained = plain_pytorch(model, begun[j][c], clients[c], update, one.make, theirs[c])
        for name, value in (shared | kept).items():
            np.testing.assert_allclose(value[c], trained[name], rtol=1e-4, atol=1e-5, err_msg=name)
            still = trained[name] == begun[j][c][name]
            np.testing.assert_array_equal(value[c][still], begun[j][c][name][still], "bit for bit")
    drawn = [[generator.bit_generator.state for generator in each] for each in (ours, theirs)]
    assert drawn[0] == drawn[1], "and only who shuffles draws"
    for name, value in (hypotheses | local).items():
        np.testing.assert_array_equal(value, copies[name], "what was handed over is left as it was")


@pytest.mark.parametrize(("name", "engine"), [(name, engine) for name, one in TABLE.items() for engine in one.engines])
def test_every_learner_equals_plain_pytorch(name: str, engine: str) -> None:
    """For clients of many rows, one of few, and one of a single row."""
    check(TABLE[name], engine, [7, 3, 1, 4], TABLE[name].update)


@pytest.mark.parametrize("engine", [*ENGINES, SITE])
@pytest.mark.parametrize("name", PROTECTED)
def test_the_sum_is_that_of_each_rows_gradient_clipped_by_itself(name: str, engine: str) -> None:
    """And a step is along that sum by a public number, where training has a guarantee for each row."""
    check(PROTECTED[name], engine, [7, 3, 1, 4], PROTECTED[name].update)


@settings(max_examples=examples(20))
@given(
    st.sampled_from(
        ["steps", "the root of a mean square", "a convolution", "factors by epochs", "a head of one's own"]
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.builds(LocalUpdate, st.integers(0, 3), st.just(0.1), st.integers(0, 10), st.integers(0, 3)),
    st.integers(0, 2**32 - 1),
)
def test_whatever_clients_are_asked(name: str, lengths: list[int], update: LocalUpdate, seed: int) -> None:
    for engine in TABLE[name].engines:
        check(TABLE[name], engine, lengths, update, seed)


# --- scores by hand


@all_engines
def test_scores_are_those_of_every_hypothesis_on_every_client(engine: str) -> None:
    # (1, 2) leaves the residuals -2, 2 to the first client and 0 to the second; (3, 1) leaves 0, 0 and 1.
    cohort = cohort_of(([[1, 0], [0, 2]], [3.0, 2.0]), ([[1, 1]], [3.0]))
    losses, metrics = score(models.load("linear"), linear([1, 2], [3, 1]), cohort, engine)
    assert losses.tolist() == metrics.tolist() == [[2, 0], [0, 1]], "the linear model's loss and metric are both RMSE"
    assert losses.dtype == np.float64
    # Odds of three to one, right three times of four, and even odds, for class 0. The logits of x are (w0 x, w1 x).
    logistic = own(lambda: nn.Linear(1, 2, bias=False))
    hypotheses = {"weight": np.array([[[np.log(3)], [0]], [[0], [0]]], np.float32)}
    losses, metrics = score(logistic, hypotheses, cohort_of(([[1], [-1], [1], [1]], [0, 1, 0, 1])), engine)
    np.testing.assert_allclose(losses, [[(3 * np.log(4 / 3) + np.log(4)) / 4], [np.log(2)]], rtol=1e-6)
    assert metrics.tolist() == [[0.75], [0.5]]


def test_the_lowest_loss_wins_ties_go_to_the_lowest_index_and_what_is_no_number_never_wins() -> None:
    losses = np.array([[3.0, 1, 2, np.inf], [1, 1, 2, np.inf], [2, 1, 1, np.inf]])
    assert best_hypothesis(losses).tolist() == [1, 0, 2, 0]
    losses = np.array([[np.nan, 7, np.nan, np.nan], [9, np.nan, np.inf, np.nan]])
    assert best_hypothesis(losses).tolist() == [1, 0, 0, 0]


# --- a client's rows are its own


@all_engines
@pytest.mark.parametrize("huge", [1e30, np.inf, np.nan])
@pytest.mark.parametrize("batch_size", [0, 2])
def test_a_client_never_sees_the_rows_of_another(engine: str, huge: float, batch_size: int) -> None:
    few: Rows = ([[0.1, 0.2, 0.3]], [0.5])
    many: Rows = (np.full((5, 3), huge), np.full(5, huge))
    hypotheses, update = draw_hypotheses(MLP, 2), LocalUpdate(2, 0.1, batch_size)
    alone = train(MLP, hypotheses, np.array([1]), cohort_of(few), update, generators(1), engine)
    together = train(MLP, hypotheses, np.array([0, 1, 0]), cohort_of(many, few, many), update, generators(3), engine)
    assert np.isfinite(alone["0.weight"]).all()
    assert_close({name: value[1:2] for name, value in together.items()}, alone)
    scores = np.stack(score(MLP, hypotheses, cohort_of(many, few, many), engine))
    np.testing.assert_allclose(scores[:, :, 1:2], score(MLP, hypotheses, cohort_of(few), engine), **CLOSE)


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
            for engine in ENGINES
        )
        finite = [np.isfinite(flatten(trained)).all(axis=1).tolist() for trained in (loop, batched)]
        assert finite[0] == finite[1], seed
        unharmed += finite[0]
    assert 0.5 < np.mean(unharmed) < 0.98


# --- chunks and threads

SIX = cohort_of(*[draw_client(LINEAR, rows, np.random.default_rng(rows)) for rows in (4, 7, 3, 5, 1, 6)])


@engines
@pytest.mark.parametrize(("chunk_bytes", "chunks"), [(1, 5), (900, 3)])
def test_chunks_change_no_number(engine: str, chunk_bytes: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    cohort = cohort_of(*[draw_client(MLP, rows, generator) for rows in (8, 1, 9, 3, 5)])
    hypotheses, chosen, update = draw_hypotheses(MLP, 2), np.array([0, 1, 1, 0, 1]), LocalUpdate(2, 0.1, 4)
    whole_scores = score(MLP, hypotheses, cohort, engine)
    whole = train(MLP, hypotheses, chosen, cohort, update, generators(5), engine)
    kind = Loop if engine == "loop" else Batched
    parts, original = list[int](), kind.descend

    def spy(self: Any, start: Any, part: Cohort, *rest: Any) -> Any:
        parts.append(len(part))
        return original(self, start, part, *rest)

    monkeypatch.setattr(kind, "descend", spy)
    monkeypatch.setattr(umbel.client.learner, "CPU_CHUNK_BYTES", chunk_bytes)
    assert_close(train(MLP, hypotheses, chosen, cohort, update, generators(5), engine), whole)
    assert (len(parts), sum(parts)) == (chunks, 5)
    np.testing.assert_allclose(score(MLP, hypotheses, cohort, engine), whole_scores, **CLOSE)


def with_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> Model:
    return replace(own(lambda: nn.Linear(2, 1), "mse"), loss=replace(LOSSES["mse"], per_sample=loss))


@all_engines
def test_a_small_chunk_takes_one_thread_and_all_are_there_afterwards(engine: str) -> None:
    seen: set[int] = set()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.add(torch.get_num_threads())
        return squared_error(outputs, targets)

    model, before = with_loss(loss), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(model, draw_hypotheses(model, 1), [0] * 6, SIX, LocalUpdate(1, 0.1, 0), generators(6), engine)
        assert (seen, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)


# --- memory that is not enough


class Short:
    """A loss that runs out of memory in the first tries, each time after so many that went well."""

    def __init__(self, tries: int, after: int) -> None:
        self.tries, self.after, self.computed = tries, after, 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.computed += 1
        if self.tries and self.computed > self.after:
            self.tries, self.computed = self.tries - 1, 0
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return squared_error(outputs, targets)


@all_engines
@pytest.mark.parametrize("what", ["train", "score", "choose"])
def test_a_chunk_for_which_memory_is_not_enough_is_computed_again_in_halves(engine: str, what: str) -> None:
    """And the shuffles of its clients are those that they would have been."""

    def done(tries: int) -> Any:
        # Of training, in the second epoch; a loop has been through the rows of its first clients by then.
        loss = Short(tries, 11 if what == "train" else 0)
        learner = ByArrays(learner_of(engine, with_loss(loss)))
        start = draw_hypotheses(with_loss(loss), 2)
        if what == "train":
            update, shuffles = LocalUpdate(4, 0.1, 2), streams(0, "shuffle", 1, range(6))
            found: Any = learner.train(start, np.arange(6) % 2, SIX, update, shuffles)[0]
        else:
            found = {what: np.asarray(getattr(learner, what)(start, SIX))}
        assert loss.tries == 0, "memory ran out as often as it should"
        return found

    for tries in (1, 2):
        assert_close(done(tries), done(0))


@all_engines
def test_a_client_for_whom_alone_memory_is_not_enough_is_told(engine: str) -> None:
    model, update, chosen = with_loss(Short(99, 0)), LocalUpdate(1, 0.1, 0), np.zeros(6, np.int64)
    learner, start = ByArrays(learner_of(engine, model)), draw_hypotheses(model, 2)
    for compute in (
        lambda: learner.score(start, SIX),
        lambda: learner.choose(start, SIX),
        lambda: learner.train(start, chosen, SIX, update, generators(6)),
    ):
        with raises(ModelError, "model.memory", "'own'", "4 rows", "2 GiB", "batch-size", 'device = "cpu"'):
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
        (MLP, "cuda", "batched"),
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
    assert [learner_for(model, "cpu", engine).engine for engine in ENGINES] == [*ENGINES]
    assert learner_for(LINEAR, "cpu") is learner_for(LINEAR, "cpu", "batched"), "one for each model"
