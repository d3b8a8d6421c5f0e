"""On a GPU clients are scored and trained as on the CPU, and no tensor is left behind.

No GPU is needed: see `tests.helpers.fake_gpu`, where a tensor in the wrong place is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import umbel.client.cohort
import umbel.client.learner
import umbel.privacy.channels.on_gpu
from benchmarks import steps, whole_rounds
from tests.client.test_invariant import mixing
from tests.client.test_learner import PROTECTED, TABLE, check
from tests.helpers.cohorts import CLOSE, CPU, ByArrays, Kind, assert_close
from tests.helpers.datasets import manifest
from tests.helpers.fake_gpu import fake_gpu
from tests.helpers.messages import task_of
from tests.helpers.models import draw_hypotheses, own
from tests.helpers.sites import simulated
from tests.helpers.strangers import normalised_mlp
from umbel import models
from umbel.client import batched
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import SITE, Learner
from umbel.client.loop import Loop
from umbel.client.personal import Task, method
from umbel.client.prediction import Learnt, predictions
from umbel.client.trial import try_out
from umbel.data import Dataset, offsets_of
from umbel.privacy.channels import Place
from umbel.privacy.channels.client import ClientSanitiser
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


@pytest.fixture
def released_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the GPU release small models too."""
    monkeypatch.setattr(umbel.privacy.channels.on_gpu, "_LEAST", 1)


MLP = Kind(models.load("mlp"), (3,))


def dataset_of(kind: Kind, lengths: Sequence[int] = LENGTHS) -> Dataset:
    generator = np.random.default_rng(0)
    clients = [kind.client(generator, rows) for rows in lengths]
    features, targets = (np.concatenate([client[part] for client in clients]) for part in (0, 1))
    features, targets = (part.astype(np.float32) if part.dtype.kind == "f" else part for part in (features, targets))
    return Dataset(manifest(len(lengths), tokens=kind.tokens), features, targets, offsets_of(lengths))


# --- where tensors are

ROWS = TABLE | {f"each row, {name}": one for name, one in PROTECTED.items()}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        (name, engine)
        for name, one in ROWS.items()
        for engine in one.engines
        if engine != SITE or batched.is_exact(one.kind.model)
    ],
)
def test_every_learner_equals_plain_pytorch_there_too(name: str, engine: str) -> None:
    with fake_gpu():
        check(ROWS[name], engine, [4, 1, 5], ROWS[name].update, device=CUDA)


def test_what_drops_out_and_what_newcomers_fit_is_that_of_the_cpu() -> None:
    model = own(normalised_mlp)
    kind, update, clients = Kind(model, (6,), 3), LocalUpdate(1, 0.1, 2), range(len(LENGTHS))
    hypotheses, local = draw_hypotheses(model, 2), model.initial_local(streams(0, "local", 0, clients))

    def found(device: torch.device) -> list[Any]:
        learner, cohort = ByArrays(Learner(model, device)), Cohort.gather(dataset_of(kind), clients, device)
        shuffles = streams(0, "shuffle", 1, clients)
        shared, own = learner.train(hypotheses, np.arange(3) % 2, cohort, update, shuffles, local)
        return [*(shared | own).values(), *learner.score_newcomers(hypotheses, cohort, local, 0.1)]

    expected = found(CPU)
    with fake_gpu():
        for ours, theirs in zip(found(CUDA), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, **CLOSE)


@pytest.mark.parametrize("others", [None, slice(0, 1), slice(1, None)], ids=["alone", "in all", "in those that follow"])
def test_a_site_computes_clients_together_unless_the_card_makes_one_hang_on_others(others: slice | None) -> None:
    """As in a card whose step adds a little of other clients' gradients to each, or to the last."""
    with fake_gpu(), mixing(others) if others else nullcontext():
        found = try_out(models.load("mlp inputs=3 hidden=4 outputs=1"), dataset_of(MLP), "cuda", SITE)
    assert found.engine == ("loop" if others else SITE)


# --- what the host gives and takes


