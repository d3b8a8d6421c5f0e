"""What a site's node makes of the server's replies: it tries again, or ends with the reason and the remedy."""

from __future__ import annotations

import json
import ssl
from email.utils import formatdate
from typing import Any

import httpx
import pytest

from umbel.deploy.node import Link

NOW = 1_800_000_000.0


class Time:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.now, self.waits = 100.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def link(time: Time) -> Link:
    return Link("umbel.example.org:8000", lambda: time.now, lambda: NOW, time.sleep)


def refused(path: str, status: int, content: dict[str, Any] | None = None, behind: float = 0.0) -> httpx.HTTPError:
    """Return the error of a call to which the server, whose clock is ahead by `behind`, replied with a status."""
    request = httpx.Request("POST", f"https://umbel.example.org:8000/v1/fleet/{path}")
    date = {"Date": formatdate(NOW + behind, usegmt=True)}
    response = httpx.Response(status, headers=date, content=json.dumps(content or {}), request=request)
    return httpx.HTTPStatusError("refused", request=request, response=response)


def keep_calling(link: Link, error: httpx.HTTPError) -> None:
    while link.fails(error):
        pass


NOT_ADMITTED = refused("activate-node", 412, {"code": 2009, "detail": "Failed to activate SuperNode."})


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (refused("register-node", 412, {"code": 2001, "detail": "…"}), "site.no-key", "--auth-supernode-private-key"),
        (refused("pull-messages", 401), "site.key-refused", "operator"),
        (refused("send-node-heartbeat", 401, behind=-60), "site.clock", "60 s ahead"),
        (refused("activate-node", 401, behind=600), "site.clock", "600 s behind"),
        (refused("activate-node", 401, behind=60), "site.key-refused", "operator"),
    ],
)
def test_a_node_ends_at_once_where_time_does_not_help(
    link: Link, time: Time, error: httpx.HTTPError, code: str, part: str
) -> None:
    with pytest.raises(SystemExit) as end:
        link.fails(error)
    assert (end.value.code.code, end.value.code.exit_code, time.waits) == (code, 2, [])
    assert part in end.value.code.text


def test_a_killed_nodes_session_is_waited_for_with_growing_pauses_and_not_for_ever(
    link: Link, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(6):
        assert link.fails(NOT_ADMITTED)
        fault = link.fault()
        assert fault
        assert fault.code == "site.key-refused"
    assert time.waits == [2, 4, 8, 10, 10, 10]
    link.works()
    assert link.fault() is None
    assert caplog.text.count("[site.key-refused]") == 1, "once for each outage"
    time.waits.clear()
    with pytest.raises(SystemExit) as end:
        keep_calling(link, NOT_ADMITTED)
    assert 90 < sum(time.waits) < 110
    assert end.value.code.code == "site.key-refused"
    for word in ("registered", "make another", "online"):
        assert word in end.value.code.text


def test_a_server_that_is_not_there_is_told_once_and_again_after_it_was_there(
    link: Link, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower itself waits and tries again."""
    assert link.lost() is None
    for _ in range(2):
        for _ in range(3):
            assert not link.fails(httpx.ConnectError("Connection refused"))
            fault = link.fault()
            assert fault
            assert fault.code == "site.no-server"
            assert link.lost() is fault
        link.works()
        assert link.fault() is link.lost() is None
    assert caplog.text.count("[site.no-server]") == 2
    assert caplog.text.count("answers again") == 2


def untrusted(code: int, message: str) -> httpx.HTTPError:
    error = httpx.ConnectError("failed")
    error.__cause__ = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.__cause__.verify_code, error.__cause__.verify_message = code, message
    return error


def test_a_certificate_that_expires_while_a_site_is_connected_is_waited_for(link: Link, time: Time) -> None:
    """Flower's node would end for good."""
    expired = untrusted(10, "certificate has expired")
    assert not link.fails(expired), "a site that starts with it ends, and its supervisor tries again"
    link.works()
    for _ in range(100):
        assert link.fails(expired)
    assert sum(time.waits) > 600
    fault = link.fault()
    assert fault
    assert fault.code == "site.certificate"
    assert "umbel certs" in fault.text
    link.works()
    assert link.fault() is None


def test_a_certificate_that_is_refused_is_told_as_such(link: Link) -> None:
    assert not link.fails(untrusted(20, "unable to get local issuer certificate"))
    fault = link.lost()
    assert fault
    assert fault.code == "site.certificate"
    assert "local issuer" in fault.text


@pytest.mark.parametrize(
    ("path", "again"), [("pull-messages", True), ("send-node-heartbeat", True), ("push-messages", False)]
)
def test_a_fault_of_the_servers_stops_neither_looks_for_messages_nor_heartbeats(
    link: Link, path: str, again: bool
) -> None:
    """Flower's node would make no more of them, and stay in memory."""
    assert link.fails(refused(path, 500)) is again
    fault = link.fault()
    assert fault
    assert fault.code == "site.server-fault"


def test_a_node_is_not_ready_before_it_is_connected(link: Link) -> None:
    fault = link.fault()
    assert fault
    assert fault.code == "site.connecting"
