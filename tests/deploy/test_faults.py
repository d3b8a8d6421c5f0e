"""Processes that die, lie or are refused, and what the others make of it.

Nothing here races a clock: a site that holds its reply back keeps a round open until what is to happen in it has
happened, and what ends a wait is Flower's own notice that a process is gone, which takes it a minute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.deploy.conftest import CLIENTS, SHORT, TRAIN, deployed, start_site, write_site
from tests.deploy.processes import RETURN_S, RUN_S, Deployment, Member, wait_until
from tests.deploy.tampered.sitecustomize import GARBAGE, HOLD, UNREADABLE
from tests.helpers.paper import ACCEPTED
from tests.strategies.test_secure_average import keys
from umbel.deploy import certs

pytestmark = pytest.mark.timeout(5400)

CRASH = pytest.mark.rest(
    twin="tests/privacy/site/test_journal_restored.py::test_what_left_is_paid_for_whenever_the_process_is_killed"
)
REFUSED = pytest.mark.rest(twin="tests/deploy/test_node.py::test_a_node_ends_where_time_does_not_help")
SUMS = pytest.mark.rest(twin="tests/privacy/channels/secure/test_sums.py::test_parties_may_fall_silent_at_any_stage")


OWN = Path(__file__).parents[1] / "helpers" / "own"
"""Where a strategy of one's own lies."""
ROUND_S = 900.0
"""How long the server would wait for a round's replies; Flower notices in one minute or two that a process is gone."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    with deployed(folder, "steady", "struck", "lost", server_path=[OWN], database=True) as deployment:
        yield deployment


@CRASH
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


@CRASH
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


# --- garbage


EVERYBODY = TRAIN + 2 * CLIENTS
OTHERS = EVERYBODY - CLIENTS


@pytest.fixture(scope="module")
def garbled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Three sites, of which the north lets a client report; what a site does otherwise each run says."""
    with deployed(tmp_path_factory.mktemp("deployment"), soon=False) as deployment:
        for name, slope, role in [("north", 3.0, "split"), ("south", 2.0, "train"), ("tampered", -3.0, "train")]:
            start_site(deployment, name, slope, role=role)
        deployment.wait_until_online()
        yield deployment


@CRASH
def test_garbage_is_a_lost_reply_which_its_site_pays_for_and_the_others_go_on_learning(garbled: Deployment) -> None:
    """The tampered site sends garbage of another kind in every round but the last two.

    The last kind Flower itself cannot read, so that its node is left out for a round, as one that was silent.
    """
    kinds = [*GARBAGE, UNREADABLE]
    garbled.nodes["tampered"].tamper(dict(enumerate(kinds, 1)))
    run = garbled.submit(**SHORT, rounds=len(kinds) + 2, clients_per_round=EVERYBODY)
    assert garbled.wait(run) == "finished:completed"
    _, *spoilt, without, whole = run.history
    assert [(entry["releases"], entry["lost_nodes"]) for entry in spoilt] == [(OTHERS, 1)] * len(kinds)
    assert [(entry["releases"], entry["lost_nodes"]) for entry in (without, whole)] == [(OTHERS, 0), (EVERYBODY, 0)]
    assert all(entry["moved"] for entry in run.history[1:])
    assert all(np.isfinite(entry["loss"]) for entry in run.history)
    assert all(np.isfinite(value).all() for value in run.hypotheses().values())
    *others, tampered = (node.rounds_paid(run) for node in garbled.nodes.values())
    assert others == [[*range(1, len(kinds) + 3)]] * 2
    assert tampered == [*range(1, len(kinds) + 1), len(kinds) + 2]


# --- sites that refuse the server, or that it refuses


ENDS_S = 900.0
ROUNDS = SHORT | {"rounds": 2, "clients_per_round": 6, "wait": "nodes=2"}


def end(member: Member) -> tuple[int, str]:
    """Return the exit code of a node, and its last error's."""
    code = member.process.wait(ENDS_S)
    [*_, error] = [line for line in member.log.splitlines() if line.startswith("Error: ")]
    return code, error.rpartition("[")[2].rstrip("]")


