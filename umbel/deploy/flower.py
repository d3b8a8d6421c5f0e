"""Flower's processes with umbel's parts in them: SuperLink, SuperNode, executors, and a ClientApp's process.

This module and `umbel.protocol.flower` alone touch what is not public in Flower (``tools/private.toml`` says why).
Imports are made inside functions, since each process needs others, and they take long.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import distribution
from logging import WARNING
from pathlib import Path
from threading import Lock
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import httpx

from umbel.deploy.ready import PATH, Fault, endpoint
from umbel.protocol.flower import limit_in, log, pull_soon, without_proxy
from umbel.protocol.polling import pause

_EXPIRED_S = 1.0
"""Seconds between a SuperLink's checks for tasks whose processes died."""

CONNECTIONS = 512
"""Maximum simultaneous connections. A site has two; a process may usually have 1,024 files and connections."""

_OBJECTS = 10_000
"""Maximum number of parts of an answer: records, arrays, and each 5 MiB of an array. While the server notes them, about
a thousand a second, the database is blocked for others."""

_ANSWERS = 10_000
"""Number of latest answers whose bytes are counted."""

_LONGEST_S = 1e9
"""Longest time in seconds that a node may report for an answer: Flower fails on an infinite sum of them."""

_IDLE_S = 1.0
"""Longest extra wait, in seconds, of an executor without a task."""

CLIENT_TASK = "flwr-clientapp"
"""The task type of a ClientApp."""
SUPEREXEC = "flower-superexec"
"""Flower's program that looks for tasks and starts a process for each."""


def run_program(name: str, arguments: Sequence[str]) -> None:
    """Run a program of Flower's, such as ``flwr-serverapp``, with its options, as its command does."""
    pull_soon()
    os.environ.update(without_proxy())
    [program] = distribution("flwr").entry_points.select(group="console_scripts", name=name)
    sys.argv = [name, *arguments]
    program.load()()


