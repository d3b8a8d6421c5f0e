"""On a GPU clients are scored and trained as on the CPU, and no tensor is left behind.

No GPU is needed: see `tests.helpers.fake_gpu`, where a tensor in the wrong place is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import umbel.client.learner
from tests.helpers.cohorts import CLOSE, CPU, ByArrays, assert_close
from tests.helpers.datasets import manifest
from tests.helpers.fake_gpu import fake_gpu
from tests.helpers.models import draw_hypotheses, headed, model_of, tiny_cnn
from tests.helpers.strangers import TiedWriter, layered_mlp, normalised_mlp
from umbel import models
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner
from umbel.client.personal import Task, method
from umbel.client.prediction import Learnt, predictions
from umbel.client.trial import try_out
from umbel.data import Dataset, offsets_of
from umbel.models import LOSSES, METRICS, Model
from umbel.models.optimizers import OPTIMIZERS
from umbel.privacy.mechanisms.randomness import streams
from umbel.privacy.site.policy import Personal
from umbel.protocol.run_config import RunConfig
from umbel.simulation.in_process import play, run_config

pytestmark = pytest.mark.rest

CUDA = torch.device("cuda")
LENGTHS = (4, 1, 5)
BOTH = ("loop", "batched")


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have newcomers fit what is local in two epochs: where tensors are does not hang on how many there are."""
    monkeypatch.setattr(umbel.client.learner, "_NEWCOMER_EPOCHS", 2)


class Case(NamedTuple):
    """A model, rows for it, and the learners that compute it."""

    model: Model
    features: NDArray[Any]
    targets: NDArray[Any]
    learners: tuple[str, ...] = BOTH
    lengths: tuple[int, ...] = LENGTHS

    @property
    def dataset(self) -> Dataset:
        described = manifest(len(self.lengths), tokens=11 if self.features.dtype == np.int64 else 0)
        return Dataset(described, self.features, self.targets, offsets_of(self.lengths))


def cases() -> Iterator[Case]:
    """Yield models of each kind there is."""
    rng, count = np.random.default_rng(0), sum(LENGTHS)

    def rows(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal((count, *shape), np.float32)

    def classifier(name: str, network: Any) -> Model:
        return model_of(name, network, LOSSES["cross-entropy"], METRICS["accuracy"])

    numbers, classes, words = rows(), rng.integers(0, 3, count), rng.integers(0, 11, (count, 6))
    likes = rng.choice([-1.0, 1.0], count).astype(np.float32)
    items = np.concatenate([rng.permutation(7)[:own] for own in LENGTHS]).astype(np.float32)[:, None]
    own_loss = Model("own-loss", lambda: nn.Linear(2, 1), models.load_loss("torch.nn.functional:mse_loss"),
                     models.load_metric("torch.nn.functional:l1_loss"))  # fmt: skip
    yield Case(models.load("mlp"), rows(3), numbers)
    yield Case(models.load("softmax features=4 classes=3", "cross-entropy"), rows(4), classes)
    yield Case(classifier("convolutions", tiny_cnn), rows(1, 6, 6), classes)
    yield Case(classifier("layer-normalisation", layered_mlp), rows(6), classes)
    yield Case(classifier("batch-normalisation-and-dropout", normalised_mlp), rows(6), classes, ("loop",))
    yield Case(classifier("attention-over-tokens", TiedWriter), words, np.roll(words, -1, 1))
    yield Case(models.load("factors items=7 size=3"), items, likes)
    yield Case(models.load("biased-factors items=7 size=3"), items, likes)
    yield Case(headed(), rows(2), numbers)
    yield Case(headed(frozen="body.weight", local=""), rows(2), numbers)
    yield Case(own_loss, rows(2), numbers)


CASES = list(cases())
EPOCH = LocalUpdate(1, 0.1, 2)
# Clipped, and held near its start.
ADAM = LocalUpdate(1, 0.1, 0, 2, descent=OPTIMIZERS["adam"](clip_gradient=1.0, proximal=0.1))


def everything(learner: Learner, dataset: Dataset, update: LocalUpdate) -> dict[str, Any]:
    """Return what a learner makes of all clients."""
    model, clients = learner.model, range(len(dataset.offsets) - 1)
    cohort = Cohort.gather(dataset, clients, learner.device)
    hypotheses = draw_hypotheses(model, 2)
    local = model.initial_local(streams(0, "local", 0, clients))
    chosen, scores = (
        ByArrays(learner).choose(hypotheses, cohort, local),
        ByArrays(learner).score(hypotheses, cohort, local),
    )
    shared, own = ByArrays(learner).train(
        hypotheses, np.arange(len(cohort)) % 2, cohort, update, streams(0, "shuffle", 1, clients), local
    )
    newcomers = ByArrays(learner).score_newcomers(hypotheses, cohort, local, 0.1) if local else ()
    one = {name: value[0] for name, value in (shared | own).items()}
    outputs = ByArrays(learner).outputs(one, torch.from_numpy(np.asarray(dataset.features, np.float32)))
    return {"choice": [chosen], "scores": scores, "shared": shared, "local": own, "newcomers": newcomers,
            "outputs": [outputs.cpu()]}  # fmt: skip


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for what, values in theirs.items():
        found, expected = ((list(one.values()) if isinstance(one, dict) else one) for one in (ours[what], values))
        for mine, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, other, **CLOSE, err_msg=what)


