"""The server: Flower's SuperLink behind umbel's guard, and the secret that admits ``flwr``.

    umbel server start --control-secret certs/control.secret --host 0.0.0.0 --port 8000 ...
    umbel server login umbel certs/control.secret

The first takes the options of Flower's ``flower-superlink``. On its own, that command would start runs and register
nodes for everyone who reaches its port; here the guard (`umbel.deploy.guard`) admits callers with the operator's
secret.

After a login, `flwr` sends the secret only to the address of this connection. The secret is kept where Flower keeps
sign-ins: ``credentials.yaml`` beside ``config.toml``, which no other user can read.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import time
import tomllib
from collections.abc import Callable, Sequence
from logging import ERROR, INFO
from numbers import Real
from pathlib import Path
from typing import Annotated, Any

import typer
from sqlalchemy import Engine, Pool, event
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from umbel.deploy.flower import SUPEREXEC, run_superlink
from umbel.deploy.guard import Guard, Rules, look_up, parse_networks, read_secret
from umbel.deploy.listening import check_port, check_validity, option
from umbel.deploy.programs import THROUGH, environment
from umbel.deploy.ready import Asgi
from umbel.protocol import logs
from umbel.protocol.cli import PASSES_ON, command_line, errors_in_one_line
from umbel.protocol.errors import DiskError, GuardError, ServerError, UmbelError
from umbel.protocol.flower import keep_secret
from umbel.protocol.home import LAST_ROOM, LEAST_ROOM, check_room, disk_error, umbel_home
from umbel.protocol.log import log
from umbel.protocol.words import as_line

_RECENT_S = 60.0
"""Seconds after a failed write for which the disk counts as full: some limits do not show in its free space."""

_LOCKED_S = 30.0
"""Seconds that a request waits to write to the database; Flower gives up after 5 seconds."""

_URL = "sqlite:///"


class Database:
    """A server's database file, its disk, and what the server does without; None for a database in memory.

    On a full or read-only disk no reply can be stored. Then the server answers 503, so that sites and the ServerApp try
    again, and the log says why, once. As long as a little room is left, only sites have to wait: a run can still end
    with its reason.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._clock = path, clock
        self._failed: tuple[float, DiskError] | None = None
        self._told = False

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Database:
        """Return the database that options of Flower's SuperLink name."""
        name = option(arguments, "--database").removeprefix(_URL)
        return cls(Path(name).absolute() if name and not name.startswith(":") else None)

    def check(self) -> None:
        """Raise unless the file can be made and written."""
        if self.path is None:
            return
        if not self.path.parent.is_dir():
            text = f"there is no folder {self.path.parent} for the server's database; make it, or change --database"
            raise ServerError(text, code="server.database")
        check_room(self.path, LEAST_ROOM)

    def fault(self) -> UmbelError | None:
        """Return the error of a full or read-only disk; the log tells when that changes."""
        fault = self._fault()
        if (fault is not None) != self._told:
            if fault:
                log(ERROR, "%s", fault)
                log(ERROR, "Until it can be written, sites wait. Runs that end meanwhile can be resumed.")
            else:
                log(INFO, "The server's disk can be written again")
            self._told = fault is not None
        return fault

    def watch(self) -> None:
        """From here on, answer requests for which there is no room with 503, wait longer to write, and shrink files."""
        for kind, what, listener in self.listeners:
            event.listen(kind, what, listener)

    @property
    def listeners(self) -> tuple[tuple[type, str, Callable[..., None]], ...]:
        """Functions that SQLAlchemy calls for every database of this process."""
        return (Engine, "handle_error", self._failing), (Engine, "connect", _shrink), (Pool, "checkout", _be_patient)

    def _fault(self) -> UmbelError | None:
        if self.path is None:
            return None
        if self.path.exists() and not os.access(self.path, os.W_OK):
            text = f"the server's database {self.path} cannot be written: its disk is read-only, or another user's"
            return ServerError(f"{text}; mount it again, or chown", code="server.database")
        try:
            check_room(self.path, LAST_ROOM)
        except DiskError as error:
            return error
        if self._failed and self._clock() < self._failed[0] + _RECENT_S:
            return self._failed[1]
        return None

    def _failing(self, context: Any) -> None:
        from fastapi import HTTPException  # as Flower has done by now

        if error := disk_error(context.original_exception, self.path or "the database"):
            self._failed = self._clock(), error
            self.fault()
            raise HTTPException(503, f"the server's disk is full; it tries again [{error.code}]")


