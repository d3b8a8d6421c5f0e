"""When a run is over a site keeps the hypothesis that fits each of its clients best, and tells nobody."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from flwr.app import Message, RecordDict
from numpy.typing import NDArray

from tests.helpers.datasets import manifest
from tests.helpers.messages import asked, refused, task_of
from tests.helpers.nodes import ask
from umbel import models
from umbel.client.app import app
from umbel.client.cohort import Cohort
from umbel.client.learner import learner_for
from umbel.client.local import LocalParameters
from umbel.client.node import Node
from umbel.client.personal import Predictors
from umbel.client.personal.keep import models_to_keep
from umbel.data import offsets_of, write_dataset
from umbel.models.prior import Prior
from umbel.privacy.site.time_limit import check_time
from umbel.protocol.arrays import Arrays
from umbel.protocol.home import write_atomically
from umbel.protocol.messages import keep_request
from umbel.protocol.records import pack
from umbel.protocol.run_config import RunConfig
from umbel.protocol.simulated import in_process
from umbel.protocol.tasks import EvaluationSpec
from umbel.simulation.grid import InProcessGrid

Config = dict[str, Any]

# y = 5 x for clients 0 and 3, y = -4 x for the others.
SLOPES = [5.0, -4.0, -4.0, 5.0]
HYPOTHESES: Arrays = {"weight": np.array([[[5, 0]], [[-4, 0]]], np.float32)}


@pytest.fixture
def site(tmp_path: Path) -> Config:
    """The configuration of a site of four clients, two of which train, that keeps models."""
    features = np.array([[1, 0], [2, 0]] * 4, np.float32)
    targets = features[:, 0] * np.repeat(SLOPES, 2).astype(np.float32)
    write_dataset(tmp_path / "own", manifest(2, 2, model="linear"), features, targets, offsets_of([2] * 4))
    return {"data-path": str(tmp_path / "own"), "role": "split", "keep-model": str(tmp_path / "models")}


class Site:
    """A node and what a run says to it; another `run` is another run, which may have the same `name`."""

    def __init__(self, config: Config, node_config: Config, run: int = 1, name: str = "spring") -> None:
        self.grid, self.name = InProcessGrid(app, config, node_configs=[node_config]), name
        [context] = self.grid.contexts.values()
        context.run_id = run

    def evaluate(self, *clients: int, hypotheses: Arrays = HYPOTHESES) -> Message:
        return ask(self.grid, asked(hypotheses, None, EvaluationSpec(1, clients, run=self.name)))

    def train(self, *clients: int, hypotheses: Arrays = HYPOTHESES) -> Message:
        return ask(self.grid, asked(hypotheses, task_of(clients, run=self.name)))

    def keep(self, hypotheses: Arrays = HYPOTHESES, prior: Arrays | None = None) -> Message:
        """Tell the node what the run has found, and return its reply."""
        return ask(self.grid, keep_request(pack(hypotheses), self.name, prior), "query.keep")


def keep(config: Config, node_config: Config, hypotheses: Arrays = HYPOTHESES, **run: Any) -> Message:
    """Have the clients that report do so, tell their node what the run has found, and return its reply."""
    site = Site(config, node_config, **run)
    assert not site.evaluate(2, 3, hypotheses=hypotheses).has_error()
    return site.keep(hypotheses)


def models_in(folder: Path) -> dict[str, Arrays]:
    return {path.name: safetensors.numpy.load_file(path) for path in sorted(folder.iterdir())}


def test_each_client_gets_the_hypothesis_that_fits_it_best(site: Config, tmp_path: Path, run_config: Config) -> None:
    before = os.umask(0)
    try:
        reply = keep(run_config, site)
    finally:
        os.umask(before)
    assert reply.content == RecordDict(), "the server learns nothing of it"
    folder = tmp_path / "models"
    modes = [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())]
    assert modes == [0o700] + [0o600] * 4, "only the site may read them, even at umask 0"
    found = models_in(tmp_path / "models")
    assert list(found) == [f"client-{number}.safetensors" for number in range(4)]
    assert [own["weight"].tolist() for own in found.values()] == [[[slope, 0]] for slope in SLOPES]


@pytest.mark.parametrize("how", ["fine-tune epochs=1", "interpolate epochs=1", "calibrate", "mixture", "bayes", "auto"])
def test_a_site_may_make_them_each_clients_own(how: str, site: Config, tmp_path: Path, run_config: Config) -> None:
    """Hypotheses of four fifths of the slope are made each client's own, closer to its rows, and enough to predict.

    Trained by a step of a tenth of the mean of x^2, 2.5, times two, they go half of the way to the client's own slope.
    """
    hypotheses = {"weight": HYPOTHESES["weight"] * np.float32(0.8)}
    reply = keep(run_config | {"loss": "", "batch-size": 0}, site | {"personalise": how}, hypotheses)
    assert reply.content == RecordDict(), "the server learns nothing of it"
    learner = learner_for(models.load("linear", loss="mse"))
    for path, slope in zip(sorted((tmp_path / "models").iterdir()), SLOPES, strict=True):
        assert path.stat().st_mode & 0o777 == 0o600
        found = safetensors.numpy.load_file(path)
        rows = Cohort(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([slope, 2 * slope]), np.array([2]))
        loss, _ = Predictors.read(found).score(learner, rows)
        assert loss < 0.501 * 0.2 * abs(slope) * np.sqrt(2.5), "half of the error of the hypothesis"
        if "epochs" in how:
            np.testing.assert_allclose(found["weight"][0, 0], slope * 0.9, rtol=1e-5)


def test_a_prior_of_the_server_is_used(site: Config, tmp_path: Path, run_config: Config) -> None:
    """Clients that differ in the second weight alone, which their rows say nothing of, move less in the first."""
    prior = Prior(np.tile(np.diag([0.0, 1.0]), (2, 1, 1)), np.ones(2))
    moved = []
    for given in (None, prior.arrays):
        node = Site(run_config | {"loss": ""}, site | {"personalise": "bayes"}, run=len(moved) + 1)
        hypotheses = {"weight": HYPOTHESES["weight"] * np.float32(0.8)}
        assert not node.evaluate(2, hypotheses=hypotheses).has_error()
        assert not refused(node.keep(hypotheses, given))
        moved.append(models_in(tmp_path / "models")["client-0.safetensors"]["weight"][0, 0] - 4)
    assert 0 < moved[1] < moved[0]


def test_a_prior_that_is_none_is_refused(site: Config, tmp_path: Path, run_config: Config, caplog: Any) -> None:
    node = Site(run_config, site)
    assert not node.evaluate(2).has_error()
    assert refused(node.keep(prior=Prior(np.ones((2, 3)), np.ones(2)).arrays))
    assert "protocol.prior" in caplog.text
    assert not (tmp_path / "models").exists()


class Panic(BaseException):
    """As a library's code in Rust raises where it panics."""


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        ("models_to_keep", MemoryError("cannot allocate")),
        ("models_to_keep", Panic("at a bound")),
        ("write_models", OSError("disk full")),
    ],
)
def test_what_goes_wrong_with_a_sites_data_or_disk_is_not_told(
    site: Config, run_config: Config, monkeypatch: pytest.MonkeyPatch, caplog: Any, step: str, fault: BaseException
) -> None:
    """Whether memory is enough depends on the rows; which sites keep models is their own affair."""

    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(f"umbel.client.app.{step}", fail)
    assert keep(run_config, site).content == RecordDict()
    assert str(fault) in caplog.text


