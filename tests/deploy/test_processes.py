"""Sites and a SuperLink, each a process of its own, over TLS and with node authentication.

A start of processes is dear, so that all tests share it. First a server ships code of its own, against sites whose
executor runs only what they installed; a careless site with Flower's own executor shows what that code would do. Then
comes an honest run, in which one of the sites refuses to train.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import ssl
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from flwr.app import Context, RecordDict

from tests.deploy.conftest import CLIENTS, SHORT, TRAIN, write_site
from tests.deploy.processes import CONNECTION, Deployment, Member, Run
from tests.deploy.thief import THIEF, Attack, attack, write_thief
from tests.helpers.keys import pair
from tests.helpers.paper import ACCEPTED
from umbel.client.app import app as client_app
from umbel.client.bundle import Bundle
from umbel.privacy.site.runs import Runs, Status
from umbel.protocol.flower import build_bundle
from umbel.protocol.run_config import RunConfig
from umbel.protocol.signatures import server_of, sign
from umbel.server.app import app as server_app
from umbel.simulation.grid import InProcessGrid

pytestmark = pytest.mark.slow

MIN = 7.5
"""The lowest noise multiplier that the west accepts; the others accept what the run asks for."""
RELEASES = TRAIN + CLIENTS
"""Clients of a round that release: those of the north but for the one that reports, and those of the south."""
REFUSED_S = 900.0
OWN = Path(__file__).parents[1] / "helpers" / "own"
"""Where a strategy of one's own lies, in a package that umbel does not know."""
CONFIG: dict[str, Any] = SHORT | {
    "rounds": 2,
    "clients_per_round": RELEASES + CLIENTS,
    "seed": 3,
    "strategy": "momentum:Momentum momentum=0.5 rate=0.8",
}


def node_config(folder: Path, name: str) -> dict[str, Any]:
    """Return what a site is configured as, but for its ledger."""
    slope, entries = {
        "north": (3.0, {"role": "split"}),
        "south": (2.0, {"role": "train"}),
        "west": (-3.0, {"role": "train", "min-noise-multiplier": MIN}),
    }[name]
    return {"data-path": write_site(folder / "data" / name, slope), "insecure-seed": True, **ACCEPTED, **entries}


@pytest.fixture(scope="module")
def thief(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thief(tmp_path_factory.mktemp("thief") / "umbel")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, thief: Path) -> Iterator[Deployment]:
    """Three hospitals; only the north lets a client report, and the south names the bundles that it has reviewed, and
    a researcher."""
    folder = tmp_path_factory.mktemp("deployment")
    own, sent = Bundle.installed(), hashlib.sha256(build_bundle(thief)).hexdigest()
    assert own
    # As far as Flower's own names of bundles go, the thief's is a reviewed one.
    _, public = pair(folder / "ann")
    reviewed = {"bundle": f"{own.sha256} {sent[:8]}{own.sha256[8:]}", "researchers": f"ann={public.split()[1]}"}
    with Deployment(folder, server_path=[OWN]) as deployment:
        for name in ("north", "south", "west"):
            deployment.start_node(name, **node_config(folder, name), **(reviewed if name == "south" else {}))
        deployment.wait_until_online()
        yield deployment


def was_robbed(deployment: Deployment, name: str) -> bool:
    """Whether the thief's code has run at a site."""
    return (deployment.folder / "data" / f"{name}.stolen").exists()


@pytest.fixture(scope="module")
def attacked(deployment: Deployment, thief: Path) -> Attack:
    """An attack that reaches a careless site as well."""
    data = write_site(deployment.folder / "data" / "careless", 1.0)
    deployment.start_node("careless", flowers_own=True, **{"data-path": data})
    deployment.wait_until_online()
    done = attack(deployment, thief)
    return replace(done, careless=deployment.remove_node("careless"))


def test_a_bundle_that_was_not_reviewed_is_refused(deployment: Deployment, attacked: Attack, thief: Path) -> None:
    """Flower's own executor hands over the data; else this would hold for a harmless thief as well."""
    assert attacked.status == "finished:completed"
    assert attacked.got[attacked.careless] == ["arrays"]
    assert was_robbed(deployment, "careless")
    own, sent = Bundle.installed(), hashlib.sha256(build_bundle(thief)).hexdigest()
    for node in deployment.nodes.values():
        reason = attacked.got[node.node_id]
        assert reason == f"this site runs {own}; it has not reviewed bundle {sent}, which the server sent"
        assert reason in node.log
        assert not was_robbed(deployment, node.name)
        assert not node.charges


