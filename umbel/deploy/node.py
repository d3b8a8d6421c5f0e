"""A site's node on one machine: a SuperNode, and beside it umbel's own executor.

    umbel site start --superlink HOST:PORT --root-certificates ca.crt \\
        --auth-supernode-private-key site.key --node-config 'data-path="/data/site"'

takes the options of Flower's ``flower-supernode``. On its own, that command would run the code that the server sends;
here the site's own app answers (`umbel.deploy.executor`). The two processes end together.

    python -m umbel.cli.parts supernode --superlink HOST:PORT --isolation=process ...

starts the SuperNode alone. Flower's looks for messages every three seconds, which takes most of a small model's round.
This one looks more often while there are any, and as rarely only after a minute without a message. If the server is
slow to answer it looks even more rarely: many idle sites would delay those with work.

If the server refuses the site, the SuperNode says why, and tries again if that can help (`Link`).
``GET /ready`` at the executor's port says whether messages can arrive and be answered.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from logging import ERROR, INFO, WARNING
from pathlib import Path
from threading import Lock
from types import FrameType
from typing import Any, NoReturn

import httpx
import typer

from umbel.client.checks import ahead_of, clock_fault, connection_fault, entries_of, file_checks
from umbel.client.readiness import Readiness
from umbel.deploy.flower import run_supernode
from umbel.deploy.listening import check_port, check_validity, option
from umbel.deploy.programs import environment
from umbel.deploy.ready import Fault
from umbel.privacy.site.config import NODE_CONFIG, SERVER_CA, Site
from umbel.privacy.site.policy_file import POLICY_FILE
from umbel.protocol import logs
from umbel.protocol.cli import PASSES_ON, command_line, errors_in_one_line, printable
from umbel.protocol.errors import SiteError
from umbel.protocol.log import log
from umbel.protocol.polling import Pace
from umbel.protocol.words import in_time

_LOOK_S = 1.0
_ENDS_S = 10.0
_LOG_JSON = "--log-json"
_EXECUTOR_ENDED = signal.SIGUSR1
_OURS = ("--isolation", "--superexec-auth-secret-file")
_PATIENCE_S = 90.0
"""Seconds for which the server may count a node's previous session as online; Flower's server takes 60."""
_FIRST_S, _LONGEST_S = 2.0, 10.0
"""The shortest and the longest pause between two tries; each is twice the one before."""
_KEPT_UP = ("/pull-messages", "/send-node-heartbeat")
"""Calls that a busy server may fail: after one failure Flower's node would make no more of them, and stay in memory."""

_NO_KEY = SiteError(
    "the server admits only sites with a registered key; name it: --auth-supernode-private-key FILE", code="site.no-key"
)
_NOT_ADMITTED = SiteError(
    "the server does not admit this site's key: it is not registered (its operator registers the key's .pub file), it "
    "has been removed (make another: umbel certs --node NAME), or the server still counts another session with it as "
    "online, as for a minute after a process was killed",
    code="site.key-refused",
)
"""Flower's server does not tell which."""
_FORGOTTEN = SiteError(
    "the server no longer accepts this site's key: its operator has removed the site, or the server has lost its "
    "database; ask the operator, and make another key if the site was removed (umbel certs --node NAME)",
    code="site.key-refused",
)


def ended(fault: SiteError) -> SystemExit:
    """Return the end of a node, with the reason as its code; it passes Flower's own handling of errors."""
    return SystemExit(fault)


