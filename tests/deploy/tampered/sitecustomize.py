"""Makes a node's client processes send something else than the app's reply, or send it later.

Python imports a module of this name when it starts, where its folder is on PYTHONPATH; all other processes of the node
it leaves alone. What is done to which round's replies stands in ``tampering.json`` in the node's folder: the name of
a kind of `GARBAGE`, `UNREADABLE`, or `HOLD` to wait, with all paid and drawn, until the plan says otherwise.

Of any process, the environment sets how many seconds pass between signs of life (``HEARTBEAT_S``; Flower takes a
process for dead after two of them without one), and by how many its clock is ahead (``AHEAD_S``).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

HOLD = "hold"


def _with_arrays(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return what puts other arrays in the place of a train reply's."""

    def tamper(content: Any) -> None:
        from umbel.protocol.records import pack, unpack

        content["arrays"] = pack({name: change(value) for name, value in unpack(content["arrays"]).items()})

    return tamper


def _add_client(content: Any) -> None:
    content["released"]["clients"] = [*content["released"]["clients"], 1]
    _with_arrays(lambda value: value[[*range(len(value)), 0]])(content)


def _cut_arrays(content: Any) -> None:
    for value in content["arrays"].values():
        value.data = value.data[:-1]


def _break_objects(_: Any) -> None:
    """Send what Flower itself cannot read when it arrives: the app's own checks come too late for that."""
    from flwr.app import Array
    from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

    Array.deflate = lambda self: add_header_to_object_body(b"not what it says", self)  # type: ignore[method-assign]


GARBAGE: dict[str, Callable[[Any], None]] = {
    "not finite": _with_arrays(lambda value: value * float("nan")),
    "another shape": _with_arrays(lambda value: value[..., :1]),
    "another type": _with_arrays(lambda value: value.astype("float64")),
    "one client more": _add_client,
    "arrays cut off": _cut_arrays,
    "nothing": lambda content: content.clear(),
}
UNREADABLE = "unreadable"


# A client process has another home, which is empty.
PLAN = Path(os.environ.get("FLWR_HOME", "")) / "tampering.json"


def _planned(round: str) -> str:
    return str(json.loads(PLAN.read_text(encoding="utf-8")).get(round, ""))


def _tampered(push: Callable[..., None]) -> Callable[..., None]:
    def push_message(client: Any, message: Any, context: Any) -> None:
        round = message.metadata.group_id.partition(",")[0]  # and not how large the answer may be
        while _planned(round) == HOLD:
            time.sleep(0.05)
        if message.metadata.message_type == "train" and message.has_content():
            kinds = GARBAGE | {UNREADABLE: _break_objects}
            kinds.get(_planned(round), lambda _: None)(message.content)
        push(client, message, context)

    return push_message


if seconds := os.environ.get("HEARTBEAT_S"):
    importlib.import_module("flwr.common.constant").HEARTBEAT_DEFAULT_INTERVAL = int(seconds)  # type: ignore[attr-defined]

if ahead := float(os.environ.get("AHEAD_S", 0)):
    date, clock = importlib.import_module("flwr.supercore.date"), time.time
    now = date.now
    date.now = lambda: now() + timedelta(seconds=ahead)  # type: ignore[attr-defined]
    time.time = lambda: clock() + ahead

if "executor" in sys.orig_argv:
    module = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    module.push_message = _tampered(module.push_message)  # type: ignore[attr-defined]
