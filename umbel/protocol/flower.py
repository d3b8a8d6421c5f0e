"""The parts of Flower that are not public. Only this module imports them.

They change between releases; `tests/protocol/test_flower.py` names each part that is gone or has changed. Imports that
only a site's executor or the server needs are made inside functions, since they take long.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path
from threading import Lock
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NoReturn, Protocol, Self, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.config import parse_config_args
from flwr.common.constant import ErrorCode, SType, SubStatus
from flwr.proto.fleet_pb2 import PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import PushTaskOutputRequest, SendTaskHeartbeatRequest
from flwr.supercore import log
from flwr.supercore.logger import FLOWER_LOGGER, update_console_handler
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from umbel.protocol import project
from umbel.protocol.polling import pause

__all__ = [
    "CLIENT_TASK",
    "FLOWER_LOGGER",
    "READY",
    "SUPEREXEC",
    "Answer",
    "Claim",
    "ErrorCode",
    "Link",
    "Refusal",
    "Run",
    "SType",
    "TaskIdentity",
    "build_bundle",
    "delivered",
    "drop_limit",
    "encoded",
    "filled",
    "identify",
    "in_memory",
    "keep_beating",
    "keep_secret",
    "limit_answer",
    "log",
    "parse_config_args",
    "pull_soon",
    "refusal_in",
    "refuse_repeated_parts",
    "run_program",
    "run_superexec",
    "run_superlink",
    "run_supernode",
    "run_task",
    "tell_why",
    "with_content",
    "without_proxy",
]

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)
T = TypeVar("T")
_RECORDS = (RecordDict, ArrayRecord, ConfigRecord, MetricRecord)

Answer = Callable[[Message, Context], Message]
"""A ClientApp as a function: from a message and the node's context to the reply."""

_SOON_S = 0.05
"""Seconds until a missing part of a message is looked for again; Flower waits one second at first."""

_EXPIRED_S = 1.0
"""Seconds between a SuperLink's checks for tasks whose processes died."""

_LOCKED_S = 30.0
"""Seconds that a request to a SuperLink waits to write to the database; Flower gives up after 5 seconds."""

_CONNECTIONS = 40
"""Connections to the database that a SuperLink keeps open, one for each of its threads. Flower keeps five, and opens
and closes others for single requests."""

_OBJECTS = 10_000
"""Maximum number of parts of a message or answer: records, arrays, and each 5 MiB of an array. While the server notes
them, about a thousand a second, the database is blocked for others."""

_ANSWERS = 10_000
"""Number of latest answers whose bytes are counted."""

_LONGEST_S = 1e9
"""Longest time in seconds that a node may report for an answer. Flower sums these times and fails on an infinite
sum."""

_LIMIT = re.compile(r", answer up to (\d{1,18}) bytes$")
"""Maximum size of the answer, in a message's group: Flower's database keeps the group, and the logs show it."""

_IDLE_S = 1.0
"""Longest extra wait, in seconds, of an executor without a task."""

READY = "ready"
"""The name of readiness in an executor's health service; the empty name is Flower's, and says that it is alive."""

CLIENT_TASK = "flwr-clientapp"
"""The task type of a ClientApp."""
SUPEREXEC = "flower-superexec"
"""Flower's program that looks for tasks and starts a process for each."""


def identify(node: int = 1) -> None:
    """Set this process's identity where Flower has not: no Message can be made without one."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, node, 1


def filled(record: R, entries: Mapping[str, Any]) -> R:
    """Put entries that fit into a record, without Flower's check of each number, which takes longer than all the
    rest."""
    record.__dict__["_data"].update(entries)
    return record


def encoded(dtype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """Return an array in NumPy's format, like ``Array(dtype, shape, SType.NUMPY, data)`` but without its checks."""
    array = Array.__new__(Array)
    array.__dict__.update(dtype=dtype, shape=shape, stype=SType.NUMPY, data=data, _is_dirty=True)
    return array


def with_content(message: Message, content: RecordDict) -> Message:
    """Return a message with other content, for use within this process."""
    other = _shallow(message)
    other.__dict__["_content"] = content
    return other


def delivered(message: Message) -> Message:
    """Return a message as it arrives over a network: whoever changes it changes no other.

    Only the bytes of arrays are shared, which are read-only.
    """
    other = _shallow(message)
    content = _deep(message.content) if message.has_content() else None
    other.__dict__.update(_metadata=_shallow(message.metadata), _content=content)
    return other


