"""The plain app is the algorithm that umbel is compared with."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from benchmarks.peers import plain_flower
from benchmarks.peers.plain.hospital import task
from benchmarks.peers.plain.hospital.client_app import app as client_app
from benchmarks.peers.plain.hospital.server_app import app as server_app
from benchmarks.peers.plain.hospital.server_app import kmeans
from tests.benchmarks.conftest import write_charges
from umbel.simulation.grid import InProcessGrid

pytestmark = pytest.mark.rest


def test_the_whole_of_it_runs_and_learns(tmp_path: Path) -> None:
    data = Path(write_charges(tmp_path, [2] * 8, 5))
    project = tomllib.loads((plain_flower.PLAIN / "pyproject.toml").read_text(encoding="utf-8"))
    shared = {
        "hypotheses": 2, "noise-multiplier": 1e-3, "clients-per-round": 5, "validation": "clients=3",
        "step-size": 0.1, "rounds": 20,
    }  # fmt: skip
    config: dict[str, Any] = project["tool"]["flwr"]["app"]["config"]
    config = config | plain_flower.plain_config(shared, data, tmp_path / "results.json")
    server_app(InProcessGrid(client_app, config, nodes=8), Context(1, 0, {}, RecordDict(), config))
    rounds = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["rounds"]
    assert len(rounds) == 20
    assert rounds[-1]["loss"] < rounds[0]["loss"]
    assert plain_flower.reading(rounds).loss == min(one["loss"] for one in rounds)
    # An empty cluster keeps its centroid.
    found = kmeans(np.array([[0.0, 0.0], [0.0, 2.0], [9.0, 0.0]]), np.array([[1.0, 1.0], [8.0, 0.0], [99.0, 99.0]]))
    np.testing.assert_array_equal(found, [[0, 1], [9, 0], [99, 99]])


def test_a_step_descends_the_root_of_the_mean_square() -> None:
    torch.manual_seed(0)
    state, x, y = task.network().state_dict(), torch.rand(4, 3), torch.rand(4)
    net = task.with_state(state)
    task.rmse(net, x, y).backward()
    expected = {name: value.detach() - 0.4 * value.grad for name, value in net.named_parameters()}
    trained = task.train(state, x, y, epochs=1, step=0.4, batch=10)
    torch.testing.assert_close(dict(trained), expected)


def test_noise_is_laplaces_of_the_updates_norm() -> None:
    """Its norm is Gamma(n, 1 / epsilon), of mean nu * radius."""
    torch.manual_seed(0)
    start, trained = {"weight": torch.zeros(1, 3)}, {"weight": torch.tensor([[0.0, 3.0, 4.0]])}
    noise = (
        torch.stack([task.sanitise(start, trained, 2.0, 0.01)["weight"][0] for _ in range(4000)]) - trained["weight"]
    )
    assert float(noise.norm(dim=1).mean()) == pytest.approx(2 * 5, rel=0.03)
    # The variance of a component is (n + 1) / epsilon^2 (Lemma 4.3).
    assert float(noise.var(dim=0).mean()) == pytest.approx(4 / (3 / 10) ** 2, rel=0.1)