class Link:
    """The link of a node; Flower's calls to the server report to it (`umbel.deploy.flower.run_supernode`).

    Flower ends a node whose key or clock the server refuses as "terminated gracefully", or with exit code 305. Here the
    reason goes to the site's log. If time may help, the node tries again: the server counts a killed node as online for
    up to a minute, and does not say whether that is why. If it does not help, as with a wrong clock, the node ends, and
    the error's code says why.

    Parameters
    ----------
    address : str
        ``HOST:PORT`` of the server.
    clock, wall, sleep : callable
        Seconds of a steady clock and since 1970; waits for some seconds.
    """

    def __init__(
        self,
        address: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._address, self._clock, self._wall, self._sleep = address, clock, wall, sleep
        self._fault: SiteError | None = SiteError(f"not connected to {address} yet", code="site.connecting")
        self._since: float | None = None  # of an outage
        self._pause = _FIRST_S
        self._worked = False
        self._lock = Lock()  # heartbeats have a thread

    def fault(self) -> SiteError | None:
        """Return why no message can arrive now."""
        return self._fault

    def lost(self) -> SiteError | None:
        """Return why calls fail; None if none has failed since the last that worked."""
        return None if self._since is None else self._fault

    def works(self) -> None:
        """Note a call that the server answered."""
        with self._lock:
            if self._since is not None:
                log(INFO, "The server answers again, after %s", in_time(self._clock() - self._since))
            self._fault, self._since, self._pause, self._worked = None, None, _FIRST_S, True

    def fails(self, error: httpx.HTTPError) -> bool:
        """Note a call that failed; return whether to repeat it, after a pause.

        Raises
        ------
        SystemExit
            If no later call can succeed either.
        """
        if not isinstance(error, httpx.HTTPStatusError):
            fault = connection_fault(self._address, error)
            self._note(fault)
            if fault.code != "site.certificate" or not self._worked:
                return False
            # Flower's node would end. This site's own files have worked: the certificate has expired or changed.
            self._wait()
            return True
        response, path = error.response, error.request.url.path
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            ahead = ahead_of(response, self._wall())
            raise ended((None if ahead is None else clock_fault(ahead)) or _FORGOTTEN)
        if path.endswith(("/activate-node", "/register-node")):
            return self._not_admitted(response)
        self._note(SiteError(f"the server at {self._address} replied {_told(response)}", code="site.server-fault"))
        if response.is_server_error and path.endswith(_KEPT_UP):
            self._wait()
            return True
        return False

    def _not_admitted(self, response: httpx.Response) -> bool:
        """Wait if the server may admit the node later."""
        if response.status_code != HTTPStatus.PRECONDITION_FAILED:
            self._note(SiteError(f"the server at {self._address} replied {_told(response)}", code="site.server-fault"))
            return False
        if response.request.url.path.endswith("/register-node"):  # as only a node without a key does
            raise ended(_NO_KEY)
        self._note(_NOT_ADMITTED)
        if self._clock() - (self._since or 0.0) > _PATIENCE_S:
            raise ended(_NOT_ADMITTED)
        self._wait()
        return True

    def _note(self, fault: SiteError) -> None:
        """Log a fault when it begins."""
        with self._lock:
            if self._since is None:
                self._since = self._clock()
            if self._fault is None or self._fault.code != fault.code:
                log(ERROR, "%s", fault)
                log(WARNING, "This site tries again by itself")
            self._fault = fault

    def _wait(self) -> None:
        self._sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_S)


def _told(response: httpx.Response) -> str:
    """Return a reply's status and the first words of its text."""
    return f"{response.status_code} ({' '.join(response.text.split())[:200]})"


_APART = "process"
HOST, PORT = "127.0.0.1", "9094"
"""Where the executor finds the SuperNode, unless options say otherwise."""


def check(arguments: Sequence[str]) -> None:
    """Raise `SiteError` if the files that options name cannot be used, or the executor's port cannot."""
    named = (option(arguments, name) for name in ("--root-certificates", "--auth-supernode-private-key"))
    ca, key = (Path(name).expanduser() if name else None for name in named)
    for _, checked in file_checks(ca, key):
        try:
            checked()
        except SiteError as fault:
            if fault.code != "site.permissions":  # where others are on the machine; not in a container
                raise
            log(WARNING, "%s", fault)
    if ca:
        check_validity(ca, "get another from the operator")
    check_port(SiteError, option(arguments, "--host", HOST), option(arguments, "--port", PORT))


def run(arguments: Sequence[str], site: Fault = lambda: None) -> NoReturn:
    """Run a SuperNode with the options of ``flower-supernode`` until it ends.

    Parameters
    ----------
    arguments : sequence of str
    site : callable
        Returns why the site could answer nothing, if its ledger is on this machine.
    """
    logs.configure(strangers=True)
    pace, link = Pace(), Link(option(arguments, "--superlink", "the server's address"))

    def wait(seconds: float) -> None:
        time.sleep(pace.seconds(seconds))

    fault = SiteError("the SuperNode has stopped; the lines above say why", code="site.stopped")
    try:
        run_supernode(arguments, wait, link, lambda: link.fault() or site())
    except SystemExit as end:
        if not end.code:
            raise
        fault = end.code if isinstance(end.code, SiteError) else link.lost() or fault
    typer.echo(logs.error(printable(str(fault))), err=True)
    # Flower's application for the executor has a thread, for which the process would wait. The exit code is not that of
    # wrong options: a supervisor has to start the node again, as once its key is registered.
    os._exit(1)


