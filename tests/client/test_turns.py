"""A site computes its clients on as many threads as help, and a client's bits do not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from tests.client.test_app import a_site
from tests.helpers.datasets import manifest
from tests.helpers.messages import asked, releases, task_of
from tests.helpers.models import draw_hypotheses
from tests.helpers.nodes import ask
from umbel import models
from umbel.client import learner
from umbel.client.learner import Turns
from umbel.client.node import Node
from umbel.client.work import NodeClients
from umbel.data import offsets_of, write_dataset
from umbel.protocol.clients import ClientInDataset

CLIENTS = 9
EVERYONE = [ClientInDataset(c) for c in range(CLIENTS)]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Give PyTorch two threads on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def node(path: Path, run_config: dict[str, Any], model: str = "lenet10", clients: int = CLIENTS) -> Node:
    rows = np.zeros((clients, 28, 28), np.float32)
    write_dataset(path, manifest(clients, model=model), rows, np.zeros(clients, np.int64), offsets_of([1] * clients))
    return Node.of({"data-path": str(path), "role": "train"}, run_config)


def turns_of(own: Node, clients: list[ClientInDataset]) -> Turns:
    work = NodeClients(own.site, own.run, RecordDict())
    vars(work)["node"] = own
    return work._turns(clients)


def test_with_four_clients_a_core_each_core_has_a_client(tmp_path: Path, run_config: dict[str, Any]) -> None:
    """Also after the site's time, a thread that has not ended computes on a network that no other uses."""
    own = node(tmp_path / "many", run_config)
    many, later = turns_of(own, EVERYONE), turns_of(own, EVERYONE)
    assert many.size == 2
    with many.learner() as one, many.learner() as other, later.learner() as third, later.learner() as fourth:
        assert len({id(lent.model.module) for lent in (one, other, third, fourth)}) == 4
    with many.threads:
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("model", "clients", "asked", "threads"),
    [
        ("lenet10", CLIENTS, 1, 1),  # the clients that are asked decide nothing: one thread computes it too
        ("lenet10", 7, 7, 2),  # few clients have all cores
        ("cnn-dropout", CLIENTS, CLIENTS, 2),  # and so have networks that draw
    ],
)
def test_others_are_computed_one_at_a_time(
    model: str, clients: int, asked: int, threads: int, tmp_path: Path, run_config: dict[str, Any]
) -> None:
    turns = turns_of(node(tmp_path / "own", run_config, model, clients), EVERYONE[:asked])
    assert turns.size == 1
    with turns.threads:
        assert torch.get_num_threads() == threads


def test_memory_and_a_network_that_cannot_be_copied_bound_the_number_of_clients_at_a_time(
    tmp_path: Path, run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = node(tmp_path / "many", run_config)
    with monkeypatch.context() as short:
        short.setattr(learner, "CPU_CHUNK_BYTES", 1)
        assert turns_of(own, EVERYONE).size == 1
    monkeypatch.setattr(own.model.module, "odd", (one for one in ()), raising=False)
    assert turns_of(own, EVERYONE).size == 1


def test_clients_on_several_threads_have_the_bits_of_one_thread(tmp_path: Path, run_config: dict[str, Any]) -> None:
    features = np.random.default_rng(0).standard_normal((2 * CLIENTS, 28, 28)).astype(np.float32)
    grid = a_site(tmp_path, run_config, "lenet10", features, [2] * CLIENTS)
    task = task_of(tuple(range(CLIENTS)), batch_size=1, clipping="update", noise_multiplier=100.0)
    content = asked(draw_hypotheses(models.load("lenet10"), 2), task)
    found = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        found.append({name: value.tobytes() for name, value in releases(ask(grid, content)).items()})
    assert found[0] == found[1]
