"""Makes a node's client processes send the app's reply later.

Python imports a module of this name when it starts, where its folder is on PYTHONPATH; all other processes of the node
it leaves alone. Of which rounds replies wait stands in ``tampering.json`` in the node's folder: `HOLD` is to wait, with
all paid and drawn, until the plan says otherwise.

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


# A client process has another home, which is empty.
PLAN = Path(os.environ.get("FLWR_HOME", "")) / "tampering.json"


def _planned(round: str) -> str:
    return str(json.loads(PLAN.read_text(encoding="utf-8")).get(round, ""))


def _tampered(push: Callable[..., None]) -> Callable[..., None]:
    def push_message(client: Any, message: Any, context: Any) -> None:
        round = message.metadata.group_id.partition(",")[0]  # and not how large the answer may be
        while _planned(round) == HOLD:
            time.sleep(0.05)
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
