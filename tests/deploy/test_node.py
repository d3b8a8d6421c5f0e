"""One command for a site's SuperNode and its executor; that it works, `test_processes.py` sees."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.helpers.errors import raises
from tests.helpers.ports import free_port
from umbel.deploy import certs, node
from umbel.privacy.site.config import NODE_CONFIG, SERVER_CA
from umbel.protocol.errors import SiteError


@pytest.mark.parametrize("option", ["--isolation=subprocess", "--superexec-auth-secret-file"])
def test_what_would_run_the_servers_code_cannot_be_asked_for(option: str) -> None:
    with raises(SiteError, "site.own-option", option.split("=")[0]):
        node.start([option])


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start nothing beside the node, and keep its environment from other tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "fork", lambda: 1)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv(SERVER_CA, "/of/another/server.crt")
    monkeypatch.setenv(NODE_CONFIG, "of=another")


def test_a_site_knows_for_which_server_runs_are_signed_from_its_connection_alone(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    certs.make(tmp_path / "certs", [], [])
    monkeypatch.chdir(tmp_path)
    node.start(["--port", str(free_port()), "--root-certificates", "certs/ca.crt"])
    assert os.environ[SERVER_CA] == str(tmp_path / "certs" / "ca.crt")
    node.start(["--port", str(free_port()), "--insecure"])
    assert os.environ[SERVER_CA] == ""


def test_the_executor_knows_the_policy_from_who_starts_it(alone: None) -> None:
    for words in (["--node-config", 'data-path="/data"'], []):
        node.start(["--port", str(free_port()), *words])
        assert os.environ[NODE_CONFIG] == "".join(words[1:])


def test_what_a_site_writes_is_its_users_alone(tmp_path: Path, alone: None) -> None:
    os.umask(0)
    node.start(["--port", str(free_port())])
    (tmp_path / "written").touch()
    assert not any(path.stat().st_mode & 0o077 for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(("command", "gone"), [("true", False), ("sleep 0.5", True)])
def test_an_executor_that_ends_by_itself_gets_no_signal(command: str, gone: bool) -> None:
    """Flower's executor sees that its SuperNode is gone; a second signal makes it write a traceback."""
    executor = subprocess.Popen(command.split())
    node._wait(executor, parent=os.getppid() + gone)
    assert executor.returncode == 0


@pytest.mark.parametrize(("ignored", "status"), [("", -signal.SIGTERM), ("trap '' TERM;", -signal.SIGKILL)])
def test_an_executor_that_stays_when_its_supernode_is_gone_is_ended(
    ignored: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "_ENDS_S", 0.5)
    executor = subprocess.Popen(["sh", "-c", f"{ignored} exec sleep infinity"])
    node._wait(executor, parent=os.getppid() + 1)
    assert executor.returncode == status


def test_a_node_whose_executor_breaks_down_does_not_end_gracefully() -> None:
    with pytest.raises(SystemExit) as end:
        node._executor_ended(signal.SIGUSR1, None)
    assert (end.value.code.code, end.value.code.exit_code) == ("site.executor", 2)


def test_the_executor_imports_nothing_from_a_working_folder_that_hides_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site may be started in a folder that somebody has sent, with data and more in it."""
    (tmp_path / "umbel").mkdir()
    for name in ("umbel/__init__", "umbel/__main__", "fractions", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('code of somebody else')")
    monkeypatch.chdir(tmp_path)
    executor = node._executor(["--help"], stdout=subprocess.PIPE, text=True)
    told, _ = executor.communicate()
    assert executor.returncode == 0
    assert "python -m umbel.cli.parts executor" in told