@dataclass
class Episode:
    """A run of two rounds, and who tried to get in while it went on."""

    run: Run
    status: str
    strangers: dict[str, Member]
    answers: dict[str, str]
    """What a site reads that tries what is the operator's."""
    before: tuple[set[str], set[str]]
    """The runs and the nodes that the server knew before."""


def known(deployment: Deployment) -> tuple[set[str], set[str]]:
    """Return the runs and the nodes that the server knows."""
    runs = json.loads(deployment.flwr("list", CONNECTION, "--format", "json"))["runs"]
    nodes = json.loads(deployment.flwr("supernode", "list", CONNECTION, "--format", "json"))["nodes"]
    return {run["run-id"] for run in runs}, {node["node-id"] for node in nodes}


@pytest.fixture(scope="module")
def episode(deployment: Deployment, thief: Path) -> Episode:
    """A researcher signed the run, and where Flower would look for its bundle lies the thief's."""
    own = Bundle.installed()
    assert own
    planted = deployment.nodes["north"].folder / "apps" / f"umbel.umbel.{own.version}.{own.sha256[:8]}"
    shutil.copytree(thief, planted)
    (planted / "client").mkdir()
    (planted / "client" / "app.py").write_text(THIEF, encoding="utf-8")
    before = known(deployment)
    entries = RunConfig.parse({key.replace("_", "-"): value for key, value in CONFIG.items()}).unsigned()
    until = datetime.now(UTC) + timedelta(days=1)
    run = deployment.submit(
        **CONFIG, signature=sign(entries, deployment.folder / "ann", until, server_of(deployment.ca))
    )
    strangers = {
        "unregistered": deployment.start_stranger("unregistered", deployment.write_key("unregistered")),
        "without key": deployment.start_stranger("keyless"),
    }
    key = deployment.write_key("another")
    answers = {
        " ".join(words[:2]): deployment.flwr_of_somebody(*words)
        for words in (
            ("run", str(deployment.app), CONNECTION),
            ("supernode", "register", f"{key}.pub", CONNECTION),
            ("supernode", "unregister", deployment.nodes["north"].node_id, CONNECTION),
            ("supernode", "list", CONNECTION),
            ("list", CONNECTION),
            ("stop", run.id, CONNECTION),
        )
    }
    return Episode(run, deployment.wait(run), strangers, answers, before)


def test_sites_learn_together_though_one_refuses(deployment: Deployment, episode: Episode) -> None:
    run = episode.run
    assert episode.status == "finished:completed"
    start, first, second = run.history
    assert [(one["releases"], one["lost_nodes"]) for one in run.history] == [(0, 0), (RELEASES, 1), (RELEASES, 0)]
    assert first["moved"]
    assert second["moved"]
    assert start["loss"] != first["loss"] != second["loss"], "validation scores hypotheses that moved"
    assert all(np.isfinite(value).all() for value in run.hypotheses().values())
    # What the run leaves is whole.
    whole = "config.toml history.jsonl hypotheses.safetensors latest.safetensors ledger.csv outcome.json"
    assert {path.name for path in run.folder.iterdir()} >= {*whole.split(), "participations.jsonl", "report.html"}
    saved = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8"))
    assert saved["config"]["noise-multiplier"] == SHORT["noise_multiplier"]
    assert run.folder.name in (run.folder / "report.html").read_text(encoding="utf-8")
    # What was signed needed no approval, and what was planted did not run.
    [request] = [one for one in Runs(deployment.nodes["south"].ledger).requests() if one.run == run.id]
    assert (request.status, request.person, request.reason) == (Status.APPROVED, "ann", "signed")
    for name in ("north", "south"):
        assert not was_robbed(deployment, name)
        assert deployment.nodes[name].rounds_paid(run) == [1, 2]


