"""When a run is over a site keeps the hypothesis that fits each of its clients best, and tells nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import Message, RecordDict

import models
from client.app import app
from client.keep import keep as keep_models
from client.local import LocalParameters
from client.node import Node
from federation import offsets_of, write_federation
from privacy.site import in_process
from protocol.arrays import Arrays
from protocol.messages import keep_request
from protocol.records import to_array_record
from protocol.run_config import RunConfig
from simulation.grid import InProcessGrid
from tests.helpers.federations import manifest
from tests.helpers.messages import refused
from tests.helpers.nodes import ask

Config = dict[str, Any]

# y = 5 x for clients 0 and 3, y = -4 x for the others.
SLOPES = [5.0, -4.0, -4.0, 5.0]
HYPOTHESES: Arrays = {"weight": np.array([[[5, 0]], [[-4, 0]]], np.float32)}


@pytest.fixture
def site(tmp_path: Path) -> Config:
    """The configuration of a site of four clients, two of which train, that keeps models."""
    features = np.array([[1, 0], [2, 0]] * 4, np.float32)
    targets = features[:, 0] * np.repeat(SLOPES, 2).astype(np.float32)
    write_federation(tmp_path / "own", manifest(2, 2, model="linear"), features, targets, offsets_of([2] * 4))
    return {"data-path": str(tmp_path / "own"), "role": "split", "keep-model": str(tmp_path / "models")}


def keep(config: Config, node_config: Config, hypotheses: Arrays = HYPOTHESES) -> Message:
    """Tell a node what a run has found, and return its reply."""
    grid = InProcessGrid(app, config, node_configs=[node_config])
    return ask(grid, keep_request(to_array_record(hypotheses)), "query.keep")


def models_in(folder: Path) -> dict[str, Arrays]:
    """Return the models that a folder holds."""
    return {path.name: safetensors.numpy.load_file(path) for path in sorted(folder.iterdir())}


def test_each_client_gets_the_hypothesis_that_fits_it_best(site: Config, tmp_path: Path, run_config: Config) -> None:
    reply = keep(run_config, site)
    assert reply.content == RecordDict(), "the server learns nothing of it"
    found = models_in(tmp_path / "models")
    assert list(found) == [f"client-{number}.safetensors" for number in range(4)]
    assert [own["weight"].tolist() for own in found.values()] == [[[slope, 0]] for slope in SLOPES]


def test_the_models_of_the_run_before_are_replaced(site: Config, tmp_path: Path, run_config: Config) -> None:
    keep(run_config, site)
    keep(run_config, site, {"weight": HYPOTHESES["weight"] * np.float32(0.5)})
    assert [own["weight"][0, 0] for own in models_in(tmp_path / "models").values()] == [2.5, -2, -2, 2.5]


def test_a_site_that_does_not_want_models_gets_none(site: Config, tmp_path: Path, run_config: Config) -> None:
    del site["keep-model"]
    before = sorted(tmp_path.iterdir())
    assert keep(run_config, site).content == RecordDict()
    assert sorted(tmp_path.iterdir()) == before


def test_hypotheses_that_do_not_fit_are_not_kept(
    site: Config, tmp_path: Path, run_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    assert refused(keep(run_config, site, {"weight": np.zeros((2, 1, 3), np.float32)}))
    assert "do not fit model 'linear'" in caplog.text
    assert not (tmp_path / "models").exists()


def test_of_a_model_with_local_parameters_the_shared_ones_are_kept(tmp_path: Path, run_config: Config) -> None:
    """As they were broadcast; which fits best a client finds out as a newcomer does."""
    items = np.array([[1, 0], [-1, 0], [1, 0], [-1, 0], [1, 0]], np.float32)
    # Of the first hypothesis nothing can be learnt: it says the same of all items.
    hypotheses = {"items": np.stack([np.ones((5, 2), np.float32), items])}
    clients = 20  # by a vector drawn at random some would find the first to fit better
    own, rows = manifest(clients, model="factors-5x2"), np.tile(np.arange(5, dtype=np.float32), clients)[:, None]
    labels = np.tile([1, -1, 1, -1, 1], clients)
    write_federation(tmp_path / "own", own, rows, labels, offsets_of([5] * clients))
    keep(run_config, {"data-path": str(tmp_path / "own"), "keep-model": str(tmp_path / "models")}, hypotheses)
    found = models_in(tmp_path / "models")
    assert [list(arrays) for arrays in found.values()] == [["items"]] * clients
    for arrays in found.values():
        np.testing.assert_array_equal(arrays["items"], items)


def test_a_client_with_a_head_of_its_own_keeps_that_too(tmp_path: Path) -> None:
    """One that trained none gets the shared parameters alone."""
    model = models.load("mlp", local="2.*")
    data = manifest(2, 0, model="mlp", local="2.*")
    write_federation(
        tmp_path / "own", data, np.ones((4, 3), np.float32), np.ones((4, 1), np.float32), offsets_of([2] * 2)
    )
    config = {"data-path": str(tmp_path / "own"), "ledger-path": str(tmp_path / "ledger.sqlite")}
    run = RunConfig(federation="").entries()
    with in_process():
        node = Node.of(config, run)
    head = {name: np.full((1, *shape), 7, np.float32) for name, shape in model.local_shapes.items()}
    shared = {name: np.ones((1, *shape), np.float32) for name, shape in model.shapes.items()}
    kept = LocalParameters(node.site, RecordDict(), node.model, "run", None)
    kept.write([1], head, shared)
    keep_models(node, shared, kept, tmp_path / "models")
    without, whole = models_in(tmp_path / "models").values()
    assert set(without) == set(model.shapes)
    assert set(whole) == set(model.shapes) | set(model.local_shapes)
    assert whole["2.bias"].tolist() == [7]
