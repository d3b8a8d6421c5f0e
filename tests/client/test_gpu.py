"""On a GPU clients are scored and trained as on the CPU, and no tensor is left behind.

No GPU is needed: see `tests.helpers.fake_gpu`, where a tensor in the wrong place is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import umbel.client.learner
from tests.helpers.cohorts import CLOSE, CPU, ByArrays, Kind, assert_close
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


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have newcomers fit what is local in two epochs: where tensors are does not hang on how many there are."""
    monkeypatch.setattr(umbel.client.learner, "_NEWCOMER_EPOCHS", 2)


def classifier(network: Callable[[], nn.Module]) -> Model:
    return model_of("classes", network, LOSSES["cross-entropy"], METRICS["accuracy"])


OWN_LOSS = Model("own-loss", lambda: nn.Linear(2, 1), models.load_loss("torch.nn.functional:mse_loss"),
                 models.load_metric("torch.nn.functional:l1_loss"))  # fmt: skip
KINDS = {
    "mlp": Kind(models.load("mlp"), (3,)),
    "softmax": Kind(models.load("softmax features=4 classes=3", "cross-entropy"), (4,), 3),
    "convolutions": Kind(classifier(tiny_cnn), (1, 6, 6), 3),
    "layer normalisation": Kind(classifier(layered_mlp), (6,), 3),
    "batch normalisation and dropout": Kind(classifier(normalised_mlp), (6,), 3),
    "attention over tokens": Kind(classifier(TiedWriter), (6,), "next", tokens=11),
    "factors": Kind(models.load("factors items=7 size=3"), (), "items"),
    "factors with biases": Kind(models.load("biased-factors items=7 size=3"), (), "items"),
    "a head of one's own": Kind(headed(), (2,)),
    "a frozen body": Kind(headed(frozen="body.weight", local=""), (2,)),
    "a loss of one's own": Kind(OWN_LOSS, (2,)),
}
"""Models of each kind there is."""


def dataset_of(kind: Kind, lengths: Sequence[int] = LENGTHS) -> Dataset:
    """Draw clients of so many rows."""
    generator = np.random.default_rng(0)
    clients = [kind.client(generator, rows) for rows in lengths]
    features, targets = (np.concatenate([client[part] for client in clients]) for part in (0, 1))
    features, targets = (part.astype(np.float32) if part.dtype.kind == "f" else part for part in (features, targets))
    return Dataset(manifest(len(lengths), tokens=kind.tokens), features, targets, offsets_of(lengths))


EPOCH = LocalUpdate(1, 0.1, 2)
# Clipped, and held near its start.
ADAM = LocalUpdate(1, 0.1, 0, 2, descent=OPTIMIZERS["adam"](clip_gradient=1.0, proximal=0.1))


def everything(learner: Learner, dataset: Dataset, update: LocalUpdate) -> dict[str, Any]:
    """Return what a learner makes of all clients."""
    model, clients = learner.model, range(len(dataset.offsets) - 1)
    cohort = Cohort.gather(dataset, clients, learner.device)
    hypotheses = draw_hypotheses(model, 2)
    local = model.initial_local(streams(0, "local", 0, clients))
    computed = ByArrays(learner)
    chosen, scores = computed.choose(hypotheses, cohort, local), computed.score(hypotheses, cohort, local)
    shared, own = computed.train(
        hypotheses, np.arange(len(cohort)) % 2, cohort, update, streams(0, "shuffle", 1, clients), local
    )
    newcomers = computed.score_newcomers(hypotheses, cohort, local, 0.1) if local else ()
    one = {name: value[0] for name, value in (shared | own).items()}
    outputs = computed.outputs(one, torch.from_numpy(np.asarray(dataset.features, np.float32)))
    return {"choice": [chosen], "scores": scores, "shared": shared, "local": own, "newcomers": newcomers,
            "outputs": [outputs.cpu()]}  # fmt: skip


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for what, values in theirs.items():
        found, expected = ((list(one.values()) if isinstance(one, dict) else one) for one in (ours[what], values))
        for mine, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, other, **CLOSE, err_msg=what)


