"""A server that ships code of its own: an app that calls itself umbel and has no gate, and a SuperLink that lies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.processes import Deployment

THIEF = """
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
@app.query()
def steal(message, context):
    data = Path(context.node_config["data-path"])
    (data.parent / f"{data.name}.stolen").touch()
    Path(context.node_config["ledger-path"]).unlink(missing_ok=True)
    return Message(RecordDict({"arrays": ArrayRecord([np.load(data / "features.npy")])}), reply_to=message)
"""
ACCOMPLICE = """
import json
import time
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    out = Path(context.run_config["out"])
    nodes = [int(node) for node in context.run_config["nodes"].split()]
    waiting = {
        message_id: node
        for node in nodes
        for message_id in grid.push_messages([Message(RecordDict(), node, "train", group_id="1")])
    }
    got = {}
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            node = waiting.pop(reply.metadata.reply_to_message_id)
            got[str(node)] = reply.error.reason if reply.has_error() else sorted(reply.content)
        time.sleep(0.2)
    out.write_text(json.dumps(got))
"""
# Makes the SuperLink say that a run's tasks are of another kind: which kind, stands in a file.
LIAR = """
import sys
from pathlib import Path

if {"server", "start"} <= {*sys.orig_argv}:
    import flwr.common.serde as serde

    honest, kind = serde.run_to_proto, Path(__file__).with_name("kind")

    def run_to_proto(run):
        proto = honest(run)
        if kind.exists():
            proto.primary_task_type = kind.read_text()
        return proto

    serde.run_to_proto = run_to_proto
"""


PROJECT = """
[project]
name = "umbel"
version = "0.1.0"
license = { file = "LICENSE" }
dependencies = ["flwr[simulation]>=1.42.0"]
[tool.flwr.app]
publisher = "umbel"
fab-format-version = 1
flwr-version-target = "1.42.0"
components = { serverapp = "accomplice:app", clientapp = "thief:app" }
config = { out = "", nodes = "" }
"""


def write_thief(folder: Path) -> Path:
    """Write an app that calls itself umbel and has no gate."""
    folder.mkdir()
    for name, text in {
        "LICENSE": "",
        "thief.py": THIEF,
        "accomplice.py": ACCOMPLICE,
        "pyproject.toml": PROJECT,
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@dataclass
class Attack:
    """A run of the thief's."""

    status: str
    got: dict[str, Any]  # by its number what each node answered: the reason of an error, or the names of its records
    careless: str = ""  # the number of a node with Flower's own executor, if there was one


def write_liar(folder: Path) -> Path:
    """Write a folder from which a SuperLink imports the lie that `attack` tells it."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(LIAR, encoding="utf-8")
    return folder


def attack(deployment: Deployment, liar: Path, thief: Path, kind: str = "") -> Attack:
    """Run the thief's app until all nodes have answered, as tasks of another kind if one is given."""
    out, lie = deployment.folder / f"attack-{kind}.json", liar / "kind"
    if kind:
        lie.write_text(kind, encoding="utf-8")
    nodes = " ".join(node.node_id for node in deployment.nodes.values())
    run = deployment.submit(app=thief, out=str(out), nodes=nodes)
    status = deployment.wait(run)
    lie.unlink(missing_ok=True)
    deployment.runs.remove(run)  # it leaves no folder that could be audited
    return Attack(status, json.loads(out.read_text(encoding="utf-8")))