@REFUSED
def test_what_time_does_not_heal_ends_a_site_with_the_reason_and_it_waits_for_the_rest(tmp_path: Path) -> None:
    with deployed(tmp_path / "deployment", "site") as deployment:
        ahead = start_site(deployment, "ahead", ahead=60)
        assert end(ahead) == (1, "site.clock")
        # Less by the time that its request took.
        assert re.search(r"\b[1-6]\d s ahead of", ahead.log)
        assert "terminated gracefully" not in ahead.log
        # Back within a minute of a kill, it waits until its last session is over.
        site = deployment.nodes["site"]
        assert site.ready() == (200, "")
        site.kill()
        again = deployment.start_again("site")
        wait_until("refusal", lambda: again.ready() == (503, "site.key-refused"), ENDS_S)
        wait_until("admission", lambda: again.ready() == (200, ""), RETURN_S)
        assert len({*again.node_ids}) == 1
        assert again.process.poll() is None
        # Without its key it ends at once, and after a while where it tries that again.
        deployment.flwr("supernode", "unregister", again.node_id, "deployment")
        assert end(again) == (1, "site.key-refused")
        last = deployment.start_again("site")
        assert end(last) == (1, "site.key-refused")
        assert "make another" in last.log
        assert not any("Traceback" in node.log for node in (ahead, last))


def restart(deployment: Deployment, days: float) -> None:
    """Start the server again with a certificate that is valid for so many days."""
    deployment.superlink.kill()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certs, "SERVER_DAYS", days)
        patch.setattr(certs, "RENEW_DAYS", certs.CA_DAYS)  # at once
        deployment.write_certificate()
    deployment.start_superlink(verified=days > 0)


@REFUSED
def test_sites_wait_while_the_certificate_has_expired_and_go_on_after_its_renewal(tmp_path: Path) -> None:
    with deployed(tmp_path / "deployment", "north", "south", database=True) as deployment:
        before = deployment.submit(**ROUNDS)
        assert deployment.wait(before) == "finished:completed"
        restart(deployment, days=-0.01)
        for node in deployment.nodes.values():
            wait_until(f"refusal by {node.name}", lambda node=node: node.ready() == (503, "site.certificate"), RETURN_S)
            assert "certificate has expired" in node.log
            assert "umbel certs" in node.log
        restart(deployment, days=certs.SERVER_DAYS)
        for node in deployment.nodes.values():
            wait_until(f"return of {node.name}", lambda node=node: node.ready() == (200, ""), RETURN_S)
            assert len({*node.node_ids}) == 1, "a site that was never started again keeps its number"
            assert "Traceback" not in node.log
        after = deployment.submit(**ROUNDS)
        assert deployment.wait(after) == "finished:completed"
        assert sum(len(node.charges) for node in deployment.nodes.values()) == before.releases + after.releases


# --- secure sums, while a quarter or more are killed between two exchanges


STAGES = {"mask": "1", "agree": "secure agree", "open": "secure open"}
"""The messages that a killed site has read, by exchange: those of round 1, and two that ask for no training."""
SIZES = [(4, 1), (10, 3), (20, 6)]


@SUMS
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("sites", "killed"), SIZES)
def test_a_round_is_added_without_sites_that_were_killed(tmp_path: Path, stage: str, sites: int, killed: int) -> None:
    """They have read a message of the exchange, and die before they reply. All rounds move the hypothesis, and none
    waits for them.

    Sites that die after the first exchange are in the first sum; the others do without them from then on.
    """
    names = [f"site-{number:02}" for number in range(sites)]
    with Deployment(tmp_path / "deployment", soon=True) as deployment:
        paths, listed = keys(tmp_path / "keys", *names)
        for number, name in enumerate(names):
            policy = ACCEPTED | {
                "data-path": write_site(tmp_path / "data" / name, number / sites), "release": "secure",
                "parties": listed, "party-key": paths[name], "mechanisms": "discrete-gaussian",
            }  # fmt: skip
            deployment.start_node(name, tampered=number < killed, **policy)
        deployment.wait_until_online()
        doomed = [deployment.nodes[name] for name in names[:killed]]
        for node in doomed:
            node.tamper({STAGES[stage]: HOLD})  # type: ignore[dict-item]
        config = SHORT | {
            "strategy": "secure-average explore=0.0", "mechanism": "discrete-gaussian",
            "clipping": "public", "hypotheses": 1, "rounds": 3, "clients_per_round": sites * CLIENTS,
            "wait": f"nodes={sites} below={sites - killed}",
        }  # fmt: skip
        run = deployment.submit(**config)
        for node in doomed:
            wait_until("the message", lambda node=node: node.has_heard_of(STAGES[stage], run), RUN_S)
        for node in doomed:
            node.kill()
        assert deployment.wait(run) == "finished:completed"
        trained = [entry for entry in run.history if entry["asked"]]
        left = (sites - killed) * CLIENTS
        assert all(entry["moved"] for entry in trained)
        assert [entry["releases"] for entry in trained] == [
            left if stage == "mask" else sites * CLIENTS, left, left,
        ]  # fmt: skip
        assert {row["kind"] for row in deployment.nodes[names[-1]].charges} == {"secure"}
