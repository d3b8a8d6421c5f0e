"""Whole runs in one process: the ServerApp and the ClientApp as they are, and a Grid between them."""

from __future__ import annotations

import csv
import errno
import logging
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from numpy.typing import NDArray

import umbel.client.app
import umbel.server.app
from tests.helpers.disk import Killed, kill_when
from tests.helpers.drawing import leave_blank
from tests.helpers.errors import raises
from tests.helpers.grids import ListeningGrid, failing
from tests.helpers.ledgers import participations, spent
from tests.helpers.messages import scores
from tests.helpers.models import write_module
from tests.helpers.paper import paper_run
from tests.helpers.runs import AppRun, run_app
from umbel.data import BUNDLED, Manifest, offsets_of, open_dataset, write_dataset
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.totals import Totals
from umbel.protocol.arrays import flatten
from umbel.protocol.errors import ConfigError, DiskError, FleetError
from umbel.protocol.messages import numbers_asked
from umbel.protocol.project import ENGINE
from umbel.protocol.records import unpack
from umbel.server import callbacks
from umbel.server.callbacks import Released
from umbel.server.run import Run, draw_hypotheses
from umbel.server.run_folder import RunFolder
from umbel.server.runs import all_runs
from umbel.server.setup import Setup
from umbel.server.status import RunState
from umbel.strategies import Callback

# What is drawn `tests/server/report` looks at.
pytestmark = pytest.mark.usefixtures("blank_figures")

OPTIMA = np.array([[5.0, 6.0], [4.0, -4.5]])
FILES = [
    "config.toml", "dataset.json", "history.jsonl", "hypotheses.safetensors", "latest.safetensors", "ledger.csv",
    "nodes.json", "outcome.json", "participations.jsonl", "report.html",
]  # fmt: skip
SYNTHETIC = BUNDLED / "synthetic.json"
SHORT = {"rounds": 6, "restarts": 2}

Play = Callable[..., AppRun]


def play_app(
    app: Any = umbel.client.app.app, nodes: int = 1, sites: Any = None, engine: str = "auto", **changes: Any
) -> AppRun:
    config = paper_run() | SHORT | {key.replace("_", "-"): value for key, value in changes.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENGINE, engine)
        return run_app(config, ListeningGrid(app, config, nodes, sites))


@pytest.fixture
def play() -> Play:
    """Run the app on the default run config with some changes; without any it is six rounds of training."""
    return play_app


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Run the app in a home of its own, for runs that several tests look at and none changes."""

    def run(**changes: Any) -> AppRun:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UMBEL_HOME", str(tmp_path_factory.mktemp("home")))
            leave_blank(patch)
            return play_app(**changes)

    return run


@pytest.fixture(scope="module")
def whole(elsewhere: Play) -> AppRun:
    """Six rounds of training on one node, without any change."""
    return elsewhere()


@pytest.fixture(scope="module")
def looped_run(elsewhere: Play) -> AppRun:
    """The same with the engine that computes clients one by one."""
    return elsewhere(engine="loop")


def distances(run: AppRun) -> list[float]:
    """Return how far the best hypotheses are from each of the synthetic data's optima."""
    found = flatten(run.arrays("hypotheses"))
    return [float(np.linalg.norm(found - optimum, axis=1).min()) for optimum in OPTIMA]


# --- what a run leaves behind


