"""Flower's own programs at the server, whose logs have umbel's form.

    python -m umbel.cli.parts server-executor --runtime-api-address HOST:PORT ...

takes the options of ``flower-superexec``, and starts the program of each task, such as ``flwr-serverapp``, by this
module.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from logging import ERROR, WARNING
from threading import Thread
from typing import Any

import typer

from umbel.deploy.flower import SUPEREXEC, Claim, run_program, run_superexec
from umbel.protocol import logs
from umbel.protocol.cli import PASSES_ON, command_line
from umbel.protocol.errors import ServerError
from umbel.protocol.log import log
from umbel.protocol.project import PACKAGE

THROUGH = (sys.executable, "-P", "-m", __spec__.name)
"""The beginning of a command that runs a program of Flower's, with its name and options behind it; it needs
`environment`."""

_BEAT_S = 10.0
"""Seconds between heartbeats. Without one, a claim lasts 30 seconds at first, and later 60."""

_CLAIMS = 5
"""Number of claims to a task that may expire."""

_LAST_LINE_S = 1.0
"""Longest wait for the last line of a process that has ended."""


def environment() -> dict[str, str]:
    """Return the environment for another process of umbel's, which finds this umbel but no module in its folder."""
    places = filter(None, [*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(PACKAGE.parent)])
    return os.environ | {"PYTHONPATH": os.pathsep.join(places)}


class _Process:
    """A task's process, and the claim that lasts while the process lives."""

    def __init__(self, claim: Claim, command: Sequence[str], quiet: bool) -> None:
        self._claim = claim
        self._beat()  # before the process starts: on a busy machine it imports for longer than a claim lasts
        how: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} if quiet else {}
        self._popen = subprocess.Popen(command, env=environment(), text=True, errors="replace", **how)
        self._last: deque[str] = deque(maxlen=1)
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def keep(self) -> str | None:
        """Send the heartbeat if one is due; say how a process has ended, with its last line if that was kept."""
        if (code := self._popen.poll()) is None:
            if time.monotonic() >= self._due:
                self._beat()
            return None
        self._claim.close()
        self._reader.join(_LAST_LINE_S)  # a child of the process may keep its output open
        return f"ended with exit code {code}: {''.join(self._last)}".rstrip(": ") if code else ""

    def end(self) -> None:
        """End the process at once."""
        self._popen.kill()
        self._popen.wait()
        self._claim.close()

    def _read(self) -> None:
        self._last.extend(line.strip() for line in self._popen.stderr or () if line.strip())

    def _beat(self) -> None:
        self._claim.beat()
        self._due = time.monotonic() + _BEAT_S


class Programs:
    """The tasks of an executor: one process for each at a time, whose claim the executor keeps.

    Parameters
    ----------
    through : sequence of str
        The beginning of a program's command.
    claim : callable
        Returns the claim to a task.
    """

    def __init__(self, through: Sequence[str] = THROUGH, claim: Callable[[Any], Claim] = Claim) -> None:
        self._through, self._claim = through, claim
        self._processes: dict[int, _Process] = {}
        self._claims: dict[int, int] = {}
        self._ends: dict[int, str] = {}

    def launch(self, task: Any) -> None:
        """Start the process of a task; end the task if too many claims to it have expired."""
        expired = self._claims.get(task.task_id, 0)
        self._claims[task.task_id] = expired + 1
        if process := self._processes.pop(task.task_id, None):
            process.end()  # it can do nothing: it has the claim that expired
        if expired:
            text = "Task %d comes back, %d of at most %d times: no process of %s took it before the claim expired"
            log(WARNING, text, task.task_id, expired, _CLAIMS, task.task_type)
        claim = self._claim(task)
        if expired < _CLAIMS:
            self._processes[task.task_id] = _Process(claim, self._command(task), task.suppress_output)
            return
        end = self._ends.get(task.task_id)
        why = f"and the last {end}" if end else "or had no answer from the server"
        fix = "mend that" if end else "give the server's machine more processor time or memory"
        fault = ServerError(
            f"{expired} processes of {task.task_type} ended before they took their task, {why}; {fix}, then start the "
            "run again",
            code="server.not-started",
        )
        log(ERROR, "Task %d fails: %s", task.task_id, fault)
        claim.fail(str(fault))
        claim.close()

    def keep(self) -> None:
        """Keep the claims of processes that live, and say which have failed."""
        for number, process in list(self._processes.items()):
            if (end := process.keep()) is not None:
                del self._processes[number]
                if end:
                    self._ends[number] = end
                    log(WARNING, "The process of task %d %s", number, end)

    def _command(self, task: Any) -> list[str]:
        command = [*self._through, str(task.task_type), "--runtime-api-address", task.runtime_api_address]
        command += ["--token", task.token, "--parent-pid", str(task.parent_pid)]
        if task.insecure:
            command += ["--insecure"]
        elif task.root_certificates_path:
            command += ["--root-certificates", task.root_certificates_path]
        if task.runtime_dependency_install:
            command += ["--allow-runtime-dependency-installation"]
        return command


def main(context: typer.Context) -> None:
    """Start only the ServerApps' executor. Takes the options of flower-superexec."""
    _run(SUPEREXEC, context.args)


def _run(name: str, arguments: list[str]) -> None:
    logs.configure()
    if name == SUPEREXEC:
        programs = Programs()
        run_superexec(arguments, programs.launch, keep=programs.keep)
    else:
        run_program(name, arguments)


app = command_line(main, **PASSES_ON)

if __name__ == "__main__":
    _run(sys.argv[1], sys.argv[2:])