# --- where tensors are


@pytest.mark.parametrize(
    ("name", "engine", "update"),
    [
        pytest.param(name, engine, update, id=f"{name}-{engine}-{optimizer}")
        for name in KINDS
        for engine in ("loop", "batched")[: 1 if name.startswith("batch norm") else 2]
        for optimizer, update in {"sgd": EPOCH, "adam": ADAM}.items()
        if update is EPOCH or name == "factors with biases"
    ],
)
def test_the_numbers_are_those_of_the_cpu(name: str, engine: str, update: LocalUpdate) -> None:
    model, dataset = KINDS[name].model, dataset_of(KINDS[name])
    expected = everything(Learner(model, CPU, engine), dataset, update)
    with fake_gpu():
        found = everything(Learner(model, CUDA, engine), dataset, update)
    assert_same(found, expected)


# --- memory

MANY = models.load("linear inputs=200 outputs=1")
ROWS = Dataset(manifest(12), np.ones((12, 200), np.float32), np.ones(12, np.float32), offsets_of([1] * 12))


@pytest.mark.parametrize(
    ("kind", "what"),
    [("batched", "choose"), ("batched", "score"), ("batched", "train"), ("loop", "train")],
)
def test_a_chunk_that_does_not_fit_is_halved(kind: str, what: str) -> None:
    """And all that the first try held is let go before the next."""
    hypotheses, update = draw_hypotheses(MANY, 2), LocalUpdate(1, 0.1, 0)

    def done(device: torch.device) -> list[Any]:
        learner = ByArrays(Learner(MANY, device, kind))
        cohort = Cohort.gather(ROWS, range(12), device)
        if what == "train":
            generators = streams(0, "shuffle", 1, range(12))
            return [learner.train(hypotheses, np.arange(12) % 2, cohort, update, generators)[0]["1.weight"]]
        return [*learner.score(hypotheses, cohort)] if what == "score" else [learner.choose(hypotheses, cohort)]

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
    learner = Learner(MANY, CUDA, "batched")
    with fake_gpu(said_free=1 << 30):
        assert learner._chunk_bytes() == 1 << 30
    with fake_gpu(said_free=(1 << 29) - 1):
        assert learner._chunk_bytes() == 1 << 28


# --- the trial, runs, and what comes after


@pytest.mark.parametrize("name", [*KINDS][::2])
def test_a_trial_step_picks_the_learner_as_on_the_cpu(name: str) -> None:
    """But for convolutions, which a GPU computes in batches."""
    model, dataset = KINDS[name].model, dataset_of(KINDS[name])
    picked = try_out(model, dataset, "cpu").engine
    with fake_gpu():
        found = try_out(model, dataset, "auto")
    assert found.device == CUDA
    assert found.engine == ("batched" if name == "convolutions" else picked)


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
    model, update, clients = KINDS["mlp"].model, LocalUpdate(1, 0.1, 2), range(len(LENGTHS))
    hypotheses = draw_hypotheses(model, 3)

    def own(device: torch.device) -> Any:
        cohort = Cohort.gather(dataset_of(KINDS["mlp"]), clients, device)
        learner = Learner(model, device, "batched")
        draws = partial(streams, 0, "shuffle", 0, clients)
        return method(how)(Task(learner, hypotheses, cohort, update, draws)).arrays(0)

    expected = own(CPU)
    with fake_gpu():
        assert_close(own(CUDA), expected)


def test_predictions_are_those_of_the_cpu() -> None:
    model, dataset = KINDS["mlp"].model, dataset_of(KINDS["mlp"])
    learnt = Learnt(model, draw_hypotheses(model, 2), RunConfig())
    expected = [*predictions(learnt, dataset, [0, 2])]
    with fake_gpu():
        found = [*predictions(learnt, dataset, [0, 2])]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.hypothesis == theirs.hypothesis
        np.testing.assert_allclose(ours.outputs, theirs.outputs, **CLOSE)
