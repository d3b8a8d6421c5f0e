"""A site's executor: it runs the ClientApp that the site installed, and never opens a bundle.

A Flower server ships the code that its clients run, and Flower's own executor starts any kind of task that the server
names. This executor runs the app that is installed here: umbel's, or another that the site names as ``app`` in its
configuration. It refuses bundles that the site has not reviewed (`umbel.client.bundle`), and tasks of any other kind.

It replaces ``flower-superexec`` and takes the same options::

    python -m umbel.cli.parts executor --runtime-api-address HOST:PORT --insecure

One process has loaded Python, PyTorch and the app, and forks for each message, so that a message needs no imports.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from logging import ERROR, INFO
from pathlib import Path
from typing import Any, NoReturn

import typer
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from umbel.client.app import app
from umbel.client.bundle import Bundle, reviewed
from umbel.client.checks import entries_of
from umbel.client.readiness import Readiness
from umbel.client.trial import try_engines
from umbel.deploy.flower import CLIENT_TASK, prepare_tasks, run_superexec, run_task
from umbel.deploy.listening import option, without
from umbel.deploy.ready import serve_health
from umbel.privacy.site.config import NODE_CONFIG, Site
from umbel.privacy.site.refusals import record_refusal, refuse
from umbel.protocol import logs
from umbel.protocol.cli import PASSES_ON, command_line
from umbel.protocol.errors import Refused, SiteError
from umbel.protocol.flower import ErrorCode, refuse_repeated_parts, without_proxy
from umbel.protocol.log import log
from umbel.protocol.plugins import import_by_name

_REQUEST = 1 << 16  # bytes, more than a task needs
_LOOK_S = 1.0  # seconds between looks for children that have ended
_LEDGER = "UMBEL_LEDGER_PATH"
_POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
_HEALTH = "--health-server-address"


class WarmProcess:
    """A process that has everything loaded, and forks for each task.

    It is made before there are threads, which a fork would lose, and ends with the process that made it.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._socket.close()
            _serve(theirs)
        theirs.close()

    def launch(self, task: Any) -> None:
        """Let a child of the warm process answer the message of a task."""
        how = task.runtime_api_address, task.token, task.insecure, task.root_certificates_path, os.getpid()
        try:
            self._socket.send(json.dumps([str(task.task_type), *how]).encode())
        except OSError as error:
            # The executor must be restarted: without the warm process the site would be online and answer nothing.
            log(ERROR, "the warm process is gone (%s); the executor ends", error)
            sys.exit(1)


def _serve(requests: socket.socket) -> NoReturn:
    """Fork for each request, until no process is left that can send one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # A terminal sends these signals to all its processes; this one ends with the process that made it.
        signal.signal(number, signal.SIG_IGN)
    try_engines()  # before any child: each would load the same, and in the time of its message
    homes: dict[int, str] = {}
    while True:
        ready, _, _ = select.select([requests], [], [], _LOOK_S)
        _take_leave(homes)
        if not ready:
            continue
        request = requests.recv(_REQUEST)
        if not request:
            break
        home = _home()
        child = os.fork()
        if child == 0:
            requests.close()
            _work(home, json.loads(request))
        homes[child] = home
    while homes:
        select.select([], [], [], _LOOK_S)
        _take_leave(homes)
    os._exit(0)


def _home() -> str:
    """Return an empty folder for a task."""
    try:
        return tempfile.mkdtemp(prefix="umbel-task-")
    except OSError as error:
        # Nothing is written there, and without an answer the site would be late in every round.
        log(ERROR, "a task has no folder: %s", error)
        return os.path.join(tempfile.gettempdir(), f"umbel-task-{os.getpid()}-{time.monotonic_ns()}")


def _take_leave(homes: dict[int, str]) -> None:
    """Remove the homes of children that have ended."""
    for child in list(homes):
        if os.waitpid(child, os.WNOHANG)[0]:
            shutil.rmtree(homes.pop(child), ignore_errors=True)


def _work(home: str, task: list[Any]) -> NoReturn:
    """Answer a message, as `run_task` describes, in a separate process with an empty Flower home."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ["FLWR_HOME"] = home
        kind, address, token, insecure, certificates, parent = task
        run_task(address, token, insecure, certificates, parent, partial(load, kind))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        log(ERROR, "a client process failed", exc_info=error)
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Skip clean-up: everything that the warm process set up belongs to it.
        os._exit(code)


def load(kind: str, bundle: bytes) -> ClientAppCallable:
    """Return the app that answers a message with a bundle, which stays packed: the site's own app, or a refusal."""

    def answer(message: Message, context: Context) -> Message:
        try:
            if (own_config := os.environ.get(NODE_CONFIG)) is not None:
                context.node_config = entries_of(own_config)
            wrong = "" if kind == CLIENT_TASK else f"this site runs no {kind}"
            reason = wrong or reviewed(bundle, context.node_config)
        except Exception as error:  # Flower would send its text to the server
            log(ERROR, "umbel refused to answer: %s", error)
            reason = "refused"
        if not reason:
            if own := Site.of(context.node_config).policy.app:
                return _own_answer(own, message, context)
            try:
                return app(message=message, context=context)
            except Exception as error:  # a type of message that the app does not have
                record_refusal(message, context, kind, error)
                raise
        log(ERROR, "umbel refused to answer: %s", reason)
        record_refusal(message, context, kind, Refused(reason, code="refused.bundle-or-task"))
        return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)

    return answer


def _own_answer(name: str, message: Message, context: Context) -> Message:
    """Return the reply of another app of the site's; the server does not see errors around its gate."""
    try:
        own = import_by_name(name)
        if not isinstance(own, ClientApp):
            raise SiteError(
                f"app {name!r} is not a ClientApp; set app to one, as package.module:app", code="site.no-client-app"
            )
        return own(message=message, context=context)
    except Exception as error:
        return refuse(message, context, error)


def run(arguments: Sequence[str]) -> None:
    """Load everything, then wait for tasks, with the options of ``flower-superexec``."""
    logs.configure(strangers=True)
    refuse_repeated_parts()
    prepare_tasks()
    own = Bundle.installed()
    log(INFO, "This site runs %s", own or "an umbel without a pyproject.toml, so its bundle is unknown; set bundle")
    # Flower's second between looks would be added to every round.
    os.environ.setdefault(_POLL, "0.1")
    os.environ.update(without_proxy())  # before the warm process starts
    warm = WarmProcess()
    if address := option(arguments, _HEALTH):
        # In another container than the SuperNode, only this process can look at the ledger.
        ledger = os.environ.get(_LEDGER)
        serve_health(address, Readiness(Path(ledger)).fault if ledger else lambda: None)
    run_superexec(without(arguments, _HEALTH), warm.launch)


def main(context: typer.Context) -> None:
    """Start only the executor, which runs the site's own app. Takes the options of flower-superexec."""
    run(context.args)


command = command_line(main, **PASSES_ON)
