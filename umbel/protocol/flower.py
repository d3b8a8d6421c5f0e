"""The parts of Flower that are not public, imported here and nowhere else in the app.

They move from one release to the next; `tests/protocol/test_flower.py` says which is gone or has changed. What only a
site's executor or the server needs is imported when it is called for, since it takes long.
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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from threading import Lock
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Self, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.config import parse_config_args
from flwr.common.constant import ErrorCode, SType
from flwr.proto.fleet_pb2 import PushMessagesResponse
from flwr.supercore import log
from flwr.supercore.logger import FLOWER_LOGGER
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from umbel.protocol import project
from umbel.protocol.polling import pause

__all__ = [
    "CLIENT_TASK",
    "FLOWER_LOGGER",
    "Answer",
    "ErrorCode",
    "Run",
    "SType",
    "TaskIdentity",
    "build_bundle",
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
    "refuse_repeated_parts",
    "run_superexec",
    "run_superlink",
    "run_supernode",
    "run_task",
    "with_content",
]

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)

Answer = Callable[[Message, Context], Message]
"""What a ClientApp is: from a message and the node's context to the reply."""

_SOON_S = 0.05
"""After which a part of a message that is still on its way is looked for again; Flower waits a second at first."""

_EXPIRED_S = 1.0
"""From one look of a SuperLink for tasks whose processes died to the next."""

_LOCKED_S = 30.0
"""How long a request to a SuperLink waits for its turn to write to the database; Flower gives up after 5 seconds."""

_OBJECTS = 10_000
"""Parts of an answer, such as its records and arrays, and each 20 MiB of an array. The database is not free for others
while they are noted, some thousand a second."""

_ANSWERS = 10_000
"""The latest answers whose bytes are counted."""

_LONGEST_S = 1e9
"""Seconds that a node may say an answer took. Flower adds them up, and cannot show a sum that is infinite."""

_LIMIT = re.compile(r", answer up to (\d{1,18}) bytes$")
"""In a message's group, which Flower's database keeps and shows in the logs: how large the answer may be."""

_IDLE_S = 1.0
"""The most by which an executor without a task looks later for the next one."""

CLIENT_TASK = "flwr-clientapp"
"""The kind of task that is a ClientApp's."""


def identify(node: int = 1) -> None:
    """Say who this process is, where Flower has not: without that no Message can be made."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, node, 1


def filled(record: R, entries: Mapping[str, Any]) -> R:
    """Put entries into a record, which fit it: Flower's check of each number takes longer than all the rest."""
    record.__dict__["_data"].update(entries)
    return record


