"""A server's certificate that has run out: sites say so, wait, and go on once it is renewed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.conftest import SHORT, write_site
from tests.deploy.processes import RETURN_S, Deployment, wait_until
from tests.helpers.paper import ACCEPTED
from umbel.deploy import certs

pytestmark = [
    pytest.mark.rest(
        twin="tests/deploy/test_link.py::test_a_certificate_that_expires_while_a_site_is_connected_is_waited_for"
    ),
    pytest.mark.timeout(5400),
]

SITES = ("north", "south")
ROUNDS = {"rounds": 2, "clients_per_round": 6, "wait": f"nodes={len(SITES)}"}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("deployment"), database=True, soon=True) as deployment:
        for name in SITES:
            data_path = write_site(deployment.folder / "data" / name, len(name))
            deployment.start_node(name, **ACCEPTED, **{"data-path": data_path})
        deployment.wait_until_online()
        yield deployment


def test_sites_wait_while_the_certificate_has_expired_and_go_on_after_its_renewal(
    deployment: Deployment,
) -> None:
    before = deployment.submit(**SHORT | ROUNDS)
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
    after = deployment.submit(**SHORT | ROUNDS)
    assert deployment.wait(after) == "finished:completed"
    assert sum(len(node.charges) for node in deployment.nodes.values()) == before.releases + after.releases


def restart(deployment: Deployment, days: float) -> None:
    """Start the server again with a certificate that is valid for so many days."""
    deployment.superlink.kill()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certs, "SERVER_DAYS", days)
        patch.setattr(certs, "RENEW_DAYS", certs.CA_DAYS)  # at once
        deployment.write_certificate()
    deployment.start_superlink(verified=days > 0)
