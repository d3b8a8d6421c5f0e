"""A site's SuperNode and its executor: what they make of the server's replies, and what ends them with which reason.

That they work, `test_processes.py` sees.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.helpers.errors import ended
from tests.helpers.ports import free_port
from umbel.cli.main import app as umbel
from umbel.cli.main import parts
from umbel.deploy import certs, node
from umbel.deploy.node import Link
from umbel.privacy.site.config import NODE_CONFIG, SERVER_CA

NOW = 1_800_000_000.0

# --- the link to the server


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


def fault_of(link: Link) -> str:
    """Return the code of a link's fault, and an empty text where it has none."""
    fault = link.fault()
    return fault.code if fault else ""


def refused(path: str, status: int, content: dict[str, Any] | None = None, behind: float = 0.0) -> httpx.HTTPError:
    """Return the error of a call to which the server, whose clock is ahead by `behind`, replied with a status."""
    request = httpx.Request("POST", f"https://umbel.example.org:8000/v1/fleet/{path}")
    date = {"Date": formatdate(NOW + behind, usegmt=True)}
    response = httpx.Response(status, headers=date, content=json.dumps(content or {}), request=request)
    return httpx.HTTPStatusError("refused", request=request, response=response)


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
def test_a_node_ends_where_time_does_not_help(
    link: Link, time: Time, error: httpx.HTTPError, code: str, part: str
) -> None:
    with pytest.raises(SystemExit) as end:
        link.fails(error)
    assert (end.value.code.code, end.value.code.exit_code, time.waits) == (code, 2, [])
    assert part in end.value.code.text


def test_a_killed_nodes_session_is_waited_for_a_while(link: Link, time: Time, caplog: pytest.LogCaptureFixture) -> None:
    not_admitted = refused("activate-node", 412, {"code": 2009, "detail": "Failed to activate SuperNode."})
    for _ in range(6):
        assert link.fails(not_admitted)
        assert fault_of(link) == "site.key-refused"
    assert time.waits == [2, 4, 8, 10, 10, 10]
    link.works()
    assert fault_of(link) == ""
    assert caplog.text.count("[site.key-refused]") == 1, "once for each outage"
    time.waits.clear()

    def keep_calling() -> None:
        while link.fails(not_admitted):
            pass

    with pytest.raises(SystemExit) as end:
        keep_calling()
    assert 90 < sum(time.waits) < 110
    assert end.value.code.code == "site.key-refused"