@pytest.mark.parametrize("model", ["linear inputs=4 outputs=1", "lenet10"])
def test_a_chunk_of_any_steps_waits_twice_and_gets_four_copies(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows, its choices, its minibatches, and once a message the hypotheses; back come losses and results.

    Each wait is for all that the GPU was asked before. What was not computed cannot be asked for: a mask, a number.
    """
    kind = Kind(models.load(model), (28, 28), 10) if model == "lenet10" else Kind(models.load(model), (4,))
    data, hypotheses = dataset_of(kind, [4, 1, 5, 12]), draw_hypotheses(kind.model, 2)

    def counts(epochs: int) -> tuple[int, int]:
        with fake_gpu() as gpu:
            learner = Learner(kind.model, CUDA, "batched")
            starts, cohort = learner.tensors(hypotheses), Cohort.gather(data, range(4), CUDA)
            update, draws = LocalUpdate(epochs, 0.1, 2), streams(0, "shuffle", 1, range(4))
            learner.train(starts, learner.choose(starts, cohort), cohort, update, draws)
        return gpu.sent, gpu.fetched

    assert counts(1) == counts(20) == (4, 2)
    monkeypatch.setattr(umbel.client.cohort, "_AT_ONCE", 1)  # so that each minibatch goes by itself
    assert counts(20)[0] > 100


def test_a_client_of_the_loop_waits_once_too() -> None:
    data, hypotheses = dataset_of(MLP, [4, 1, 5]), draw_hypotheses(MLP.model, 2)
    with fake_gpu() as gpu:
        learner = Learner(MLP.model, CUDA, "loop")
        starts, cohort = learner.tensors(hypotheses), Cohort.gather(data, range(3), CUDA)
        chosen = learner.choose(starts, cohort)
        assert gpu.fetched == 1, "all losses together"
        learner.train(starts, chosen, cohort, LocalUpdate(20, 0.1, 2), streams(0, "shuffle", 1, range(3)))
    assert (gpu.sent, gpu.fetched) == (2 + 1 + 3, 2)


@pytest.mark.parametrize(
    ("device", "precision", "last"), [(CPU, "float32", True), (CUDA, "float32", False), (CUDA, "bf16", True)]
)
def test_kernels_lie_channels_last_where_that_is_faster(device: torch.device, precision: str, last: bool) -> None:
    cohort = Cohort.without_rows(1, (28, 28), CPU)
    arranged = Loop(models.load("cnn"), device, precision)._arrangement(cohort)(torch.zeros(8, 4, 3, 3))
    assert arranged.is_contiguous(memory_format=torch.channels_last) is last


# --- memory

MANY = models.load("linear inputs=200 outputs=1")
ALIKE = Dataset(manifest(12), np.ones((12, 200), np.float32), np.ones(12, np.float32), offsets_of([1] * 12))


@pytest.mark.parametrize(
    ("kind", "what"),
    [("batched", "choose"), ("batched", "score"), ("batched", "train"), ("loop", "train")],
)
def test_a_chunk_that_does_not_fit_is_halved(kind: str, what: str) -> None:
    """And all that the first try held is let go before the next."""
    hypotheses, update = draw_hypotheses(MANY, 2), LocalUpdate(1, 0.1, 0)

    def done(device: torch.device) -> list[Any]:
        learner = ByArrays(Learner(MANY, device, kind))
        cohort = Cohort.gather(ALIKE, range(12), device)
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


@pytest.mark.usefixtures("released_there")
def test_clients_whose_release_does_not_fit_release_the_same_in_halves() -> None:
    hypotheses, update, clients = draw_hypotheses(MANY, 2), LocalUpdate(1, 0.1, 0), range(12)
    sanitiser = ClientSanitiser.of(Place(simulated(), 3), hypotheses, task_of(tuple(clients)))
    shapes = {name: value.shape[1:] for name, value in hypotheses.items()}

    def released(most: int) -> NDArray[np.float32]:
        """Run out of memory after each release of more clients than `most`."""
        found = sanitiser.on_gpu([*clients], shapes)
        assert found is not None

        def release(part: slice, trained: Tensor, start: Tensor) -> None:
            found.release(part, trained, start)
            if len(trained) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")

        learner, cohort = Learner(MANY, CUDA, "batched"), Cohort.gather(ALIKE, clients, CUDA)
        chosen, draws = torch.arange(12) % 2, streams(0, "shuffle", 1, clients)
        learner.train(learner.tensors(hypotheses), chosen, cohort, update, draws, release=release)
        return found.arrays.matrix.copy()

    with fake_gpu():
        np.testing.assert_array_equal(released(3), released(12))


def test_what_a_gpu_says_is_free_bounds_a_chunk() -> None:
    """A quarter of all of it, or less in halves."""
    learner = Learner(MANY, CUDA, "batched")
    with fake_gpu(said_free=1 << 30):
        assert learner._chunk_bytes() == 1 << 30
    with fake_gpu(said_free=(1 << 29) - 1):
        assert learner._chunk_bytes() == 1 << 28


def test_a_simulated_node_says_what_a_step_takes_before_it_takes_it(caplog: pytest.LogCaptureFixture) -> None:
    """From it the size of a chunk follows (`Learner.room`). On the CPU there is nothing to say."""
    config = run_config("synthetic", rounds=1, restarts=1, batch_size=1)
    with fake_gpu(said_free=1 << 30):
        play(config | {"device": "cuda"})
    [said] = [line for line in caplog.messages if "a step trains" in line]
    assert said.startswith("a step trains up to ")
    assert said.endswith(" clients at a time on cuda, 0.0 MiB each")
    caplog.clear()
    play(config | {"device": "cpu"})
    assert not [line for line in caplog.messages if "a step trains" in line]


# --- the trial, runs, and what comes after


@pytest.mark.parametrize("name", ["all rows at once", "a convolution", "batch normalisation", "factors by epochs"])
def test_a_trial_step_picks_the_learner_as_on_the_cpu(name: str) -> None:
    """But for convolutions, which a GPU computes in batches."""
    model, dataset = TABLE[name].kind.model, dataset_of(TABLE[name].kind)
    picked = try_out(model, dataset, "cpu").engine
    with fake_gpu():
        found = try_out(model, dataset, "auto")
    assert found.device == CUDA
    assert found.engine == ("batched" if name == "a convolution" else picked)


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


@pytest.mark.usefixtures("released_there")
def test_a_round_releases_there_what_the_cpu_would_but_for_noise() -> None:
    config = run_config("synthetic", rounds=2, restarts=1, noise_multiplier=0.0)
    expected = play(config | {"device": "cpu"}).state.hypotheses
    with fake_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientSanitiser, "sanitised", None)
        found = play(config | {"device": "cuda"}).state.hypotheses
    assert_close(found, expected)


@pytest.mark.usefixtures("released_there")
def test_noise_drawn_there_does_not_hang_on_the_number_of_nodes() -> None:
    config = run_config("synthetic", device="cuda", rounds=2, restarts=1)
    with fake_gpu():
        alone, three = (play(config, nodes=nodes).state.hypotheses for nodes in (1, 3))
        other = play(config | {"seed": 7}).state.hypotheses
    for name, value in alone.items():
        np.testing.assert_allclose(three[name], value, **CLOSE)
        assert (other[name] != value).all()


@pytest.mark.usefixtures("released_there")
@pytest.mark.parametrize("task", ["numbers", "images"])
def test_a_round_of_any_steps_waits_twice_and_gets_four_copies(task: str, tmp_path: Path) -> None:
    """With its releases, which come back in one copy: nothing else of the gate's work waits for the GPU."""
    fast = {"restarts": 1, "patience": 0, "validation": "every=9"}
    if task == "images":
        config = whole_rounds.config_of("cnn", tmp_path, clients=2, rounds=1, device="cuda") | fast
    else:
        config = run_config("synthetic", device="cuda", **fast)

    def counts(rounds: int, **asked: Any) -> tuple[int, int]:
        with fake_gpu() as gpu:
            play(config | {"rounds": rounds} | asked)
        return gpu.sent, gpu.fetched

    counts(1)  # with the trial of the model
    for asked in ({"batch-size": 60}, {"local-epochs": 3, "batch-size": 20}):
        assert np.subtract(counts(3, **asked), counts(2, **asked)).tolist() == [4, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here")
@pytest.mark.parametrize("network", steps.NETWORKS)
def test_on_a_real_gpu_the_host_never_waits_between_steps(network: str) -> None:
    steps.train_without_waiting(network, 3, CUDA)


@pytest.mark.parametrize("how", list(Personal))
def test_a_model_of_ones_own_is_that_of_the_cpu(how: Personal) -> None:
    model, update, clients = MLP.model, LocalUpdate(1, 0.1, 2), range(len(LENGTHS))
    hypotheses = draw_hypotheses(model, 3)

    def own(device: torch.device) -> Any:
        cohort = Cohort.gather(dataset_of(MLP), clients, device)
        learner = Learner(model, device, "batched")
        draws = partial(streams, 0, "shuffle", 0, clients)
        return method(how)(Task(learner, hypotheses, cohort, update, draws)).arrays(0)

    expected = own(CPU)
    with fake_gpu():
        assert_close(own(CUDA), expected)


def test_predictions_are_those_of_the_cpu() -> None:
    model, dataset = MLP.model, dataset_of(MLP)
    learnt = Learnt(model, draw_hypotheses(model, 2), RunConfig())
    expected = [*predictions(learnt, dataset, [0, 2])]
    with fake_gpu():
        found = [*predictions(learnt, dataset, [0, 2])]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.hypothesis == theirs.hypothesis
        np.testing.assert_allclose(ours.outputs, theirs.outputs, **CLOSE)