def _deep(value: Any) -> Any:
    """Return a copy of a record, or of an entry of one."""
    if isinstance(value, _RECORDS):
        record: Any = value.copy()
        return filled(record, {name: _deep(entry) for name, entry in value.items()})
    if isinstance(value, Array):
        return _shallow(value)
    return value.copy() if type(value) is list else value


def _shallow(value: T) -> T:
    other = object.__new__(type(value))
    other.__dict__.update(value.__dict__)
    return other


def build_bundle(folder: Path) -> bytes:
    """Return the bundle that ``flwr run`` would submit for the app in a folder."""
    build, folder = import_module("flwr.cli.build"), folder.resolve()
    if folder != project.APP:
        return bytes(build.build_fab_from_disk(folder))
    # Of umbel's own app Flower takes only these, wherever they lie: a checkout has a virtual environment beside them.
    files = {file.name: file for file in folder.iterdir() if file.is_file() and not file.is_symlink()}
    package = import_module("flwr.cli.utils").collect_files(project.PACKAGE)
    own = {name: file for name, file in package.items() if project.INSTALLED not in file.parents}
    return bytes(build.build_fab_from_files(files | {f"{project.PACKAGE.name}/{name}": own[name] for name in own})[0])


def run_superexec(
    arguments: Sequence[str],
    launch: Callable[[Any], None],
    ready: Callable[[], bool] = lambda: True,
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Run Flower's SuperExec with its command-line options.

    Every task of any kind goes to `launch`. Flower itself would look for a command on the PATH and start it.

    Parameters
    ----------
    arguments : sequence of str
        Options of ``flower-superexec``.
    launch : callable
        Called with a task: ``task_type``, `CLIENT_TASK` or another, ``task_id``, ``runtime_api_address``, ``token``,
        ``insecure``, ``root_certificates_path``, ``parent_pid``, ``runtime_dependency_install``, ``suppress_output``.
    ready : callable
        Returns whether tasks can be answered; the health service says so under the name `READY`.
    keep : callable
        Called before each look for a task, at most a few seconds apart while the server answers.
    """
    command = import_module("flwr.supercore.cli.flower_superexec")
    health = import_module("flwr.supercore.grpc_health.health_server")
    servicer = _readiness(health.SimpleHealthServicer, ready)
    _replace(health, health.run_health_server_grpc_no_tls, SimpleHealthServicer=servicer)
    superexec = import_module("flwr.supercore.superexec.run_superexec")
    _replace(superexec, superexec.run_superexec, get_executor=lambda *_, **__: _Executor(launch, keep))
    stay_at_server()
    sys.argv = [SUPEREXEC, *arguments]
    command.flower_superexec()


def run_program(name: str, arguments: Sequence[str]) -> None:
    """Run a program of Flower's, such as ``flwr-serverapp``, with its options, as its command does."""
    [program] = distribution("flwr").entry_points.select(group="console_scripts", name=name)
    sys.argv = [name, *arguments]
    program.load()()


class Claim:
    """An executor's claim to a task, which its server lets expire unless heartbeats arrive.

    A task whose claim expires before its process has taken it goes to the next executor that looks for one.

    Parameters
    ----------
    task : object
        As in `run_superexec`.
    """

    def __init__(self, task: Any) -> None:
        superexec = import_module("flwr.supercore.superexec.run_superexec")
        interceptors = import_module("flwr.supercore.interceptors")
        self._failure = import_module("httpx").HTTPError
        self._client = superexec.RuntimeHttpClient.from_server_address(
            task.runtime_api_address,
            task.insecure,
            superexec.validate_and_resolve_root_certificates(task.root_certificates_path, task.insecure),
            [
                superexec.RuntimeVersionHttpInterceptor(component_name="SuperExec"),
                interceptors.RuntimeTokenHttpInterceptor(task.token),
            ],
        )

    def beat(self) -> None:
        """Send a heartbeat. One that fails is not repeated: the next may arrive in time, and a task that has ended
        takes none."""
        with suppress(self._failure):
            self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def fail(self, reason: str) -> None:
        """End the task as failed, for a reason that the server shows; a run ends with its ServerApp's task."""
        with suppress(self._failure):
            self._client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=reason))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def plain_console() -> None:
    """Give the lines of Flower's log a time, and no codes for colours."""
    update_console_handler(timestamps=True, colored=False)


