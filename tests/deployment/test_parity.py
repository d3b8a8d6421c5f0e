"""One federation over three sites, each a process of its own, gives what one process gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from flwr.app import Context, RecordDict

from client.app import app as client_app
from server.app import app as server_app
from simulation.grid import InProcessGrid
from tests.deployment.conftest import write_site
from tests.deployment.processes import Deployment

pytestmark = pytest.mark.slow

SITES, CLIENTS = 3, 8


def in_process(run_config: dict[str, Any], home: Path) -> dict[str, Any]:
    """Return the hypotheses that a run in this process leaves."""
    server_app(InProcessGrid(client_app, run_config, nodes=2), Context(1, 0, {}, RecordDict(), run_config))
    [folder] = (home / "runs").iterdir()
    return safetensors.numpy.load_file(folder / "latest.safetensors")


def test_sites_that_share_the_run_s_seed_learn_bit_for_bit_what_a_simulation_learns(
    tmp_path: Path, run_config: dict[str, Any], umbel_home: Path
) -> None:
    data_path = write_site(tmp_path / "data", 2.0, CLIENTS)
    config = {"federation": data_path, "rounds": 3, "restarts": 2, "seed": 3, "clients-per-round": 5}
    expected = in_process(run_config | config, umbel_home)

    with Deployment(tmp_path) as deployment:
        for i in range(SITES):
            place = {"place": f"{i}/{SITES}", "role": "split", "insecure-seed": True}
            deployment.start_node(f"site-{i}", **{"data-path": data_path} | place)
        deployment.wait_until_online()
        run = deployment.submit(**{key.replace("-", "_"): value for key, value in config.items()}, min_nodes=SITES)
        assert deployment.wait(run) == "finished:completed", deployment.tails()
        found = run.hypotheses()

    assert run.releases == config["rounds"] * config["clients-per-round"]
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }
