"""Sites that refuse the server, or that it refuses: the reason and the remedy, and another try where that helps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.conftest import SHORT, deployed, start_site
from tests.deploy.processes import RETURN_S, Deployment, Member, wait_until
from umbel.deploy import certs

pytestmark = [
    pytest.mark.rest(twin="tests/deploy/test_node.py::test_a_node_ends_where_time_does_not_help"),
    pytest.mark.timeout(5400),
]

ENDS_S = 900.0
ROUNDS = SHORT | {"rounds": 2, "clients_per_round": 6, "wait": "nodes=2"}


def end(member: Member) -> tuple[int, str]:
    """Return the exit code of a node, and its last error's."""
    code = member.process.wait(ENDS_S)
    [*_, error] = [line for line in member.log.splitlines() if line.startswith("Error: ")]
    return code, error.rpartition("[")[2].rstrip("]")


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
