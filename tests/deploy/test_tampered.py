"""A site whose client processes answer garbage, or answer late, and what the server and the other sites make of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.deploy.conftest import CLIENTS, SHORT, TRAIN, deployed, start_site
from tests.deploy.processes import RUN_S, Deployment, wait_until
from tests.deploy.tampered.sitecustomize import GARBAGE, HOLD, UNREADABLE

pytestmark = [
    pytest.mark.rest(twin="tests/privacy/site/test_crash.py::test_a_kill_between_charge_and_release_leaves_the_charge"),
    pytest.mark.timeout(5400),
]

EVERYBODY = TRAIN + 2 * CLIENTS
OTHERS = EVERYBODY - CLIENTS
ROUND_S = 150.0
"""How long the server waits for a round's replies."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Three sites, of which the north lets a client report; what a site does otherwise each run says."""
    with deployed(tmp_path_factory.mktemp("deployment"), soon=False) as deployment:
        for name, slope, role in [("north", 3.0, "split"), ("south", 2.0, "train"), ("tampered", -3.0, "train")]:
            start_site(deployment, name, slope, role=role)
        deployment.wait_until_online()
        yield deployment


def test_garbage_is_a_lost_reply_which_its_site_pays_for_and_the_others_go_on_learning(deployment: Deployment) -> None:
    """The tampered site sends garbage of another kind in every round but the last."""
    deployment.nodes["tampered"].tamper(dict(enumerate(GARBAGE, 1)))
    run = deployment.submit(**SHORT, rounds=len(GARBAGE) + 1, clients_per_round=EVERYBODY)
    assert deployment.wait(run) == "finished:completed"
    _, *spoilt, whole = run.history
    assert [(entry["releases"], entry["lost_nodes"]) for entry in spoilt] == [(OTHERS, 1)] * len(GARBAGE)
    assert (whole["releases"], whole["lost_nodes"]) == (EVERYBODY, 0)
    assert all(entry["moved"] for entry in run.history[1:])
    assert all(np.isfinite(entry["loss"]) for entry in run.history)
    assert all(np.isfinite(value).all() for value in run.hypotheses().values())
    rounds = [*range(1, len(GARBAGE) + 2)]
    assert [node.rounds_paid(run) for node in deployment.nodes.values()] == [rounds] * 3


def test_what_flower_itself_cannot_read_is_a_lost_reply_too(deployment: Deployment) -> None:
    deployment.nodes["tampered"].tamper({1: UNREADABLE})
    run = deployment.submit(**SHORT, rounds=1, clients_per_round=EVERYBODY)
    assert deployment.wait(run) == "finished:completed"
    assert (run.history[1]["releases"], run.history[1]["lost_nodes"]) == (OTHERS, 1)


def test_a_site_that_misses_the_deadline_pays_and_is_left_out_for_a_round(deployment: Deployment) -> None:
    """It keeps its reply of round 2 back until the round has ended without it."""
    tampered = deployment.nodes["tampered"]
    tampered.tamper({2: HOLD})
    run = deployment.submit(**SHORT, rounds=5, clients_per_round=EVERYBODY, round_timeout=ROUND_S)
    wait_until("end of round 2", lambda: run.rounds == 2, RUN_S)
    tampered.tamper({})
    assert deployment.wait(run) == "finished:completed"
    assert [(entry["asked"], entry["releases"], entry["lost_nodes"]) for entry in run.history] == [
        (0, 0, 0),
        (EVERYBODY, EVERYBODY, 0),
        (EVERYBODY, OTHERS, 1),
        (OTHERS, OTHERS, 0),
        (EVERYBODY, EVERYBODY, 0),
        (EVERYBODY, EVERYBODY, 0),
    ]
    assert run.history[2]["seconds"] >= ROUND_S, "it is waited for; that the wait ends the run itself shows"
    assert tampered.rounds_paid(run) == [1, 2, 4, 5]


def test_a_reply_that_comes_after_the_quorum_is_counted_and_not_used(deployment: Deployment) -> None:
    """Unlike one after the deadline, with which the message has died, so that the SuperLink takes no reply to it."""
    south, tampered = deployment.nodes["south"], deployment.nodes["tampered"]
    tampered.tamper({1: HOLD})
    south.tamper({2: HOLD})
    run = deployment.submit(**SHORT, rounds=2, clients_per_round=EVERYBODY, quorum=0.6)
    wait_until("round 2", lambda: south.has_heard_of(2, run), RUN_S)
    tampered.tamper({})
    wait_until("late reply", lambda: tampered.has_answered(1, run), RUN_S)
    south.tamper({})
    assert deployment.wait(run) == "finished:completed"
    assert [(entry["asked"], entry["releases"], entry["dropped"]) for entry in run.history] == [
        (0, 0, 0),
        (EVERYBODY, OTHERS, 0),
        (OTHERS, OTHERS, 1),
    ]
    assert tampered.rounds_paid(run) == [1]
