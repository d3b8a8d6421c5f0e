"""Sites as processes, which add their sums securely; a quarter or more are killed between two exchanges."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.conftest import CLIENTS, SHORT, write_site
from tests.deploy.processes import RUN_S, Deployment, wait_until
from tests.deploy.tampered.sitecustomize import HOLD
from tests.helpers.paper import ACCEPTED
from tests.strategies.test_secure_average import keys

pytestmark = [
    pytest.mark.rest(twin="tests/privacy/channels/secure/test_sums.py::test_parties_may_fall_silent_at_any_stage"),
    pytest.mark.timeout(5400),
]

STAGES = {"mask": "1", "agree": "secure agree", "open": "secure open"}
"""The messages that a killed site has read, by exchange: those of round 1, and two that ask for no training."""
SIZES = [(4, 1), (10, 3), (20, 6)]


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
