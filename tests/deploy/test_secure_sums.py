"""Four sites as processes, which add their sums securely; one is killed between two exchanges."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.conftest import CLIENTS, SHORT, write_site
from tests.deploy.processes import RUN_S, Deployment, wait_until
from tests.deploy.tampered.sitecustomize import HOLD
from tests.helpers.paper import ACCEPTED
from tests.strategies.test_secure_average import keys

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(5400)]

NAMES = ("east", "north", "south", "west")


def test_a_round_is_added_without_the_site_that_was_killed_before_it_signed(tmp_path: Path) -> None:
    with Deployment(tmp_path / "deployment", soon=True) as deployment:
        paths, listed = keys(tmp_path / "keys", *NAMES)
        for name in NAMES:
            policy = ACCEPTED | {
                "data-path": write_site(tmp_path / "data" / name, len(name)), "release": "secure", "parties": listed,
                "party-key": paths[name], "mechanisms": "discrete-gaussian",
            }  # fmt: skip
            deployment.start_node(name, tampered=True, **policy)
        deployment.wait_until_online()
        west = deployment.nodes["west"]
        west.tamper({"secure agree": HOLD})
        config = SHORT | {
            "strategy": "secure-average", "strategy_options": "explore=0.0", "mechanism": "discrete-gaussian",
            "clipping": "public", "hypotheses": 1, "rounds": 3, "clients_per_round": 4 * CLIENTS, "min_nodes": 4,
            "pause_below": 3,
        }  # fmt: skip
        run = deployment.submit(**config)
        wait_until("the question for west's signature", lambda: west.has_heard_of("secure agree", run), RUN_S)
        west.kill()
        assert deployment.wait(run) == "finished:completed"
        trained = [entry for entry in run.history if entry["asked"]]
        assert all(entry["moved"] for entry in trained)
        assert [entry["releases"] for entry in trained] == [4 * CLIENTS, 3 * CLIENTS, 3 * CLIENTS]
        assert {row["kind"] for row in deployment.nodes["east"].charges} == {"secure"}
