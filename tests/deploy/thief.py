"""A server that ships code of its own: an app that calls itself umbel and has no gate."""

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
    files = {"LICENSE": "", "thief.py": THIEF, "accomplice.py": ACCOMPLICE, "pyproject.toml": PROJECT}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@dataclass
class Attack:
    """A run of the thief's."""

    status: str
    got: dict[str, Any]  # by its number what each node answered: the reason of an error, or the names of its records
    careless: str = ""  # the number of a node with Flower's own executor, if there was one


def attack(deployment: Deployment, thief: Path) -> Attack:
    """Run the thief's app until all nodes have answered."""
    out = deployment.folder / "attack.json"
    run = deployment.submit(app=thief, out=str(out), nodes=" ".join(one.node_id for one in deployment.nodes.values()))
    status = deployment.wait(run)
    deployment.runs.remove(run)  # it leaves no folder that could be audited
    return Attack(status, json.loads(out.read_text(encoding="utf-8")))