def _readiness(alive: type, ready: Callable[[], bool]) -> type:
    """Return Flower's health service, extended by readiness."""

    class Health(alive):
        def Check(self, request: Any, context: Any) -> Any:
            reply = super().Check(request, context)
            if request.service == READY and not ready():
                reply.status = type(reply).NOT_SERVING
            return reply

    return Health


def run_superlink(
    arguments: Sequence[str],
    guard: Callable[[Any], Any],
    connection: type,
    loop: str,
    largest_answer: int,
    through: Sequence[str],
) -> None:
    """Run Flower's SuperLink with its command-line options.

    Parameters
    ----------
    arguments : sequence of str
        Options of ``flower-superlink``.
    guard : callable
        Wraps the application that Flower would serve, and returns the one to serve.
    connection : type
        A uvicorn protocol, instantiated for each connection.
    loop : str
        A function that returns the event loop, as module:name.
    largest_answer : int
        Maximum bytes of a site's answer, all parts together, also where the message allows more or names no limit
        (`limit_answer`).
    through : sequence of str
        The beginning of the command that starts the ServerApps' SuperExec, before its name.
    """
    command = import_module("flwr.superlink.cli.flower_superlink")
    uvicorn = import_module("uvicorn")

    def serve(app: Any, **options: Any) -> None:
        # Proxy headers would let a caller claim any address.
        # A connection that becomes a WebSocket would never count as closed; Flower uses none.
        uvicorn.run(
            app=guard(app), **options | {"proxy_headers": False, "ws": "none", "http": connection, "loop": loop}
        )

    _replace(command, command._run_superlink_http_api, uvicorn=SimpleNamespace(run=serve))
    superexec = command._get_superexec_command
    _replace(
        command,
        command.SuperLinkLifespan._start_superexec_if_needed,
        _get_superexec_command=lambda *given, **options: [*through, *superexec(*given, **options)],
    )
    router = import_module("flwr.superlink.routers.fleet.router")
    handlers = router.fleet_handlers
    answers = _Answers(largest_answer, handlers.push_messages, handlers.push_object)
    _replace(handlers, router.fleet_push_messages, push_messages=answers.push_messages)
    _replace(handlers, router.fleet_push_object, push_object=answers.push_object)
    _replace(handlers, router.fleet_activate_node, activate_node=tell_why(handlers.activate_node))
    keep_true_parts()
    state = import_module("flwr.supercore.corestate.sql_corestate").SqlCoreState
    state._cleanup_expired_task_tokens = _seldom(state._cleanup_expired_task_tokens, _EXPIRED_S)
    sql = import_module("flwr.supercore.sql_mixin")
    # In a new database, content that has been read is removed from the disk too.
    pragmas = {"auto_vacuum": "FULL"} | dict(sql.SQLITE_PRAGMAS) | {"busy_timeout": f"{1000 * _LOCKED_S:.0f}"}
    _replace(sql, sql._set_sqlite_pragmas, SQLITE_PRAGMAS=tuple(pragmas.items()))
    sql.SqlMixin.initialize = _pooled(sql.SqlMixin.initialize)
    for second_door in (command.FLWR_INTERNAL_GRPC_CONTROL_API, command.FLWR_INTERNAL_GRPC_FLEET_API):
        # With these, Flower would serve the same application again on unguarded ports.
        os.environ.pop(second_door, None)
    os.environ.update(without_proxy())
    sys.argv = ["flower-superlink", *arguments]
    command.flower_superlink()


