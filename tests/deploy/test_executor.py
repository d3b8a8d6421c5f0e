"""The executor, as far as it needs no Flower process beside it (`tests/deploy/test_processes.py` has those)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from tests.client.test_bundle import OWN
from tests.deploy.conftest import write_site
from tests.helpers.ledgers import forget
from tests.helpers.paper import paper_run
from tests.helpers.paper import sites_accept_the_paper as sites_accept_the_paper
from tests.helpers.sources import ROOT
from umbel.deploy import executor
from umbel.deploy.executor import WarmProcess, load
from umbel.nodes.exchange import Answer
from umbel.nodes.roster import hosting_of
from umbel.privacy.site.config import NODE_CONFIG
from umbel.privacy.site.journal import Journal
from umbel.protocol import messages, project
from umbel.protocol.asked import Names
from umbel.protocol.messages import hosting_in, query


@pytest.fixture
def site_config(tmp_path: Path) -> dict[str, Any]:
    """Return the configuration of a site with data of its own."""
    return {"data-path": write_site(tmp_path / "data", 2.0), "ledger-path": str(tmp_path / "ledger.jsonl")}


RUN = {**paper_run(), "dataset": "", "model": "linear", "loss": "mse"}


def of_site(node_config: dict[str, Any]) -> Context:
    return Context(run_id=1, node_id=1, node_config=node_config, state=RecordDict(), run_config=RUN)


def asked(kind: str, bundle: bytes, node_config: dict[str, Any], content: RecordDict | None = None) -> Message:
    """Return what a node answers to a query that comes with a bundle."""
    return load(kind, bundle)(Message(content or query(), 1, "query"), of_site(node_config))


def recorded(node_config: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what a site's journal says of messages: the decision on each, and the reason."""
    lines = Journal(Path(node_config["ledger-path"])).messages()
    return [(str(line["decision"]), str(line["reason"])) for line in lines]


