"""Processes that die, sites that are away or cut off, and what the others make of it.

Nothing here races a clock: a site that holds its reply back keeps a round open until what is to happen in it has
happened, and what ends a wait is Flower's own notice that a process is gone, which takes it a minute.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.deploy.conftest import CLIENTS, SHORT, deployed, start_site, write_site
from tests.deploy.namespace import NamespaceError, namespace
from tests.deploy.processes import RUN_S, Deployment, Run, wait_until
from tests.deploy.tampered.sitecustomize import HOLD

pytestmark = [
    pytest.mark.rest(twin="tests/privacy/site/test_crash.py::test_a_kill_between_charge_and_release_leaves_the_charge"),
    pytest.mark.timeout(5400),
]

OWN = Path(__file__).parents[1] / "helpers" / "own"
"""Where a strategy of one's own lies."""
ROUND_S = 900.0
"""How long the server would wait for a round's replies; Flower notices in one minute or two that a process is gone."""
NOTICE_S = 120.0
"""The longest that Flower takes to notice that a node is gone, where the server waits no longer either."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    with deployed(folder, "steady", "struck", "lost", server_path=[OWN], database=True) as deployment:
        yield deployment


def test_a_run_goes_on_without_what_it_loses_and_takes_back_what_returns(deployment: Deployment) -> None:
    """In round 1 a client process and a SuperNode die. The SuperNode comes back, a site joins, and one with bad data.

    The second round lasts until the SuperNode is back and the others are there, the third until those that joined have
    said what they host.
    """
    spoilt = write_site(deployment.folder / "data" / "spoilt", 6.0)
    features = np.load(file := Path(spoilt) / "features.npy")
    features[25] = np.nan  # of client 2
    np.save(file, features)
    steady, struck, lost = deployment.nodes.values()
    steady.tamper({2: HOLD, 3: HOLD})
    for dying in (struck, lost):
        dying.tamper({1: HOLD})
    run = deployment.submit(**SHORT, rounds=5, clients_per_round=3 * CLIENTS, round_timeout=ROUND_S)
    wait_until("charges of round 1", lambda: struck.charges and lost.charges, RUN_S)
    [process] = struck.client_apps
    process.kill()
    lost.kill()
    for dying in (struck, lost):
        dying.tamper({})

    wait_until("round 2", lambda: steady.has_heard_of(2, run), RUN_S)
    deployment.restart_node("lost")
    late, broken = start_site(deployment, "late"), start_site(deployment, "broken", **{"data-path": spoilt})
    deployment.wait_until_online()
    assert len(run.history) == 1, "the first round is not complete yet"
    steady.tamper({3: HOLD})
    for joining in (late, broken):
        wait_until("answer of a site that joins", partial(joining.has_answered, "query", run), RUN_S)
    assert len(run.history) == 2
    steady.tamper({})
    assert deployment.wait(run) == "finished:completed"

    _, first, *others = run.history
    assert [entry["number"] for entry in run.history] == [0, 1, 2, 3, 4, 5]
    assert all(entry["moved"] for entry in (first, *others))
    assert first["seconds"] < ROUND_S, "no longer than until the dead are known to be dead"
    assert (first["asked"], first["releases"], first["lost_nodes"]) == (3 * CLIENTS, CLIENTS, 2)
    assert [entry["releases"] for entry in others[:2]] == [2 * CLIENTS, 3 * CLIENTS]
    # What was charged before a process died stands, and was not used.
    returned = deployment.nodes["lost"]
    for node in (struck, returned):
        assert sum(row["round"] == 1 for row in node.charges) == CLIENTS
    assert struck.rounds_paid(run) == [1, 2, 3, 4, 5], "a site whose client process died is asked again at once"
    assert returned.rounds_paid(run) == [1, 3, 4, 5], "it is left out of the round after the one that it missed"
    assert len(set(returned.node_ids)) == 1, "the key makes it the same node"
    # It is there while round 2 goes on, and says what it hosts in round 3.
    assert late.rounds_paid(run) == [4, 5]
    # Only the site itself reads what is wrong with its data.
    for words in ("features of client 2, row 25", "[data.not-finite]", "umbel refused to answer"):
        assert words in broken.log
    assert not broken.charges
    log = deployment.server_log(run)
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


def test_a_run_waits_for_sites_that_are_away_says_so_and_continues_by_itself(tmp_path: Path) -> None:
    """First south dies and returns. In another run a site refuses, and south's registration ends."""

    def sites(run: Run) -> dict[str, dict[str, Any]]:
        """Return what ``umbel server status`` reads, by name."""
        return {site["name"]: site for site in json.loads((run.folder / "status.json").read_text())["sites"]}

    with deployed(tmp_path / "deployment", "north", "south") as deployment:
        north, south = deployment.nodes.values()
        for node in (north, south):
            node.tamper({2: HOLD})
        config = SHORT | {"rounds": 4, "round_timeout": ROUND_S}
        run = deployment.submit(**config | {"wait": "nodes=2 below=2", "clients_per_round": 2 * CLIENTS})
        wait_until("round 2", lambda: 2 in south.rounds_paid(run) and 2 in north.rounds_paid(run), RUN_S)
        south.kill()
        for node in (south, north):
            node.tamper({})
        wait_until("pause", lambda: "Paused before round 3" in deployment.server_log(run), RUN_S)
        assert run.rounds == 2
        assert sites(run)["north"]["presence"] == "online"
        assert sites(run)["south"]["presence"] in {"offline", "silent"}
        assert "site south (" in deployment.server_log(run)
        deployment.restart_node("south")
        assert deployment.wait(run) == "finished:completed"
        assert "The run continues with round 3" in deployment.server_log(run)
        assert [entry["number"] for entry in run.history] == [0, 1, 2, 3, 4]
        assert [entry["releases"] for entry in run.history[1:]] == [2 * CLIENTS, CLIENTS, 2 * CLIENTS, 2 * CLIENTS]

        start_site(deployment, "strict", **{"min-noise-multiplier": 100.0})
        deployment.wait_until_online()
        north.tamper({2: HOLD})
        run = deployment.submit(**config | {"clients_per_round": 3 * CLIENTS})
        wait_until("round 2", lambda: 2 in north.rounds_paid(run), RUN_S)
        deployment.remove_node("south")
        north.tamper({})
        assert deployment.wait(run) == "finished:completed"
        assert [entry["asked"] for entry in run.history][2:] == [2 * CLIENTS, 2 * CLIENTS, CLIENTS]
        assert (sites(run)["strict"]["releases"], sites(run)["strict"]["refusals"]) == (0, {"refused.noise": 2})
        assert sites(run)["south"]["presence"] == "offline"
        assert "site strict refused the task of round 1" in deployment.server_log(run)


