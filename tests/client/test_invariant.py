"""A site's client has, bit for bit, the numbers that it has alone, whoever else is asked with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.client.test_learner import TABLE
from tests.helpers.cohorts import CPU, ByArrays, Kind, cohort_of
from tests.helpers.datasets import manifest, save_plane
from tests.helpers.examples import examples
from tests.helpers.models import TINY_CNN, draw_hypotheses, own
from tests.helpers.strangers import Recurrent, Words
from umbel import models
from umbel.client import batched, trial
from umbel.client import learner as module
from umbel.client.batched import SLOTS
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import LOOP, SITE, Learner, Turns, learner_for
from umbel.client.trial import try_out
from umbel.data import open_dataset, write_dataset
from umbel.models import LOSSES, Model
from umbel.models.optimizers import SGD, Adam, Momentum
from umbel.protocol.arrays import Arrays

# --- which models


DENSE = ["linear", "mlp", "linear inputs=9 outputs=1", "mlp inputs=5 hidden=7,4 outputs=3"]
TOGETHER = [
    *(models.load(name, loss) for name in DENSE for loss in ("mse", "rmse")),
    *(models.load("linear inputs=4 outputs=1", loss) for loss in ("log", "hinge", "margin")),
    models.load("softmax features=20 classes=10"),
]
ONE_BY_ONE = [
    *map(models.load, sorted(models.MODELS.keys() - {"linear", "mlp"})),
    models.load("factors items=9 size=2"),
    models.load("biased-factors items=9 size=2"),
    own(partial(Recurrent, "LSTM")),
    own(Words),
    models.load("mlp", "torch.nn.functional:mse_loss"),
    replace(own(nn.Flatten), loss=replace(LOSSES["mse"], per_sample=lambda outputs, _: outputs[..., 0])),
    replace(models.load("mlp"), frozen=("0.*",)),
]


@pytest.mark.parametrize(
    ("model", "engine"), [*((one, SITE) for one in TOGETHER), *((one, LOOP) for one in ONE_BY_ONE)]
)
def test_only_dense_networks_with_umbels_losses_are_computed_together(model: Model, engine: str) -> None:
    assert learner_for(model, "cpu", SITE).engine == engine


def test_rows_that_are_no_vectors_are_computed_one_by_one(tmp_path: Path) -> None:
    """A dense layer takes them, but a chunk has no place for another axis."""
    model = own(lambda: nn.Linear(3, 3), "mse")
    for shape, kind in (((3,), "site"), ((2, 3), "loop")):
        rows = np.zeros((2, *shape), np.float32)
        path = tmp_path / str(len(shape))
        write_dataset(path, manifest(1), rows, rows, np.array([0, 2]))
        assert try_out(model, open_dataset(path), "cpu", SITE).engine == kind


@contextmanager
def mixing(others: slice) -> Iterator[None]:
    """Compute the steps of some clients with a little of the gradients of all."""

    def mixed(value: Tensor, gradient: Tensor, step_size: float) -> Tensor:
        gradient = gradient.clone()
        gradient[others] += 1e-4 * gradient.sum(0)
        return value - gradient * step_size

    caches = (module._made, trial._tried)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "_rounded_twice", mixed)
        for cache in caches:
            cache.cache_clear()
        try:
            yield
        finally:
            for cache in caches:
                cache.cache_clear()


def test_a_site_looks_whether_others_change_a_clients_bits(tmp_path: Path) -> None:
    """PyTorch may compute otherwise on another processor; then the site computes one by one."""
    with mixing(slice(None)):
        dataset = open_dataset(save_plane(tmp_path / "plane", 2))
        assert try_out(models.load("linear"), dataset, "cpu", SITE).engine == "loop"


# --- whoever else is there


KINDS = {
    name: TABLE[name].kind
    for name in (
        "all rows at once", "one row at a time", "units", "log loss", "hinge loss", "softmax regression",
        "activations, one used twice", "a head of one's own", "a convolution", "a recurrent layer",
    )
}  # fmt: skip
ALONE = {"a convolution", "a recurrent layer"}
"""Kinds that the loop computes."""
OPTIMIZERS = (SGD(), Momentum(clip_gradient=0.5, proximal=0.1), Adam())


@dataclass(frozen=True)
class Crowd:
    """Clients of a kind, by number, and what they are asked."""

    kind: Kind
    seed: int
    k: int
    lengths: tuple[int, ...]
    update: LocalUpdate

    @property
    def hypotheses(self) -> Arrays:
        return draw_hypotheses(self.kind.model, self.k, self.seed)

    def results(self, learner: Learner, clients: list[int]) -> list[tuple[bytes, ...]]:
        found = {}
        for some in Turns(learner, [self.lengths[c] for c in clients]).batches:
            asked = np.array(clients)[some].tolist()
            cohort, local = self.cohort(asked), self.local(asked)
            losses, metrics = ByArrays(learner).score(self.hypotheses, cohort, local)
            chosen = ByArrays(learner).choose(self.hypotheses, cohort, local)
            shuffles = [np.random.default_rng([self.seed, c]) for c in asked]
            shared, own = ByArrays(learner).train(self.hypotheses, chosen, cohort, self.update, shuffles, local)
            for i, c in enumerate(asked):
                values = losses[:, i], metrics[:, i], chosen[i], *(one[i] for one in (shared | own).values())
                found[c] = tuple(np.asarray(value).tobytes() for value in values)
        return [found[c] for c in clients]

    def cohort(self, clients: list[int]) -> Cohort:
        rows = []
        for c in clients:
            generator = np.random.default_rng([self.seed, c])
            features, targets = self.kind.client(generator, self.lengths[c])
            rows.append((features * np.exp(generator.standard_normal(features.shape)), targets))
        return cohort_of(*rows)

    def local(self, clients: list[int]) -> Arrays:
        return self.kind.model.initial_local([np.random.default_rng([self.seed, c, 1]) for c in clients])


@st.composite
def crowds(draw: st.DrawFn, kind: str) -> tuple[Crowd, list[list[int]]]:
    rows, most = (4, 4) if kind in ALONE else (40, 2 * SLOTS)
    lengths = draw(st.lists(st.integers(1, rows), min_size=1, max_size=most))
    epochs, size, steps = draw(st.integers(0, 2)), draw(st.integers(0, 17)), draw(st.integers(0, 2))
    update = LocalUpdate(epochs, 0.3, size, steps, descent=draw(st.sampled_from(OPTIMIZERS)))
    crowd = Crowd(KINDS[kind], draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 3)), tuple(lengths), update)
    everyone = st.permutations(range(len(lengths)))
    asked = [draw(everyone)[: draw(st.integers(1, len(lengths)))] for _ in range(2)]
    return crowd, asked


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(8))
@given(st.data())
def test_a_client_has_the_same_bits_in_any_company(kind: str, data: st.DataObject) -> None:
    crowd, asked = data.draw(crowds(kind))
    learner = learner_for(crowd.kind.model, "cpu", SITE)
    expected = crowd.results(learner, list(range(len(crowd.lengths))))
    for clients in asked:
        assert crowd.results(learner, clients) == [expected[c] for c in clients]
    alone = asked[0][0]
    assert crowd.results(learner, [alone]) == [expected[alone]]


MLP = Crowd(KINDS["one row at a time"], 7, 2, tuple(1 + c % 8 for c in range(SLOTS)), LocalUpdate(2, 0.3, 3))


def test_every_slot_gives_the_same_bits() -> None:
    learner, one = learner_for(MLP.kind.model, "cpu", SITE), 5
    (expected,) = MLP.results(learner, [one])
    others = [c for c in range(SLOTS) if c != one]
    for slot in range(SLOTS):
        clients = [*others[:slot], one, *others[slot:]]
        assert MLP.results(learner, clients)[slot] == expected


@pytest.mark.parametrize("kind", ["one row at a time", "softmax regression", "activations, one used twice"])
def test_threads_change_no_bit(kind: str) -> None:
    crowd, threads = replace(MLP, kind=KINDS[kind]), torch.get_num_threads()
    learner, clients = learner_for(crowd.kind.model, "cpu", SITE), list(range(SLOTS))
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(crowd.results(learner, clients))
    finally:
        torch.set_num_threads(threads)
    assert found[1:] == found[:1] * 2


def test_one_call_for_many_clients_gives_each_its_bits() -> None:
    """Where they have different widths, a learner cuts them itself."""
    crowd = replace(MLP, lengths=(3, 9, 30, 4, 4, 17, 2000, 3, 5000), update=LocalUpdate(1, 0.3, 0))
    learner, clients = learner_for(crowd.kind.model, "cpu", SITE), list(range(9))
    losses, metrics = ByArrays(learner).score(crowd.hypotheses, crowd.cohort(clients))
    for c, (loss, metric, *_) in enumerate(crowd.results(learner, clients)):
        assert (losses[:, c].tobytes(), metrics[:, c].tobytes()) == (loss, metric)


# --- which clients


def test_clients_of_similar_numbers_of_rows_are_computed_together() -> None:
    """Rows are padded to 8, 16, 32 and so on; clients beyond 2,048 rows, with six products a row, are alone."""
    learner = Learner(models.load("mlp"), CPU, "site")
    assert Turns(learner, [1, 9, 8, 16, 2049, 2048, 17]).batches == [
        [0, 2], [1, 3], [5], [6], slice(4, 5)
    ]  # fmt: skip
    assert [len(batch) for batch in Turns(learner, [3] * 150).batches] == [64, 64, 22]


def test_networks_whose_products_fill_a_chunk_are_computed_one_by_one() -> None:
    """With 784 x 10 products a row, eight rows of 64 clients take 16 MB."""
    learner = Learner(models.load("softmax features=784 classes=10"), CPU, "site")
    assert Turns(learner, [1, 2]).batches == [slice(0, 1), slice(1, 2)]
    assert Turns(Learner(TINY_CNN, CPU), [1, 2]).batches == [slice(0, 1), slice(1, 2)]