def _shrink(connection: Any, _record: Any) -> None:
    """In a new database, remove content that has been read from the disk too; Flower's own settings come later."""
    connection.execute("PRAGMA auto_vacuum = FULL")


def _be_patient(connection: Any, _record: Any, _proxy: Any) -> None:
    connection.execute(f"PRAGMA busy_timeout = {1000 * _LOCKED_S:.0f}")


_ISOLATION, _AUTHORITY, _EXECUTORS_SECRET = "--isolation", "--ssl-ca-certfile", "--superexec-auth-secret-file"
_NO_INSTALLS = "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"
_HOST, _PORT = "127.0.0.1", "8000"
"""Where Flower's SuperLink listens, unless options say otherwise."""


def _start(
    context: typer.Context,
    control_secret: Annotated[
        Path | None,
        typer.Option(
            help="File with a secret. Callers with the secret may start runs and register nodes, from any address."
        ),
    ] = None,
    control_from: Annotated[
        str,
        typer.Option(
            help="Addresses and networks that may start runs and register nodes without a secret; by default this "
            "machine's, if --control-secret is missing."
        ),
    ] = "",
    runtime_at: Annotated[
        str,
        typer.Option(
            help="Name or address of this machine that only the ServerApp's executor can reach; by default the "
            "executor must be on this machine."
        ),
    ] = "",
    largest_answer: Annotated[
        int, typer.Option(min=1, help="Maximum size of a site's reply, for all its clients together, in MiB.")
    ] = 1024,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Write the log of server and runs as lines of JSON.")
    ] = False,
) -> None:
    """Start Flower's SuperLink behind umbel's guard. Takes the options of flower-superlink, of which a server needs:

    --host ADDRESS, --port NUMBER: where sites and the researcher reach it

    --database FILE: where runs and nodes are kept

    --enable-supernode-auth: only registered sites may take part

    --ssl-ca-certfile, --ssl-certfile, --ssl-keyfile FILE: its certificates, as umbel certs makes them

    --disable-runtime-dependency-installation: a run installs no packages here
    """
    if log_json:
        os.environ[logs.FORM] = logs.JSON
    with errors_in_one_line():
        rules = Rules(
            secret=read_secret(control_secret) if control_secret else None,
            control_from=parse_networks(control_from),
            runtime_at=look_up(runtime_at) if runtime_at else frozenset(),
            sites="--simulation" not in context.args,
        )
        database = Database.of(context.args)
        _check(context.args, database)
    logs.configure()
    with errors_in_one_line():
        for name in (_AUTHORITY, "--ssl-certfile"):
            if file := option(context.args, name):
                check_validity(Path(file).expanduser())
    os.umask(0o077)  # messages in the database, the app's code, runs
    allowed = ["callers with the operator's secret"] if rules.secret else []
    allowed += [f"callers from {network}" for network in rules.control_from]
    log(INFO, "Runs and registration are allowed for %s", " and ".join(allowed) or "this machine itself")
    database.watch()
    with errors_in_one_line():
        try:
            run_superlink([*context.args, f"{_ISOLATION}=process"], lambda served: _guarded(served, rules, database),
                largest_answer << 20, database.fault, lambda: _start_executor(context.args))  # fmt: skip
        except (SQLAlchemyError, HTTPException) as error:
            if fault := database.fault():
                raise fault from None
            text = f"the server's database {database.path} cannot be used: {error}; restore it, or change --database"
            raise ServerError(" ".join(text.split()), code="server.database") from None