def test_a_server_that_is_not_there_is_told_once_each_time(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    """Flower itself waits and tries again."""
    assert (link.lost(), fault_of(link)) == (None, "site.connecting")
    for _ in range(2):
        for _ in range(3):
            assert not link.fails(httpx.ConnectError("Connection refused"))
            assert fault_of(link) == "site.no-server"
            assert link.lost() is link.fault()
        link.works()
        assert link.fault() is link.lost() is None
    assert [caplog.text.count(words) for words in ("[site.no-server]", "answers again")] == [2, 2]


def test_a_certificate_that_expires_while_a_site_is_connected_is_waited_for(link: Link, time: Time) -> None:
    """Flower's node would end for good; one that starts with it ends, and its supervisor tries again."""

    def untrusted(code: int, message: str) -> httpx.HTTPError:
        error = httpx.ConnectError("failed")
        error.__cause__ = ssl.SSLCertVerificationError(1, "certificate verify failed")
        error.__cause__.verify_code, error.__cause__.verify_message = code, message
        return error

    expired = untrusted(10, "certificate has expired")
    assert not link.fails(untrusted(20, "unable to get local issuer certificate"))
    lost = link.lost()
    assert lost
    assert (lost.code, "local issuer" in lost.text) == ("site.certificate", True)
    assert not link.fails(expired)
    link.works()
    assert all(link.fails(expired) for _ in range(100))
    assert sum(time.waits) > 600
    assert fault_of(link) == "site.certificate"
    link.works()
    assert fault_of(link) == ""


@pytest.mark.parametrize(
    ("path", "again"), [("pull-messages", True), ("send-node-heartbeat", True), ("push-messages", False)]
)
def test_a_fault_of_the_servers_stops_neither_looks_nor_heartbeats(link: Link, path: str, again: bool) -> None:
    """Flower's node would make no more of them, and stay in memory."""
    assert link.fails(refused(path, 500)) is again
    assert fault_of(link) == "site.server-fault"


# --- the SuperNode


def exit_code() -> int:
    """Run a node to its end, at which nothing in the process is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "_exit", sys.exit)
        with pytest.raises(SystemExit) as end:
            node.run(["--insecure"])
    return int(end.value.code or 0)


def test_a_node_says_at_its_end_which_call_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[httpx.HTTPError] = []
    waited: list[float] = []

    def gives_up(_arguments: list[str], sleep: Any, link: Link, _fault: object) -> None:
        sleep(3.0)
        sleep(0.5)
        if calls:
            assert not link.fails(calls.pop())
        sys.exit(1)

    monkeypatch.setattr(node.time, "sleep", waited.append)
    monkeypatch.setattr(node, "run_supernode", gives_up)
    assert exit_code() == 1
    assert waited == [0.5, 0.1]
    assert "[site.stopped]" in capsys.readouterr().err
    calls.append(httpx.ConnectError("Connection refused"))
    assert exit_code() == 1
    assert "[site.no-server]" in capsys.readouterr().err.splitlines()[-1]
    for stops, code in ((lambda *_: sys.exit(0), 0), (lambda *_: None, 1)):  # it is told to end; Flower ends it
        monkeypatch.setattr(node, "run_supernode", stops)
        assert exit_code() == code


DATA = ["--node-config", 'data-path="/data"']
MISSPELT = ["--node-config", 'data-path="/data" bugdet=1.0']
NO_KEY = ["--auth-supernode-private-key", "/nowhere/key"]


@pytest.mark.parametrize(
    ("command", "options", "code", "part"),
    [
        ("start", [], "site.no-data", "data-path"),
        ("start", ["--node-config", "nonsense"], "site.bad-pairs", "nonsense"),
        ("start", MISSPELT, "site.unknown-key", "bugdet"),
        ("start", [*DATA, *NO_KEY], "site.key", "/nowhere/key"),
        ("start", [*DATA, "--root-certificates=/nowhere/ca.crt"], "site.certificate", "/nowhere/ca.crt"),
        # What would run the server's code cannot be asked for.
        ("start", [*DATA, "--isolation=process"], "site.own-option", "--isolation"),
        ("start", [*DATA, "--superexec-auth-secret-file"], "site.own-option", "--superexec-auth-secret-file"),
        ("start", [*DATA, "--port", "{taken}"], "site.port", "{taken}"),
        ("supernode", MISSPELT, "site.unknown-key", "bugdet"),
        ("supernode", ["--isolation=subprocess"], "site.own-option", "server's code"),
    ],
)
def test_what_a_site_lacks_is_told_before_anything_starts(
    command: str, options: list[str], code: str, part: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        group, words = (umbel, ["site", command]) if command == "start" else (parts, [command])
        told = CliRunner().invoke(group, [*words, *(word.format(taken=taken) for word in options)])
    ended(told.exit_code, told.output, code, part.format(taken=taken))


# --- its executor


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start nothing beside the node, and keep its environment from other tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "fork", lambda: 1)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv(SERVER_CA, "/of/another/server.crt")
    monkeypatch.setenv(NODE_CONFIG, "of=another")


@pytest.mark.usefixtures("alone")
def test_the_executor_knows_server_and_policy_from_who_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For which server runs are signed, a site knows from its connection."""
    certs.make(tmp_path / "certs", [], [])
    monkeypatch.chdir(tmp_path)
    os.umask(0)
    for words, ca, policy in (
        (["--root-certificates", "certs/ca.crt"], str(tmp_path / "certs" / "ca.crt"), ""),
        (["--insecure", *DATA], "", DATA[1]),
        (["--insecure"], "", ""),
    ):
        node.start(["--port", str(free_port()), *words])
        assert (os.environ[SERVER_CA], os.environ[NODE_CONFIG]) == (ca, policy)
    (tmp_path / "written").touch()
    written = [path for path in tmp_path.rglob("*") if "certs" not in path.parts]
    assert not any(path.stat().st_mode & 0o077 for path in written)


@pytest.mark.parametrize(
    ("command", "gone", "status"),
    [
        ("true", False, 0),
        # Flower's executor sees that its SuperNode is gone; a second signal makes it write a traceback.
        ("sleep 0.5", True, 0),
        ("exec sleep infinity", True, -signal.SIGTERM),
        ("trap '' TERM; exec sleep infinity", True, -signal.SIGKILL),
    ],
)
def test_only_an_executor_that_stays_is_ended_and_a_node_without_one_fails(
    command: str, gone: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if status:
        monkeypatch.setattr(node, "_ENDS_S", 0.5)
    executor = subprocess.Popen(["sh", "-c", command])
    node._wait(executor, parent=os.getppid() + gone)
    assert executor.returncode == status
    with pytest.raises(SystemExit) as end:
        node._executor_ended(signal.SIGUSR1, None)
    assert (end.value.code.code, end.value.code.exit_code) == ("site.executor", 2)


def test_the_executor_imports_nothing_from_its_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site may be started in a folder that somebody has sent, with data and more in it."""
    (tmp_path / "umbel").mkdir()
    for name in ("umbel/__init__", "umbel/__main__", "fractions", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('code of somebody else')")
    monkeypatch.chdir(tmp_path)
    executor = node._executor(["--help"], stdout=subprocess.PIPE, text=True)
    told, _ = executor.communicate()
    assert executor.returncode == 0
    assert "python -m umbel.cli.parts executor" in told
