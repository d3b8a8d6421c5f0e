"""The server as it is started: Flower's own application behind the guard, and the secret that `flwr` sends to it."""

from __future__ import annotations

import asyncio
import errno
import importlib
import logging
import math
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import HTTPException
from flwr.proto.fleet_pb2 import (
    PushMessagesRequest,
    PushMessagesResponse,
    RegisterNodeFleetRequest,
)  # fmt: skip
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from sqlalchemy import Connection, Engine, create_engine, event
from typer.testing import CliRunner

from tests.helpers.errors import ended
from umbel.cli.main import app as umbel
from umbel.deploy import certs, guard
from umbel.deploy.programs import THROUGH
from umbel.deploy.server import Database

SECRET = "0123456789abcdef" * 4
DOORS = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "control.secret"
    file.write_text(SECRET, encoding="utf-8")
    return file


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What uvicorn is asked to serve."""
    watching, watch = list[Database](), Database.watch
    monkeypatch.setattr(Database, "watch", lambda self: (watch(self), watching.append(self)))
    command = importlib.import_module("flwr.superlink.cli.flower_superlink")
    asked: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda **options: asked.update(options))
    monkeypatch.setattr(command, "uvicorn", uvicorn)
    monkeypatch.setattr(
        "umbel.deploy.server.subprocess.Popen",
        lambda command, **_: asked.update(executor=command) or SimpleNamespace(terminate=lambda: None),
    )
    router = importlib.import_module("flwr.superlink.routers.fleet.router")
    monkeypatch.setattr(router, "fleet_handlers", router.fleet_handlers)  # undone after the test
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(command, "event", lambda *_: None)
    monkeypatch.setenv("FLWR_DISABLE_UPDATE_CHECK", "1")
    for logger in (logging.getLogger("flwr"), logging.getLogger("uvicorn.access")):
        monkeypatch.setattr(logger, "filters", [])
    yield asked
    ROUTES[:] = BEFORE
    for listener in (one for database in watching for one in database.listeners):
        if event.contains(*listener):
            event.remove(*listener)


ROUTES = importlib.import_module("flwr.supercore.routers.health").router.routes
BEFORE = (*ROUTES,)


def start(*options: str) -> Any:
    ROUTES[:] = BEFORE  # as in a process of its own
    return CliRunner().invoke(
        umbel, ["server", "start", "--insecure", "--host", "127.0.0.1", "--port", "21999", *options]
    )


def ask(app: Any, method: str, path: str, client: str, token: str = "") -> int:
    """Return the status of a request from an address."""

    async def send() -> int:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(client, 5000))
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with httpx.AsyncClient(transport=transport, base_url="http://192.0.2.1:8000") as asking:
            return (await asking.request(method, path, headers=headers)).status_code

    return asyncio.run(send())


def test_a_site_gets_to_the_fleet_alone(served: dict[str, Any], secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    monkeypatch.setattr(guard, "_is_this_user", lambda scope: True)  # no socket is open here
    for door in DOORS:
        monkeypatch.setenv(door, "1")
    done = start("--control-secret", str(secret))
    assert done.exit_code == 0, done.output
    assert (served["host"], served["port"], served["proxy_headers"]) == ("127.0.0.1", 21999, False)
    assert served["ws"] == "none", "such a connection would never count as closed"
    executor = served["executor"]
    assert executor[: len(THROUGH)] == [*THROUGH], "not one of that name on the PATH"
    assert executor[len(THROUGH) :] == [
        "flower-superexec", "--runtime-api-address", "127.0.0.1:21999", "--parent-pid", str(os.getpid()), "--insecure",
        "--allow-runtime-dependency-installation",
    ]  # fmt: skip
    # Flower would serve the same on other ports.
    assert not any(door in os.environ for door in DOORS)

    app, site, own = served["app"], "192.0.2.7", "192.0.2.1"
    kinds = {"fleet": 0, "control": 0, "runtime": 0}
    for method, path in PROTOBUF_REQUEST_TYPES:
        kind = path.split("/")[2]
        kinds[kind] += 1
        # Flower finds nothing that it could read in an empty request, and says so in its own way.
        assert (ask(app, method, path, site) == 403) is (kind != "fleet"), path
        assert (ask(app, method, path, site, SECRET) == 403) is (kind == "runtime"), path
        assert (ask(app, method, path, own) == 403) is (kind == "control"), path
    assert min(kinds.values()) > 5
    for path in ("/docs", "/openapi.json", "/v1/runtime/responses", "/"):
        assert ask(app, "GET", path, site) == 403
        assert ask(app, "POST", path, site) == 403
    assert ask(app, "GET", "/health", site) == 200


OWN_ANSWERS = "403: a node may send only its own answers"
TIMES = "time of creation"


@pytest.mark.parametrize(
    ("changes", "messages", "parts", "reason"),
    [
        ({}, 1, 9_999, ""),
        ({}, 0, 0, OWN_ANSWERS),
        ({}, 2, 0, OWN_ANSWERS),
        # An order to another site, and one to the server itself, which would be taken for the answer of another.
        ({"src_node_id": 1, "dst_node_id": 9, "reply_to_message_id": ""}, 1, 0, OWN_ANSWERS),
        ({"src_node_id": 1, "dst_node_id": 1, "reply_to_message_id": ""}, 1, 0, OWN_ANSWERS),
        *((one, 1, 0, OWN_ANSWERS) for one in ({"src_node_id": 1}, {"src_node_id": 9}, {"dst_node_id": 9})),
        ({"reply_to_message_id": ""}, 1, 0, OWN_ANSWERS),
        # The database keeps no such number as one, and the server fails with every look at how old the answer is.
        *((one, 1, 0, TIMES) for one in ({"ttl": math.nan}, {"created_at": math.nan}, {"ttl": math.inf})),
        # While tens of thousands are noted, the database is closed to all others, for longer than they wait.
        ({}, 1, 10_000, "at most 10000 parts"),
    ],
)
def test_a_site_sends_its_own_answers_to_the_server_and_nothing_else_nor_what_would_stop_it(
    served: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    messages: int,
    parts: int,
    reason: str,
) -> None:
    router = importlib.import_module("flwr.superlink.routers.fleet.router")
    taken: list[Any] = []
    monkeypatch.setattr(
        router.fleet_handlers, "push_messages", lambda request, state: taken.append(1) or PushMessagesResponse()
    )
    start()
    asked = SimpleNamespace(get_valid_message_ins=lambda _: {"dst_node_id": 7, "group_id": "3"})
    said = {"src_node_id": 7, "dst_node_id": 1, "reply_to_message_id": "order", "message_id": "answer", "ttl": 60.0}
    tree = ObjectTree(object_id="answer", children=[ObjectTree(object_id=str(part)) for part in range(parts)])
    request = PushMessagesRequest(
        node=Node(node_id=7),
        messages_list=[ProtoMessage(metadata=Metadata(**said | {"created_at": 1.0} | changes))] * messages,
        message_object_trees=[tree] * bool(messages),
    )
    with pytest.raises(HTTPException, match=reason) if reason else nullcontext():
        router.fleet_push_messages(request, asked)
    assert len(taken) == (not reason)


FORGED = "x\n\x1b[92mINFO \x1b[0m:      [Fleet.ActivateNode] Activated node_id=7\n" + "x" * 1_000_000


@pytest.mark.parametrize(
    ("logger", "message", "values"),
    [
        ("flwr", "[Fleet.GetFab] Requesting FAB for fab_hash=%s", (FORGED,)),
        ("flwr", f"[/v1/fleet/get-fab][ApiError:2009] SuperNode 7, run_id=5, fab_hash={FORGED}", ()),
        ("flwr", "Failed to store object %s: %s", ("ab", ValueError(FORGED))),
        ("uvicorn.access", '%s - "%s %s HTTP/%s" %d', ("192.0.2.7:5000", "GET", "/" + FORGED, "1", 403)),
    ],
)
def test_no_request_writes_its_own_lines(
    served: dict[str, Any], logger: str, message: str, values: tuple[Any, ...]
) -> None:
    """Flower writes what a site names into its log, a megabyte or more, and with it lines that look like Flower's."""
    start()
    record = logging.makeLogRecord({"name": logger, "level": logging.INFO, "msg": message, "args": values})
    assert logging.getLogger(logger).filter(record)
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 500
    assert record.getMessage().startswith((message % values)[:20])