def test_the_sites_own_app_answers_a_reviewed_bundle_by_the_sites_policy_alone(
    site_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user of the machine may listen at the SuperNode's port as soon as that has ended."""
    monkeypatch.setenv(NODE_CONFIG, " ".join(f'{name}="{value}"' for name, value in site_config.items()))
    theirs = site_config | {"ledger-path": str(tmp_path / "theirs.jsonl"), "budget": "inf", "insecure-seed": "yes"}
    for config in (site_config, theirs):
        assert hosting_in(asked("flwr-clientapp", OWN, config).content).train > 0
    assert len(recorded(site_config)) == 2
    assert not list(tmp_path.glob("theirs*"))


@pytest.mark.parametrize(
    ("version", "own", "line"),
    [
        # The site has reviewed the run's bundle, so the bundle alone does not refuse it.
        (8, "", "[refused.version]"),
        (0, "0.1.0", "This run has umbel 0.1.0: start it from the site's files"),
        (0, "0.10.0", "This run has umbel 0.10.0: upgrade umbel at the site"),
        (0, "0.0.9", "This run has umbel 0.0.9: start the run with umbel 0.1.0"),
    ],
)
def test_a_run_of_another_protocol_or_bundle_hears_which_side_must_move(
    site_config: dict[str, Any], version: int, own: str, line: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    with monkeypatch.context() as patch:
        if version:
            patch.setattr(messages, "VERSION", version)
            site_config |= {"bundle": hashlib.sha256(b"another").hexdigest()}
        content = query()
    reply = asked("flwr-clientapp", b"another", site_config, content)
    monkeypatch.setattr(project, "described", lambda: {"version": own})
    assert hosting_of(Answer(7, "query", reply), 10, False, Names()) is None
    assert line in caplog.messages[-1]


@pytest.mark.parametrize(
    ("kind", "bundle", "policy", "reason"),
    [
        ("flwr-clientapp", b"another", {}, "it has not reviewed bundle"),
        ("flwr-agentapp", OWN, {}, "this site runs no flwr-agentapp"),
        ("flwr-serverapp", b"another", {}, "this site runs no flwr-serverapp"),
        # What is wrong in a site's own configuration is for its own log.
        ("flwr-clientapp", OWN, {"bundle": "12345678"}, "refused"),
        ("flwr-clientapp", OWN, {"budged": 3.0}, "refused"),
        ("flwr-clientapp", OWN, {"researchers": "Dr. Day"}, "refused"),
        ("flwr-clientapp", OWN, {"keep-model": "~no-such-user/kept"}, "refused"),
    ],
)
def test_all_else_is_refused(
    kind: str, bundle: bytes, policy: dict[str, Any], reason: str, site_config: dict[str, Any]
) -> None:
    """And it is on record, but stays refused where the journal cannot be written."""
    told = asked(kind, bundle, site_config | policy).error.reason
    assert reason == told if reason == "refused" else reason in told
    if reason != "refused":
        [(decision, line)] = recorded(site_config)
        assert (decision, reason in line) == ("refused", True)
    index = Path(site_config["ledger-path"]).with_suffix(".index")
    index.unlink(missing_ok=True)
    index.mkdir()
    forget()
    assert asked(kind, bundle, site_config | policy).error.reason == told
    index.rmdir()
    with pytest.raises(ValueError, match="steal"):
        load("flwr-clientapp", OWN)(Message(query(), 1, "query.steal"), of_site(site_config))
    assert recorded(site_config)[-1][0] == "refused", "a message of an unknown type"


OTHER_APP = """
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

import umbel

app, broken, no_app = ClientApp(mods=[umbel.Gate(2.0, 1.0)]), ClientApp(), 17


@app.train()
def train(message, context):
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)


@broken.lifespan()
def lifespan(context):
    raise ValueError("diagnosis-of-patient-17")
    yield
"""


@pytest.mark.parametrize("name", ["app", "broken", "no_app", "nowhere"])
def test_another_app_that_the_site_has_installed_answers_in_its_place(
    name: str, site_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is raised around its gate, Flower itself would tell the server."""
    (tmp_path / "other_app.py").write_text(OTHER_APP)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = site_config | {"app": f"other_app:{name}", "bundle": hashlib.sha256(b"theirs").hexdigest()}
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(30, np.float32))})})
    reply, other = (
        load("flwr-clientapp", bundle)(Message(content, 1, "train"), of_site(config)) for bundle in (b"theirs", OWN)
    )
    assert [decision for decision, _ in recorded(site_config)] == [
        "answered" if name == "app" else "refused",
        "refused",
    ]
    if name == "app":
        assert (reply.content["arrays"]["w"].numpy() != 0).any()
    else:
        assert reply.error.reason == "refused"
    assert "it has not reviewed bundle" in other.error.reason


PROBE = """
import json, os, sys
from types import SimpleNamespace
from umbel.deploy import executor

def run_task(*task):
    home = os.environ["FLWR_HOME"]
    found = {"task": task[:5], "kind": task[5].args[0], "left": os.listdir(home), "pid": os.getpid(),
             "loaded": "torch._dynamo" in sys.modules}
    open(os.path.join(home, "left.txt"), "w").close()
    os.write(int(sys.argv[1]), json.dumps(found | {"home": home}).encode() + b"\\n")
    if task[1] == "raises":
        raise ValueError("broken")

executor.run_task = run_task
warm = executor.WarmProcess()
for token in ("first", "raises", "last"):
    task = dict(task_type="flwr-clientapp", runtime_api_address="node:1", token=token, insecure=True,
                root_certificates_path=None)
    warm.launch(SimpleNamespace(**task))
"""


@pytest.mark.slow
def test_each_task_has_a_process_and_an_empty_home_of_its_own_and_leaves_nothing() -> None:
    """The pipe ends when the last process has gone, the warm one too: its maker ends at once, long before them."""
    read, write = os.pipe()
    maker = subprocess.Popen([sys.executable, "-c", PROBE, str(write)], pass_fds=[write], cwd=ROOT)
    os.close(write)
    with os.fdopen(read) as lines:
        found = [json.loads(line) for line in lines]
    assert maker.wait() == 0
    assert sorted(one["task"][1] for one in found) == ["first", "last", "raises"]
    assert all(one["task"] == ["node:1", one["task"][1], True, None, maker.pid] for one in found)
    assert {one["kind"] for one in found} == {"flwr-clientapp"}
    assert len({one["pid"] for one in found} | {maker.pid}) == 4
    assert [one["left"] for one in found] == [[]] * 3
    assert all(one["loaded"] for one in found), "what training would otherwise load in its time"
    assert not any(Path(one["home"]).exists() for one in found)


def test_without_its_warm_process_the_executor_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be online and answer nothing; whoever watches it starts it again."""
    warm = WarmProcess.__new__(WarmProcess)
    warm._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    task = {"task_type": "flwr-clientapp", "runtime_api_address": "nowhere:1", "token": "t", "insecure": True}
    with pytest.raises(SystemExit) as end:
        warm.launch(SimpleNamespace(**task, root_certificates_path=None))
    assert end.value.code == 1


def test_the_options_are_those_of_flowers_own_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(executor, "WarmProcess", lambda: SimpleNamespace(launch=None))
    with pytest.raises(SystemExit) as end:
        executor.run(["--help"])
    assert end.value.code == 0


def test_its_health_tells_whether_its_ledger_can_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a separate container, where the SuperNode cannot look."""
    served: list[Any] = []
    given: list[Any] = []
    monkeypatch.setattr(executor, "WarmProcess", lambda: SimpleNamespace(launch=None))
    monkeypatch.setattr(executor, "serve_health", lambda *arguments: served.append(arguments))
    monkeypatch.setattr(executor, "run_superexec", lambda arguments, _: given.append(arguments))
    options = ["--insecure", "--health-server-address=127.0.0.1:9095", "--parent-pid", "1"]
    executor.run(options)
    monkeypatch.setenv("UMBEL_LEDGER_PATH", str(tmp_path / "ledger.jsonl"))
    executor.run(["--health-server-address", "127.0.0.1:9095", *options[:1], *options[2:]])
    executor.run(["--insecure", "--parent-pid", "1"])
    assert given == [["--insecure", "--parent-pid", "1"]] * 3
    (address, without), (_, beside_it) = served
    assert address == "127.0.0.1:9095"
    assert without() is None
    assert beside_it().code == "ledger.missing"
    Journal.create(tmp_path / "ledger.jsonl")
    assert beside_it() is None


def test_a_task_needs_no_room_for_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(prefix: str) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("umbel.deploy.executor.tempfile.mkdtemp", full)
    assert not Path(executor._home()).exists()
