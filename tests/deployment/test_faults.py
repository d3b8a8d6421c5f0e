"""Processes that die, and what the others make of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.deployment.conftest import CLIENTS, SHORT, write_site
from tests.deployment.processes import Deployment, Member, Run, wait_until

# By themselves (`make faults`): rounds of twenty seconds are too short where other tests compute beside them.
pytestmark = [pytest.mark.slow, pytest.mark.faults]

ROUND_S = 20.0
"""How long the server waits for a round's replies."""


MANY = 30_000
"""Clients of one site, so many that drawing their noise takes a while."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("deployment")) as deployment:
        start_site(deployment, "struck", MANY)
        for name in ("steady", "lost", "broken"):
            start_site(deployment, name)
        spoil(deployment.folder / "data" / "broken")
        deployment.wait_until_online()
        yield deployment


def start_site(deployment: Deployment, name: str, clients: int = CLIENTS) -> Member:
    data_path = write_site(deployment.folder / "data" / name, len(name), clients)
    return deployment.start_node(name, **{"data-path": data_path})


def spoil(data: Path) -> None:
    """Leave a row of client 2 without a value."""
    features = np.load(data / "features.npy")
    features[25] = np.nan
    np.save(data / "features.npy", features)


@dataclass
class Storm:
    """A run of four rounds: in the first a client process dies, in the second a SuperNode; meanwhile one joins."""

    run: Run
    status: str
    late: Member


@pytest.fixture(scope="module")
def storm(deployment: Deployment) -> Storm:
    struck, lost = deployment.nodes["struck"], deployment.nodes["lost"]
    run = deployment.submit(**SHORT, rounds=4, clients_per_round=MANY + 2 * CLIENTS, round_timeout=ROUND_S)

    wait_until("message of round 1", lambda: "ROUND 1]" in struck.log, 90.0)
    [process] = wait_until("process of round 1", lambda: struck.client_apps, 10.0)
    wait_until("charge", lambda: struck.charges, 30.0, pause=0.001)
    process.kill()
    late = start_site(deployment, "late")

    wait_until("message of round 2", lambda: "ROUND 2]" in lost.log, 90.0)
    lost.kill()
    return Storm(run, deployment.wait(run), late)


def test_a_run_goes_on_without_the_nodes_it_loses_and_keeps_every_round(storm: Storm) -> None:
    assert storm.status == "finished:completed"
    assert [entry["number"] for entry in storm.run.history] == [1, 2, 3, 4]
    assert [entry["moved"] for entry in storm.run.history] == [True] * 4


def test_no_round_waits_longer_than_it_may(storm: Storm) -> None:
    assert all(entry["seconds"] < ROUND_S + 15 for entry in storm.run.history)


def test_what_a_client_process_was_charged_before_it_died_stands_and_was_not_used(
    deployment: Deployment, storm: Storm
) -> None:
    assert sum(row["round"] == 1 for row in deployment.nodes["struck"].charges) == MANY
    first = storm.run.history[0]
    assert (first["asked"], first["releases"], first["lost_nodes"]) == (MANY + 2 * CLIENTS, 2 * CLIENTS, 1)


def test_no_ledger_counts_less_than_the_server_used(deployment: Deployment, storm: Storm) -> None:
    charged = sum(len(node.charges) for node in deployment.nodes.values())
    assert 0 < storm.run.releases <= charged - MANY, "the struck site paid for nothing"


def test_only_a_site_itself_reads_what_is_wrong_with_its_data(deployment: Deployment, storm: Storm) -> None:
    broken = deployment.nodes["broken"]
    assert "features of client 2, row 25, are not finite; remove or repair that row" in broken.log
    assert "Traceback" in broken.log
    assert not broken.charges
    log = deployment.server_log(storm.run)
    assert f"node {broken.node_id} cannot take part: refused" in log
    assert "not finite" not in log


def test_a_node_that_joins_later_takes_part_from_then_on(storm: Storm) -> None:
    assert storm.late.charges
    assert 1 not in {row["round"] for row in storm.late.charges}


def test_a_run_that_a_dying_superlink_cuts_off_keeps_its_rounds_and_can_go_on(
    deployment: Deployment, storm: Storm
) -> None:
    """The SuperLink takes its ServerApp along; its nodes wait and come back by themselves."""
    config = SHORT | {"rounds": 2, "clients_per_round": MANY + 2 * CLIENTS}
    run = deployment.submit(**config)
    wait_until("end of round 1", lambda: run.history, 90.0)
    deployment.superlink.kill()
    kept = run.history
    deployment.start_superlink()
    # Until Flower has given the run up, its nodes are busy with the message that was lost.
    assert deployment.wait(run) == "finished:failed"
    assert run.history == kept

    following = deployment.submit(**config, resume=run.folder.name)
    assert deployment.wait(following) == "finished:completed"
    assert run.history[: len(kept)] == kept
    assert [entry["releases"] for entry in run.history] == [MANY + 2 * CLIENTS] * 2