def test_a_run_of_a_name_that_is_too_long_is_not_remembered(site: Config, tmp_path: Path, run_config: Config) -> None:
    """Else each refused message would leave on the site's disk whatever a server sends."""
    node = Site(run_config, site | {"ledger-path": str(tmp_path / "ledger.jsonl")})
    content = asked(HYPOTHESES, task_of((0,)))
    content.config_records["training"]["run"] = "x" * 10**6
    assert refused(ask(node.grid, content))
    assert not any(b"x" * 1000 in path.read_bytes() for path in tmp_path.glob("*.sqlite*"))


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(
    ("hypotheses", "reason"),
    [
        (np.zeros((2, 1, 3), np.float32), "do not fit model 'linear'"),
        (np.array([[[5, np.nan]], [[-4, 0]]], np.float32), "[refused.hypotheses]"),
        (np.zeros((2, 1, 2)), "[refused.hypotheses]"),
        (np.zeros((5000, 1, 2), np.float32), "[refused.hypotheses]"),
        (np.zeros((0, 1, 2), np.float32), "[refused.hypotheses]"),
        (HYPOTHESES["weight"] + np.float32(1), "[refused.unknown-result]"),
    ],
)
def test_what_no_run_has_found_is_not_kept(
    site: Config, tmp_path: Path, run_config: Config, caplog: Any, hypotheses: NDArray[Any], reason: str, keeps: bool
) -> None:
    """And a site that keeps nothing answers as one that does."""
    node = Site(run_config, site if keeps else {key: value for key, value in site.items() if key != "keep-model"})
    assert not node.evaluate(2).has_error()
    assert refused(node.keep({"weight": hypotheses}))
    assert reason in caplog.text
    assert not (tmp_path / "models").exists()
    assert not refused(node.keep()), "and the run may still tell what it has found"


def test_a_run_tells_once_what_it_has_found(
    site: Config, tmp_path: Path, run_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that goes on after an interruption has its name and another number, and has found more."""
    other = {"weight": HYPOTHESES["weight"] * np.float32(0.5)}
    node = Site(run_config, site)
    node.evaluate(2)
    node.evaluate(2, hypotheses=other)
    assert not refused(node.keep())
    assert refused(node.keep(other))
    assert "the run has already announced its result" in caplog.text
    assert refused(Site(run_config, site).keep(other)), "a node that was started again remembers"
    assert models_in(tmp_path / "models")["client-0.safetensors"]["weight"].tolist() == [[5, 0]]
    assert not refused(Site(run_config, site, run=2).keep(other)), "which it sent before the interruption"
    assert models_in(tmp_path / "models")["client-0.safetensors"]["weight"].tolist() == [[2.5, 0]]


def test_a_run_that_has_asked_nothing_has_found_nothing(
    site: Config, tmp_path: Path, run_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    assert refused(Site(run_config, site).keep())
    assert not refused(keep(run_config, site))
    assert refused(Site(run_config, site, run=2, name="").keep())
    assert refused(Site(run_config, site, run=3, name="summer").keep())
    assert caplog.text.count("has asked nothing of this site") == 3


def test_where_clients_only_train_what_a_run_found_may_be_new(site: Config, tmp_path: Path, run_config: Config) -> None:
    """The site may not have been asked in the round that found it."""
    node = Site(run_config, site | {"role": "train"})
    best = {"weight": HYPOTHESES["weight"] + np.float32(1)}
    assert refused(node.keep(best))
    node.train(0)
    assert not refused(node.keep(best))
    assert len(models_in(tmp_path / "models")) == 4


def test_no_time_limit_ends_the_writing_when_some_files_are_of_this_run_and_others_of_the_last(
    site: Config, tmp_path: Path, run_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_late(*arguments: Any, **options: Any) -> None:
        with monkeypatch.context() as later:
            later.setattr(time, "monotonic", lambda: math.inf)
            check_time()
        write_atomically(*arguments, **options)

    monkeypatch.setattr("umbel.client.personal.keep.write_atomically", write_late)
    assert not refused(keep(run_config, site | {"max-seconds": 3600.0}))
    assert len(models_in(tmp_path / "models")) == 4


def test_what_a_site_remembers_of_runs_must_be_whole(site: Config, tmp_path: Path, run_config: Config) -> None:
    ledger = tmp_path / "ledger.jsonl"
    node = Site(run_config, site | {"ledger-path": str(ledger)})
    assert not node.evaluate(2).has_error()
    ledger.write_bytes(b"")
    assert refused(node.evaluate(2))
    assert refused(node.keep())


def test_a_client_with_a_head_of_its_own_keeps_that_too(tmp_path: Path) -> None:
    """One that trained none gets the shared parameters alone."""
    model = models.load("mlp", local="2.*")
    data = manifest(2, 0, model="mlp", local="2.*")
    write_dataset(tmp_path / "own", data, np.ones((4, 3), np.float32), np.ones((4, 1), np.float32), offsets_of([2] * 2))
    config = {"data-path": str(tmp_path / "own"), "ledger-path": str(tmp_path / "ledger.jsonl")}
    run = RunConfig(dataset="").entries()
    with in_process():
        node = Node.of(config, run)
    head = {name: np.full((1, *shape), 7, np.float32) for name, shape in model.local_shapes.items()}
    shared = {name: np.ones((1, *shape), np.float32) for name, shape in model.shapes.items()}
    kept = LocalParameters(node.site, RecordDict(), node.model, "run", None)
    kept.write([1], head, shared)
    found = models_to_keep(node, shared, kept)
    assert set(found[0]) == set(model.shapes)
    assert set(found[1]) == set(model.shapes) | set(model.local_shapes)
    assert found[1]["2.bias"].tolist() == [7]