def _guarded(served: Asgi, rules: Rules, database: Database) -> Guard:
    for logger in (logging.getLogger("flwr"), logging.getLogger("uvicorn.access")):
        logger.addFilter(_in_one_line)
    return Guard(served, rules, database.fault)


def _start_executor(arguments: list[str]) -> None:
    """Start the ServerApps' executor beside the server, unless it is in another container; it ends with the server.

    Flower would start its own, by its name on the PATH.
    """
    if option(arguments, _ISOLATION) == "process":
        return
    host, port = option(arguments, "--host", _HOST), option(arguments, "--port", _PORT)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    command = [*THROUGH, SUPEREXEC, "--runtime-api-address", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
    command += ["--parent-pid", str(os.getpid())]
    command += ["--insecure"] if "--insecure" in arguments else ["--root-certificates", option(arguments, _AUTHORITY)]
    if secret := option(arguments, _EXECUTORS_SECRET):
        command += [_EXECUTORS_SECRET, secret]
    if "--disable-runtime-dependency-installation" not in arguments and os.environ.get(_NO_INSTALLS) != "1":
        command += ["--allow-runtime-dependency-installation"]
    atexit.register(subprocess.Popen(command, env=environment(), start_new_session=True).terminate)


def _in_one_line(record: logging.LogRecord) -> bool:
    """Make a record of the server's log one short line: Flower puts text of requests into it, of any length."""
    if isinstance(record.args, tuple) and record.args:
        record.args = tuple(one if isinstance(one, Real) else as_line(one) for one in record.args)
    else:
        record.msg = as_line(record.msg)
    return True


def _check(arguments: list[str], database: Database) -> None:
    """Raise if the port, the database or a file that options name cannot be used."""
    for name in (_AUTHORITY, "--ssl-certfile", "--ssl-keyfile", _EXECUTORS_SECRET):
        if file := option(arguments, name):
            try:
                Path(file).expanduser().open("rb").close()
            except OSError as error:
                text = f"{name} {file} cannot be read: {error.strerror}; make certificates and secrets: umbel certs"
                raise ServerError(text, code="server.file") from None
    homes = {"FLWR_HOME": _flower_home()}
    if option(arguments, _ISOLATION) != "process":  # else runs are written where the executor is
        homes["UMBEL_HOME"] = umbel_home()
    for name, home in homes.items():
        there = next(folder for folder in (home, *home.parents) if os.path.isdir(folder))
        if not os.access(there, os.W_OK | os.X_OK):
            text = f"{home} cannot be written to, so every run would fail; set {name} to a folder of the server's user"
            raise ServerError(text, code="server.home")
    database.check()
    check_port(ServerError, option(arguments, "--host", _HOST), option(arguments, "--port", _PORT))


def _flower_home() -> Path:
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")


def _login(
    connection: Annotated[str, typer.Argument(help="A connection in Flower's config.toml.")],
    secret: Annotated[Path, typer.Argument(help="The file that holds the operator's secret.")],
) -> None:
    """Store the operator's secret for a connection of flwr."""
    with errors_in_one_line():
        home = _flower_home()
        address = _address(home / "config.toml", connection)
        keep_secret(home, address, read_secret(secret).decode())
    typer.echo(f"flwr sends the operator's secret to {address}")


def _address(config: Path, connection: str) -> str:
    try:
        return str(tomllib.loads(config.read_text(encoding="utf-8"))["superlink"][connection]["address"])
    except (KeyError, TypeError, ValueError):
        text = f"{config} has no connection {connection!r} with an address; write it first"
        raise GuardError(text, code="guard.no-connection") from None


start, login = command_line(_start, **PASSES_ON), command_line(_login)