def run_superexec(
    arguments: Sequence[str], launch: Callable[[Any], None], keep: Callable[[], None] = lambda: None
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
    keep : callable
        Called before each look for a task, at most a few seconds apart while the server answers.
    """
    superexec = import_module("flwr.supercore.superexec.run_superexec")
    executor = _Executor(launch, keep, superexec.LaunchResult.accepted)
    _replace(superexec, superexec.run_superexec, get_executor=lambda *_, **__: executor)
    watch_calls()
    run_program(SUPEREXEC, arguments)


class _Executor:
    """Stands in for what Flower's SuperExec uses to find capacity and to run a task."""

    def __init__(self, launch: Callable[[Any], None], keep: Callable[[], None], accepted: Callable[[], Any]) -> None:
        self._launch, self._keep, self._accepted = launch, keep, accepted
        self._last = time.monotonic()

    def get_eligible_capacity(self, supported: Collection[Any], **_: Any) -> tuple[set[Any], set[str]]:
        return set(supported), set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        pass

    def launch(self, task: Any) -> Any:
        self._last = time.monotonic()
        self._launch(task)
        return self._accepted()

    def reconcile(self) -> None:
        """Wait before Flower looks for the next task, if none has come for a while."""
        self._keep()
        time.sleep(pause(time.monotonic() - self._last, 0.0, _IDLE_S))

    def close(self) -> None:
        pass


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
        self._requests = import_module("flwr.proto.runtime_pb2")
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
        with suppress(httpx.HTTPError):
            self._client.SendTaskHeartbeat(self._requests.SendTaskHeartbeatRequest())

    def fail(self, reason: str) -> None:
        """End the task as failed, for a reason that the server shows; a run ends with its ServerApp's task."""
        with suppress(httpx.HTTPError):
            self._client.PushTaskOutput(self._requests.PushTaskOutputRequest(sub_status="failed", details=reason))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def run_superlink(
    arguments: Sequence[str],
    guard: Callable[[Any], Any],
    largest_answer: int,
    fault: Fault,
    begin: Callable[[], None],
) -> None:
    """Run Flower's SuperLink with its command-line options.

    Parameters
    ----------
    arguments : sequence of str
        Options of ``flower-superlink``.
    guard : callable
        Wraps the application that Flower would serve, and returns the one to serve.
    largest_answer : int
        Maximum bytes of a site's answer, all parts together; a message may allow less (`limit_answer`).
    fault : callable
        Returns why the server is not ready.
    begin : callable
        Called before it serves.
    """
    command = import_module("flwr.superlink.cli.flower_superlink")

    def serve(app: Any, **options: Any) -> None:
        # Proxy headers would let a caller claim any address.
        # h11 limits a request's head; uvicorn's other parser, httptools, keeps everything that is sent.
        options |= {"proxy_headers": False, "ws": "none", "http": "h11", "limit_concurrency": CONNECTIONS}
        begin()
        import_module("uvicorn").run(app=guard(app), **options)

    _replace(command, command._run_superlink_http_api, uvicorn=SimpleNamespace(run=serve))
    _guard_answers(largest_answer)
    state = import_module("flwr.supercore.corestate.sql_corestate").SqlCoreState
    try:
        state._cleanup_expired_task_tokens = _seldom(state._cleanup_expired_task_tokens, _EXPIRED_S)
    except AttributeError:
        log(WARNING, "Flower looks for dead tasks in another way: this server is slower with many sites")
    _say_ready(fault)
    for second_door in (command.FLWR_INTERNAL_GRPC_CONTROL_API, command.FLWR_INTERNAL_GRPC_FLEET_API):
        # With these, Flower would serve the same application again on unguarded ports.
        os.environ.pop(second_door, None)
    run_program("flower-superlink", arguments)


def _say_ready(fault: Fault) -> None:
    """Let Flower's application answer whether it is ready, beside whether it is alive."""
    health = import_module("flwr.supercore.routers.health")
    health.router.add_api_route(PATH, endpoint(fault), methods=["GET", "HEAD"])


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


def _guard_answers(largest: int) -> None:
    """Let sites send only what `_Answers` accepts."""
    router: Any = import_module("flwr.superlink.routers.fleet.router")
    handlers = router.fleet_handlers
    answers = _Answers(largest, handlers.push_messages, handlers.push_object)
    ours = {"push_messages": answers.push_messages, "push_object": answers.push_object}
    _check(router.fleet_push_messages, ["fleet_handlers", "push_messages"])
    _check(router.fleet_push_object, ["fleet_handlers", "push_object"])
    router.fleet_handlers = SimpleNamespace(**vars(handlers) | ours)


@dataclass
class _Answer:
    """The bytes that an answer may still send, and the session in which Flower takes its parts."""

    left: int
    session: str = ""


class _Answers:
    """Accepts from a node only its own answers to the server, none larger than requested.

    Flower authenticates the node by its key, but believes the sender and receiver that its message names. So a node
    could give orders to another site in the server's name.

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
        self._nothing = import_module("flwr.superlink.routers.fleet.router").PushMessagesResponse
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
            return self._nothing()  # late, or for another: Flower replies the same, but records a session first
        most = limit_in(group, self._most)
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


def _asked(state: Any, message: str) -> tuple[int, str]:
    """Return the node that a message is for, and its group; 0 where the message does not exist or has expired."""
    if (kept := getattr(state, "message_ins_store", None)) is not None:  # without a database
        return (kept[message].metadata.dst_node_id, kept[message].metadata.group_id) if message in kept else (0, "")
    row = state.get_valid_message_ins(message)
    return (row["dst_node_id"] % 2**64, row["group_id"]) if row else (0, "")


def _more_than(most: int, tree: Any) -> bool:
    """Return whether a tree has more than so many objects."""
    left, number = [tree], 0
    while left and number <= most:
        number += 1
        left += left.pop().children
    return number > most


class Link(Protocol):
    """A node's reactions to its calls to the server; see `umbel.deploy.node.Link`."""

    def works(self) -> None:
        """Note a call that the server answered."""

    def fails(self, error: Any) -> bool:
        """Note an error of httpx; return whether to repeat the call."""


def run_supernode(arguments: Sequence[str], sleep: Callable[[float], None], link: Link, fault: Fault) -> None:
    """Run Flower's SuperNode with its command-line options; it returns only after an error in Flower.

    Parameters
    ----------
    arguments : sequence of str
        Options of ``flower-supernode``.
    sleep : callable
        Replaces Flower's waiting; gets the seconds that Flower would wait for the next message or reply.
    link : Link
    fault : callable
        Returns why the node is not ready.
    """
    pull_soon()
    client = import_module("flwr.supernode.start_client_internal")
    for function in (client.start_client_internal, client._push_messages):
        _replace(client, function, saves_time=True, time=SimpleNamespace(sleep=sleep))
    watch_calls(link)
    _say_ready(fault)
    run_program("flower-supernode", arguments)


def watch_calls(link: Link | None = None) -> None:
    """Make this process's calls follow no redirect, and report to a link, which may repeat them.

    A server could else make a site call any address in its network, with the site's headers.
    """
    kind = import_module("flwr.supercore.protobuf.client").ProtobufClient
    send = kind._send
    _check(kind._unary_unary, ["_send"])
    _check(send, ["_client"])

    def watched(client: Any, call: Any, **how: Any) -> Any:
        client._client.follow_redirects = False
        unsigned = call.request.headers
        while True:
            call.request.headers = unsigned.copy()
            try:
                reply = send(client, call, **how)
                if link:
                    reply.raise_for_status()
                    link.works()
                return reply
            except httpx.HTTPError as error:
                if link is None or not link.fails(error):
                    raise

    kind._send = watched


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
        Gets the bytes of the bundle, which are never unpacked; returns the app that answers.
    """
    runtime = import_module("flwr.supernode.runtime.run_clientapp")
    bundles: list[bytes] = []
    _replace(
        runtime,
        runtime.run_clientapp,
        install_from_fab=lambda content, **_: bundles.append(bytes(content)),
        get_load_client_app_fn=lambda **_: lambda *_: app(bundles[-1]),
    )
    runtime.run_clientapp(
        runtime_api_address=address,
        token=token,
        insecure=insecure,
        certificates=Path(certificates).expanduser().read_bytes() if certificates and not insecure else None,
        parent_pid=parent_pid,
        runtime_dependency_install=False,
    )


def prepare_tasks() -> None:
    """Import what the first task would otherwise import."""
    pull_soon()
    import_module("flwr.supernode.runtime.run_clientapp")


def _check(function: FunctionType, names: Collection[str]) -> None:
    """Raise if a Flower function does not use names: a change of theirs would have no effect."""
    if missing := sorted({*names} - {*_names_in(function.__code__)}):
        text = f"Flower's {function.__name__} no longer uses {', '.join(missing)}; use Flower 1.42"
        raise RuntimeError(text)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # of a function inside
            yield from _names_in(constant)


def _replace(module: ModuleType, function: FunctionType, saves_time: bool = False, **parts: Any) -> None:
    """Make a Flower function use other parts; raise if it no longer uses them, or warn if they only save time."""
    try:
        _check(function, parts)
    except RuntimeError as error:
        if not saves_time:
            raise
        log(WARNING, "%s: this is slower than it could be", error)
        return
    for name, part in parts.items():
        setattr(module, name, part)
