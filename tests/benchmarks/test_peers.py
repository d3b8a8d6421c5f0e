"""The benchmark against peers: they get umbel's own task, and one that is not there gets a line."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers import __main__ as contest
from benchmarks.peers import plain_flower, rivals, tasks
from benchmarks.peers.brief import Brief
from benchmarks.peers.networks import loss_of, network
from tests.benchmarks.conftest import write_charges
from tests.helpers.errors import raises
from umbel import models
from umbel.simulation.in_process import play, run_config

pytestmark = pytest.mark.rest


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """The hospital experiment in small, on made-up rows."""
    return run_config(
        "hospital", dataset=write_charges(tmp_path, [1, 2, 3, 4] * 4, 10), rounds=3, patience=0, clients_per_round=4,
        validation="clients=3",
    )  # fmt: skip


def test_peers_get_the_clients_and_the_start_of_umbels_own_run(config: dict[str, Any], tmp_path: Path) -> None:
    tasks.brief_of(config).write(tmp_path)
    brief = Brief.read(tmp_path)
    run = play(config)

    trained = np.bincount(np.concatenate(brief.settings.train), minlength=10)
    assert trained.tolist() == run.fleet.participations.tolist()
    assert (brief.rounds, len(brief.settings.validate)) == (3, 4)
    loss, hypotheses = loss_of(brief), [network(brief, j) for j in range(5)]
    with torch.no_grad():
        best = [
            min(loss(hypothesis(torch.from_numpy(x)), torch.from_numpy(y)).item() for hypothesis in hypotheses)
            for x, y in map(brief.client, brief.settings.validate[0])
        ]
    assert np.mean(best) == pytest.approx(run.state.history[0].loss, rel=1e-5)


def test_peers_get_umbels_network_for_images(tmp_path: Path) -> None:
    tasks.write_images(tmp_path / "images", clients=3, validation=1)
    brief = tasks.brief_of(
        run_config("femnist", dataset=str(tmp_path / "images"), rounds=1, clients_per_round=2, validation="clients=1")
    )
    images = torch.from_numpy(brief.client(2)[0])
    parameters = {name: torch.from_numpy(value) for name, value in brief.initial(1).items()}
    torch.testing.assert_close(network(brief, 1)(images), models.load("cnn").apply(parameters, images))


@pytest.mark.slow
def test_a_peer_that_does_not_run_gets_a_line_and_the_others_go_on(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contest.compare("small", config, {"blazefl": Path(sys.executable)}, tmp_path, times=1, cores=1)
    said = capsys.readouterr().out
    version = rivals.PEERS["blazefl"].version
    assert f"{version}: not measured: does not run: ModuleNotFoundError: No module named 'blazefl'" in said
    assert "umbel, FedAvg" in said
    with raises(rivals.Absent, "peer.no-python", "1.5"):
        rivals.environment(replace(rivals.PEERS["blazefl"], pythons=("1.5",)))
    assert rivals.environment(plain_flower.PEER) == Path(sys.executable), "what this environment has needs no other"


@pytest.mark.parametrize("peer", [*rivals.PEERS.values(), plain_flower.PEER], ids=lambda peer: peer.name)
def test_each_peer_has_an_environment_of_exact_versions_and_a_program(peer: rivals.Peer) -> None:
    assert all("==" in line for line in peer.requirements)
    folder = Path(rivals.__file__).parent
    assert (folder / f"play_{peer.name}.py").is_file() or (folder / peer.name / "pyproject.toml").is_file()
