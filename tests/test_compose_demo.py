"""The demo's own decisions; that it works is seen with an engine: ``make compose-demo``."""

from __future__ import annotations

import base64
import os
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from tests.helpers.errors import raises
from tools import compose_demo as demo
from umbel.data import open_dataset
from umbel.deploy import certs


def called() -> str:
    """Return what the demo says, which fails."""
    app = typer.Typer()
    app.command()(demo.main)
    told = CliRunner().invoke(app, [])
    assert told.exit_code == 1
    return told.output


def test_its_sites_have_the_hospitals_that_come_with_umbel(umbel_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(home: Path) -> Any:
        sites = [open_dataset(home / site) for site in demo.SITES]
        assert sum(site.manifest.clients for site in sites) == 2947
        if os.geteuid() == 0:  # only their owner may read them: here the containers' user, who is not root
            assert {path.stat().st_uid for site in demo.SITES for path in [home / site, *(home / site).iterdir()]} == {
                1000
            }
        raise demo.DemoError("far enough", code="demo.step-failed")

    monkeypatch.delenv("IMAGE_UID", raising=False)
    monkeypatch.setattr(demo, "composer", build)
    assert "[demo.step-failed]" in called()


def test_what_the_containers_said_outlives_a_demonstration_that_fails(
    umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def compose(*arguments: str, capture: bool = False) -> str:
        done.append(arguments[0])
        return "site-1  | it needs more memory\n" if capture else ""

    def fails(*_: Any) -> Path:
        raise demo.DemoError("not all sites are online", code="demo.offline")

    monkeypatch.setattr(demo, "composer", lambda home: compose)
    monkeypatch.setattr(demo, "_run", fails)
    assert "[demo.offline]" in called()
    assert (umbel_home / "demo" / demo.LOGS).read_text() == "site-1  | it needs more memory\n"
    assert done == ["build", "logs", "down"], "the logs end with the containers"


def test_it_keeps_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(demo, "_tool", lambda name: name)
    monkeypatch.setattr(demo, "_call", lambda command, environment, capture: seen.update(environment) or "")
    monkeypatch.setenv("SERVER", "somebody.example.org:8000")
    demo.composer(tmp_path)("up")
    # Not a site's project, keys, policy or server, which may be on this machine as well.
    assert seen["COMPOSE_PROJECT_NAME"] == "umbel-demo"
    assert seen["LISTEN"] == "127.0.0.1:"
    assert seen["SERVER"] == "superlink:8000"
    assert Path(seen["CERTS"]).parent == tmp_path


def test_it_has_the_operators_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certs.make(tmp_path, [], [])

    def register(_: Path, environment: dict[str, str]) -> None:
        kept = yaml.safe_load((Path(environment["FLWR_HOME"]) / "credentials.yaml").read_text(encoding="utf-8"))
        [token] = [value for name, value in kept.items() if "localhost:49153" in name and "access" in name]
        assert base64.b64decode(token) == (tmp_path / "control.secret").read_bytes()
        raise demo.DemoError("far enough")

    monkeypatch.setattr(demo, "_register", register)
    monkeypatch.setattr(demo, "_wait_until_ready", lambda *_: None)
    with pytest.raises(demo.DemoError, match="far enough"):
        demo._run(lambda *_, **__: "127.0.0.1:49153\n", tmp_path)


def test_all_programs_load_at_once_and_a_site_starts_when_its_key_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node without a registered key ends."""
    certs.make(tmp_path, [], [])
    done: list[str] = []
    monkeypatch.setattr(demo, "_register", lambda key, _: done.append(key.stem))
    monkeypatch.setattr(demo, "_wait_until_ready", lambda *_: done.append("ready"))

    def compose(*words: str, capture: bool = False) -> str:
        done.append(" ".join(words[:4]) if words[0] == "up" else words[0])
        return "127.0.0.1:49153\n"

    with demo.started(compose, tmp_path):
        pass
    assert [one for one in done if one != "exec"] == [
        "up --detach --no-deps superlink", "port", "ready", "up --detach --no-deps serverapp",
        *sorted(demo.SITES, key=done.index), "up --detach --no-deps site-1",
    ]  # fmt: skip
    assert done.count("exec") == 3, "a ledger of each site"
    assert done[-1] == "up --detach --no-deps site-1"


def test_the_server_is_waited_for_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, True, False]
    monkeypatch.setattr(demo, "_LOOK_S", 0.0)
    monkeypatch.setattr(demo, "healthy", lambda *_: answers.pop(0))
    demo._wait_until_ready("localhost:1", tmp_path)
    monkeypatch.setattr(demo, "_READY_S", -1.0)
    with raises(demo.DemoError, "demo.offline"):
        demo._wait_until_ready("localhost:1", tmp_path)


@pytest.mark.parametrize(
    ("slow", "status", "code"),
    [
        (False, "finished:failed", "demo.run-failed"),
        (True, "starting", "demo.too-slow"),
        (True, "finished:completed", ""),
    ],
)
def test_a_run_ends_within_its_time_or_fails_with_a_reason(
    slow: bool, status: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flwr(*words: str, capture: bool = False, seconds: float | None = None) -> str:
        if words[0] == "run" and slow:
            assert seconds == demo._RUN_S
            raise subprocess.TimeoutExpired(["flwr"], demo._RUN_S)
        return f'{{"runs": [{{"status": "{status}", "status-details": "why"}}]}}'

    monkeypatch.setattr(demo, "started", lambda *_: nullcontext(flwr))
    monkeypatch.setattr(demo, "_fetch", lambda _: tmp_path)
    with raises(demo.DemoError, code) if code else nullcontext():
        assert demo._run(lambda *_, **__: "", tmp_path) == tmp_path


def test_a_step_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(demo.DemoError, "demo.step-failed"):
        demo._call(["false", "up"], {})
    with raises(demo.DemoError, "demo.not-installed"):
        demo._tool("no-such-tool")
    monkeypatch.setattr(demo, "_tool", lambda name: name)
    for answer in ("[code: 23] Public key already in use.", "no server"):
        done = subprocess.CompletedProcess([], 1, "", answer)
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        with raises(demo.DemoError, "demo.not-registered") if answer == "no server" else nullcontext():
            demo._register(Path("site-1.pub"), {})
