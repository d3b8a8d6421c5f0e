"""A site's SuperNode waits at umbel's pace; that it works, `test_processes.py` sees."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tests.helpers.errors import ended
from tests.helpers.ports import free_port
from umbel.cli.main import app as umbel
from umbel.cli.main import parts
from umbel.deploy import node as supernode
from umbel.deploy.node import Link


def test_flower_waits_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(supernode.time, "sleep", waited.append)
    monkeypatch.setattr(supernode, "run_supernode", lambda arguments, sleep, *_: [sleep(3.0), sleep(0.5)])
    assert exit_code() == 1
    assert waited == [0.5, 0.1]


def exit_code() -> int:
    """Run a node to its end, at which nothing in the process is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "_exit", sys.exit)
        with pytest.raises(SystemExit) as end:
            supernode.run(["--insecure"])
    return int(end.value.code or 0)


def test_a_node_that_flower_ends_says_which_call_failed_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gives_up(_arguments: list[str], _sleep: object, link: Link, _fault: object) -> None:
        if calls:
            assert not link.fails(calls.pop())
        sys.exit(1)

    calls: list[httpx.HTTPError] = []
    monkeypatch.setattr(supernode, "run_supernode", gives_up)
    assert exit_code() == 1
    assert "[site.stopped]" in capsys.readouterr().err
    calls.append(httpx.ConnectError("Connection refused"))
    assert exit_code() == 1
    assert "[site.no-server]" in capsys.readouterr().err.splitlines()[-1]


def test_a_node_that_is_told_to_end_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supernode, "run_supernode", lambda *_: sys.exit(0))
    assert exit_code() == 0


DATA = ["--node-config", 'data-path="/data"']


@pytest.mark.parametrize(
    ("command", "options", "code", "part"),
    [
        ("start", [], "site.no-data", "data-path"),
        ("start", ["--node-config", "nonsense"], "site.bad-pairs", "nonsense"),
        ("start", ["--node-config", 'data-path="/data" bugdet=1.0'], "site.unknown-key", "bugdet"),
        ("start", [*DATA, "--auth-supernode-private-key", "/nowhere/key"], "site.key", "/nowhere/key"),
        ("start", [*DATA, "--root-certificates=/nowhere/ca.crt"], "site.certificate", "/nowhere/ca.crt"),
        ("start", [*DATA, "--isolation=process"], "site.own-option", "--isolation"),
        ("start", [*DATA, "--port", "{taken}"], "site.port", "{taken}"),
        ("supernode", ["--node-config", 'data-path="/data" bugdet=1.0'], "site.unknown-key", "bugdet"),
        ("supernode", ["--port={taken}"], "site.port", "{taken}"),
        ("supernode", ["--auth-supernode-private-key", "/nowhere/key"], "site.key", "/nowhere/key"),
        ("supernode", ["--isolation=subprocess"], "site.own-option", "server's code"),
    ],
)
def test_what_a_site_lacks_is_told_in_one_line_before_anything_starts(
    command: str, options: list[str], code: str, part: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        group, words = (umbel, ["site", command]) if command == "start" else (parts, [command])
        told = CliRunner().invoke(group, [*words, *(word.format(taken=taken) for word in options)])
    ended(told.exit_code, told.output, code, part.format(taken=taken))


def test_a_server_that_is_not_there_is_told_in_one_line_by_a_node_that_gives_up(tmp_path: Path) -> None:
    """Otherwise it tries for ever."""
    command = [
        sys.executable,
        "-m",
        "umbel.cli.parts",
        "supernode",
        "--insecure",
        f"--superlink=localhost:{free_port()}",
    ]
    own = {"FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    done = subprocess.run(
        [*command, "--max-retries=1", "--port", str(free_port())],
        env=os.environ | own, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, "after 2, systemd would not start it again"
    assert done.stderr.splitlines()[-1].endswith("[site.no-server]")
    assert "Traceback" not in done.stderr