# --- where tensors are


@pytest.mark.parametrize(
    ("case", "kind", "update"),
    [
        pytest.param(case, kind, update, id=f"{case.model.name}-{kind}-{optimizer}")
        for case in CASES
        for kind in case.learners
        for optimizer, update in {"sgd": EPOCH, "adam": ADAM}.items()
        if update is EPOCH or case.model.name == "biased-factors items=7 size=3"
    ],
)
def test_the_numbers_are_those_of_the_cpu(case: Case, kind: str, update: LocalUpdate) -> None:
    expected = everything(Learner(case.model, CPU, kind), case.dataset, update)
    with fake_gpu():
        found = everything(Learner(case.model, CUDA, kind), case.dataset, update)
    assert_same(found, expected)


# --- memory

MANY = Case(
    models.load("linear inputs=200 outputs=1"),
    np.ones((12, 200), np.float32),
    np.ones(12, np.float32),
    lengths=(1,) * 12,
)


@pytest.mark.parametrize(
    ("kind", "what"),
    [("batched", "choose"), ("batched", "score"), ("batched", "train"), ("loop", "train")],
)
def test_a_chunk_that_does_not_fit_is_halved(kind: str, what: str) -> None:
    """And all that the first try held is let go before the next."""
    hypotheses, update = draw_hypotheses(MANY.model, 2), LocalUpdate(1, 0.1, 0)

    def done(device: torch.device) -> list[Any]:
        learner, cohort = Learner(MANY.model, device, kind), Cohort.gather(MANY.dataset, range(12), device)
        if what == "train":
            generators = streams(0, "shuffle", 1, range(12))
            return [ByArrays(learner).train(hypotheses, np.arange(12) % 2, cohort, update, generators)[0]["1.weight"]]
        return (
            [*ByArrays(learner).score(hypotheses, cohort)]
            if what == "score"
            else [ByArrays(learner).choose(hypotheses, cohort)]
        )

    expected = done(CPU)
    with fake_gpu() as gpu:
        done(CUDA)
    with fake_gpu(said_free=1) as least:  # one client after the other
        done(CUDA)
    assert least.peak < gpu.peak
    with fake_gpu(memory=(least.peak + gpu.peak) // 2) as short:
        for ours, theirs in zip(done(CUDA), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, **CLOSE)
    assert least.peak < short.peak < gpu.peak, "but not one by one"
    before = 4 * (12 * 200 + 2 * 201) + 4 * 12  # rows and two hypotheses; targets
    assert short.left
    assert {*short.left} == {before}


def test_what_a_gpu_says_is_free_bounds_a_chunk() -> None:
    """A quarter of all of it, or less in halves."""
    learner = Learner(MANY.model, CUDA, "batched")
    with fake_gpu(said_free=1 << 30):
        assert learner._chunk_bytes() == 1 << 30
    with fake_gpu(said_free=(1 << 29) - 1):
        assert learner._chunk_bytes() == 1 << 28


# --- the trial, runs, and what comes after


@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.model.name)
def test_a_trial_step_picks_the_learner_as_on_the_cpu(case: Case) -> None:
    """But for convolutions, which a GPU computes in batches."""
    picked = try_out(case.model, case.dataset, "cpu").engine
    with fake_gpu():
        found = try_out(case.model, case.dataset, "auto")
    assert found.device == CUDA
    assert found.engine == ("batched" if case.model.name == "convolutions" else picked)


def test_a_run_is_that_of_the_cpu() -> None:
    """Of a model with local parameters: the clients that report are newcomers."""
    asked = {"model": "tests.helpers.models:Headed", "local": "head.*", "loss": "mse", "rounds": 1, "restarts": 1}
    expected = play(run_config("synthetic", device="cpu", **asked))
    with fake_gpu():
        found = play(run_config("synthetic", device="cuda", **asked))
    for name, value in expected.state.hypotheses.items():
        np.testing.assert_allclose(found.state.hypotheses[name], value, **CLOSE)
    assert [entry.loss for entry in found.state.history] == pytest.approx(
        [entry.loss for entry in expected.state.history]
    )


@pytest.mark.parametrize("how", list(Personal))
def test_a_model_of_ones_own_is_that_of_the_cpu(how: Personal) -> None:
    case, update, clients = CASES[0], LocalUpdate(1, 0.1, 2), range(len(LENGTHS))
    hypotheses = draw_hypotheses(case.model, 3)

    def own(device: torch.device) -> Any:
        cohort = Cohort.gather(case.dataset, clients, device)
        learner = Learner(case.model, device, "batched")
        draws = partial(streams, 0, "shuffle", 0, clients)
        return method(how)(Task(learner, hypotheses, cohort, update, draws)).arrays(0)

    expected = own(CPU)
    with fake_gpu():
        assert_close(own(CUDA), expected)


def test_predictions_are_those_of_the_cpu() -> None:
    case = CASES[0]
    learnt = Learnt(case.model, draw_hypotheses(case.model, 2), RunConfig())
    expected = [*predictions(learnt, case.dataset, [0, 2])]
    with fake_gpu():
        found = [*predictions(learnt, case.dataset, [0, 2])]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.hypothesis == theirs.hypothesis
        np.testing.assert_allclose(ours.outputs, theirs.outputs, **CLOSE)
