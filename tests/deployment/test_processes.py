"""Three sites and a SuperLink, each a process of its own, over TLS and with node authentication."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tests.deployment.conftest import CLIENTS, SHORT, TRAIN, write_site
from tests.deployment.processes import Deployment, Member, Run

pytestmark = pytest.mark.slow

LEAST = 2.5
"""The lowest noise multiplier that the sites accept."""
REFUSED_S = 900.0


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Three hospitals; only the north lets a client report."""
    folder = tmp_path_factory.mktemp("deployment")
    with Deployment(folder) as deployment:
        for name, slope, role in [("north", 3.0, "split"), ("south", 2.0, "train"), ("west", -3.0, "train")]:
            data_path = write_site(folder / "data" / name, slope)
            deployment.start_node(name, **{"data-path": data_path, "role": role, "least-noise-multiplier": LEAST})
        deployment.wait_until_online()
        yield deployment


@dataclass
class Episode:
    """A run of two rounds, and who tried to get in while it went on."""

    run: Run
    status: str
    strangers: dict[str, Member]


@pytest.fixture(scope="module")
def episode(deployment: Deployment) -> Episode:
    run = deployment.submit(**SHORT, rounds=2, clients_per_round=TRAIN + 2 * CLIENTS)
    strangers = {
        "unregistered": deployment.start_stranger("unregistered", deployment.write_key("unregistered")),
        "without key": deployment.start_stranger("keyless"),
        "without TLS": deployment.start_stranger("plain", tls=False),
    }
    return Episode(run, deployment.wait(run), strangers)


def test_three_sites_learn_together(episode: Episode) -> None:
    assert episode.status == "finished:completed"
    first, second, last = episode.run.history
    assert [first["releases"], second["releases"], last["releases"]] == [TRAIN + 2 * CLIENTS] * 2 + [0]
    assert first["moved"]
    assert second["moved"]
    assert first["loss"] != second["loss"] != last["loss"], "validation scores hypotheses that moved"
    assert all(np.isfinite(value).all() for value in episode.run.hypotheses().values())


def test_the_run_folder_is_whole(episode: Episode) -> None:
    folder = episode.run.folder
    assert {path.name for path in folder.iterdir()} >= {
        "config.toml",
        "history.jsonl",
        "hypotheses.safetensors",
        "latest.safetensors",
        "ledger.csv",
        "outcome.json",
        "report.html",
    }
    saved = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    assert saved["config"]["noise-multiplier"] == SHORT["noise_multiplier"]
    assert folder.name in (folder / "report.html").read_text(encoding="utf-8")


def test_each_ledger_holds_what_its_clients_released_and_nothing_else(deployment: Deployment, episode: Episode) -> None:
    charged = []
    for name, trains in [("north", TRAIN), ("south", CLIENTS), ("west", CLIENTS)]:
        rows = [row for row in deployment.nodes[name].charges if row["run"] == episode.run.id]
        assert {row["kind"] for row in rows} == {"train"}
        assert {row["noise_multiplier"] for row in rows} == {SHORT["noise_multiplier"]}
        assert sorted((row["round"], row["client"]) for row in rows) == [
            (round, client) for round in (1, 2) for client in range(trains)
        ]
        charged += [sum(row["client"] == client for row in rows) for client in range(trains)]
    assert charged == list(episode.run.participations.values())


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        ("unregistered", "[code: 2004] Failed to activate SuperNode."),
        (
            "without key",
            "[code: 2001] SuperNode authentication is enabled. All SuperNodes must be registered via the CLI.",
        ),
        ("without TLS", "Server disconnected without sending a response."),
    ],
)
def test_a_stranger_is_refused_and_the_run_goes_on_undisturbed(episode: Episode, who: str, reason: str) -> None:
    stranger = episode.strangers[who]
    assert stranger.process.wait(REFUSED_S) == 1
    assert f"Exit Code: 305\nFailed to initialize the connection to the SuperLink.\n{reason}\n" in stranger.log
    assert not stranger.charges
    assert [entry["lost_nodes"] for entry in episode.run.history] == [0, 0, 0]


def test_when_every_site_refuses_the_run_ends_where_it_began_and_only_the_sites_know_why(
    deployment: Deployment, episode: Episode
) -> None:
    run = deployment.submit(**SHORT | {"noise_multiplier": 1.0}, rounds=1, clients_per_round=TRAIN + 2 * CLIENTS)
    assert deployment.wait(run) == "finished:completed"
    first, last = run.history
    assert (first["releases"], first["lost_nodes"], first["moved"]) == (0, 3, False)
    assert first["loss"] == last["loss"], "the same hypotheses have the same loss"
    assert not run.participations
    assert not [row for node in deployment.nodes.values() for row in node.charges if row["run"] == run.id]

    log = deployment.server_log(run)
    assert log.count(": refused") == 3
    reason = f"this site accepts no less than {LEAST}".encode()
    knows = {path for path in deployment.folder.rglob("*") if path.is_file() and reason in path.read_bytes()}
    assert knows == {node.folder / "log" for node in deployment.nodes.values()}
    assert reason.decode() not in log
