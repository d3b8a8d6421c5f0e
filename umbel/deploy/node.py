"""A site's node on one machine: a SuperNode, and beside it umbel's own executor.

    umbel site start --superlink HOST:PORT --root-certificates ca.crt \\
        --auth-supernode-private-key site.key --node-config 'data-path="/data/site"'

takes the options of Flower's ``flower-supernode``. On its own, that command would run the code that the server sends;
here the site's own app answers (`umbel.deploy.executor`). The two processes end together.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

from umbel.client.checks import entries_of
from umbel.client.readiness import Readiness
from umbel.deploy import supernode
from umbel.deploy.listening import option
from umbel.deploy.supernode import ended
from umbel.privacy.gate.site import NODE_CONFIG, SERVER_CA
from umbel.protocol import logs
from umbel.protocol.cli import PASSES_ON, command_line, errors_in_one_line
from umbel.protocol.errors import SiteError
from umbel.protocol.project import PACKAGE

_LOOK_S = 1.0
_ENDS_S = 10.0
_LOG_JSON = "--log-json"
_EXECUTOR_ENDED = signal.SIGUSR1
_OURS = ("--isolation", "--superexec-auth-secret-file")


def start(arguments: list[str]) -> list[str]:
    """Start an executor beside this process, which then becomes its SuperNode; return the SuperNode's options.

    These are `arguments` and additional ones; by default only an executor on this machine reaches the SuperNode.
    """
    if taken := [name for name in _OURS if any(word.split("=")[0] == name for word in arguments)]:
        raise SiteError(f"this command sets {taken[0]} itself; leave it out", code="site.own-option")
    supernode.check(arguments)
    authority = option(arguments, "--root-certificates")
    # Also where there is none: signed runs are for the server of this connection, and no other.
    os.environ[SERVER_CA] = str(Path(authority).expanduser().absolute()) if authority else ""
    # Another user's process may listen at the SuperNode's port as soon as it has ended, and send another.
    os.environ[NODE_CONFIG] = option(arguments, "--node-config")
    os.umask(0o077)
    host, port = option(arguments, "--host", supernode.HOST), option(arguments, "--port", supernode.PORT)
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
    places = filter(None, [*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(PACKAGE.parent)])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-P", "-m", "umbel.cli.parts", "executor", *options]
    return subprocess.Popen(command, env=environment, **how)


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


def main(context: typer.Context) -> None:
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
    supernode.run(arguments, site.fault if site else lambda: None)


app = command_line(main, **PASSES_ON)