def test_a_site_whose_cable_is_pulled_out_is_left_out_and_takes_part_again_once_it_is_back(tmp_path: Path) -> None:
    """That happens when its reply of round 2 is due, and the cable is back in before round 3 is over."""
    try:
        with namespace() as network, deployed(tmp_path / "deployment", "north", "south", host=network.host) as three:
            north, island = three.nodes["north"], start_site(three, "island", within=network.within)
            three.wait_until_online()
            north.tamper({3: HOLD})
            island.tamper({2: HOLD})
            run = three.submit(**SHORT, rounds=5, clients_per_round=3 * CLIENTS, round_timeout=NOTICE_S)
            wait_until("charge of round 2", lambda: 2 in island.rounds_paid(run), RUN_S)
            network.plug("down")
            island.tamper({})
            wait_until("round 3", lambda: north.has_heard_of(3, run), RUN_S)
            network.plug("up")
            three.wait_until_online("island")
            assert run.rounds == 2
            north.tamper({})
            assert three.wait(run) == "finished:completed"
    except NamespaceError as error:
        pytest.skip(f"needs a network namespace, so root and iproute2: {error}")
    everybody, others = 3 * CLIENTS, 2 * CLIENTS
    assert [(entry["asked"], entry["releases"], entry["lost_nodes"]) for entry in run.history[1:]] == [
        (everybody, everybody, 0),
        (everybody, others, 1),
        (others, others, 0),
        (everybody, everybody, 0),
        (everybody, everybody, 0),
    ]
    assert all(entry["moved"] for entry in run.history[1:])
    assert island.rounds_paid(run) == [1, 2, 4, 5], "the release that was cut off is paid for like any other"
