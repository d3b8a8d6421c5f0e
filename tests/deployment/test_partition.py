"""A site whose network is down for some rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.deployment.conftest import CLIENTS, SHORT, write_site
from tests.deployment.namespace import Namespace, NamespaceError, namespace
from tests.deployment.processes import Deployment, Run, wait_until
from tests.deployment.tampered.sitecustomize import HOLD

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(900)]

ROUND_S = 45.0
ROUNDS = 5


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
    with Deployment(tmp_path_factory.mktemp("deployment"), network.host) as deployment:
        for name, within in [("north", ()), ("south", ()), ("island", network.within)]:
            data_path = write_site(deployment.folder / "data" / name, len(name))
            deployment.start_node(name, tampered=True, within=within, **{"data-path": data_path})
        deployment.wait_until_online()
        yield deployment


@pytest.fixture(scope="module")
def run(deployment: Deployment, network: Namespace) -> Run:
    """The cable is out while the island's reply of round 2 is due, and back in when round 3 is over."""
    island = deployment.nodes["island"]
    island.tamper({2: HOLD})
    run = deployment.submit(**SHORT, rounds=ROUNDS, clients_per_round=3 * CLIENTS, round_timeout=ROUND_S)
    wait_until("charge of round 2", lambda: 2 in island.rounds_paid(run), 180.0)
    network.unplug()
    island.tamper({})
    wait_until("end of round 3", lambda: run.rounds >= 3, 4 * ROUND_S)
    network.plug_in()
    assert deployment.wait(run) == "finished:completed"
    return run


def test_the_others_go_on_without_it_and_keep_every_round(run: Run) -> None:
    assert [entry["number"] for entry in run.history] == list(range(1, ROUNDS + 1))
    assert [entry["moved"] for entry in run.history] == [True] * ROUNDS
    assert [(entry["releases"], entry["lost_nodes"]) for entry in run.history[:3]] == [
        (3 * CLIENTS, 0),
        (2 * CLIENTS, 1),
        (2 * CLIENTS, 0),
    ]


def test_the_island_takes_part_again_and_has_paid_for_what_was_lost(deployment: Deployment, run: Run) -> None:
    assert run.history[-1]["releases"] == 3 * CLIENTS
    used = sum(entry["releases"] - 2 * CLIENTS for entry in run.history)
    charged = [row for row in deployment.nodes["island"].charges if row["run"] in run.ids]
    assert 2 in {row["round"] for row in charged}
    assert len(charged) >= used + CLIENTS, "the release of round 2 was lost, its charge was not"