def _alone(context: typer.Context) -> None:
    """Start only the SuperNode, for an executor in another container. Takes the options of flower-supernode."""
    with errors_in_one_line():
        if option(context.args, "--isolation", _APART) != _APART:
            text = f"Flower's own executor would run the server's code; leave --isolation out, or set {_APART}"
            raise SiteError(text, code="site.own-option")
        check(context.args)
        entries = entries_of(option(context.args, "--node-config"))
        if entries and not entries.get(POLICY_FILE):  # which only the executor sees
            Site.of(entries)
    run([*context.args, f"--isolation={_APART}"])


supernode = command_line(_alone, **PASSES_ON)


def start(arguments: list[str]) -> list[str]:
    """Start an executor beside this process, which then becomes its SuperNode; return the SuperNode's options.

    These are `arguments` and additional ones; by default only an executor on this machine reaches the SuperNode.
    """
    if taken := [name for name in _OURS if any(word.split("=")[0] == name for word in arguments)]:
        raise SiteError(f"this command sets {taken[0]} itself; leave it out", code="site.own-option")
    check(arguments)
    authority = option(arguments, "--root-certificates")
    # Also where there is none: signed runs are for the server of this connection, and no other.
    os.environ[SERVER_CA] = str(Path(authority).expanduser().absolute()) if authority else ""
    # Another user's process may listen at the SuperNode's port as soon as it has ended, and send another.
    os.environ[NODE_CONFIG] = option(arguments, "--node-config")
    os.umask(0o077)
    host, port = option(arguments, "--host", HOST), option(arguments, "--port", PORT)
    # Other users of this machine reach the same port: without the secret they could take the site's messages.
    folder = Path(tempfile.mkdtemp(prefix="umbel-node-"))
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(secrets.token_bytes(32))
    signal.signal(_EXECUTOR_ENDED, _executor_ended)
    own = os.getpid()
    if os.fork() == 0:
        _execute(own, folder, f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}", secret)
    fixed = ["--isolation=process", f"--superexec-auth-secret-file={secret}", "--host", host, "--port", port]
    return [*arguments, *fixed]


def _execute(parent: int, folder: Path, address: str, secret: Path) -> NoReturn:
    """Run an executor that ends with the SuperNode, and end the SuperNode with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the executor gets both signals too, and ends this process
    options = ["--insecure", "--runtime-api-address", address]
    options += ["--superexec-auth-secret-file", str(secret), "--parent-pid", str(parent)]
    executor = _executor(options, preexec_fn=_listen)
    _wait(executor, parent)
    shutil.rmtree(folder, ignore_errors=True)
    if os.getppid() == parent:
        os.kill(parent, _EXECUTOR_ENDED if executor.returncode else signal.SIGTERM)
    os._exit(0)


def _executor_ended(_number: int, _frame: FrameType | None) -> NoReturn:
    raise ended(SiteError("the executor has ended; the lines above say why", code="site.executor"))


def _executor(options: list[str], **how: Any) -> subprocess.Popen[Any]:
    """Start the executor with installed modules only, never those in the working folder."""
    command = [sys.executable, "-P", "-m", "umbel.cli.parts", "executor", *options]
    return subprocess.Popen(command, env=environment(), **how)


def _wait(executor: subprocess.Popen[bytes], parent: int) -> None:
    """Wait until the executor ends; end it if this process's parent is no longer the SuperNode."""
    while executor.poll() is None and os.getppid() == parent:
        with suppress(subprocess.TimeoutExpired):
            executor.wait(_LOOK_S)
    # It ends by itself, unless its SuperNode is a zombie. Two signals at once would write a traceback.
    for end in (executor.terminate, executor.kill):
        with suppress(subprocess.TimeoutExpired):
            executor.wait(_ENDS_S)
        end()
    executor.wait()


def _listen() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _node(context: typer.Context) -> None:
    """Start a site's node on one machine: a SuperNode, and umbel's executor.

    Takes the options of flower-supernode, of which a site needs:

    --superlink HOST:PORT: the server's address

    --root-certificates FILE: the certificate authority of the server, ca.crt

    --auth-supernode-private-key FILE: the site's key, which the server's operator has registered

    --node-config TEXT: the site's policy, as 'data-path="/srv/hospital" max-participations=30'; umbel config --site
    lists the entries

    --port NUMBER: for a second site on the same machine

    With --log-json, both write their log as lines of JSON.
    """
    given = [word for word in context.args if word != _LOG_JSON]
    if given != context.args:
        os.environ[logs.FORM] = logs.JSON
    with errors_in_one_line():
        site = Readiness.of(entries_of(option(given, "--node-config")))
        arguments = start(given)
    run(arguments, site.fault if site else lambda: None)


app = command_line(_node, **PASSES_ON)
