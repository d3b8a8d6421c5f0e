"""The server's executor: one process for each task, whose claim it keeps while the process lives."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from flwr.proto.runtime_pb2 import PushTaskOutputRequest, SendTaskHeartbeatResponse
from flwr.supercore.superexec.executor import subprocess_executor

from umbel.deploy import programs
from umbel.deploy.flower import Claim
from umbel.deploy.programs import Programs

TASK: dict[str, Any] = {
    "task_id": 7, "task_type": "flwr-serverapp", "token": "a1b2", "runtime_api_address": "127.0.0.1:8000",
    "insecure": True, "root_certificates_path": None, "runtime_dependency_install": False, "parent_pid": os.getpid(),
    "suppress_output": True,
}  # fmt: skip


class Heard:
    """The claims of an executor, and what the server hears of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def claim(self, _: Any) -> Any:
        def hear(name: str) -> Any:
            return lambda *said: self.calls.append(" ".join([name, *said]))

        return SimpleNamespace(beat=hear("beat"), fail=hear("fail"), close=hear("close"))


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the executor writes to its log."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """A file that a program waits for someone to write."""
    os.mkfifo(tmp_path / "held")
    return tmp_path / "held"


def importing(held: Path) -> list[str]:
    """The beginning of a command whose program imports until someone writes to a file, and then fails."""
    return [sys.executable, "-c", f"open({str(held)!r}).read(); import sys; sys.stderr.write('why\\n\\n'); exit(3)"]


def only(executor: Programs) -> subprocess.Popen[bytes]:
    """The only process of an executor."""
    [process] = executor._processes.values()
    return process._popen


def test_the_first_heartbeat_leaves_before_a_process_starts_and_the_executor_keeps_its_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard, given = Heard(), dict[str, Any]()
    monkeypatch.setattr(programs.subprocess, "Popen", lambda *_, **__: heard.calls.append("start") or Mock(stderr=()))
    Programs(claim=heard.claim).launch(SimpleNamespace(**TASK))
    assert heard.calls == ["beat", "start"]
    monkeypatch.setattr(programs.logs, "configure", lambda: None)
    monkeypatch.setattr(programs, "run_superexec", lambda _, launch, keep: given.update(launch=launch, keep=keep))
    programs._run("flower-superexec", [])
    assert given["launch"].__func__ is Programs.launch
    assert given["keep"] == given["launch"].__self__.keep


def test_a_claim_is_kept_while_its_process_imports(held: Path, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process itself could send nothing yet."""
    heard, now = Heard(), [0.0]
    monkeypatch.setattr(programs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    executor = Programs(importing(held), heard.claim)
    executor.launch(SimpleNamespace(**TASK))
    for now[0] in (1.0, 9.9, 10.0, 11.0, 20.0, 3600.0):
        executor.keep()
    assert heard.calls == ["beat"] * 4
    process = only(executor)
    assert process.poll() is None
    held.write_text("done")
    process.wait()
    executor.keep()
    executor.keep()
    assert heard.calls[4:] == ["close"], "and no heartbeat of a process that has ended"
    assert lines() == ["The process of task 7 ended with exit code 3: why"]


def test_a_task_has_one_process_and_fails_after_five_expired_claims(held: Path, lines: Any) -> None:
    heard, processes = Heard(), []
    executor = Programs(importing(held), heard.claim)
    for _ in range(5):
        executor.launch(SimpleNamespace(**TASK))
        processes.append(only(executor))
    assert [process.poll() for process in processes] == [-9, -9, -9, -9, None], "one lives"
    assert not any(call.startswith("fail") for call in heard.calls)
    # Claims to other tasks are counted by themselves.
    executor.launch(SimpleNamespace(**TASK | {"task_id": 8}))
    assert processes[-1].poll() is None
    executor.launch(SimpleNamespace(**TASK))
    assert processes[-1].poll() == -9
    [reason] = [call for call in heard.calls if call.startswith("fail")]
    assert reason.endswith("[server.not-started]")
    assert [line.endswith("[server.not-started]") for line in lines()].count(True) == 1
    assert heard.calls.count("close") == 6
    only(executor).kill()


def test_a_process_finds_this_umbel_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in the image, which has the source alone; without site-packages, only the environment can lead there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('umbel.deploy') is None)"
    executor = Programs([sys.executable, "-S", "-P", "-c", look], Heard().claim)
    executor.launch(SimpleNamespace(**TASK))
    assert only(executor).wait() == 0


@pytest.mark.parametrize(
    ("differs", "ends"),
    [
        ({}, ["--insecure"]),
        ({"insecure": False, "root_certificates_path": "ca.crt"}, ["--root-certificates", "ca.crt"]),
        ({"runtime_dependency_install": True}, ["--insecure", "--allow-runtime-dependency-installation"]),
    ],
)
def test_a_process_gets_flowers_options(
    differs: dict[str, Any], ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs: list[list[str]] = []
    monkeypatch.setattr(subprocess_executor.subprocess, "Popen", lambda command, **_: theirs.append(command))
    task = SimpleNamespace(**TASK | differs)
    subprocess_executor.SubprocessExecutor().launch(task)
    [command] = theirs
    own = Programs(["python"])._command(task)
    assert own[1] == command[0] == "flwr-serverapp"
    assert sorted(own[1:]) == sorted(command)
    assert own[-len(ends) :] == ends


def test_a_claim_speaks_for_its_task_alone() -> None:
    heard: list[tuple[str, str | None, bytes]] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            heard.append((self.path, self.headers["flwr-task-token"], content))
            answer = SendTaskHeartbeatResponse(success=True).SerializeToString() if len(heard) < 2 else b""
            self.send_response(200 if len(heard) != 2 else 401)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        claim = Claim(SimpleNamespace(**TASK | {"runtime_api_address": f"127.0.0.1:{server.server_port}"}))
        claim.beat()
        claim.beat()  # refused, which is no error: the task may have ended
        claim.fail("no time")
        claim.close()
        server.shutdown()
    assert [(path, token) for path, token, _ in heard] == [
        ("/v1/runtime/send-task-heartbeat", "a1b2"),
        ("/v1/runtime/send-task-heartbeat", "a1b2"),
        ("/v1/runtime/push-task-output", "a1b2"),
    ]
    output = PushTaskOutputRequest.FromString(heard[2][2])
    assert (output.sub_status, output.details) == ("failed", "no time")
