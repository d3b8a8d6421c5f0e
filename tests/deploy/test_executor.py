"""A server that ships code of its own, against a site whose executor runs nothing but what the site installed.

Beside it stands a careless site with Flower's own executor, which shows what that code would do.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.deploy.conftest import SHORT, write_site
from tests.deploy.processes import APP, Deployment, Run
from umbel.client.bundle import Bundle
from umbel.protocol.flower import build_bundle

pytestmark = pytest.mark.slow

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


def write_thief(folder: Path) -> Path:
    """Write an app that calls itself umbel and has no gate."""
    folder.mkdir()
    (folder / "LICENSE").touch()
    (folder / "thief.py").write_text(THIEF, encoding="utf-8")
    (folder / "accomplice.py").write_text(ACCOMPLICE, encoding="utf-8")
    own = {
        "project": {
            "name": "umbel",
            "version": "0.1.0",
            "license": {"file": "LICENSE"},
            "dependencies": ["flwr[simulation]>=1.41.0"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "umbel",
                    "fab-format-version": 1,
                    "flwr-version-target": "1.41.0",
                    "components": {"serverapp": "accomplice:app", "clientapp": "thief:app"},
                    "config": {"out": "", "nodes": ""},
                }
            }
        },
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(own), encoding="utf-8")
    return folder


@dataclass
class Attack:
    """A run of the thief's."""

    run: Run
    status: str
    got: dict[str, Any]
    """What each node answered: the reason of an error, or the names of what it sent."""


@pytest.fixture(scope="module")
def thief(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thief(tmp_path_factory.mktemp("thief") / "umbel")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, thief: Path) -> Iterator[Deployment]:
    """Three sites: careful by default, pinned to what nearly is the thief's bundle, and careless."""
    folder = tmp_path_factory.mktemp("deployment")
    liar = folder / "liar"
    liar.mkdir()
    (liar / "sitecustomize.py").write_text(LIAR, encoding="utf-8")
    preimage = hashlib.sha256(build_bundle(thief)).hexdigest()
    own = Bundle.installed()
    assert own
    policies = {
        "careful": {},
        # As far as Flower's own names of bundles go, the thief's is the reviewed one.
        "pinned": {"bundle": f"{own.sha256} {preimage[:8]}{own.sha256[8:]}"},
        "careless": {},
    }
    with Deployment(folder, server_path=liar) as deployment:
        for name, policy in policies.items():
            data = write_site(folder / "data" / name, float(len(name)))
            deployment.start_node(name, flowers_own=name == "careless", **{"data-path": data, **policy})
        deployment.wait_until_online()
        yield deployment


def attack(deployment: Deployment, thief: Path, name: str, kind: str = "") -> Attack:
    """Run the thief's app until all nodes have answered."""
    out, lie = deployment.folder / f"{name}.json", deployment.folder / "liar" / "kind"
    if kind:
        lie.write_text(kind, encoding="utf-8")
    nodes = " ".join(node.node_id for node in deployment.nodes.values())
    run = deployment.submit(app=thief, out=str(out), nodes=nodes)
    status = deployment.wait(run)
    lie.unlink(missing_ok=True)
    deployment.runs.remove(run)  # it leaves no folder that could be audited
    return Attack(run, status, json.loads(out.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def theft(deployment: Deployment, thief: Path) -> Attack:
    return attack(deployment, thief, "theft")


def was_robbed(deployment: Deployment, name: str) -> bool:
    """Whether the thief's code has run at a site."""
    return (deployment.folder / "data" / f"{name}.stolen").exists()


def test_flowers_own_executor_hands_over_the_data(deployment: Deployment, theft: Attack) -> None:
    """Else the tests below would hold for a harmless thief as well."""
    assert theft.status == "finished:completed"
    assert theft.got[deployment.nodes["careless"].node_id] == ["arrays"]
    assert was_robbed(deployment, "careless")


@pytest.mark.parametrize("name", ["careful", "pinned"])
def test_a_bundle_that_was_not_reviewed_is_refused_and_told_what_the_site_runs(
    deployment: Deployment, theft: Attack, thief: Path, name: str
) -> None:
    own, sent = Bundle.installed(), hashlib.sha256(build_bundle(thief)).hexdigest()
    assert own
    reason = theft.got[deployment.nodes[name].node_id]
    assert reason == f"this site runs {own}; it has not reviewed bundle {sent}, which the server sent"
    assert reason in deployment.nodes[name].log
    assert not was_robbed(deployment, name)
    assert not deployment.nodes[name].charges


def test_a_site_may_answer_with_another_app_that_it_has_installed(deployment: Deployment, theft: Attack) -> None:
    """An ordinary one behind `umbel.Gate`: the site runs its own copy, with a policy that no server can change."""
    quickstart = APP / "examples" / "quickstart"
    own = {"app": "quickstart.client_app:app", "bundle": hashlib.sha256(build_bundle(quickstart)).hexdigest()}
    own |= {"data-path": str(deployment.folder / "data"), "mechanisms": "gaussian", "budget": "inf"}
    node = deployment.start_node("other", within=["env", f"PYTHONPATH={quickstart}"], **own, **{"partition-id": 0})
    deployment.wait_until_online("other")
    run = deployment.submit(app=quickstart, num_server_rounds=1)
    assert deployment.wait(run) == "finished:completed"
    deployment.runs.remove(run)
    assert [(row["kind"], row["n"], row["noise_multiplier"], row["mechanism"]) for row in node.charges] == [
        ("train", 12, 2.0, "gaussian")
    ]
    assert "Received 1 results and 3 failures" in deployment.server_log(run), "the others have not reviewed its bundle"
    deployment.nodes.pop("other").kill()


def test_a_task_of_another_kind_is_refused(deployment: Deployment, theft: Attack, thief: Path) -> None:
    """Flower's own executor would start an agent of the bundle's."""
    deployment.nodes.pop("careless").kill()
    done = attack(deployment, thief, "agent", "flwr-agentapp")
    assert done.got == {node.node_id: "this site runs no flwr-agentapp" for node in deployment.nodes.values()}
    assert not any(was_robbed(deployment, name) for name in deployment.nodes)


def test_an_honest_run_completes_right_after_whatever_was_planted(
    deployment: Deployment, theft: Attack, thief: Path
) -> None:
    """What lies where Flower would look for the bundle of this run is not run."""
    own = Bundle.installed()
    assert own
    planted = deployment.nodes["careful"].folder / "apps" / f"umbel.umbel.{own.version}.{own.sha256[:8]}"
    shutil.copytree(thief, planted)
    (planted / "client").mkdir()
    (planted / "client" / "app.py").write_text(THIEF, encoding="utf-8")
    run = deployment.submit(**SHORT | {"min_nodes": 2}, rounds=1, clients_per_round=8)
    assert deployment.wait(run) == "finished:completed"
    assert run.history[0]["releases"] == 8
    for name in ("careful", "pinned"):
        assert not was_robbed(deployment, name)
        assert deployment.nodes[name].rounds_paid(run) == [1]
    assert APP.joinpath("client", "app.py").exists()
