"""Sites that are away: a run waits for them, says so, and continues by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.conftest import CLIENTS, SHORT, write_site
from tests.deploy.processes import RUN_S, Deployment, Run, wait_until
from tests.deploy.tampered.sitecustomize import HOLD
from tests.helpers.paper import ACCEPTED

pytestmark = [pytest.mark.rest, pytest.mark.timeout(5400)]

ROUND_S = 900.0
ROUNDS = 4


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("deployment"), soon=True) as deployment:
        for name in ("north", "south"):
            start_site(deployment, name)
        deployment.wait_until_online()
        yield deployment


def start_site(deployment: Deployment, name: str, **policy: Any) -> None:
    data_path = write_site(deployment.folder / "data" / name, len(name))
    deployment.start_node(name, tampered=True, **ACCEPTED | policy, **{"data-path": data_path})


def sites(run: Run) -> dict[str, dict[str, Any]]:
    """Return what ``umbel server status`` reads, by name."""
    return {site["name"]: site for site in json.loads((run.folder / "status.json").read_text())["sites"]}


def test_a_run_pauses_says_for_whom_it_waits_and_continues_by_itself(deployment: Deployment) -> None:
    """South dies in round 2 while north holds its reply back, and returns after the run has paused."""
    north, south = deployment.nodes.values()
    north.tamper({2: HOLD})
    south.tamper({2: HOLD})
    config = SHORT | {"wait": "nodes=2 below=2", "rounds": ROUNDS, "clients_per_round": 2 * CLIENTS}
    run = deployment.submit(**config, round_timeout=ROUND_S)
    wait_until("round 2", lambda: 2 in south.rounds_paid(run) and 2 in north.rounds_paid(run), RUN_S)
    south.kill()
    south.tamper({})
    north.tamper({})
    wait_until("pause", lambda: "Paused before round 3" in deployment.server_log(run), RUN_S)
    assert run.rounds == 2
    found = sites(run)
    assert found["north"]["presence"] == "online"
    assert found["south"]["presence"] in {"offline", "silent"}
    assert "site south (" in deployment.server_log(run)

    deployment.restart_node("south")
    assert deployment.wait(run) == "finished:completed"
    assert "The run continues with round 3" in deployment.server_log(run)
    assert [entry["number"] for entry in run.history] == list(range(ROUNDS + 1))
    assert [entry["releases"] for entry in run.history[1:]] == [2 * CLIENTS, CLIENTS, 2 * CLIENTS, 2 * CLIENTS]


def test_a_site_that_refuses_is_named_with_its_code_and_one_without_registration_is_not_asked(
    deployment: Deployment,
) -> None:
    """Of rounds 1 to 4 the site that refuses is left out of the second, and the other's registration ends in it."""
    start_site(deployment, "strict", **{"min-noise-multiplier": 100.0})
    deployment.wait_until_online()
    north = deployment.nodes["north"]
    north.tamper({2: HOLD})
    run = deployment.submit(**SHORT | {"rounds": ROUNDS, "clients_per_round": 3 * CLIENTS}, round_timeout=ROUND_S)
    wait_until("round 2", lambda: 2 in north.rounds_paid(run), RUN_S)
    deployment.remove_node("south")
    north.tamper({})
    assert deployment.wait(run) == "finished:completed"
    assert [entry["asked"] for entry in run.history][2:] == [2 * CLIENTS, 2 * CLIENTS, CLIENTS]
    found = sites(run)
    assert found["strict"]["releases"] == 0
    assert found["strict"]["refusals"] == {"refused.noise": 2}
    assert found["south"]["presence"] == "offline"
    assert "site strict refused the task of round 1" in deployment.server_log(run)
