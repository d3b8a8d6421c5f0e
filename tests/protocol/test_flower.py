"""What of Flower is not public is imported in one place, and is still there."""

from __future__ import annotations

import ast
import importlib
import json
import shutil
import subprocess
import sys
from functools import cache
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectUnavailableError,
    pull_and_inflate_object_from_tree,
    pull_objects,
)

from tests.helpers import flower_parts
from tests.helpers.grids import PaperGrid
from tests.helpers.sources import APP, LAB, ROOT, files, imported
from umbel.protocol import project
from umbel.protocol.flower import encoded, filled, identify, in_memory, with_content, without_proxy

DOOR = ROOT / "umbel" / "protocol" / "flower.py"
PRIVATE = ("flwr.common", "flwr.proto", "flwr.supercore", "flwr.superlink", "flwr.supernode")
IMPORTED = [
    (node.module, alias.name)
    for node in ast.walk(ast.parse(DOOR.read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__"
    for alias in node.names
]

LOOK = {
    "in_memory": "whether the grid of Flower's simulation still has this class, of which the app gets one",
    "build_bundle": "whether Flower still takes only files that it finds by `collect_files`, and the first it returns",
    "run_superexec": (
        "whether a task of any kind still goes to the executor that `get_executor` returns, and nothing is looked "
        "up on the PATH"
    ),
    "Claim": (
        "whether a claim still lasts 30 s without a heartbeat, and 60 s after one; whether a task that ends as failed "
        "ends its run"
    ),
    "run_superlink": (
        "whether all of Flower's interfaces are still served by one `uvicorn.run(app=...)`, behind the guard; "
        "whether a node's messages still pass `push_messages(request=, state=)`; whether dead tasks are still "
        "looked for so often, and writers wait for `busy_timeout`; whether `initialize` still hands options on to "
        "SQLAlchemy; whether another environment variable opens "
        "another port"
    ),
    "run_supernode": (
        "whether a node still waits by `time.sleep` alone, between messages and for a reply, and fetches parts by "
        "`pull_objects`"
    ),
    "_tell": (
        "whether all calls to the server still pass `_unary_unary`, a refusal still reaches it as 401 or 412, and a "
        "node still gives up by `flwr_exit`"
    ),
    "refusal_in": "whether a server still tells by these codes that it wants a key, and details by `public_details`",
    "tell_why": "whether a node that is not admitted still gets this code, after its signature was checked",
    "_refusal": "whether a removed node still has this status, and no longer a number",
    "keep_beating": "whether a failed heartbeat still ends all of them, and one that returns False is repeated",
    "pull_soon": "whether the server still waits a second for what is missing of a reply",
    "keep_secret": (
        "whether the access token still travels as Authorization: Bearer, and is refreshed only with a refresh token"
    ),
    "run_task": (
        "whether the app still comes from `get_load_client_app_fn` alone, and the bundle's bytes go to "
        "`install_from_fab` alone: nothing of a server's bundle may be unpacked or imported; whether the heartbeat "
        "still begins before the app is loaded"
    ),
    "stay_at_server": "whether all of Flower's requests still go through one `httpx.Client` of `ProtobufClient`",
    "refuse_repeated_parts": "whether an array's list of parts is still `arraychunk_ids` of its body",
    "keep_true_parts": (
        "whether both stores still keep the first claim of an object's parts; whether nothing else changes the store "
        "within `_mutation_session` or `lock_store`; whether `ref_count` is how many objects have it as a part"
    ),
    "_get_object_tree": "whether a reply whose tree cannot be read is still dropped",
    "_preregister": "whether the tree still comes parts first",
    "_parts_named_in": "whether an object's content still begins with the names of its parts",
    "_Answers": (
        "whether the server's number is still that of no node; whether a message's group is still kept by "
        "`get_valid_message_ins` and `message_ins_store`, one answer still has one session, and parts still come by "
        "`push_object` alone: tests/deploy/test_answers.py"
    ),
    "_Executor": "whether Flower calls other methods of an executor, and `accepted` still means that a task has begun",
}
"""What to look at where a part of Flower has changed, by the function of `umbel.protocol.flower` that uses it."""
PINNED = {
    "flwr.app.message.array:Array.inflate.__func__": "58f6604b3b19",
    "flwr.app.message.array:get_object_body": "221a88d53513",
    "flwr.cli.auth_plugin:OidcCliPlugin.store_tokens": "bda41fb82194",
    "flwr.cli.utils:collect_files": "702850cf487d",
    "flwr.common.constant:SUPERLINK_NODE_ID": "6b86b273ff34",
    "flwr.supercore.auth.typing:AccountAuthCredentials": "94fc6594dee4",
    "flwr.supercore.cli.flower_superexec:flower_superexec": "f0e2725c92a5",
    "flwr.supercore.constant:NodeStatus.UNREGISTERED": "6de7c0854b9c",
    "flwr.supercore.corestate.sql_corestate:SqlCoreState._cleanup_expired_task_tokens": "4f11fd6575df",
    "flwr.supercore.credential_store:FileCredentialStore": "29106e4af133",
    "flwr.supercore.error:ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED": "b779aef91ab3",
    "flwr.supercore.error:ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED": "c70b9f69191c",
    "flwr.supercore.error:FlowerError": "5791034e4609",
    "flwr.supercore.error:FlowerError.from_json": "a73157e7f94c",
    "flwr.supercore.exit.exit_handler:trigger_exit_handlers": "5703e77e3197",
    "flwr.supercore.grpc_health.health_server:SimpleHealthServicer": "484b8aa7f742",
    "flwr.supercore.grpc_health.health_server:run_health_server_grpc_no_tls": "e5bc76e5ceee",
    "flwr.supercore.inflatable.inflatable_object:get_object_children_ids_from_object_content": "de77457a9d36",
    "flwr.supercore.inflatable.inflatable_object:iterate_object_tree": "34c0fe845619",
    "flwr.supercore.interceptors:RuntimeTokenHttpInterceptor": "06cbf14d2ea8",
    "flwr.supercore.object_store.in_memory_object_store:InMemoryObjectStore": "f0690484616d",
    "flwr.supercore.object_store.sql_object_store:SqlObjectStore": "4c553d469e5f",
    "flwr.supercore.object_store:NoObjectInStoreError": "dd414d00e383",
    "flwr.supercore.protobuf.client:ProtobufClient.__init__": "ac3846e60234",
    "flwr.supercore.sql_mixin:SQLITE_PRAGMAS": "f940cbaa04ab",
    "flwr.supercore.sql_mixin:SqlMixin.initialize": "b3e8155fcf84",
    "flwr.supercore.sql_mixin:_set_sqlite_pragmas": "6cf87a44250e",
    "flwr.supercore.superexec.executor.types:LaunchResult": "52068f09cea4",
    "flwr.supercore.superexec.run_superexec:RuntimeHttpClient.from_server_address": "611bbd7b5bd4",
    "flwr.supercore.superexec.run_superexec:RuntimeVersionHttpInterceptor": "32dc4f3d763a",
    "flwr.supercore.superexec.run_superexec:get_executor": "891abfc53747",
    "flwr.supercore.superexec.run_superexec:run_superexec": "91e7a33c5b89",
    "flwr.supercore.superexec.run_superexec:validate_and_resolve_root_certificates": "bc209e39f349",
    "flwr.supercore.tls:validate_and_resolve_root_certificates": "bc209e39f349",
    "flwr.superlink.cli.flower_superlink:FLWR_INTERNAL_GRPC_CONTROL_API": "ab8e559ab0cf",
    "flwr.superlink.cli.flower_superlink:FLWR_INTERNAL_GRPC_FLEET_API": "f4a9673a8944",
    "flwr.superlink.cli.flower_superlink:SuperLinkLifespan._start_superexec_if_needed": "f741bd4c4cb3",
    "flwr.superlink.cli.flower_superlink:_get_superexec_command": "5d60007f01d1",
    "flwr.superlink.cli.flower_superlink:_run_superlink_http_api": "eb0d78b85f99",
    "flwr.superlink.cli.flower_superlink:flower_superlink": "398ce9c85755",
    "flwr.superlink.grid.http_grid:HttpGrid.pull_messages": "3e88fb5bcc84",
    "flwr.superlink.grid.http_grid:pull_objects": "31bb2de46b45",
    "flwr.superlink.grid.inmemory_grid:InMemoryGrid": "ed7b7b9af493",
    "flwr.superlink.routers.fleet.router:fleet_activate_node": "edb39539bc1a",
    "flwr.superlink.routers.fleet.router:fleet_handlers.activate_node": "0370edbbeb92",
    "flwr.superlink.routers.fleet.router:fleet_handlers.push_messages": "70c2fe927c66",
    "flwr.superlink.routers.fleet.router:fleet_handlers.push_object": "df7e96f1188e",
    "flwr.superlink.routers.fleet.router:fleet_push_messages": "925bc195db09",
    "flwr.superlink.routers.fleet.router:fleet_push_object": "1910dcd9cc2f",
    "flwr.supernode.cli.flower_supernode:_start_supernode_http_api": "b2832210a0ca",
    "flwr.supernode.cli.flower_supernode:flower_supernode": "e263e1045207",
    "flwr.supernode.fleet_http_connection:FleetHttpClient": "9f33ca6d39a8",
    "flwr.supernode.fleet_http_connection:HeartbeatSender": "27714c8e3512",
    "flwr.supernode.fleet_http_connection:flwr_exit": "1445f36e9999",
    "flwr.supernode.fleet_http_connection:http_request_response.__wrapped__": "b80ca36779c2",
    "flwr.supernode.main:create_app": "f7215c8a9ef9",
    "flwr.supernode.runtime.run_clientapp:get_load_client_app_fn": "f7790dd641ba",
    "flwr.supernode.runtime.run_clientapp:get_project_dir": "155c70517e73",
    "flwr.supernode.runtime.run_clientapp:install_from_fab": "481bd04cde58",
    "flwr.supernode.runtime.run_clientapp:pull_and_inflate_object_from_tree": "139811483a15",
    "flwr.supernode.runtime.run_clientapp:pull_task_input": "5607a23e1673",
    "flwr.supernode.runtime.run_clientapp:run_clientapp": "6ce09559f3a2",
    "flwr.supernode.start_client_internal:_pull_and_store_message": "eaf5d0e36dc3",
    "flwr.supernode.start_client_internal:_push_messages": "00bb86faffde",
    "flwr.supernode.start_client_internal:pull_objects": "31bb2de46b45",
    "flwr.supernode.start_client_internal:start_client_internal": "9e89a6eb68fb",
}
"""Digests of the parts of Flower 1.42.0, on which what is not public rests."""


def private(names: set[str]) -> set[str]:
    """Return the names that are in Flower's private packages."""
    return {name for name in names if any(name == own or name.startswith(f"{own}.") for own in PRIVATE)}


def test_one_file_alone_imports_what_is_not_public() -> None:
    others = {
        str(file.relative_to(ROOT)): found
        for file in files((*APP, LAB))
        if file != DOOR and "flwr" in file.read_text(encoding="utf-8") and (found := private(imported(file)))
    }
    assert not others
    assert private(imported(DOOR))


@pytest.mark.parametrize(("module", "name"), IMPORTED)
def test_what_is_imported_there_is_there(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name), f"{module} has no {name}; see Flower's changes"


def alone(code: str, *arguments: str) -> Any:
    """Return what code prints as JSON in a process of its own: other tests may have replaced parts in this one."""
    code = (
        f"import json, sys; from pathlib import Path; from tests.helpers import flower_parts; print(json.dumps({code}))"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@cache
def used_parts() -> dict[str, list[str]]:
    """The parts of Flower that are used, by who uses them."""
    code = "{user: sorted(parts) for user, parts in flower_parts.parts(Path(sys.argv[1])).items()}"
    found: dict[str, list[str]] = alone(code, str(DOOR))
    return found


def test_every_part_that_is_used_is_pinned() -> None:
    parts = used_parts()
    assert parts.keys() == LOOK.keys()
    assert set().union(*parts.values()) == PINNED.keys()
    assert "flwr.supernode.runtime.run_clientapp:install_from_fab" in parts["run_task"], "replaced, and not read"


def test_flower_has_not_moved_under_a_patch() -> None:
    now = alone("{part: flower_parts.digest(part) for part in sys.argv[1:]}", *PINNED)
    moved = {part for part, digest in now.items() if digest != PINNED[part]}
    users = used_parts().items()
    looks = [f"- {part}: {user}: {LOOK[user]}" for part in moved for user, parts in users if part in parts]
    assert not moved, "\n".join(["Look in umbel/protocol/flower.py, then pin these parts of Flower:", *looks])


def test_an_executor_has_the_methods_that_flower_calls() -> None:
    flowers = flower_parts.found("flwr.supercore.superexec.executor.types:Executor")
    ours = importlib.import_module("umbel.protocol.flower")._Executor
    methods = {name for name in vars(flowers) if not name.startswith("_")}
    assert methods == {name for name in vars(ours) if not name.startswith("_")}
    for name in methods:
        asked = [
            one
            for one in signature(getattr(flowers, name)).parameters.values()
            if one.kind is one.POSITIONAL_OR_KEYWORD
        ]
        signature(getattr(ours, name)).bind(*asked)


def test_records_made_without_checks_are_those_of_flower() -> None:
    identify()
    entries: dict[str, Any] = {"a": 1, "b": [0.5, 2.0], "c": "text"}
    assert filled(ConfigRecord(), entries) == ConfigRecord(entries)
    assert filled(ConfigRecord(), entries).object_id == ConfigRecord(entries).object_id
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    array = Array(values)
    made = encoded(array.dtype, array.shape, array.data)
    assert vars(made) == vars(array)
    assert made.object_id == array.object_id
    content, other = (filled(RecordDict(), {"x": filled(ArrayRecord(), {name: made})}) for name in "yz")
    assert content.object_id == RecordDict({"x": ArrayRecord({"y": array})}).object_id
    message = Message(content, 7, "train")
    changed = with_content(message, other)
    assert (message.content, changed.content, changed.metadata) == (content, other, message.metadata)


def test_a_bundle_is_what_flower_makes(tmp_path: Path) -> None:
    """Of umbel's own app it looks only at what Flower takes."""
    door = importlib.import_module("umbel.protocol.flower")
    for name in ("pyproject.toml", "LICENSE", "README.md", ".gitignore", "umbel"):
        there, copy = project.APP / name, tmp_path / name
        shutil.copytree(there, copy) if there.is_dir() else shutil.copy(there, copy)
    (tmp_path / "more.py").write_text("1")
    (tmp_path / "linked").symlink_to(tmp_path / "umbel")
    made = build_fab_from_disk(tmp_path)
    assert door.build_bundle(project.APP) == door.build_bundle(tmp_path) == made


def test_parts_of_flower_are_replaced_only_where_it_uses_them() -> None:
    """Else it would do what it does by itself: install the bundle and run it."""
    door = importlib.import_module("umbel.protocol.flower")
    module = ModuleType("module")
    exec("def work():\n    return part()", vars(module))
    with pytest.raises(RuntimeError, match="Flower's work no longer uses another"):
        door._replace(module, module.work, another=lambda: 1)
    door._replace(module, module.work, part=lambda: 7)
    assert module.work() == 7


def test_the_grid_of_flowers_simulation_is_known() -> None:
    kind = importlib.import_module("flwr.superlink.grid.inmemory_grid").InMemoryGrid
    assert in_memory(kind.__new__(kind))
    assert not in_memory(PaperGrid({}))


def test_parts_of_a_message_that_are_missing_are_looked_for_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    door, grid = (importlib.import_module(name) for name in ("umbel.protocol.flower", "flwr.superlink.grid.http_grid"))
    for pull in (pull_objects, pull_and_inflate_object_from_tree):
        assert signature(pull).parameters["initial_backoff"].default == 1, "a second, if nobody says otherwise"
    monkeypatch.setattr(grid, "pull_objects", pull_objects)
    door.pull_soon()
    looks: list[str] = []

    def part(name: str) -> bytes:
        looks.append(name)
        if len(looks) == 1:
            raise ObjectUnavailableError("a")
        return b"there"

    assert grid.pull_objects(["a"], part) == {"a": b"there"}
    assert len(looks) == 2
    assert grid.pull_objects.keywords == {"initial_backoff": 0.05}


def test_a_superlink_looks_for_dead_processes_once_a_second_and_not_with_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked for the state of a run in almost every request; to look, it writes to its database."""
    door = importlib.import_module("umbel.protocol.flower")
    state = importlib.import_module("flwr.supercore.corestate.sql_corestate").SqlCoreState
    linkstate = importlib.import_module("flwr.server.superlink.linkstate.sql_linkstate").SqlLinkState
    assert linkstate._cleanup_expired_task_tokens is state._cleanup_expired_task_tokens
    assert "_cleanup_expired_task_tokens" in linkstate.get_run_status.__code__.co_names
    now, looks = [0.0], list[object]()
    monkeypatch.setattr(door, "time", SimpleNamespace(monotonic=lambda: now[0]))
    seldom = door._seldom(looks.append, 1.0)
    for now[0] in (0.0, 0.5, 0.9, 1.0, 1.5, 7.0):
        seldom(now[0])
    assert looks == [0.0, 1.0, 7.0]


@pytest.mark.parametrize(("status", "goes_on"), [(500, True), (503, True), (403, False)])
def test_a_node_goes_on_saying_that_it_is_there_when_the_superlink_had_no_time(status: int, goes_on: bool) -> None:
    """Flower's heartbeat ends with the first answer of this kind, and the node would be gone for good."""
    door = importlib.import_module("umbel.protocol.flower")
    answer = httpx.Response(status, request=httpx.Request("POST", "https://superlink"))

    def beat() -> bool:
        answer.raise_for_status()
        return True

    again = door._steady(lambda beat: beat, beat)
    if goes_on:
        assert again() is False, "which Flower takes for a call that did not come through, and makes again"
    else:
        with pytest.raises(httpx.HTTPStatusError):
            again()


def test_an_executor_without_a_task_looks_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    door = importlib.import_module("umbel.protocol.flower")
    now, waited = [0.0], list[float | str]()
    monkeypatch.setattr(door, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=waited.append))
    executor = door._Executor(lambda _: None, lambda: waited.append("kept"))
    for now[0] in (0.0, 4.0, 3600.0):
        executor.reconcile()
    executor.launch("a task")
    executor.reconcile()
    assert waited == ["kept", 0.0, "kept", pytest.approx(0.2), "kept", 1.0, "kept", 0.0]


BOMB = """
import hashlib, json, resource, sys
from flwr.app import Array
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from umbel.protocol.flower import refuse_repeated_parts

contents = {}

def named(kind, parts, body):
    content = f"{kind} {','.join(parts)} {len(body)}".encode() + bytes(1) + body
    name = hashlib.sha256(content).hexdigest()
    contents[name] = content
    return name

def array(parts, uses, dtype="uint8"):
    entries = {"dtype": dtype, "shape": [1], "stype": "numpy.ndarray", "arraychunk_ids": uses}
    return named("Array", parts, json.dumps(entries).encode())

many, part = 5_000, named("ArrayChunk", [], bytes(100_000))
arrays = {
    "one use": lambda: [array([part], [0])],
    "an index twice": lambda: [array([part], [0] * many)],
    "a name twice": lambda: [array([part] * many, [*range(many)])],
    "several arrays": lambda: [array([part], [0], f"x{i}") for i in range(many)],
}[sys.argv[1]]()
record = named("ArrayRecord", arrays, json.dumps({name: name for name in arrays}).encode())
for _ in range(2):
    refuse_repeated_parts()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    inflate_object_from_contents(record, contents)
    print("taken")
except ValueError as error:
    assert "repeats one of its parts" in str(error), error
    print("refused")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize("repeated", ["one use", "an index twice", "a name twice", "several arrays"])
def test_memory_is_flat_where_a_message_repeats_a_part_of_its_arrays(repeated: str) -> None:
    """Flower would take 500 MB for a part of 100 kB that is used 5,000 times."""
    done = subprocess.run([sys.executable, "-c", BOMB, repeated], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    taken, mebibytes = done.stdout.split()
    assert taken == ("taken" if repeated == "one use" else "refused")
    assert int(mebibytes) < 64


def test_arrays_are_read_as_ever_where_repeated_parts_are_refused() -> None:
    code = """
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from umbel.protocol.flower import refuse_repeated_parts
refuse_repeated_parts()
large = np.random.default_rng(1).bytes(50 << 20)
arrays = {"a": np.arange(7.0), "same": np.arange(7.0), "large": np.frombuffer(large, np.uint8)}
sent = ArrayRecord({name: Array(value) for name, value in arrays.items()})
contents = {name: one.deflate() for name, one in get_all_nested_objects(sent).items()}
read = inflate_object_from_contents(sent.object_id, contents)
assert all((read[name].numpy() == sent[name].numpy()).all() for name in sent)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_server_cannot_send_a_site_elsewhere() -> None:
    """Neither to another address nor from https to http: what comes back is the redirect, an error."""
    code = """
import http.server, threading
from umbel.protocol.flower import stay_at_server
from flwr.supercore.protobuf.client import ProtobufClient

asked = []
class Elsewhere(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        self.send_response(302 if self.path == '/' else 200)
        self.send_header('Location', '/inside')
        self.send_header('Content-Length', '0')
        self.end_headers()
    def log_message(self, *_): pass

server = http.server.HTTPServer(('127.0.0.1', 0), Elsewhere)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f'http://127.0.0.1:{server.server_port}'
print(ProtobufClient(url)._client.get(url + '/').status_code, asked)
stay_at_server()
asked.clear()
print(ProtobufClient(url)._client.get(url + '/').status_code, asked)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "200 ['/', '/inside']\n302 ['/']\n", done.stderr


@pytest.mark.parametrize(("named", "there"), [(None, ""), ("hospital.example", "hospital.example,")])
def test_programs_of_this_machine_reach_each_other_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, named: str | None, there: str
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    if named:
        monkeypatch.setenv("NO_PROXY", named)
    expected = f"{there}127.0.0.1,localhost"
    assert without_proxy() == {"no_proxy": expected, "NO_PROXY": expected}