@pytest.mark.parametrize("more", [(), ("--simulation",)])
def test_what_a_server_writes_is_its_users_alone(served: dict[str, Any], tmp_path: Path, more: tuple[str, ...]) -> None:
    os.umask(0)
    start(*more)
    assert served
    (file := tmp_path / "state.db").touch()
    assert file.stat().st_mode & 0o777 == 0o600


def test_without_a_secret_it_is_this_machine_or_named_addresses_that_control(served: dict[str, Any]) -> None:
    """It has none, and another user of its machine could register one."""

    def refused(path: str) -> list[bool]:
        return [ask(served["app"], "POST", path, client) == 403 for client in ("192.0.2.1", "192.0.2.7")]

    start()
    assert refused("/v1/control/list-nodes") == [False, True]
    assert refused("/v1/fleet/register-node") == [False, False]
    start("--control-from", "192.0.2.7 10.0.0.0/8")
    assert refused("/v1/control/list-nodes") == [True, False]
    start("--simulation")
    assert refused("/v1/fleet/register-node") == [True, True]


def test_flwr_sends_the_secret_to_no_other_server(
    secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a user with one connection."""
    config, credentials = tmp_path / "config.toml", tmp_path / "credentials.yaml"
    config.write_text('[superlink.umbel]\naddress = "umbel.example.org:8000"\n', encoding="utf-8")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))

    def log_in(*arguments: object) -> Any:
        return CliRunner().invoke(umbel, ["server", "login", *map(str, arguments)])

    short = tmp_path / "short"
    short.write_text("short", encoding="utf-8")
    for words, code in ((("other", secret), "no-connection"), (("umbel", short), "no-secret")):
        assert f"[guard.{code}]" in log_in(*words).output
    assert not credentials.exists()
    done = log_in("umbel", secret)
    assert (done.exit_code, SECRET in done.output) == (0, False), done.output
    assert credentials.stat().st_mode & 0o077 == 0
    plugins = importlib.import_module("flwr.cli.auth_plugin")
    store = importlib.import_module("flwr.supercore.credential_store")
    for address, sends in (("umbel.example.org:8000", True), ("other.example.org:8000", False)):
        plugin = plugins.OidcCliPlugin(address)
        plugin.store = store.FileCredentialStore(credentials)
        plugin.load_tokens()
        assert (plugin.access_token == SECRET) is sends
    config.write_text("superlink = 1", encoding="utf-8")
    assert "[guard.no-connection]" in log_in("umbel", secret).output


def test_what_has_been_read_goes_from_the_disk(served: dict[str, Any], secret: Path, tmp_path: Path) -> None:
    assert start("--control-secret", str(secret)).exit_code == 0
    file = tmp_path / "state.db"
    engine = create_engine(f"sqlite:///{file}")
    # As Flower does; its settings must come second, since they write to the file.
    event.listen(engine, "connect", importlib.import_module("flwr.supercore.sql_mixin")._set_sqlite_pragmas)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 30_000
        connection.exec_driver_sql("CREATE TABLE answers (content BLOB)")
        connection.exec_driver_sql("INSERT INTO answers VALUES (zeroblob(20000000))")
        connection.exec_driver_sql("DELETE FROM answers")
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()
    assert file.stat().st_size < 100_000


class Directly(httpx.BaseTransport):
    """Calls an application without a network."""

    def __init__(self, app: Any) -> None:
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def ask() -> httpx.Response:
            answer = await self._transport.handle_async_request(request)
            return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())

        return asyncio.run(ask())


@pytest.fixture
def site(served: dict[str, Any], tmp_path: Path) -> FleetHttpClient:
    """A site's client of the server, which has a database."""
    assert start("--database", str(tmp_path / "state.db")).exit_code == 0
    client = FleetHttpClient("http://server", interceptors=[NodeAuthHttpInterceptor(*generate_key_pairs())])
    client._client = httpx.Client(transport=Directly(served["app"]))
    return client


def test_a_full_database_is_told_in_a_line_and_sites_try_again_until_there_is_room(
    site: FleetHttpClient, served: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With SQLite's own limit, since a test cannot fill the disk."""
    most = [1]

    def limit(connection: Connection) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {most[0]}")

    def register_another() -> int:
        keys = generate_key_pairs()
        site._interceptors = (NodeAuthHttpInterceptor(*keys),)
        return int(site.RegisterNode(RegisterNodeFleetRequest(public_key=public_key_to_bytes(keys[1]))).node_id)

    event.listen(Engine, "begin", limit)
    try:
        # Names of nodes fill the pages that are there.
        with pytest.raises(httpx.HTTPStatusError) as refused:
            [register_another() for _ in range(100)]
        assert (refused.value.response.status_code, "[disk.full]" in refused.value.response.text) == (503, True)
        assert site._client.get("http://server/health").status_code == 200
        ready = site._client.get("http://server/ready")
        assert (ready.status_code, ready.json()) == (503, {"ready": False, "code": "disk.full"})
        [line] = [line for line in caplog.messages if "[disk.full]" in line]
        assert str(tmp_path / "state.db") in line
        assert "MiB free" in line
        most[0] = 1 << 30
        assert register_another()
    finally:
        event.remove(Engine, "begin", limit)


# --- what ends a start


@pytest.mark.parametrize(
    ("options", "code", "part"),
    [
        # A guard that cannot be set up is no server.
        (["--control-secret", "nowhere"], "umbel", "nowhere"),
        (["--control-from", "everybody"], "guard.bad-network", "everybody"),
        (["--runtime-at", "nothing.invalid"], "guard.not-this-machine", "nothing.invalid"),
        (["--database", "/nowhere/state.db"], "server.database", "/nowhere"),
        (["--database", "{tmp}/other.db"], "server.database", "other.db"),
        (["--ssl-certfile", "/nowhere/server.crt"], "server.file", "umbel certs"),
        (["--ssl-certfile", "{tmp}/server.crt"], "certificate.expired", "server.crt"),
        (["--ssl-ca-certfile", "{tmp}/server.crt"], "certificate.expired", "server.crt"),
        (["--port", "{taken}"], "server.port", "{taken}"),
        (["--full", "--database", "{tmp}/state.db"], "disk.full", "1.0 MiB free"),
    ],
)
def test_what_the_server_lacks_is_told_in_one_line(
    served: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], code: str, part: str
) -> None:
    monkeypatch.setattr(certs, "SERVER_DAYS", -0.01)
    certs.make(tmp_path, [], [])
    (tmp_path / "other.db").write_text("not a database, and longer than a header of SQLite would be" * 10)
    if options[0] == "--full":
        monkeypatch.setattr("umbel.protocol.home.free_space", lambda _: 1 << 20)
        options = options[1:]
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        done = start(*(option.format(tmp=tmp_path, taken=taken) for option in options))
    ended(done.exit_code, done.output.splitlines(keepends=True)[-1], code, part.format(taken=taken))
    assert not served


@pytest.mark.parametrize("name", ["UMBEL_HOME", "FLWR_HOME"])
def test_a_server_whose_user_has_no_home_does_not_start(
    served: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    home, may = tmp_path / "home", os.access
    home.mkdir()
    monkeypatch.setenv(name, str(home / "server"))
    monkeypatch.setattr(os, "access", lambda path, *how: Path(path) != home and may(path, *how))
    done = start()
    ended(done.exit_code, done.output, "server.home", name, home / "server")
    assert not served
    # A container's file system is read-only: runs are in the executor's.
    assert (start("--isolation=process").exit_code == 0) is (name == "UMBEL_HOME")


# --- the disk of its database


def test_a_disk_is_full_for_a_minute_after_a_write_that_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A quota does not show in its free space."""
    now = [0.0]
    database = Database(tmp_path / "state.db", lambda: now[0])
    assert database.fault() is None
    failed = SimpleNamespace(original_exception=OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)))
    for now[0] in (10.0, 20.0):
        with pytest.raises(HTTPException, match="503"):
            database._failing(failed)
    for now[0], full in ((79.0, True), (81.0, False)):
        assert bool(database.fault()) is full
    assert [caplog.text.count(text) for text in ("[disk.full]", "can be written again")] == [1, 1]
    database._failing(SimpleNamespace(original_exception=ValueError("another")))


def test_a_disk_that_is_read_only_or_almost_full_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with a fault becomes read-only. Sites then keep their replies, and try again."""
    database = Database(tmp_path / "state.db")
    tmp_path.joinpath("state.db").touch()
    for name, value, code in (
        ("os.access", lambda *_: False, "server.database"),
        ("umbel.protocol.home.free_space", lambda _: 15 << 20, "disk.full"),  # for sites, not yet for the server
    ):
        assert database.fault() is None
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            fault = database.fault()
        assert fault
        assert fault.code == code
