"""Sites that the server refuses: the reason and the remedy in words, and another try where that helps."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.deploy.conftest import write_site
from tests.deploy.processes import RETURN_S, Deployment, Member, wait_until
from tests.helpers.paper import ACCEPTED

pytestmark = [
    pytest.mark.rest(twin="tests/deploy/test_link.py::test_a_node_ends_at_once_where_time_does_not_help"),
    pytest.mark.timeout(5400),
]

ENDS_S = 900.0


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("deployment"), soon=True) as deployment:
        start(deployment, "site")
        start(deployment, "ahead", ahead=60)
        deployment.wait_until_online("site")
        yield deployment


def start(deployment: Deployment, name: str, ahead: float = 0.0) -> Member:
    data_path = write_site(deployment.folder / "data" / name, len(name))
    return deployment.start_node(name, tampered=True, ahead=ahead, **ACCEPTED, **{"data-path": data_path})


def end(member: Member) -> tuple[int, str]:
    """Return the exit code of a node, and its last error's."""
    code = member.process.wait(ENDS_S)
    [*_, error] = [line for line in member.log.splitlines() if line.startswith("Error: ")]
    return code, error.rpartition("[")[2].rstrip("]")


def test_a_site_with_a_wrong_clock_ends_and_says_by_how_much(deployment: Deployment) -> None:
    ahead = deployment.nodes.pop("ahead")
    assert end(ahead) == (1, "site.clock")
    # Less by the time that its request took.
    assert re.search(r"\b[1-6]\d s ahead of", ahead.log)
    assert "terminated gracefully" not in ahead.log
    assert "Traceback" not in ahead.log


def test_a_site_that_is_back_within_a_minute_of_a_kill_waits_until_its_last_session_is_over(
    deployment: Deployment,
) -> None:
    site = deployment.nodes["site"]
    assert site.ready() == (200, "")
    site.kill()
    again = deployment.start_again("site")
    wait_until("refusal", lambda: again.ready() == (503, "site.key-refused"), ENDS_S)
    wait_until("admission", lambda: again.ready() == (200, ""), RETURN_S)
    assert len({*again.node_ids}) == 1
    assert again.process.poll() is None


def test_a_site_whose_key_is_removed_ends_at_once_and_one_that_tries_it_again_after_a_while(
    deployment: Deployment,
) -> None:
    site = deployment.nodes["site"]
    deployment.flwr("supernode", "unregister", site.node_id, "deployment")
    assert end(site) == (1, "site.key-refused")
    again = deployment.start_again("site")
    assert end(again) == (1, "site.key-refused")
    assert "make another" in again.log
    assert "Traceback" not in again.log
