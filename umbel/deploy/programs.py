"""Flower's own programs at the server, whose logs have umbel's form.

    python -m umbel.cli.parts server-executor --runtime-api-address HOST:PORT ...

takes the options of ``flower-superexec``, and starts the program of each task, such as ``flwr-serverapp``, by this
module.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from logging import ERROR, WARNING
from typing import Any

import typer

from umbel.deploy.flower import SUPEREXEC, Claim, run_program, run_superexec
from umbel.protocol import logs
from umbel.protocol.cli import PASSES_ON, command_line
from umbel.protocol.errors import ServerError
from umbel.protocol.log import log

THROUGH = (sys.executable, "-P", "-m", __spec__.name)
"""The beginning of a command that runs a program of Flower's, with its name and options behind it."""

_BEAT_S = 10.0
"""Seconds between heartbeats. Without one, a claim lasts 30 seconds at first, and later 60."""

_CLAIMS = 5
"""Number of claims to a task that may expire."""


class _Process:
    """A task's process, and the claim that lasts while the process lives."""

    def __init__(self, claim: Claim, command: Sequence[str], **how: Any) -> None:
        self._claim = claim
        self._beat()  # before the process starts: on a busy machine it imports for longer than a claim lasts
        self._popen = subprocess.Popen(command, **how)

    def keep(self) -> int | None:
        """Send the heartbeat if one is due; return the exit code of a process that has ended."""
        if (code := self._popen.poll()) is not None:
            self._claim.close()
        elif time.monotonic() >= self._due:
            self._beat()
        return code

    def end(self) -> None:
        """End the process at once."""
        self._popen.kill()
        self._popen.wait()
        self._claim.close()

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
            how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} if task.suppress_output else {}
            self._processes[task.task_id] = _Process(claim, self._command(task), **how)
            return
        fault = ServerError(
            f"{expired} processes of {task.task_type} ended, or had no answer from the server, before they took their "
            "task; give the server's machine more processor time or memory, then start the run again",
            code="server.not-started",
        )
        log(ERROR, "Task %d fails: %s", task.task_id, fault)
        claim.fail(str(fault))
        claim.close()

    def keep(self) -> None:
        """Keep the claims of processes that live, and say which have failed."""
        for number, process in list(self._processes.items()):
            if (code := process.keep()) is not None:
                del self._processes[number]
                if code:
                    log(WARNING, "The process of task %d ended with exit code %d", number, code)

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
