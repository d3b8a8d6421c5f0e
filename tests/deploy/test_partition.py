"""A site whose network is down for some rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.deploy.conftest import CLIENTS, SHORT, write_site
from tests.deploy.namespace import Namespace, NamespaceError, namespace
from tests.deploy.processes import RUN_S, Deployment, Run, wait_until
from tests.deploy.tampered.sitecustomize import HOLD
from tests.helpers.paper import ACCEPTED

pytestmark = [
    pytest.mark.rest(twin="tests/privacy/site/test_crash.py::test_a_kill_between_charge_and_release_leaves_the_charge"),
    pytest.mark.timeout(5400),
]

ROUNDS = 5
NOTICE_S = 120.0
"""The longest that Flower takes to notice that a node is gone, and that the server waits for a round's replies."""


@pytest.fixture(scope="module")
def network() -> Iterator[Namespace]:
    with ExitStack() as stack:
        try:
            network = stack.enter_context(namespace())
        except NamespaceError as error:
            pytest.skip(f"needs a network namespace, so root and iproute2: {error}")
        yield network


@pytest.fixture(scope="module")
def deployment(network: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two sites on this machine and one behind a cable."""
    with Deployment(tmp_path_factory.mktemp("deployment"), network.host, soon=True) as deployment:
        for name, within in [("north", ()), ("south", ()), ("island", network.within)]:
            data_path = write_site(deployment.folder / "data" / name, len(name))
            deployment.start_node(name, tampered=True, within=within, **ACCEPTED, **{"data-path": data_path})
        deployment.wait_until_online()
        yield deployment


@pytest.fixture(scope="module")
def run(deployment: Deployment, network: Namespace) -> Run:
    """The cable is pulled out when the island's reply of round 2 is due, and is back in before round 3 is over."""
    north, island = deployment.nodes["north"], deployment.nodes["island"]
    north.tamper({3: HOLD})
    island.tamper({2: HOLD})
    run = deployment.submit(**SHORT, rounds=ROUNDS, clients_per_round=3 * CLIENTS, round_timeout=NOTICE_S)
    wait_until("charge of round 2", lambda: 2 in island.rounds_paid(run), RUN_S)
    network.unplug()
    island.tamper({})
    wait_until("round 3", lambda: north.has_heard_of(3, run), RUN_S)
    network.plug_in()
    deployment.wait_until_online("island")
    assert run.rounds == 2
    north.tamper({})
    assert deployment.wait(run) == "finished:completed"
    return run


def test_the_others_go_on_without_it_and_keep_every_round(run: Run) -> None:
    assert [entry["number"] for entry in run.history] == list(range(ROUNDS + 1))
    assert [entry["moved"] for entry in run.history[1:]] == [True] * ROUNDS


def test_the_island_is_left_out_and_takes_part_again_once_it_is_back(run: Run) -> None:
    everybody, others = 3 * CLIENTS, 2 * CLIENTS
    assert [(entry["asked"], entry["releases"], entry["lost_nodes"]) for entry in run.history[1:]] == [
        (everybody, everybody, 0),
        (everybody, others, 1),
        (others, others, 0),
        (everybody, everybody, 0),
        (everybody, everybody, 0),
    ]


def test_the_release_that_was_cut_off_is_paid_for_like_any_other(deployment: Deployment, run: Run) -> None:
    assert deployment.nodes["island"].rounds_paid(run) == [1, 2, 4, 5]