def test_each_ledger_holds_what_its_clients_released_and_nothing_else(deployment: Deployment, episode: Episode) -> None:
    charged = []
    # In the order in which the server numbers their clients.
    for node in sorted(deployment.nodes.values(), key=lambda node: int(node.node_id)):
        rows = [row for row in node.charges if row["run"] == episode.run.id]
        trains = {"north": TRAIN, "south": CLIENTS, "west": 0}[node.name]
        # The server knows their seed, and can take the noise away.
        assert {(row["kind"], row["noise_multiplier"]) for row in rows} == ({("train", 0.0)} if trains else set())
        assert sorted((row["round"], row["client"]) for row in rows) == [
            (round, client) for round in (1, 2) for client in range(trains)
        ]
        charged += [sum(row["client"] == client for row in rows) for client in range(trains)]
    assert charged == list(episode.run.participations.values())


def test_only_a_site_that_refuses_knows_why(deployment: Deployment, episode: Episode) -> None:
    west, log = deployment.nodes["west"], deployment.server_log(episode.run)
    assert log.count("site west did not reply to the message of round 1: refused [refused.noise]\n") == 1
    reason = f"this site accepts no less than {MIN}".encode()
    knows = {path for path in deployment.folder.rglob("*") if path.is_file() and reason in path.read_bytes()}
    assert knows == {west.folder / "log", west.ledger}
    assert reason.decode() not in log


def test_a_stranger_is_refused_and_the_run_goes_on_undisturbed(deployment: Deployment, episode: Episode) -> None:
    for who, reason in (
        ("unregistered", r"\[code: 2004\] Failed to activate SuperNode."),
        ("without key", r"\[code: 2001\] SuperNode authentication is enabled. All SuperNodes must be registered via"),
    ):
        stranger = episode.strangers[who]
        assert stranger.process.wait(REFUSED_S) == 1
        assert re.search(
            rf"Exit Code: 305\nFailed to initialize the connection to the SuperLink.\n{reason}", stranger.log
        )
        assert not stranger.charges
    assert [entry["lost_nodes"] for entry in episode.run.history] == [0, 1, 0], "the west, left out of round 2"
    # Nor is anything answered without TLS.
    with pytest.raises(httpx.HTTPError, match=r"disconnected without sending a response|\[Errno 104\]"):
        httpx.get(f"http://{deployment.address}/health")


def test_a_site_starts_no_run_registers_nothing_and_takes_no_task(deployment: Deployment, episode: Episode) -> None:
    """With the server's certificate and keys of its own, from where others are let in, and from elsewhere."""
    for command, answer in episode.answers.items():
        assert "forbidden by this server's guard" in answer, f"{command}: {answer}"
    for path in ("start-run", "register-node", "unregister-node", "list-nodes", "list-runs", "stop-run"):
        assert f'"POST /v1/control/{path} HTTP/1.1" 403' in deployment.superlink.log
    runs, nodes = episode.before
    assert known(deployment) == (runs | {episode.run.id}, nodes)
    deployment.wait_until_online()
    trusted, paths = ssl.create_default_context(cafile=deployment.ca), ("runtime/acquire-task", "runtime/push-messages")
    # This machine may call what its own executor calls; Flower itself wants a task's token there.
    for source, open_to_it in (("127.0.0.1", {*paths, "fleet/pull-messages"}), ("127.0.0.2", {"fleet/pull-messages"})):
        with httpx.Client(transport=httpx.HTTPTransport(verify=trusted, local_address=source)) as caller:
            statuses = {
                path: caller.post(f"https://{deployment.address}/v1/{path}").status_code
                for path in (*paths, "fleet/pull-messages", "control/start-run")
            }
        assert {path for path, status in statuses.items() if status != 403} == open_to_it


def test_sites_that_share_the_runs_seed_learn_bit_for_bit_what_they_learn_in_one_process(
    deployment: Deployment, episode: Episode, tmp_path: Path, run_config: dict[str, Any], umbel_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """And that is what a simulation learns (`tests/server/test_app.py`), with a strategy of one's own as well."""
    monkeypatch.syspath_prepend(OWN)
    config = run_config | {key.replace("_", "-"): value for key, value in CONFIG.items()}
    # Clients are numbered in the order of their nodes' ids.
    names = sorted(deployment.nodes, key=lambda name: int(deployment.nodes[name].node_id))
    own = [node_config(tmp_path, name) | {"ledger-path": str(tmp_path / name)} for name in names]
    server_app(InProcessGrid(client_app, config, node_configs=own), Context(1, 0, {}, RecordDict(), config))
    [folder] = (umbel_home / "runs").iterdir()
    expected = safetensors.numpy.load_file(folder / "latest.safetensors")
    found = episode.run.hypotheses()
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == value.tobytes() for name, value in expected.items())
