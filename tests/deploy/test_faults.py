"""Processes that die, and what the others make of it.

Nothing here races a clock: a site that holds its reply back keeps a round open until what is to happen in it has
happened, and what ends a wait is Flower's own notice that a process is gone, which takes it a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.deploy.conftest import CLIENTS, SHORT, write_site
from tests.deploy.processes import RUN_S, Deployment, Member, Run, wait_until
from tests.deploy.tampered.sitecustomize import HOLD
from tests.helpers.paper import ACCEPTED

pytestmark = [
    pytest.mark.rest(twin="tests/privacy/site/test_crash.py::test_a_kill_between_charge_and_release_leaves_the_charge"),
    pytest.mark.timeout(5400),
]

OWN = Path(__file__).parents[1] / "helpers" / "own"
"""Where a strategy of one's own lies."""
ROUND_S = 900.0
"""How long the server would wait for a round's replies; Flower notices in one minute or two that a process is gone."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("deployment"), server_path=[OWN], database=True, soon=True) as deployment:
        for name in ("steady", "struck", "lost"):
            start_site(deployment, name)
        deployment.wait_until_online()
        yield deployment


def start_site(deployment: Deployment, name: str, spoilt: bool = False) -> Member:
    data_path = write_site(deployment.folder / "data" / name, len(name))
    if spoilt:
        spoil(Path(data_path))
    return deployment.start_node(name, tampered=True, **ACCEPTED, **{"data-path": data_path})


def spoil(data: Path) -> None:
    """Leave a row of client 2 without a value."""
    features = np.load(data / "features.npy")
    features[25] = np.nan
    np.save(data / "features.npy", features)


@dataclass
class Storm:
    """A run in whose first round a client process and a SuperNode die; the SuperNode comes back, others join.

    The second round lasts until the SuperNode is back and the others are there, the third until one that joined has
    said what it hosts.
    """

    run: Run
    status: str
    late: Member
    broken: Member


@pytest.fixture(scope="module")
def storm(deployment: Deployment) -> Storm:
    steady, struck, lost = deployment.nodes.values()
    steady.tamper({2: HOLD, 3: HOLD})
    struck.tamper({1: HOLD})
    lost.tamper({1: HOLD})
    run = deployment.submit(**SHORT, rounds=5, clients_per_round=3 * CLIENTS, round_timeout=ROUND_S)

    wait_until("charges of round 1", lambda: struck.charges and lost.charges, RUN_S)
    [process] = struck.client_apps
    process.kill()
    lost.kill()
    struck.tamper({})
    lost.tamper({})

    wait_until("round 2", lambda: steady.has_heard_of(2, run), RUN_S)
    deployment.restart_node("lost")
    late, broken = start_site(deployment, "late"), start_site(deployment, "broken", spoilt=True)
    deployment.wait_until_online()
    assert len(run.history) == 1, "the first round is not complete yet"
    steady.tamper({3: HOLD})
    for joining in (late, broken):
        wait_until("answer of a site that joins", partial(joining.has_answered, "query", run), RUN_S)
    assert len(run.history) == 2
    steady.tamper({})
    return Storm(run, deployment.wait(run), late, broken)


def test_a_run_goes_on_without_the_nodes_it_loses_and_keeps_every_round(storm: Storm) -> None:
    assert storm.status == "finished:completed"
    assert [entry["number"] for entry in storm.run.history] == [0, 1, 2, 3, 4, 5]
    assert [entry["moved"] for entry in storm.run.history[1:]] == [True] * 5


def test_a_round_waits_no_longer_than_until_the_dead_are_known_to_be_dead(storm: Storm) -> None:
    assert storm.run.history[1]["seconds"] < ROUND_S


def test_what_was_charged_before_a_process_died_stands_and_was_not_used(deployment: Deployment, storm: Storm) -> None:
    first = storm.run.history[1]
    assert (first["asked"], first["releases"], first["lost_nodes"]) == (3 * CLIENTS, CLIENTS, 2)
    for name in ("struck", "lost"):
        assert sum(row["round"] == 1 for row in deployment.nodes[name].charges) == CLIENTS


def test_a_site_whose_client_process_died_is_asked_again_at_once(deployment: Deployment, storm: Storm) -> None:
    assert deployment.nodes["struck"].rounds_paid(storm.run) == [1, 2, 3, 4, 5]


def test_a_supernode_that_comes_back_with_its_key_takes_part_again_with_its_ledger(
    deployment: Deployment, storm: Storm
) -> None:
    """It is left out of the round after the one that it missed."""
    lost = deployment.nodes["lost"]
    assert lost.rounds_paid(storm.run) == [1, 3, 4, 5]
    assert len(set(lost.node_ids)) == 1, "the key makes it the same node"
    assert [entry["releases"] for entry in storm.run.history[2:4]] == [2 * CLIENTS, 3 * CLIENTS]


def test_a_node_that_joins_is_asked_what_it_hosts_and_takes_part_from_the_next_round_on(storm: Storm) -> None:
    """It is there while round 2 goes on, and says what it hosts in round 3."""
    assert storm.late.rounds_paid(storm.run) == [4, 5]
    assert storm.late.has_heard_of("query", storm.run)


def test_only_a_site_itself_reads_what_is_wrong_with_its_data(deployment: Deployment, storm: Storm) -> None:
    broken = storm.broken
    assert "features of client 2, row 25" in broken.log
    assert "[data.not-finite]" in broken.log
    assert "umbel refused to answer" in broken.log
    assert not broken.charges
    log = deployment.server_log(storm.run)
    assert "site broken cannot take part: it says refused" in log
    assert "not finite" not in log


@pytest.mark.parametrize("victim", ["ServerApp", "SuperLink"])
def test_a_run_whose_server_dies_keeps_its_rounds_and_can_go_on(deployment: Deployment, victim: str) -> None:
    """The SuperLink takes its ServerApp along; its nodes wait and come back by themselves."""
    own = {"strategy": "momentum:Momentum momentum=0.5"}
    config = SHORT | own | {"rounds": 2, "clients_per_round": 3 * CLIENTS}
    run = deployment.submit(**config)
    wait_until("end of round 1", lambda: run.rounds, RUN_S)
    if victim == "ServerApp":
        [process] = deployment.superlink.server_apps
        process.kill()
    else:
        deployment.superlink.kill()
        deployment.start_superlink()
    kept = run.history
    # Until Flower has given the run up, its nodes are busy with the message that was lost.
    assert deployment.wait(run) == "finished:failed"
    assert run.history == kept

    deployment.resume(run, **config)
    assert deployment.wait(run) == "finished:completed"
    assert run.history[: len(kept)] == kept
    assert [entry["releases"] for entry in run.history[1:]] == [3 * CLIENTS] * 2
    assert {"strategy/step-0", "strategy/step-1"} & set(run.hypotheses()), "what the strategy keeps is there as well"