def test_a_run_leaves_its_files_in_a_folder_with_a_name_of_its_own_and_says_last_where(
    play: Play, umbel_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        run = play(nodes=2, strategy="umbel.strategies.fedavg:FedAvg", rounds=1)
    assert sorted(file.name for file in run.folder.iterdir()) == FILES
    assert caplog.messages[-1] == str(run.folder)
    assert run.folder.parent == umbel_home / "runs"
    assert run.folder.name in report_of(run)
    assert re.fullmatch(r"\d{8}-\d{6}-synthetic-umbel\.strategies\.fedavg-FedAvg-\d{6}", run.folder.name)


def test_the_log_tells_each_round_and_the_outcome(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        run = play(rounds=2, nodes=3)
    told = "\n".join(caplog.messages)
    assert "GroupPrivacy: k = 2 hypotheses, 7 clients a round, clipping update" in told
    assert "3 nodes host 100 training and 100 validation clients" in told
    lines = [message for message in caplog.messages if message.startswith("round ")]
    assert [line[:9] for line in lines] == ["round 0/2", "round 1/2", "round 2/2"]
    assert f"validation RMSE {run.history[1]['loss']:.4f}" in lines[1]
    assert "The run ended after round 2: all 2 rounds done." in told
    assert "Guarantee: none, because each update is clipped to its own norm, which proves nothing." in told


def test_a_formal_run_says_what_it_guarantees(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    """2 n / nu + choice-epsilon = 2 * 2/5 + 1/2 a participation, between any two data sets of the client."""
    with caplog.at_level(logging.INFO, "flwr"):
        run = play(rounds=2, nodes=3, clipping="public", choice_epsilon=0.5)
    most = max(times for times, _ in run.ledger.values())
    assert f"data sets of a client: pure epsilon {1.3 * most:.4g}." in caplog.text
    with (run.folder / "ledger.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(run.ledger)
    for row in rows:
        assert float(row["epsilon"]) == pytest.approx(1.3 * int(row["participations"]))
    assert f'<p class="value">pure epsilon {1.3 * most:.4g}</p>' in report_of(run)


@pytest.mark.parametrize(("changes", "told"), [({}, False), ({"clipping": "public"}, True)], ids=str)
def test_a_run_without_noise_that_clips_says_how_not_to(
    changes: dict[str, Any], told: bool, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    play(rounds=1, noise_multiplier=0.0, **changes)
    assert ("clipping=update choice-epsilon=0" in caplog.text) == told


# --- what it learns


def test_the_default_run_finds_both_optima(play: Play) -> None:
    run = play(rounds=100, restarts=5)
    assert max(distances(run)) < 1.0
    # Without an intercept the noise U[0, 1) remains, whose root mean square is sqrt(1/3) = .577.
    assert 0.55 < min(entry["loss"] for entry in run.history) < 0.65


def test_federated_averaging_finds_one_model_between_the_optima(play: Play) -> None:
    run = play(strategy="fedavg", noise_multiplier=0.0, rounds=30)
    ((x, y),) = flatten(run.arrays("hypotheses"))
    assert 3 < x < 6
    assert -2 < y < 4
    assert {tuple(entry["groups"]) for entry in run.trained} == {(7,)}


def test_ifca_finds_both_optima_without_noise(play: Play) -> None:
    run = play(strategy="ifca", noise_multiplier=0.0, rounds=60, restarts=5)
    assert max(distances(run)) < 0.5


# --- the same whatever it runs on

VARIANTS: dict[str, dict[str, Any]] = {
    "public radius": {"clipping": "public norm=0.5 decay=0.9"},
    "shuffled minibatches": {"batch_size": 3, "local_epochs": 2, "validation": "clients=20"},
    "IFCA": {"strategy": "ifca", "noise_multiplier": 0.0},
    "a recommender, which batches give to rounding alone": {
        "dataset": "preferences", "strategy": "recommender", "hypotheses": 1, "clients_per_round": 12,
        "step_size": 0.03, "clipping": "update floor=1e-6", "noise_multiplier": 1.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_no_bit_depends_on_the_number_of_nodes(play: Play, changes: dict[str, Any]) -> None:
    # Two nodes would show less: a sum of two parts does not depend on their order.
    one, seven = (play(nodes=nodes, engine="loop", rounds=3, **changes) for nodes in (1, 7))
    for name in ("hypotheses", "latest"):
        found, expected = seven.arrays(name), one.arrays(name)
        assert found.keys() == expected.keys()
        for key in expected:
            np.testing.assert_array_equal(found[key], expected[key])
    assert seven.history == one.history
    assert seven.ledger == one.ledger


@pytest.mark.parametrize("nodes", [1, 7])
def test_batched_gives_the_same_to_rounding(play: Play, looped_run: AppRun, nodes: int) -> None:
    batched = play(nodes=nodes, engine="batched")
    np.testing.assert_allclose(batched.arrays("latest")["weight"], looped_run.arrays("latest")["weight"], rtol=1e-4)
    assert [entry["groups"] for entry in batched.history] == [entry["groups"] for entry in looped_run.history]


def test_a_seed_gives_the_same_again_and_another_seed_does_not(play: Play, whole: AppRun) -> None:
    first, again, other = whole, play(), play(seed=1)
    assert again.history == first.history
    assert again.arrays("latest")["weight"].tobytes() == first.arrays("latest")["weight"].tobytes()
    assert not np.isin(other.arrays("latest")["weight"], first.arrays("latest")["weight"]).any()


def test_a_simulation_whose_nodes_refuse_to_train_ends_at_once_where_its_seed_began(
    play: Play, run_config: dict[str, Any], umbel_home: Path
) -> None:
    with raises(FleetError, "nodes.refused"):
        play(app=failing({0, 1}, parts=["training"]), nodes=2, restarts=1, seed=9)
    (folder,) = (umbel_home / "runs").iterdir()
    drawn = draw_hypotheses(Setup.parse(run_config).model, 2, seed=9, restart=0)
    latest = safetensors.numpy.load_file(folder / "latest.safetensors")
    np.testing.assert_array_equal(latest["weight"], drawn["weight"])
    assert len((folder / "history.jsonl").read_text().splitlines()) == 1


# --- what it costs


@pytest.mark.parametrize(("nodes", "noise_multiplier"), [(1, 5.0), (3, 0.3)])
def test_the_servers_ledger_is_the_sum_of_the_nodes_own(play: Play, nodes: int, noise_multiplier: float) -> None:
    run = play(nodes=nodes, noise_multiplier=noise_multiplier)
    kept = {}
    for first, context in enumerate(run.grid.contexts.values()):
        own = Totals(context.state)
        for number in range(first, 100, nodes):
            if times := participations(own, number):
                kept[number] = (times, spent(own, number))
    assert run.ledger.keys() == kept.keys()
    for number, (times, paper) in run.ledger.items():
        assert (times, paper) == (kept[number][0], pytest.approx(float(kept[number][1]), rel=1e-9))


def test_clients_take_turns_and_the_run_ends_when_all_have_had_theirs(play: Play) -> None:
    """A hundred training clients, thirty a round, twice each: seven rounds, of which the last asks twenty."""
    turns = {"rounds": 50, "clients_per_round": 30, "max_participations": 2}
    run, again = play(nodes=3, **turns), play(**turns)
    assert [entry["asked"] for entry in run.history] == [0] + [30] * 6 + [20]
    assert run.history[-1]["loss"] is not None, "what they left is evaluated"
    assert {times for times, _ in run.ledger.values()} == {2}
    assert len(run.ledger) == 100
    assert run.stopped == "every client has reached max-participations = 2"
    latest, same = (one.arrays("latest")["weight"].tobytes() for one in (run, again))
    assert latest == same, "whatever the number of nodes"


# --- when nodes fail


def test_a_run_goes_on_without_a_node_that_always_fails(play: Play) -> None:
    """It is left out for one round, then for three."""
    run = play(app=failing({1}), nodes=3, clients_per_round=30)
    assert [entry["lost_nodes"] for entry in run.trained] == [1, 0, 1, 0, 0, 0]
    assert [entry["releases"] < 30 for entry in run.trained] == [True, False, True, False, False, False]
    assert all(entry["moved"] for entry in run.trained)
    assert all(number % 3 != 1 for number in run.ledger), "clients 1, 4, 7, ... are on the node that fails"
    assert sum(times for times, _ in run.ledger.values()) == sum(entry["releases"] for entry in run.trained)


def test_when_no_site_releases_anything_the_run_ends_after_three_rounds(
    play: Play, umbel_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then the hypotheses stay as they were, and are validated all the same."""
    with raises(FleetError, "nodes.no-releases", "rounds", "3"):
        play(sites=[site | {"place": "0/1"} for site in sites(tmp_path, 3, min_noise_multiplier=100)])
    (folder,) = (umbel_home / "runs").iterdir()
    entries = RunFolder(folder).read_history()
    assert [(entry.asked, entry.moved, entry.releases) for entry in entries[1:]] == [(7, False, 0)] * 3
    assert len({entry.loss for entry in entries[:3]}) == 1
    assert caplog.text.count("TOO FEW RELEASES: hypotheses unchanged") == 2, "the last round is not complete"


def one_of_three(**policy: Any) -> list[dict[str, Any]]:
    """Node configurations of a simulation whose second node has a policy."""
    nodes = [{"partition-id": i, "num-partitions": 3} for i in range(3)]
    nodes[1] |= {key.replace("_", "-"): value for key, value in policy.items()}
    return nodes


def test_a_node_whose_policy_refuses_training_reports_all_the_same(play: Play) -> None:
    """Its training clients are asked in vain, its validation clients count like any others."""
    run = play(sites=one_of_three(min_noise_multiplier=100), clients_per_round=30)
    assert [entry["lost_nodes"] for entry in run.trained] == [1] * 6
    assert all(number % 3 != 1 for number in run.ledger)
    assert_all_reported(run)


def test_a_node_whose_clients_have_spent_their_budget_reports_all_the_same(play: Play) -> None:
    """A participation costs 2/5; with a budget of 2/5 each client of the second node releases once."""
    run = play(sites=one_of_three(paper_budget=0.4), clients_per_round=100)
    assert [entry["releases"] for entry in run.trained] == [100] + [67] * 5
    assert {times for number, (times, _) in run.ledger.items() if number % 3 == 1} == {1}
    assert {times for number, (times, _) in run.ledger.items() if number % 3 != 1} == {6}
    assert_all_reported(run)


def assert_all_reported(run: AppRun) -> None:
    """Check that in each round all hundred validation clients have said how good the hypotheses are."""
    assert isinstance(run.grid, ListeningGrid)
    for number in range(1, 8):
        replies = [reply for _, reply in run.grid.exchanged(str(number))]
        reported = [len(scores(reply)[0]) for reply in replies if "scores" in reply.content]
        assert sum(reported) == 100
    assert all(entry["loss"] > 0 for entry in run.history)


# --- what travels


def test_every_node_gets_one_message_a_round_and_its_reply_holds_what_is_allowed_alone(play: Play) -> None:
    run = play(nodes=3, clients_per_round=30, restarts=2)
    grid = run.grid
    assert isinstance(grid, ListeningGrid)
    once = Counter({100: 1, 101: 1, 102: 1})
    assert {group: count for group, count in grid.rounds.items() if not group.startswith("restart")} == {
        str(number): once for number in range(1, 8)
    }
    for number in range(1, 7):
        for message, reply in grid.exchanged(str(number)):
            assert message.metadata.message_type == "train"
            assert set(message.content) == {"hypotheses", "training", "evaluation"}
            assert set(reply.content) == {"arrays", "released", "scores"}
            assert set(reply.content.metric_records["released"]) == {"clients"}
            assert set(reply.content.metric_records["scores"]) == {"loss", "metric"}
            assert set(unpack(reply.content.array_records["arrays"])) == {"weight"}
            assert not reply.content.config_records
    for message, reply in grid.exchanged("7"):
        assert message.metadata.message_type == "evaluate"
        assert [*map(bool, numbers_asked(message.content))] == [False, True]
        assert set(reply.content) == {"scores"}
    # Before the first round: who hosts what, once, and each set of hypotheses scored; afterwards what was found.
    kinds = Counter(message.metadata.message_type for message in grid.sent)
    assert kinds == {"query": 3, "evaluate": 3 * 2 + 3, "train": 3 * 6, "query.keep": 3}


def test_a_round_that_does_not_validate_asks_for_training_alone(play: Play) -> None:
    run = play(nodes=2, validation="every=3")
    assert isinstance(run.grid, ListeningGrid)
    for number, entry in enumerate(run.history[:-1], 1):
        asked = {tuple(map(bool, numbers_asked(message.content))) for message, _ in run.grid.exchanged(str(number))}
        assert asked == ({(True, True)} if number in (1, 4) else {(True, False)})
        assert (entry["loss"] is None) == (number not in (1, 4))
    assert max(max(nodes.values()) for group, nodes in run.grid.rounds.items() if group.isdigit()) == 1


# --- other data


def plane(folder: Path, theta: tuple[float, float], train: int, validation: int, name: str = "plane") -> Path:
    """Write clients of ten rows each, with y = x . theta."""
    clients = train + validation
    x = np.random.default_rng(clients).uniform(-1, 1, size=(10 * clients, 2)).astype(np.float32)
    split = {"train": train, "validation": validation}
    manifest = Manifest(name=name, clients=clients, split=split, model="linear")
    write_dataset(folder, manifest, x, x @ np.float32(theta), offsets_of([10] * clients))
    return folder


def test_without_validation_clients_the_newest_hypotheses_are_kept(play: Play, umbel_home: Path) -> None:
    plane(umbel_home / "data" / "plane", (3, -2), train=8, validation=0)
    run = play(dataset="plane", hypotheses=1, noise_multiplier=0.0, rounds=30, step_size=0.5, patience=2)
    assert [entry["loss"] for entry in run.history] == [None] * 31
    np.testing.assert_array_equal(run.arrays("hypotheses")["weight"], run.arrays("latest")["weight"])
    np.testing.assert_allclose(run.arrays("latest")["weight"], [[[3, -2]]], atol=0.01)


def test_sites_serve_their_own_data_and_are_numbered_by_node_id(play: Play, tmp_path: Path) -> None:
    sites = [
        {"data-path": str(plane(tmp_path / "one", (3, -2), train=3, validation=2)), "role": "split"},
        {"data-path": str(plane(tmp_path / "two", (3, -2), train=5, validation=1)), "role": "split"},
    ]
    for name, site in zip(("one", "two"), sites, strict=True):
        site["ledger-path"] = str(tmp_path / f"{name}.jsonl")
    run = play(sites=sites, dataset="", model="linear", clients_per_round=8, rounds=3)
    assert run.folder.name[16:].startswith("linear-group-privacy")
    assert run.ledger == {number: (3, 3 * 2 / 5) for number in range(8)}
    for name, clients in (("one", 3), ("two", 5)):
        accounts = Journal(tmp_path / f"{name}.jsonl").accounts()
        assert {client: sum(account.values()) for client, account in accounts.items()} == dict.fromkeys(
            range(clients), 3
        )


def test_the_servers_own_data_are_not_what_a_site_serves(play: Play, tmp_path: Path, umbel_home: Path) -> None:
    # The run config names the bundled dataset; the site has other data, and fewer clients.
    site = {"data-path": str(plane(tmp_path / "one", (3, -2), train=3, validation=2)), "role": "split"}
    for changes, asked, there in (({"clients-per-round": 7}, 7, 3), ({"validation": "clients=4"}, 4, 2)):
        with raises(ConfigError, "config.too-few-clients", next(iter(changes)), asked, there):
            play(sites=[site], **{"clients-per-round": 3} | changes)
    assert not (umbel_home / "runs").exists(), "nothing is left behind"


# --- a run that was interrupted


LAST = 7
"""The evaluation after six rounds of training."""


def report_of(run: AppRun) -> str:
    return (run.folder / "report.html").read_text()


@pytest.fixture
def interrupted(play: Play, monkeypatch: pytest.MonkeyPatch, umbel_home: Path) -> Callable[..., str]:
    """Run the app until it is stopped as a file is written, and return the name of its folder."""

    def run(at_round: int, file: str = "report.html", **changes: Any) -> str:
        written = count(1)
        with monkeypatch.context() as patched:
            kill_when(patched, lambda path: path.name == file and next(written) == at_round)
            with pytest.raises(Killed):
                play(**changes)
        (folder,) = (umbel_home / "runs").iterdir()
        return folder.name

    return run


@pytest.mark.parametrize(
    ("file", "at_round"),
    [
        ("history.jsonl", 4),
        ("participations.jsonl", 4),
        ("outcome.json", 2),
        ("ledger.csv", 4),
        ("latest.safetensors", 4),
        ("latest.safetensors", LAST),
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_a_run_goes_on_as_if_nothing_had_happened_wherever_it_was_stopped(
    play: Play,
    whole: AppRun,
    interrupted: Callable[..., str],
    file: str,
    at_round: int,
    large: bool,
    umbel_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if large:  # which is written while the next round runs
        monkeypatch.setattr(callbacks, "_LARGE", 0)
    name = interrupted(at_round, file, nodes=2)
    resumed = play(resume=name, nodes=3)
    (umbel_home / "runs" / name).rename(umbel_home / "runs" / "resumed")
    again = AppRun(umbel_home / "runs" / "resumed", resumed.grid)
    for arrays in ("hypotheses", "latest"):
        np.testing.assert_array_equal(again.arrays(arrays)["weight"], whole.arrays(arrays)["weight"], strict=True)
    assert [entry | {"max_participations": 0, "median_participations": 0} for entry in again.history] == [
        entry | {"max_participations": 0, "median_participations": 0} for entry in whole.history
    ]
    # What was charged in a round that is done again stays charged: never less than was released.
    for number, (often, _) in whole.ledger.items():
        assert again.ledger[number][0] >= often
    assert (umbel_home / "runs" / "resumed" / "report.html").exists()


@pytest.mark.parametrize("file", ["history.jsonl", "hypotheses.safetensors", "latest.safetensors"])
def test_a_full_disk_ends_a_run_that_says_how_it_goes_on_once_there_is_room(
    play: Play,
    whole: AppRun,
    umbel_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    file: str,
) -> None:
    written, sync = count(1), os.fsync

    def full(handle: int) -> None:
        if file in os.readlink(f"/proc/self/fd/{handle}") and next(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with raises(DiskError, "disk.full", file, "MiB free"):
            play(nodes=2)
    (folder,) = (umbel_home / "runs").iterdir()
    assert f"resume={folder.name!r}" in caplog.text
    assert not [one for one in folder.iterdir() if one.name.endswith(".tmp")]
    again = play(resume=folder.name)
    for arrays in ("hypotheses", "latest"):
        np.testing.assert_array_equal(again.arrays(arrays)["weight"], whole.arrays(arrays)["weight"], strict=True)
    assert [entry["number"] for entry in again.history] == [entry["number"] for entry in whole.history]


def test_real_sites_are_not_charged_for_a_round_that_could_not_be_saved(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = tmp_path / "one.jsonl"
    site = {"data-path": str(plane(tmp_path / "one", (3, -2), train=3, validation=2)), "role": "split"}
    monkeypatch.setattr("umbel.protocol.home.free_space", lambda _: 1 << 20)
    with raises(DiskError, "disk.full", "1.0 MiB free"):
        play(sites=[site | {"ledger-path": str(ledger)}], dataset="", model="linear", clients_per_round=3)
    assert not ledger.exists() or not Journal(ledger).accounts()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_is_done_by_one_process(
    play: Play, interrupted: Callable[..., str], monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """Two on one folder would leave the rounds of the one and the hypotheses of the other."""
    changes = {"resume": interrupted(3, "latest.safetensors")} if resumed else {}
    do = Run.do

    def meanwhile(run: Run) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Run, "do", do)
            with raises(ConfigError, "config.run-held", run.name):
                play(resume=run.name)
        do(run)

    monkeypatch.setattr(Run, "do", meanwhile)
    assert [entry["number"] for entry in play(**changes).history] == [*range(7)]


def headed_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a model of two layers."""
    source = """
    class Headed(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(2, 3), nn.Linear(3, 1))
    """
    return f"{write_module(tmp_path, monkeypatch, textwrap.dedent(source))}:Headed"


def test_a_run_that_goes_on_says_that_simulated_clients_have_lost_their_local_parameters(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    headed = {"model": headed_model(tmp_path, monkeypatch), "loss": "mse", "local": "1.*"}
    short = play(rounds=1, **headed)
    assert "new local parameters" not in caplog.text + report_of(short)
    play(rounds=1, start_from=str(short.folder), seed=1, **headed)
    assert "Clients start with new local parameters" in caplog.text, "as does one that starts from it"
    play(rounds=2, resume=str(short.folder), **headed)
    assert "Its clients start with new local parameters: the result differs" in caplog.text


def test_limits_of_simulated_nodes_begin_anew(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UMBEL_MAX_PARTICIPATIONS", "1")
    short = play(rounds=2, clients_per_round=60)
    assert max(often for often, _ in short.ledger.values()) == 1
    resumed = play(rounds=3, clients_per_round=60, resume=str(short.folder))
    assert max(often for often, _ in resumed.ledger.values()) == 2
    assert "start from 0 again" in caplog.text


def test_turns_that_the_run_config_limits_go_on(play: Play) -> None:
    short = play(rounds=3, clients_per_round=25, max_participations=1)
    resumed = play(rounds=6, clients_per_round=25, max_participations=1, resume=str(short.folder))
    assert {often for often, _ in resumed.ledger.values()} == {1}
    assert resumed.stopped == "every client has reached max-participations = 1"


def test_a_run_that_was_over_and_went_on_is_stopped_in_its_first_round(
    play: Play, whole: AppRun, umbel_home: Path, interrupted: Callable[..., str]
) -> None:
    """Its last validation is made again in that round."""
    name = play(rounds=3).folder.name
    interrupted(2, "latest.safetensors", resume=name)  # the first time is before the round
    resumed = play(resume=name)
    np.testing.assert_array_equal(resumed.arrays("latest")["weight"], whole.arrays("latest")["weight"])


def test_a_run_that_was_killed_twice_in_a_round_goes_on(play: Play, interrupted: Callable[..., str]) -> None:
    """Each time everybody releases again: the history then knows of more releases than the participations do."""
    everybody = {"clients_per_round": 100}
    name = interrupted(3, "latest.safetensors", **everybody)
    interrupted(1, "participations.jsonl", resume=name, **everybody)
    resumed = play(resume=name, **everybody)
    assert {often for often, _ in resumed.ledger.values()} == {7}, "six rounds, and what was charged stays charged"
    assert [entry["number"] for entry in resumed.history] == [*range(7)]


def test_a_run_does_not_go_on_with_other_rows(play: Play, umbel_home: Path) -> None:
    """The best round so far was the best on rows that are not there any more."""
    data = plane(umbel_home / "data" / "plane", (3, -2), train=8, validation=4)
    short = play(dataset="plane", rounds=1)
    short.folder.rename(umbel_home / "runs" / "SHORT")
    plane(data, (3, -2.5), train=8, validation=4)
    with raises(ConfigError, "config.resume-data", "plane", "start-from", "resume"):
        play(dataset="plane", rounds=2, resume="SHORT")
    plane(data, (3, -2), train=8, validation=4)
    play(dataset="plane", rounds=2, resume="SHORT")


def test_a_run_does_not_go_on_with_other_frozen_parameters(play: Play) -> None:
    """As where the file of weights has been replaced."""
    folder = play(rounds=1).folder
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('frozen = ""', 'frozen = "of another body"', 1))
    with raises(ConfigError, "config.other-frozen", "pretrained"):
        play(rounds=2, resume=folder.name)


# --- a run that starts from what another has found


class Start(Callback):
    """Keeps the hypotheses that a run starts from."""

    seen: ClassVar[NDArray[np.float64]]

    def begin(self) -> None:
        Start.seen = flatten(self.run.state.hypotheses)


def test_a_run_starts_from_the_best_hypotheses_of_another(
    play: Play, whole: AppRun, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        run = play(start_from=str(whole.folder), seed=1, rounds=1, observers=f"{__name__}:Start")
    np.testing.assert_array_equal(Start.seen, flatten(whole.arrays("hypotheses")))
    best = whole.history[-1]["best_round"]
    assert run.history[0]["loss"] == whole.history[best]["loss"]
    assert f"starts from hypotheses of {whole.folder}; its guarantee does not count what clients spent" in caplog.text
    assert "the guarantee does not count what clients spent there" in (run.folder / "report.html").read_text()
    assert isinstance(run.grid, ListeningGrid)
    assert not run.grid.rounds.keys() & {"restart-0", "restart-1"}, "there is nothing to choose among"


def test_hypotheses_beyond_those_found_are_drawn_and_the_best_draw_is_taken(play: Play, whole: AppRun) -> None:
    play(start_from=str(whole.folder), seed=1, rounds=1, hypotheses=3, observers=f"{__name__}:Start")
    found, drawn = np.split(Start.seen, [2])
    np.testing.assert_array_equal(found, flatten(whole.arrays("hypotheses")))
    sets = [draw_hypotheses(run_setup(seed=1).model, 3, seed=1, restart=r) for r in range(SHORT["restarts"])]
    assert drawn[0].tolist() in [flatten(one)[2].tolist() for one in sets]


def run_setup(**changes: Any) -> Setup:
    return Setup.parse(paper_run() | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start_from": "nowhere"}, (ConfigError, "config.no-run", "nowhere", "start-from")),
        ({"start_from": "EMPTY"}, (ConfigError, "config.no-run", "start-from")),
        ({"seed": 0}, (ConfigError, "config.start-from-seed", "start-from", "seed", "0")),
        ({"hypotheses": 1}, (ConfigError, "config.start-from-misfit", "start-from", "hypotheses", "2")),
        ({"strategy": "fedavg"}, (ConfigError, "config.start-from-misfit", "strategy", "1")),
        (
            {"model": "mlp inputs=2 hidden=3 outputs=1"},
            (ConfigError, "config.start-from-misfit", "weight", "start-from", "hypotheses"),
        ),
    ],
)
def test_what_a_run_cannot_start_from_is_said_before_any_work(
    play: Play, whole: AppRun, umbel_home: Path, changes: dict[str, Any], words: Any
) -> None:
    empty = umbel_home / "runs" / "EMPTY"
    empty.mkdir(parents=True)
    (empty / "config.toml").touch()
    with raises(*words):
        play(**({"start_from": str(whole.folder), "seed": 1} | changes))
    assert list(empty.parent.iterdir()) == [empty], "nothing else is left behind"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.full((2, 1, 2), np.nan, np.float32), (ConfigError, "config.run-damaged", "hypotheses")),
        (np.full((2, 1, 2), 3e38, np.float32), (ConfigError, "config.run-damaged", "38")),
        (np.ones((2, 1, 2)), (ConfigError, "config.run-damaged", "hypotheses")),
        (np.ones((0, 1, 2), np.float32), (ConfigError, "config.run-damaged", "hypotheses", "0")),
    ],
)
def test_what_no_run_can_begin_with_is_named(play: Play, tmp_path: Path, value: NDArray[Any], words: Any) -> None:
    (tmp_path / "config.toml").write_text("version = 1\n[config]\nseed = 0\n")
    safetensors.numpy.save_file({"weight": value}, tmp_path / "hypotheses.safetensors")
    with raises(*words, tmp_path):
        play(start_from=str(tmp_path), seed=1)


def test_numbers_of_a_kind_that_numpy_lacks_are_named(play: Play, whole: AppRun, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes((whole.folder / "config.toml").read_bytes())
    half = torch.ones(2, 1, 2, dtype=torch.bfloat16)
    safetensors.torch.save_file({"weight": half}, tmp_path / "hypotheses.safetensors")
    with raises(ConfigError, "config.run-damaged", tmp_path, "start-from"):
        play(start_from=str(tmp_path), seed=1)


@pytest.mark.parametrize("config", ["other = 1", "version = 1\n[config]\nseed = true"])
def test_a_run_to_start_from_says_its_seed(play: Play, whole: AppRun, tmp_path: Path, config: str) -> None:
    (tmp_path / "config.toml").write_text(config)
    (tmp_path / "hypotheses.safetensors").write_bytes((whole.folder / "hypotheses.safetensors").read_bytes())
    with raises(ConfigError, "config.run-damaged", tmp_path, "/config.toml", "start-from", "seed"):
        play(start_from=str(tmp_path))


def test_hypotheses_of_other_data_are_told_with_these(play: Play, whole: AppRun, umbel_home: Path) -> None:
    plane(umbel_home / "data" / "plane", (3, -2), train=8, validation=4)
    with raises(ConfigError, "config.start-from-misfit", "synthetic", "dataset"):
        play(start_from=str(whole.folder), dataset="plane", model="mlp inputs=2 hidden=3 outputs=1", seed=1)


def test_hypotheses_go_with_their_frozen_parameters(play: Play, whole: AppRun, tmp_path: Path) -> None:
    """The same shapes, trained on top of another body."""
    (tmp_path / "config.toml").write_text('version = 1\nfrozen = "of another body"\n[config]\nseed = 0\n')
    (tmp_path / "hypotheses.safetensors").write_bytes((whole.folder / "hypotheses.safetensors").read_bytes())
    with raises(ConfigError, "config.other-frozen", "frozen", "pretrained"):
        play(start_from=str(tmp_path), seed=1)


# --- sites with data of their own


def sites(path: Path, count: int, **entries: Any) -> list[dict[str, Any]]:
    """Node configurations of sites that split one dataset among themselves."""
    common = {"data-path": str(SYNTHETIC), "role": "split"} | {key.replace("_", "-"): v for key, v in entries.items()}
    return [{**common, "place": f"{i}/{count}", "ledger-path": str(path / f"ledger-{i}.jsonl")} for i in range(count)]


def test_sites_that_allow_the_runs_seed_give_what_a_simulation_gives(play: Play, whole: AppRun, tmp_path: Path) -> None:
    deployed = play(sites=sites(tmp_path, 3, insecure_seed="true"))
    for name in ("hypotheses", "latest"):
        np.testing.assert_array_equal(deployed.arrays(name)["weight"], whole.arrays(name)["weight"], strict=True)
    # Grids absorb the rounding in which a site's engine and a simulation's differ; exact losses do not.
    for one, other in zip(deployed.history, whole.history, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=1e-6), key


def test_a_site_may_be_set_up_by_its_environment(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROLE", "split"), ("INSECURE_SEED", "true"), ("KEEP_MODEL", str(tmp_path / "own"))):
        monkeypatch.setenv(f"UMBEL_{name}", value)
    deployed = play(sites=[{"data-path": str(SYNTHETIC)}], rounds=2)
    assert len(list((tmp_path / "own").iterdir())) == 200
    for name in ("ROLE", "INSECURE_SEED", "KEEP_MODEL"):
        monkeypatch.delenv(f"UMBEL_{name}")
    monkeypatch.setenv("UMBEL_ANYTHING", "is nothing to a simulation")
    simulated = play(rounds=2)
    assert deployed.arrays("latest")["weight"].tobytes() == simulated.arrays("latest")["weight"].tobytes()


def test_sites_that_do_not_draw_noise_that_nobody_knows(play: Play, tmp_path: Path) -> None:
    simulated, deployed = play(rounds=1), play(rounds=1, sites=sites(tmp_path, 3))
    loss = simulated.history[0]["loss"]
    assert deployed.history[0]["loss"] == pytest.approx(loss, rel=1e-6), "the same initial hypotheses"
    assert (deployed.arrays("latest")["weight"] != simulated.arrays("latest")["weight"]).all()


def fails(run: Run) -> None:
    raise FleetError("no site answers", code="nodes.missing")


def is_stopped_by_flower(run: Run) -> None:
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("what", "state"),
    [
        (lambda run: None, RunState.COMPLETED), (lambda run: "it is enough", RunState.STOPPED),
        (is_stopped_by_flower, RunState.STOPPED), (fails, RunState.FAILED),
    ],
)  # fmt: skip
def test_a_run_at_sites_says_how_it_ended(
    play: Play, tmp_path: Path, umbel_home: Path, monkeypatch: pytest.MonkeyPatch, what: Any, state: RunState
) -> None:
    states = []

    def after_exchange(self: Released, round: int, stages: dict[str, float]) -> Any:
        assert self.run.folder is not None
        states.append(self.run.folder.read_status().state)
        return what(self.run)

    monkeypatch.setattr(Released, "after_exchange", after_exchange)
    ended = pytest.raises((SystemExit, FleetError)) if what in (fails, is_stopped_by_flower) else nullcontext()
    site = {"data-path": str(SYNTHETIC), "role": "split", "ledger-path": str(tmp_path / "ledger.jsonl")}
    with ended:
        play(sites=[site], rounds=2)
    assert {*states} == {RunState.RUNNING}
    [folder] = all_runs()
    assert RunFolder(folder).read_status().state is state


def test_a_site_keeps_the_hypothesis_that_fits_each_client_best(play: Play, tmp_path: Path) -> None:
    run = play(rounds=2, sites=sites(tmp_path, 2, insecure_seed="true", keep_model=str(tmp_path / "own")))
    found = flatten(run.arrays("hypotheses"))
    dataset = open_dataset(SYNTHETIC)
    kept = sorted((tmp_path / "own").iterdir())
    assert len(kept) == 200
    for number in (0, 57, 150):
        x, y = dataset.client(number)
        best = found[np.argmin([np.square(x @ theta - y).mean() for theta in found])]
        own = safetensors.numpy.load_file(tmp_path / "own" / f"client-{number}.safetensors")
        np.testing.assert_array_equal(own["weight"][0], best.astype(np.float32))


@pytest.mark.parametrize(
    "entries", [{"place": "3/3"}, {"place": "one"}, {"insecure-seed": "perhaps"}, {"keep-model": "here"}]
)
def test_a_site_that_is_set_up_wrongly_takes_no_part(play: Play, tmp_path: Path, entries: dict[str, str]) -> None:
    (site,) = sites(tmp_path, 1)
    with raises(FleetError, "nodes.missing"):
        play(sites=[site | entries], wait="seconds=0.1")


@pytest.mark.parametrize("validation", [0, 1])
def test_patience_without_validation_clients_has_no_effect_and_the_log_says_so(
    validation: int, play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = np.random.default_rng(0).normal(size=(2 * (4 + validation), 2)).astype(np.float32)
    clients = 4 + validation
    split = {"train": 4, "validation": validation}
    own = Manifest(name="own", clients=clients, split=split, model="linear", loss="mse")
    write_dataset(tmp_path / "own", own, rows, rows[:, 0], offsets_of([2] * clients))
    asked = {"clients_per_round": 4, "validation": "clients=0", "patience": 1, "rounds": 1}
    play(dataset=str(tmp_path / "own"), **asked)
    assert any("patience = 1 has no effect" in line for line in caplog.messages) == (not validation)