def _pooled(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of the function that opens a database, which keeps more connections to a file."""

    def pooled(self: Any, log_queries: bool = False, **options: Any) -> Any:
        kept = {} if self._is_in_memory_sqlite else {"pool_size": _CONNECTIONS}
        return initialize(self, log_queries, **kept | options)

    return pooled


class Link(Protocol):
    """A node's reactions to its calls to the server; see `umbel.deploy.link.Link`."""

    def works(self) -> None:
        """Note a call that the server answered."""

    def fails(self, error: Any) -> bool:
        """Note an error of httpx; return whether to repeat the call."""

    def gives_up(self, told: str) -> NoReturn:
        """End the node for lack of a connection."""


def run_supernode(
    arguments: Sequence[str], sleep: Callable[[float], None], link: Link, serve: Callable[[Any], Any]
) -> None:
    """Run Flower's SuperNode with its command-line options; it returns only after an error in Flower.

    Parameters
    ----------
    arguments : sequence of str
        Options of ``flower-supernode``.
    sleep : callable
        Replaces Flower's waiting; gets the seconds that Flower would wait for the next message or reply.
    link : Link
    serve : callable
        Wraps the application that Flower would serve to the executor, and returns the one to serve.
    """
    command = import_module("flwr.supernode.cli.flower_supernode")
    client = import_module("flwr.supernode.start_client_internal")
    for function in (client.start_client_internal, client._push_messages):
        _replace(client, function, time=SimpleNamespace(sleep=sleep))
    _replace(client, client._pull_and_store_message, pull_objects=_soon(client.pull_objects))
    keep_beating()
    _tell(link)
    main = import_module("flwr.supernode.main")
    create = main.create_app
    _replace(main, command._start_supernode_http_api, create_app=lambda **options: serve(create(**options)))
    stay_at_server()
    os.environ.update(without_proxy())
    sys.argv = ["flower-supernode", *arguments]
    try:
        command.flower_supernode()
    finally:
        # Flower's application for the executor has a thread, for which the process would wait.
        import_module("flwr.supercore.exit.exit_handler").trigger_exit_handlers(run_before_force_exit=False)


def _tell(link: Link) -> None:
    """Make a node's calls to its server report to a link, and let the link end the node."""
    connection = import_module("flwr.supernode.fleet_http_connection")
    failure = import_module("httpx").HTTPError

    class Client(connection.FleetHttpClient):  # type: ignore[name-defined]
        def _unary_unary(self, **call: Any) -> Any:
            while True:
                try:
                    reply = super()._unary_unary(**call)
                except failure as error:
                    if not link.fails(error):
                        raise
                else:
                    link.works()
                    return reply

    request_response = connection.http_request_response.__wrapped__
    _replace(connection, request_response, FleetHttpClient=Client, flwr_exit=lambda _, told: link.gives_up(told))


class Refusal(StrEnum):
    """Why a server does not admit a node."""

    UNKNOWN = "unknown"
    REVOKED = "revoked"
    ONLINE = "online"
    """It counts the node's previous session as online."""
    NO_KEY = "no key"
    UNTOLD = ""


def refusal_in(reply: str) -> Refusal:
    """Return why a server does not admit a node, from its reply."""
    error = import_module("flwr.supercore.error").FlowerError.from_json(reply)
    codes = import_module("flwr.supercore.error").ApiErrorCode
    if error is None:
        return Refusal.UNTOLD
    if error.code == codes.FLEET_SUPERNODE_REGISTRATION_DISABLED:
        return Refusal.NO_KEY
    return next((one for one in Refusal if one == error.public_details), Refusal.UNTOLD)


def tell_why(activate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of Flower's ``activate_node`` that tells the key's owner why a node is not admitted.

    Flower has checked the request's signature.
    """
    errors = import_module("flwr.supercore.error")

    def telling(request: Any, state: Any) -> Any:
        try:
            return activate(request=request, state=state)
        except errors.FlowerError as error:
            if error.code == errors.ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
                error.public_details = str(_refusal(request.public_key, state))
            raise

    return telling


def _refusal(key: bytes, state: Any) -> Refusal:
    status = import_module("flwr.supercore.constant").NodeStatus
    if state.get_node_id_by_public_key(key) is not None:
        return Refusal.ONLINE
    removed = state.get_node_info(statuses=[status.UNREGISTERED])
    return Refusal.REVOKED if any(node.public_key == key for node in removed) else Refusal.UNKNOWN


def keep_beating() -> None:
    """Keep a node's heartbeat going after a SuperLink was too busy for one: Flower would never send another."""
    connection = import_module("flwr.supernode.fleet_http_connection")
    request_response = connection.http_request_response.__wrapped__  # the function that the decorator makes a context
    _replace(connection, request_response, HeartbeatSender=partial(_steady, connection.HeartbeatSender))


def _steady(sender: Callable[..., Any], beat: Callable[[], bool]) -> Any:
    failure = import_module("httpx").HTTPStatusError

    def beat_again() -> bool:
        try:
            return beat()
        except failure as error:
            if not error.response.is_server_error:
                raise
            return False

    return sender(beat_again)


def in_memory(grid: object) -> bool:
    """Return whether a grid is Flower's own simulation grid, which Flower imports before the app runs."""
    module = sys.modules.get("flwr.superlink.grid.inmemory_grid")
    return module is not None and isinstance(grid, module.InMemoryGrid)


def pull_soon() -> None:
    """Shorten a ServerApp's wait for missing parts of a reply; in simulation no part is ever missing."""
    if (grid := sys.modules.get("flwr.superlink.grid.http_grid")) is not None:
        _replace(grid, grid.HttpGrid.pull_messages, pull_objects=_soon(grid.pull_objects))


def stay_at_server() -> None:
    """Follow no redirect: a server could make a site call any address in its network, with the site's headers."""
    client = import_module("flwr.supercore.protobuf.client")
    httpx = import_module("httpx")

    def staying(**options: Any) -> Any:
        return httpx.Client(**options | {"follow_redirects": False})

    _replace(client, client.ProtobufClient.__init__, httpx=SimpleNamespace(**vars(httpx) | {"Client": staying}))


def without_proxy() -> dict[str, str]:
    """Return the environment in which programs of this machine reach each other directly.

    Many organisations name a proxy for all addresses. It cannot reach the loopback of the machine that asks.
    """
    named = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    value = ",".join([*filter(None, [named]), "127.0.0.1", "localhost"])
    return {"no_proxy": value, "NO_PROXY": value}


@cache
def refuse_repeated_parts() -> None:
    """From here on, refuse received arrays that use a part more than once, in one array or in several of a message.

    Flower would copy the part for each use: a message of 100 kB could fill any memory. So arrays take no more memory
    than their parts.
    """
    array = import_module("flwr.app.message.array")
    inflate = array.Array.inflate.__func__

    def inflate_once(cls: type, content: bytes, children: Any = None) -> Any:
        uses = json.loads(array.get_object_body(content, cls))["arraychunk_ids"]
        parts = (children or {}).values()  # each once, though the content may name it twice
        if len(uses) != len(parts) or any("used" in vars(part) for part in parts):
            raise ValueError("an array repeats one of its parts or another array's; umbel accepts no such array")
        for part in parts:
            vars(part)["used"] = True
        return inflate(cls, content, children)

    array.Array.inflate = classmethod(inflate_once)


def keep_secret(home: Path, address: str, secret: str) -> None:
    """Make the ``flwr`` command send a secret to a server, as ``Authorization: Bearer``.

    Parameters
    ----------
    home : Path
        Flower's home, ``FLWR_HOME``.
    address : str
        Address of the server, as in the connection.
    """
    store = import_module("flwr.supercore.credential_store").FileCredentialStore(home / "credentials.yaml")
    plugin = import_module("flwr.cli.auth_plugin").OidcCliPlugin(address)
    plugin.store = store
    # Flower sends no access token without a refresh token; this one is never refreshed.
    tokens = import_module("flwr.supercore.auth.typing").AccountAuthCredentials(secret, refresh_token="none")
    plugin.store_tokens(tokens)


def run_task(
    address: str, token: str, insecure: bool, certificates: str | None, parent_pid: int | None, app: Callable[..., Any]
) -> None:
    """Answer one message as Flower's ``flwr-clientapp`` does, with another app in place of the bundle's.

    Parameters
    ----------
    address, token : str
        Address of the SuperNode, and the task's token.
    insecure : bool
        Whether the SuperNode speaks plain HTTP.
    certificates : str, optional
        File with the certificate that verifies the SuperNode.
    parent_pid : int, optional
        Process with which this one ends.
    app : callable
        Gets the bytes of the bundle, which are never unpacked; returns the app that answers (`Answer`).
    """
    runtime = import_module("flwr.supernode.runtime.run_clientapp")
    tls = import_module("flwr.supercore.tls")
    bundles: list[bytes] = []
    _replace(
        runtime,
        runtime.run_clientapp,
        install_from_fab=lambda content, **_: bundles.append(bytes(content)),
        get_project_dir=lambda *_: Path(),
        get_load_client_app_fn=lambda **_: lambda *_: app(bundles[-1]),
    )
    pull = _soon(runtime.pull_and_inflate_object_from_tree)
    _replace(runtime, runtime.pull_task_input, pull_and_inflate_object_from_tree=pull)
    runtime.run_clientapp(
        runtime_api_address=address,
        token=token,
        insecure=insecure,
        certificates=tls.validate_and_resolve_root_certificates(certificates, insecure),
        parent_pid=parent_pid,
        runtime_dependency_install=False,
    )


def _seldom(look: Callable[[Any], None], seconds: float) -> Callable[[Any], None]:
    """Return a version of `look` that runs at most once in so many seconds.

    Flower looks with almost every request of a site and writes to the database each time, so requests wait for each
    other.
    """
    due = -math.inf

    def seldom(state: Any) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + seconds
            look(state)

    return seldom


@dataclass
class _Answer:
    """The bytes that an answer may still send, and the session in which Flower takes its parts."""

    left: int
    session: str = ""


class _Answers:
    """Accepts from a node only its own answers to the server, none larger than requested.

    Flower authenticates the node by its key, but believes the sender and receiver that its message names. A node could
    so
    give orders to another site in the server's name.

    Parameters
    ----------
    most : int
        Maximum bytes of an answer to a message without a limit (`limit_answer`).
    push_messages, push_object : callable
        Flower's functions for the beginning of an answer and for each part.
    """

    def __init__(self, most: int, push_messages: Callable[..., Any], push_object: Callable[..., Any]) -> None:
        self._most, self._push_messages, self._push_object = most, push_messages, push_object
        self._refusal = import_module("fastapi").HTTPException
        self._server = import_module("flwr.common.constant").SUPERLINK_NODE_ID
        self._answers: OrderedDict[str, _Answer] = OrderedDict()  # by the message that they answer
        self._sessions: dict[str, _Answer] = {}
        self._lock = Lock()

    def push_messages(self, request: Any, state: Any) -> Any:
        """Begin an answer."""
        data, node = [one.metadata for one in request.messages_list], request.node.node_id
        own = [one.src_node_id == node and one.dst_node_id == self._server for one in data]
        trees = request.message_object_trees
        # Flower accepts a repeated answer with another tree; the name of an answer fixes its tree.
        named = [one.message_id for one in data] == [tree.object_id for tree in trees]
        if not (own == [True] and named and data[0].reply_to_message_id):
            raise self._refusal(403, "a node may send only its own answers to the server")
        if not (math.isfinite(data[0].ttl) and math.isfinite(data[0].created_at)):
            # The database cannot store such numbers: the server fails when it computes the answer's age.
            raise self._refusal(403, "an answer needs a finite time of creation and time to live")
        if _more_than(_OBJECTS, trees[0]):
            raise self._refusal(403, f"an answer may have at most {_OBJECTS} parts")
        if not all(0 <= one <= _LONGEST_S for one in request.clientapp_runtime_list):
            del request.clientapp_runtime_list[:]
        name = data[0].reply_to_message_id
        asked_node, group = _asked(state, name)
        if asked_node != node:
            return PushMessagesResponse()  # late, or for another: Flower replies the same, but records a session first
        limit = _LIMIT.search(group)
        most = min(self._most, int(limit[1])) if limit else self._most
        with self._lock:
            answer = self._answers.setdefault(name, _Answer(most))
            if len(self._answers) > _ANSWERS:
                self._sessions.pop(self._answers.popitem(last=False)[1].session, None)
        self._take(answer, request.ByteSize())
        response = self._push_messages(request=request, state=state)
        if response.objects_to_push:
            with self._lock:
                self._sessions.pop(answer.session, None)  # Flower has ended it
                answer.session = response.session_id
                self._sessions[answer.session] = answer
        return response

    def push_object(self, request: Any, state: Any) -> Any:
        """Take a part of an answer."""
        if not (session := request.session_id):
            raise self._refusal(403, "a part of an answer needs its session")
            # After a restart, the server does not know the limit.
        answer, stored = self._sessions.get(session) or _Answer(self._most, session), False
        self._take(answer, size := len(request.object_content))
        try:
            response = self._push_object(request=request, state=state)
            stored = response.stored
        finally:
            with self._lock:
                if not stored:  # it may be sent once more
                    answer.left += size
                elif session not in self._sessions:
                    self._answers[session] = self._sessions[session] = answer
        return response

    def _take(self, answer: _Answer, size: int) -> None:
        with self._lock:
            if size > answer.left:
                raise self._refusal(413, "the answer is larger than the server allowed")
            answer.left -= size


def keep_true_parts() -> None:
    """Make the server's stores read an object's parts from its content; until that arrives, the last claim holds.

    An object's name is the hash of its content, and some contents are known in advance. Flower keeps the first claim
    about
    an object's parts. So a node could make the server's next message, or another node's answer, impossible to store or
    to read.
    """
    in_file = import_module("flwr.supercore.object_store.sql_object_store").SqlObjectStore
    in_memory = import_module("flwr.supercore.object_store.in_memory_object_store").InMemoryObjectStore
    for store, parts in ((in_file, _SqlParts), (in_memory, _Parts)):
        store.preregister = _preregister(store.preregister, parts)
        store.put = _put(store.put, parts)
        store.get_object_tree = _get_object_tree(parts)


def _get_object_tree(parts: type[_Parts]) -> Callable[..., Any]:
    """Return a version of Flower's `get_object_tree` that reads at most `_OBJECTS` objects.

    A node could announce parts of parts in several answers: forty claims of two parts each make a tree of 2^40 objects.
    """
    failure = import_module("flwr.supercore.object_store").NoObjectInStoreError

    def get_object_tree(store: Any, object_id: str) -> Any:
        tree = ObjectTree(object_id=object_id)
        left, number = [tree], 1
        with parts.seen_in(store) as known:
            while left:
                one = left.pop()
                if (children := known.children(one.object_id)) is None:
                    raise failure(f"object {object_id} lacks a part, or was never announced")
                number += len(children)
                if number > _OBJECTS:
                    raise failure(f"object {object_id} has more than {_OBJECTS} parts")
                left += [one.children.add(object_id=child) for child in sorted(children)]
        return tree

    return get_object_tree


def _preregister(flowers: Callable[..., Any], parts: type[_Parts]) -> Callable[..., Any]:
    nodes_of = import_module("flwr.supercore.inflatable.inflatable_object").iterate_object_tree

    def preregister(store: Any, run_id: int, object_tree: Any) -> Any:
        with parts.of(store) as known:
            for node in nodes_of(object_tree):  # parts first
                claimed = {child.object_id for child in node.children}
                if known.children(node.object_id) in (None, claimed):
                    continue
                for child in node.children:
                    flowers(store, run_id, child)
                content = store.get(node.object_id)
                known.mend(node.object_id, _parts_named_in(content) if content else claimed)
            return flowers(store, run_id, object_tree)

    return preregister


def _put(flowers: Callable[..., Any], parts: type[_Parts]) -> Callable[..., Any]:
    def put(store: Any, object_id: str, object_content: bytes) -> Any:
        flowers(store, object_id, object_content)
        with parts.of(store) as known:
            known.mend(object_id, _parts_named_in(object_content))

    return put


def _parts_named_in(content: bytes) -> set[str]:
    inflatable = import_module("flwr.supercore.inflatable.inflatable_object")
    return set(inflatable.get_object_children_ids_from_object_content(content))


class _Parts:
    """The objects of a store in memory, while nothing else changes it."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    @contextmanager
    def of(cls, store: Any) -> Iterator[Self]:
        """Yield the objects of a store, locked."""
        with store.lock_store:
            yield cls(store)

    seen_in = of
    """The same, to read alone."""

    def children(self, name: str) -> set[str] | None:
        """Return the known parts of an object; None for an object that the store does not have."""
        entry = self._store.store.get(name)
        return None if entry is None else set(entry.child_object_ids)

    def mend(self, name: str, parts: set[str]) -> None:
        """Set the parts of an object, if the store has all of them."""
        known = self.children(name)
        if known is not None and known != parts and all(self.children(part) is not None for part in parts):
            self._change(name, known - parts, parts - known)

    def _change(self, name: str, without: set[str], with_: set[str]) -> None:
        entries = self._store.store
        entries[name].child_object_ids = [*({*entries[name].child_object_ids} - without), *with_]
        for child in without:
            entries[child].ref_count -= 1
        for child in with_:
            entries[child].ref_count += 1


class _SqlParts(_Parts):
    """The objects of a store in a database."""

    def __init__(self, store: Any, session: Any) -> None:
        super().__init__(store)
        self._session = session
        self._sql = import_module("sqlalchemy")
        self._tables = import_module("flwr.supercore.state.schema.objectstore_models")

    @classmethod
    @contextmanager
    def of(cls, store: Any) -> Iterator[Self]:
        """Yield the objects of a store, locked."""
        with store._mutation_session() as session:
            yield cls(store, session)

    @classmethod
    @contextmanager
    def seen_in(cls, store: Any) -> Iterator[Self]:
        """Yield the objects of a store, to read alone."""
        with store.session() as session:
            yield cls(store, session)

    def children(self, name: str) -> set[str] | None:
        """Return the known parts of an object; None for an object that the store does not have."""
        child, select = self._tables.ObjectChild, self._sql.select
        found = set(self._session.scalars(select(child.child_id).where(child.parent_id == name)))
        return found if found or name in self._store else None

    def _change(self, name: str, without: set[str], with_: set[str]) -> None:
        sql, child, stored = self._sql, self._tables.ObjectChild, self._tables.StoredObject
        self._session.execute(sql.delete(child).where(child.parent_id == name, child.child_id.in_(without)))
        for one in with_:
            self._session.execute(sql.insert(child).values(parent_id=name, child_id=one))
        for names, more in ((without, -1), (with_, 1)):
            counted = sql.update(stored).where(stored.object_id.in_(names))
            self._session.execute(counted.values(ref_count=stored.ref_count + more))


def _asked(state: Any, message: str) -> tuple[int, str]:
    """Return the node that a message is for, and its group; 0 where the message does not exist or has expired."""
    if (kept := getattr(state, "message_ins_store", None)) is not None:  # without a database
        return (kept[message].metadata.dst_node_id, kept[message].metadata.group_id) if message in kept else (0, "")
    row = state.get_valid_message_ins(message)
    return (row["dst_node_id"] % 2**64, row["group_id"]) if row else (0, "")


def limit_answer(message: Message, most: int) -> None:
    """Note on a message how many bytes its answer may have; a server behind umbel's guard accepts no more."""
    message.metadata.__dict__["_group_id"] = f"{message.metadata.group_id}, answer up to {most} bytes"


def drop_limit(answer: Message) -> None:
    """Give an answer the message's group from before `limit_answer`."""
    answer.metadata.__dict__["_group_id"] = _LIMIT.sub("", answer.metadata.group_id)


def _more_than(most: int, tree: Any) -> bool:
    """Return whether a tree has more than so many objects."""
    left, number = [tree], 0
    while left and number <= most:
        number += 1
        left += left.pop().children
    return number > most


class _Executor:
    """Stands in for what Flower's SuperExec uses to find capacity and to run a task."""

    def __init__(self, launch: Callable[[Any], None], keep: Callable[[], None] = lambda: None) -> None:
        self._launch, self._keep = launch, keep
        self._last = time.monotonic()
        self._results = import_module("flwr.supercore.superexec.executor.types").LaunchResult

    def get_eligible_capacity(self, supported: Collection[Any], **_: Any) -> tuple[set[Any], set[str]]:
        return set(supported), set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        pass

    def launch(self, task: Any) -> Any:
        self._last = time.monotonic()
        self._launch(task)
        return self._results.accepted()

    def reconcile(self) -> None:
        """Wait before Flower looks for the next task, if none has come for a while."""
        self._keep()
        time.sleep(pause(time.monotonic() - self._last, 0.0, _IDLE_S))

    def close(self) -> None:
        pass


def _soon(pull: Callable[..., Any]) -> Callable[..., Any]:
    return partial(pull, initial_backoff=_SOON_S)


def _replace(module: ModuleType, function: FunctionType, **parts: Any) -> None:
    """Make a Flower function use other parts; raise if it no longer uses them, since the change would have no
    effect."""
    if missing := set(parts) - set(function.__code__.co_names):
        raise RuntimeError(f"Flower's {function.__name__} no longer uses {', '.join(sorted(missing))}; use Flower 1.42")
    for name, part in parts.items():
        setattr(module, name, part)
