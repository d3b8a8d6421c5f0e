"""What of Flower is not public is imported in one place, and is still there."""

from __future__ import annotations

import ast
import importlib
import json
import shutil
import subprocess
import sys
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.cli.build import build_fab_from_disk

from tests.helpers.grids import PaperGrid
from tests.helpers.sources import ROOT
from umbel.protocol import project
from umbel.protocol.flower import delivered, encoded, filled, identify, in_memory, without_proxy

DOORS = [ROOT / "umbel" / place / "flower.py" for place in ("deploy", "protocol")]
IMPORTED = [
    (node.module, alias.name)
    for door in DOORS
    for node in ast.walk(ast.parse(door.read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__"
    for alias in node.names
]

LOOK = {
    "build_bundle": "whether Flower still takes only files whose names it is given, and returns the bundle first",
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
        "whether dead tasks are still looked for so often; whether another environment variable opens another port; "
        "whether a server of isolation process still starts no executor"
    ),
    "_guard_answers": "whether a node's messages still pass `push_messages(request=, state=)` and `push_object` alone",
    "run_supernode": "whether a node still waits by `time.sleep` alone, between messages and for a reply",
    "watch_calls": (
        "whether all of Flower's requests still go through `_send` and one `httpx.Client`, a refusal still comes as "
        "401 or 412, and a failed heartbeat or look still ends all of them"
    ),
    "keep_secret": (
        "whether the access token still travels as Authorization: Bearer, and is refreshed only with a refresh token"
    ),
    "run_task": (
        "whether the app still comes from `get_load_client_app_fn` alone, and the bundle's bytes go to "
        "`install_from_fab` alone: nothing of a server's bundle may be unpacked or imported; whether the heartbeat "
        "still begins before the app is loaded"
    ),
    "_Answers": (
        "whether the server's number is still that of no node; whether a message's group is still kept by "
        "`get_valid_message_ins` and `message_ins_store`, one answer still has one session, and parts still come by "
        "`push_object` alone: tests/deploy/test_answers.py"
    ),
}
"""What to look at where a part of Flower has changed, by the function that uses it."""
PINNED = {
    "flwr.cli.build:build_fab_from_disk": "d4912729f7fa",
    "flwr.cli.build:build_fab_from_files": "4c576876bcbb",
    "flwr.common.constant:SUPERLINK_NODE_ID": "6b86b273ff34",
    "flwr.supercore.corestate.sql_corestate:SqlCoreState._cleanup_expired_task_tokens": "4f11fd6575df",
    "flwr.supercore.credential_store.file_credential_store:FileCredentialStore.set": "01156703d48c",
    "flwr.supercore.interceptors:RuntimeTokenHttpInterceptor": "06cbf14d2ea8",
    "flwr.supercore.protobuf.client:ProtobufClient._send": "1812910fed35",
    "flwr.supercore.protobuf.client:ProtobufClient._unary_unary": "36656de2142a",
    "flwr.supercore.superexec.run_superexec:LaunchResult.accepted": "d0b90ab333c0",
    "flwr.supercore.superexec.run_superexec:RuntimeHttpClient.from_server_address": "611bbd7b5bd4",
    "flwr.supercore.superexec.run_superexec:RuntimeVersionHttpInterceptor": "32dc4f3d763a",
    "flwr.supercore.superexec.run_superexec:get_executor": "891abfc53747",
    "flwr.supercore.superexec.run_superexec:run_superexec": "91e7a33c5b89",
    "flwr.supercore.superexec.run_superexec:validate_and_resolve_root_certificates": "bc209e39f349",
    "flwr.superlink.cli.flower_superlink:FLWR_INTERNAL_GRPC_CONTROL_API": "ab8e559ab0cf",
    "flwr.superlink.cli.flower_superlink:FLWR_INTERNAL_GRPC_FLEET_API": "f4a9673a8944",
    "flwr.superlink.cli.flower_superlink:_run_superlink_http_api": "eb0d78b85f99",
    "flwr.superlink.routers.fleet.router:fleet_handlers.push_messages": "70c2fe927c66",
    "flwr.superlink.routers.fleet.router:fleet_handlers.push_object": "df7e96f1188e",
    "flwr.superlink.routers.fleet.router:fleet_push_messages": "925bc195db09",
    "flwr.superlink.routers.fleet.router:fleet_push_object": "1910dcd9cc2f",
    "flwr.supernode.runtime.run_clientapp:get_load_client_app_fn": "f7790dd641ba",
    "flwr.supernode.runtime.run_clientapp:install_from_fab": "481bd04cde58",
    "flwr.supernode.runtime.run_clientapp:run_clientapp": "6ce09559f3a2",
    "flwr.supernode.start_client_internal:_push_messages": "00bb86faffde",
    "flwr.supernode.start_client_internal:start_client_internal": "9e89a6eb68fb",
}
"""Digests of the parts of Flower 1.42.0, on which what is not public rests."""


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
    code = "{user: sorted(parts) for door in sys.argv[1:] for user, parts in flower_parts.parts(Path(door)).items()}"
    found: dict[str, list[str]] = alone(code, *map(str, DOORS))
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
    assert not moved, "\n".join(["Look at what uses these parts of Flower, then pin them:", *looks])


def test_records_made_without_checks_are_those_of_flower() -> None:
    identify()
    entries: dict[str, Any] = {"a": 1, "b": [0.5, 2.0], "c": "text"}
    assert filled(ConfigRecord(), entries) == ConfigRecord(entries)
    assert filled(ConfigRecord(), entries).object_id == ConfigRecord(entries).object_id
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    array = Array(values)
    made = encoded(array.dtype, array.shape, array.data)
    assert made == array
    assert made.object_id == array.object_id
    content = filled(RecordDict(), {"x": filled(ArrayRecord(), {"y": made})})
    assert content.object_id == RecordDict({"x": ArrayRecord({"y": array})}).object_id
    message = Message(content, 7, "train")
    arrived = delivered(message)
    assert (arrived.content, arrived.metadata) == (message.content, message.metadata)
    arrived.metadata.group_id = "other"
    del arrived.content["x"]["y"]
    assert message.metadata.group_id == ""
    assert message.content == content
    # Also where Flower keeps them in another way.
    with pytest.warns(UserWarning, match="more slowly"):
        assert filled(OrderedDict({"a": 1}), {"b": 2}) == {"a": 1, "b": 2}  # type: ignore[type-var]


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


def test_this_machine_needs_no_proxy_and_the_grid_of_a_simulation_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert without_proxy() == dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost")
    monkeypatch.setenv("NO_PROXY", "hospital.example")
    assert without_proxy() == dict.fromkeys(("no_proxy", "NO_PROXY"), "hospital.example,127.0.0.1,localhost")
    kind = importlib.import_module("flwr.superlink.grid.inmemory_grid").InMemoryGrid
    assert in_memory(kind.__new__(kind))
    assert not in_memory(PaperGrid({}))