def encoded(dtype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """Return an array in numpy's format, as ``Array(dtype, shape, SType.NUMPY, data)`` does without its checks."""
    array = Array.__new__(Array)
    array.__dict__.update(dtype=dtype, shape=shape, stype=SType.NUMPY, data=data, _is_dirty=True)
    return array


def with_content(message: Message, content: RecordDict) -> Message:
    """Return a message with other content, for use within this process."""
    other = Message.__new__(Message)
    other.__dict__.update(message.__dict__, _content=content)
    return other


def build_bundle(folder: Path) -> bytes:
    """Return the bundle that ``flwr run`` would submit of the app in a folder.

    Flower looks at every file there, which with a virtual environment in it takes seconds.
    """
    return bytes(import_module("flwr.cli.build").build_fab_from_files(_files(folder.resolve()))[0])


def _files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by their paths in it, but for those in folders that git ignores, and for links."""
    utils = import_module("flwr.cli.utils")
    rules = folder / ".gitignore"
    patterns = [] if rules.is_symlink() else utils.load_gitignore_patterns(rules)
    # A rule that takes others back may be about what lies in a folder that they leave out.
    ignored = utils.build_pathspec([] if any(one.startswith("!") for one in patterns) else patterns)
    found: dict[str, Path] = {}
    for where, folders, names in os.walk(folder):
        inside = Path(where).relative_to(folder)
        folders[:] = [name for name in folders if not ignored.match_file(f"{inside / name}/")]
        files = [Path(where, name) for name in names]
        found |= {(inside / file.name).as_posix(): file for file in files if not file.is_symlink()}
    if folder == project.INSTALLED:
        package = {name: file for name, file in _files(project.PACKAGE).items() if folder not in file.parents}
        found |= {f"{project.PACKAGE.name}/{name}": file for name, file in package.items()}
    return found


def run_superexec(arguments: Sequence[str], launch: Callable[[Any], None]) -> None:
    """Run Flower's SuperExec with its own command-line options.

    Every task goes to `launch`, of any kind. Flower itself would look for a command on the PATH and start it.

    Parameters
    ----------
    arguments : sequence of str
        As for ``flower-superexec``.
    launch : callable
        Gets a task: ``task_type``, `CLIENT_TASK` or another, ``runtime_api_address``, ``token``,
        ``insecure``, ``root_certificates_path``.
    """
    command = import_module("flwr.supercore.cli.flower_superexec")
    superexec = import_module("flwr.supercore.superexec.run_superexec")
    _replace(superexec, superexec.run_superexec, get_executor=lambda *_, **__: _Executor(launch))
    stay_at_server()
    sys.argv = ["flower-superexec", *arguments]
    command.flower_superexec()


def run_superlink(arguments: Sequence[str], guard: Callable[[Any], Any], connection: type, largest_answer: int) -> None:
    """Run Flower's SuperLink with its own command-line options.

    Parameters
    ----------
    arguments : sequence of str
        As for ``flower-superlink``.
    guard : callable
        From the application that it would serve to the one that it serves.
    connection : type
        A protocol of uvicorn's, of which there is one for each connection.
    largest_answer : int
        Bytes of all parts of a site's answer, also where the message says more or nothing (`limit_answer`).
    """
    command = import_module("flwr.superlink.cli.flower_superlink")
    uvicorn = import_module("uvicorn")

    def serve(app: Any, **options: Any) -> None:
        # By what a caller says of itself in a header it could name any address as its own.
        uvicorn.run(app=guard(app), **options | {"proxy_headers": False, "http": connection})

    _replace(command, command._run_superlink_http_api, uvicorn=SimpleNamespace(run=serve))
    router = import_module("flwr.superlink.routers.fleet.router")
    handlers = router.fleet_handlers
    answers = _Answers(largest_answer, handlers.push_messages, handlers.push_object)
    _replace(handlers, router.fleet_push_messages, push_messages=answers.push_messages)
    _replace(handlers, router.fleet_push_object, push_object=answers.push_object)
    keep_true_parts()
    state = import_module("flwr.supercore.corestate.sql_corestate").SqlCoreState
    state._cleanup_expired_task_tokens = _seldom(state._cleanup_expired_task_tokens, _EXPIRED_S)
    sql = import_module("flwr.supercore.sql_mixin")
    # What has been read goes from the disk too, where the database is new.
    pragmas = {"auto_vacuum": "FULL"} | dict(sql.SQLITE_PRAGMAS) | {"busy_timeout": f"{1000 * _LOCKED_S:.0f}"}
    _replace(sql, sql._set_sqlite_pragmas, SQLITE_PRAGMAS=tuple(pragmas.items()))
    for second_door in (command.FLWR_INTERNAL_GRPC_CONTROL_API, command.FLWR_INTERNAL_GRPC_FLEET_API):
        # With these Flower serves the same once more, on unguarded ports.
        os.environ.pop(second_door, None)
    sys.argv = ["flower-superlink", *arguments]
    command.flower_superlink()


def run_supernode(arguments: Sequence[str], sleep: Callable[[float], None]) -> None:
    """Run Flower's SuperNode with its own command-line options.

    Parameters
    ----------
    arguments : sequence of str
        As for ``flower-supernode``.
    sleep : callable
        Waits in place of Flower, which says how many seconds it would wait: for the next message, or a reply.
    """
    command = import_module("flwr.supernode.cli.flower_supernode")
    client = import_module("flwr.supernode.start_client_internal")
    for function in (client.start_client_internal, client._push_messages):
        _replace(client, function, time=SimpleNamespace(sleep=sleep))
    _replace(client, client._pull_and_store_message, pull_objects=_soon(client.pull_objects))
    keep_beating()
    stay_at_server()
    sys.argv = ["flower-supernode", *arguments]
    command.flower_supernode()


def keep_beating() -> None:
    """Have a node tell a SuperLink again that it is there, where that had no time for it: Flower never would again."""
    connection = import_module("flwr.supernode.fleet_http_connection")
    request_response = connection.http_request_response.__wrapped__  # of the function that makes it a context
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
    """Return whether a grid is that of Flower's own simulation, which imports it before the app runs."""
    module = sys.modules.get("flwr.superlink.grid.inmemory_grid")
    return module is not None and isinstance(grid, module.InMemoryGrid)


def pull_soon() -> None:
    """Have the grid of a ServerApp look soon for what is still missing of a reply; a simulation's has all of it."""
    if (grid := sys.modules.get("flwr.superlink.grid.http_grid")) is not None:
        _replace(grid, grid.HttpGrid.pull_messages, pull_objects=_soon(grid.pull_objects))


def stay_at_server() -> None:
    """Follow no redirect: a server could have a site call any address inside its network, with its key's headers."""
    client = import_module("flwr.supercore.protobuf.client")
    httpx = import_module("httpx")

    def staying(**options: Any) -> Any:
        return httpx.Client(**options | {"follow_redirects": False})

    _replace(client, client.ProtobufClient.__init__, httpx=SimpleNamespace(**vars(httpx) | {"Client": staying}))


@cache
def refuse_repeated_parts() -> None:
    """From here on, refuse an array that is sent to this process and names one of its parts more than once.

    Flower would put the part in as often as the message says: 100 kB fill any memory.
    """
    array = import_module("flwr.app.message.array")
    inflate = array.Array.inflate.__func__

    def inflate_once(cls: type, content: bytes, children: Any = None) -> Any:
        parts = json.loads(array.get_object_body(content, cls))["arraychunk_ids"]
        if len(set(parts)) != len(parts):
            raise ValueError("an array repeats a part of itself, which is not taken from elsewhere")
        return inflate(cls, content, children)

    array.Array.inflate = classmethod(inflate_once)


def keep_secret(home: Path, address: str, secret: str) -> None:
    """Have the ``flwr`` command send a secret to a server, in the header ``Authorization`` after ``Bearer``.

    Parameters
    ----------
    home : Path
        Flower's home, ``FLWR_HOME``.
    address : str
        Of the server, as in the connection.
    """
    store = import_module("flwr.supercore.credential_store").FileCredentialStore(home / "credentials.yaml")
    plugin = import_module("flwr.cli.auth_plugin").OidcCliPlugin(address)
    plugin.store = store
    # Flower sends no access token where there is nothing to refresh it by; this one is never refreshed.
    tokens = import_module("flwr.supercore.auth.typing").AccountAuthCredentials(secret, refresh_token="none")
    plugin.store_tokens(tokens)


def run_task(
    address: str, token: str, insecure: bool, certificates: str | None, parent_pid: int | None, app: Callable[..., Any]
) -> None:
    """Answer one message as Flower's ``flwr-clientapp`` does, with another app in place of the bundle's.

    Parameters
    ----------
    address, token : str
        Of the SuperNode, and of the task.
    insecure : bool
        Whether the SuperNode speaks plain HTTP.
    certificates : str, optional
        File with the certificate that it is checked by.
    parent_pid : int, optional
        A process whose end is the end of this one.
    app : callable
        From the bytes of the bundle, which are never unpacked, to what answers the message (`Answer`).
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
    """Return what looks only if the last time is so many seconds ago.

    Flower looks with almost every request of a site, and writes to the database each time: all wait for each other.
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
    """What may still come of an answer, in bytes, and the session by which Flower takes its parts."""

    left: int
    session: str = ""


class _Answers:
    """Takes from a node its own answers to the server, none larger than asked for, and nothing else.

    Flower knows the node by its key, but believes what its message says of who sent it to whom: one from the
    server to another site would be an order.

    Parameters
    ----------
    most : int
        Bytes of an answer to a message that does not say how many there may be (`limit_answer`).
    push_messages, push_object : callable
        Flower's own, for the beginning of an answer and for each part.
    """

    def __init__(self, most: int, push_messages: Callable[..., Any], push_object: Callable[..., Any]) -> None:
        self._most, self._push_messages, self._push_object = most, push_messages, push_object
        self._refusal = import_module("fastapi").HTTPException
        self._server = import_module("flwr.common.constant").SUPERLINK_NODE_ID
        self._answers: OrderedDict[str, _Answer] = OrderedDict()  # by the message that they are for
        self._sessions: dict[str, _Answer] = {}
        self._lock = Lock()

    def push_messages(self, request: Any, state: Any) -> Any:
        """Begin an answer."""
        data, node = [one.metadata for one in request.messages_list], request.node.node_id
        own = [one.src_node_id == node and one.dst_node_id == self._server for one in data]
        trees = request.message_object_trees
        # Flower takes the same answer again, with another tree; one that bears the answer's name cannot be another.
        named = [one.message_id for one in data] == [tree.object_id for tree in trees]
        if not (own == [True] and named and data[0].reply_to_message_id):
            raise self._refusal(403, "a node sends its own answers to the server, and nothing else")
        if not (math.isfinite(data[0].ttl) and math.isfinite(data[0].created_at)):
            # The database has no such numbers: the server fails where it looks how old the answer is.
            raise self._refusal(403, "an answer says when it was made, and for how long it is good")
        if _more_than(_OBJECTS, trees[0]):
            raise self._refusal(403, f"an answer has at most {_OBJECTS} parts")
        if not all(0 <= one <= _LONGEST_S for one in request.clientapp_runtime_list):
            del request.clientapp_runtime_list[:]
        name = data[0].reply_to_message_id
        asked_node, group = _asked(state, name)
        if asked_node != node:
            return PushMessagesResponse()  # too late, or for another: Flower says the same, but first notes a session
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
                self._sessions.pop(answer.session, None)  # which Flower has ended
                answer.session = response.session_id
                self._sessions[answer.session] = answer
        return response

    def push_object(self, request: Any, state: Any) -> Any:
        """Take a part of an answer."""
        if not (session := request.session_id):
            raise self._refusal(403, "a part of an answer names its session")
        # A server that has started again does not know how large it was to be.
        answer, stored = self._sessions.get(session) or _Answer(self._most, session), False
        self._take(answer, size := len(request.object_content))
        try:
            response = self._push_object(request=request, state=state)
            stored = response.stored
        finally:
            with self._lock:
                if not stored:  # it may be sent again
                    answer.left += size
                elif session not in self._sessions:
                    self._answers[session] = self._sessions[session] = answer
        return response

    def _take(self, answer: _Answer, size: int) -> None:
        with self._lock:
            if size > answer.left:
                raise self._refusal(413, "an answer larger than the server asked for is not taken")
            answer.left -= size


def keep_true_parts() -> None:
    """Have the server's stores take an object's parts from its content, and before that is there from the last claim.

    An object's name is the hash of its content, and some contents are known before they are sent. Flower keeps the
    first claim of what its parts are. So a node could make the server's next message, or another node's answer,
    impossible to store or to read.
    """
    in_file = import_module("flwr.supercore.object_store.sql_object_store").SqlObjectStore
    in_memory = import_module("flwr.supercore.object_store.in_memory_object_store").InMemoryObjectStore
    for store, parts in ((in_file, _SqlParts), (in_memory, _Parts)):
        store.preregister = _preregister(store.preregister, parts)
        store.put = _put(store.put, parts)


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
    """What a store in memory holds of objects, while nothing else changes it."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    @contextmanager
    def of(cls, store: Any) -> Iterator[Self]:
        """Yield what a store holds."""
        with store.lock_store:
            yield cls(store)

    def children(self, name: str) -> set[str] | None:
        """Return the parts of an object, as far as the store knows; None for an object that it does not have."""
        entry = self._store.store.get(name)
        return None if entry is None else set(entry.child_object_ids)

    def mend(self, name: str, parts: set[str]) -> None:
        """Give an object its parts, if the store has all of these."""
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
    """The same of a store in a database."""

    def __init__(self, store: Any, session: Any) -> None:
        super().__init__(store)
        self._session = session
        self._sql = import_module("sqlalchemy")
        self._tables = import_module("flwr.supercore.state.schema.objectstore_models")

    @classmethod
    @contextmanager
    def of(cls, store: Any) -> Iterator[Self]:
        """Yield what a store holds."""
        with store._mutation_session() as session:
            yield cls(store, session)

    def children(self, name: str) -> set[str] | None:
        """Return the parts of an object, as far as the store knows; None for an object that it does not have."""
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
    """Return the node that a message is for, and its group; 0 where there is none, or no longer."""
    if (kept := getattr(state, "message_ins_store", None)) is not None:  # without a database
        return (kept[message].metadata.dst_node_id, kept[message].metadata.group_id) if message in kept else (0, "")
    row = state.get_valid_message_ins(message)
    return (row["dst_node_id"] % 2**64, row["group_id"]) if row else (0, "")


def limit_answer(message: Message, most: int) -> None:
    """Note on a message how many bytes the answer to it may have; a server behind umbel's guard takes no more."""
    message.metadata.__dict__["_group_id"] = f"{message.metadata.group_id}, answer up to {most} bytes"


def drop_limit(answer: Message) -> None:
    """Give an answer the group of the message as it was before `limit_answer`."""
    answer.metadata.__dict__["_group_id"] = _LIMIT.sub("", answer.metadata.group_id)


def _more_than(most: int, tree: Any) -> bool:
    """Return whether a tree of objects has more than so many."""
    left, number = [tree], 0
    while left and number <= most:
        number += 1
        left += left.pop().children
    return number > most


class _Executor:
    """What Flower's SuperExec asks for a place to run a task, and to run it."""

    def __init__(self, launch: Callable[[Any], None]) -> None:
        self._launch = launch
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
        """Wait, where no task has come for a while, before Flower looks for the next one."""
        time.sleep(pause(time.monotonic() - self._last, 0.0, _IDLE_S))

    def close(self) -> None:
        pass


def _soon(pull: Callable[..., Any]) -> Callable[..., Any]:
    return partial(pull, initial_backoff=_SOON_S)


def _replace(module: ModuleType, function: FunctionType, **parts: Any) -> None:
    """Have a function of Flower's use other parts; raise where it would not, since it would then do as it likes."""
    if missing := set(parts) - set(function.__code__.co_names):
        raise RuntimeError(f"Flower's {function.__name__} no longer uses {', '.join(sorted(missing))}; use Flower 1.41")
    for name, part in parts.items():
        setattr(module, name, part)
