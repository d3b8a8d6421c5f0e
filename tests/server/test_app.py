"""Whole runs in one process: the ServerApp and the ClientApp as they are, and a Grid between them."""

from __future__ import annotations

import csv
import errno
import logging
import os
import re
from collections import Counter
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
from numpy.typing import NDArray

import umbel.client.app
import umbel.server.app
from tests.helpers.disk import Killed, kill_when
from tests.helpers.drawing import leave_blank
from tests.helpers.errors import raises
from tests.helpers.grids import ListeningGrid, failing
from tests.helpers.ledgers import participations, spent
from tests.helpers.messages import scores
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


def play(
    app: Any = umbel.client.app.app, nodes: int = 1, sites: Any = None, engine: str = "auto", **changes: Any
) -> AppRun:
    """Run the app on the paper's run config with some changes; without any it is six rounds of training."""
    config = paper_run() | SHORT | {key.replace("_", "-"): value for key, value in changes.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENGINE, engine)
        return run_app(config, ListeningGrid(app, config, nodes, sites))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> AppRun:
    """Six rounds on one node, in a home of their own: several tests look at them and none changes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UMBEL_HOME", str(tmp_path_factory.mktemp("home")))
        leave_blank(patch)
        return play()


# --- what a run leaves behind


def test_a_run_leaves_its_files_in_a_folder_of_its_own_and_says_what_it_guarantees(
    umbel_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """2 n / nu + choice-epsilon = 2 * 2/5 + 1/2 a participation, between any two data sets of the client."""
    formal = {"rounds": 2, "nodes": 3, "clipping": "public", "choice_epsilon": 0.5}
    with caplog.at_level(logging.INFO, "flwr"):
        run = play(strategy="umbel.strategies.group_privacy:GroupPrivacy", **formal)
    assert sorted(file.name for file in run.folder.iterdir()) == FILES
    assert caplog.messages[-1] == str(run.folder)
    assert run.folder.parent == umbel_home / "runs"
    assert re.fullmatch(r"\d{8}-\d{6}-synthetic-umbel\.strategies\.group.privacy-GroupPrivacy-\d{6}", run.folder.name)
    lines = [message[:9] for message in caplog.messages if message.startswith("round ")]
    assert lines == ["round 0/2", "round 1/2", "round 2/2"]
    most = max(times for times, _ in run.ledger.values())
    assert f"pure epsilon {1.3 * most:.4g}." in caplog.text
    assert f'<p class="value">pure epsilon {1.3 * most:.4g}</p>' in (run.folder / "report.html").read_text()
    with (run.folder / "ledger.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(run.ledger)
    for row in rows:
        assert float(row["epsilon"]) == pytest.approx(1.3 * int(row["participations"]))


@pytest.mark.parametrize(
    ("changes", "words", "told"),
    [
        ({"noise_multiplier": 0.0}, "clipping=update choice-epsilon=0", False),
        ({"noise_multiplier": 0.0, "clipping": "public"}, "clipping=update choice-epsilon=0", True),
        ({"patience": 1}, "patience = 1 has no effect", False),
        ({"patience": 1, "dataset": "plane", "clients_per_round": 4}, "patience = 1 has no effect", True),
    ],
    ids=str,
)
def test_a_setting_without_the_effect_that_it_seems_to_have_is_told(
    changes: dict[str, Any], words: str, told: bool, umbel_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plane(umbel_home / "data" / "plane", train=4, validation=0)
    play(rounds=1, **changes)
    assert (words in caplog.text) == told


# --- what it learns


@pytest.mark.parametrize(
    ("changes", "near"), [({"rounds": 100}, 1.0), ({"rounds": 60, "strategy": "ifca", "noise_multiplier": 0.0}, 0.5)]
)
def test_a_run_finds_both_optima(changes: dict[str, Any], near: float) -> None:
    run = play(restarts=5, **changes)
    found = flatten(run.arrays("hypotheses"))
    assert max(np.linalg.norm(found - optimum, axis=1).min() for optimum in OPTIMA) < near
    # Without an intercept the noise U[0, 1) remains, whose root mean square is sqrt(1/3) = .577.
    assert 0.55 < min(entry["loss"] for entry in run.history) < 0.65


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
def test_no_bit_depends_on_the_number_of_nodes(changes: dict[str, Any]) -> None:
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
def test_batched_gives_the_same_to_rounding(nodes: int) -> None:
    looped, batched = play(engine="loop"), play(nodes=nodes, engine="batched")
    np.testing.assert_allclose(batched.arrays("latest")["weight"], looped.arrays("latest")["weight"], rtol=1e-4)
    assert [entry["groups"] for entry in batched.history] == [entry["groups"] for entry in looped.history]


def test_a_seed_gives_the_same_again_and_another_seed_does_not(whole: AppRun) -> None:
    first, again, other = whole, play(), play(seed=1)
    assert again.history == first.history
    assert again.arrays("latest")["weight"].tobytes() == first.arrays("latest")["weight"].tobytes()
    assert not np.isin(other.arrays("latest")["weight"], first.arrays("latest")["weight"]).any()


def test_a_simulation_whose_nodes_refuse_to_train_ends_at_once_where_its_seed_began(run_config: dict[str, Any]) -> None:
    with raises(FleetError, "nodes.refused"):
        play(app=failing({0, 1}, parts=["training"]), nodes=2, restarts=1, seed=9)
    (folder,) = all_runs()
    drawn = draw_hypotheses(Setup.parse(run_config).model, 2, seed=9, restart=0)
    latest = safetensors.numpy.load_file(folder / "latest.safetensors")
    np.testing.assert_array_equal(latest["weight"], drawn["weight"])
    assert len((folder / "history.jsonl").read_text().splitlines()) == 1


# --- what it costs


@pytest.mark.parametrize(("nodes", "noise_multiplier"), [(1, 5.0), (3, 0.3)])
def test_the_servers_ledger_is_the_sum_of_the_nodes_own(nodes: int, noise_multiplier: float) -> None:
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


def test_clients_take_turns_and_the_run_ends_when_all_have_had_theirs() -> None:
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


def test_a_run_goes_on_without_a_node_that_always_fails() -> None:
    """It is left out for one round, then for three."""
    run = play(app=failing({1}), nodes=3, clients_per_round=30)
    assert [entry["lost_nodes"] for entry in run.trained] == [1, 0, 1, 0, 0, 0]
    assert [entry["releases"] < 30 for entry in run.trained] == [True, False, True, False, False, False]
    assert all(entry["moved"] for entry in run.trained)
    assert all(number % 3 != 1 for number in run.ledger), "clients 1, 4, 7, ... are on the node that fails"
    assert sum(times for times, _ in run.ledger.values()) == sum(entry["releases"] for entry in run.trained)


def test_when_no_site_releases_anything_the_run_ends_after_three_rounds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then the hypotheses stay as they were, and are validated all the same."""
    with raises(FleetError, "nodes.no-releases", "rounds", "3"):
        play(sites=[site | {"place": "0/1"} for site in sites(tmp_path, 3, min_noise_multiplier=100)])
    (folder,) = all_runs()
    entries = RunFolder(folder).read_history()
    assert [(entry.asked, entry.moved, entry.releases) for entry in entries[1:]] == [(7, False, 0)] * 3
    assert len({entry.loss for entry in entries[:3]}) == 1
    assert caplog.text.count("TOO FEW RELEASES") == 2, "the last round is not complete"


@pytest.mark.parametrize(
    ("policy", "releases", "times"),
    [
        ({"min-noise-multiplier": 100}, [67] * 6, set()),  # it refuses all training
        ({"paper-budget": 0.4}, [100] + [67] * 5, {1}),  # a participation costs 2/5
    ],
)
def test_a_node_that_does_not_train_validates_all_the_same(
    policy: dict[str, float], releases: list[int], times: set[int]
) -> None:
    nodes: list[dict[str, Any]] = [{"partition-id": i, "num-partitions": 3} for i in range(3)]
    nodes[1] |= policy
    run = play(sites=nodes, clients_per_round=100)
    assert [entry["releases"] for entry in run.trained] == releases
    assert {often for number, (often, _) in run.ledger.items() if number % 3 == 1} == times
    assert {often for number, (often, _) in run.ledger.items() if number % 3 != 1} == {6}
    assert isinstance(run.grid, ListeningGrid)
    for number in range(1, 8):
        replies = [reply for _, reply in run.grid.exchanged(str(number))]
        assert sum(len(scores(reply)[0]) for reply in replies if "scores" in reply.content) == 100
    assert all(entry["loss"] > 0 for entry in run.history)


# --- what travels


def test_every_node_gets_one_message_a_round_and_its_reply_holds_what_is_allowed_alone() -> None:
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


# --- other data


def plane(folder: Path, train: int, validation: int, name: str = "plane") -> Path:
    """Write clients of ten rows each, with y = x . theta."""
    clients = train + validation
    x = np.random.default_rng(clients).uniform(-1, 1, size=(10 * clients, 2)).astype(np.float32)
    split = {"train": train, "validation": validation}
    manifest = Manifest(name=name, clients=clients, split=split, model="linear")
    write_dataset(folder, manifest, x, x @ np.float32([3, -2]), offsets_of([10] * clients))
    return folder


def test_sites_serve_their_own_data_and_are_numbered_by_node_id(tmp_path: Path) -> None:
    sites = [
        {"data-path": str(plane(tmp_path / "one", train=3, validation=2)), "role": "split"},
        {"data-path": str(plane(tmp_path / "two", train=5, validation=1)), "role": "split"},
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


def test_the_servers_own_data_are_not_what_a_site_serves(tmp_path: Path, umbel_home: Path) -> None:
    # The run config names the bundled dataset; the site has other data, and fewer clients.
    site = {"data-path": str(plane(tmp_path / "one", train=3, validation=2)), "role": "split"}
    for changes, asked, there in (({"clients-per-round": 7}, 7, 3), ({"validation": "clients=4"}, 4, 2)):
        with raises(ConfigError, "config.too-few-clients", next(iter(changes)), asked, there):
            play(sites=[site], **{"clients-per-round": 3} | changes)
    assert not (umbel_home / "runs").exists(), "nothing is left behind"


# --- a run that was interrupted


def interrupted(at_round: int, file: str, **changes: Any) -> str:
    """Run the app until it is stopped as a file is written, and return the name of its folder."""
    written = count(1)
    with pytest.MonkeyPatch.context() as patched:
        kill_when(patched, lambda path: path.name == file and next(written) == at_round)
        with pytest.raises(Killed):
            play(**changes)
    (folder,) = all_runs()
    return folder.name


def assert_as_uninterrupted(again: AppRun, whole: AppRun) -> None:
    """Check for the same result and history; of participations a run that was interrupted may have more."""
    for arrays in ("hypotheses", "latest"):
        np.testing.assert_array_equal(again.arrays(arrays)["weight"], whole.arrays(arrays)["weight"], strict=True)
    more = {"max_participations": 0, "median_participations": 0}
    assert [entry | more for entry in again.history] == [entry | more for entry in whole.history]
    # What was charged in a round that is done again stays charged: never less than was released.
    for number, (often, _) in whole.ledger.items():
        assert again.ledger[number][0] >= often
    assert (again.folder / "report.html").exists()


@pytest.mark.parametrize(
    ("file", "at_round"),
    [
        *((file, 4) for file in ("history.jsonl", "participations.jsonl", "ledger.csv", "latest.safetensors")),
        ("outcome.json", 2),
        ("latest.safetensors", 7),  # the evaluation after six rounds of training
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_a_run_goes_on_as_if_nothing_had_happened_wherever_it_was_stopped(
    whole: AppRun, file: str, at_round: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # which is written while the next round runs
        monkeypatch.setattr(callbacks, "_LARGE", 0)
    assert_as_uninterrupted(play(resume=interrupted(at_round, file, nodes=2), nodes=3), whole)


@pytest.mark.parametrize("file", ["history.jsonl", "hypotheses.safetensors", "latest.safetensors"])
def test_a_full_disk_ends_a_run_that_says_how_it_goes_on_once_there_is_room(
    whole: AppRun, monkeypatch: pytest.MonkeyPatch, caplog: Any, file: str
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
    (folder,) = all_runs()
    assert f"resume={folder.name!r}" in caplog.text
    assert not [one for one in folder.iterdir() if one.name.endswith(".tmp")]
    assert_as_uninterrupted(play(resume=folder.name), whole)


def test_real_sites_are_not_charged_for_a_round_that_could_not_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = tmp_path / "one.jsonl"
    site = {"data-path": str(plane(tmp_path / "one", train=3, validation=2)), "role": "split"}
    monkeypatch.setattr("umbel.protocol.home.free_space", lambda _: 1 << 20)
    with raises(DiskError, "disk.full", "1.0 MiB free"):
        play(sites=[site | {"ledger-path": str(ledger)}], dataset="", model="linear", clients_per_round=3)
    assert not ledger.exists() or not Journal(ledger).accounts()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_is_done_by_one_process(monkeypatch: pytest.MonkeyPatch, resumed: bool) -> None:
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


@pytest.mark.parametrize(
    ("limit", "changes", "rounds", "most"),
    [("1", {"clients_per_round": 60}, (2, 3), 2), ("", {"clients_per_round": 25, "max_participations": 1}, (3, 6), 1)],
    ids=["limits of simulated nodes begin anew", "those of the run config go on"],
)
def test_limits_of_participations_in_a_run_that_goes_on(
    limit: str, changes: dict[str, Any], rounds: tuple[int, int], most: int, monkeypatch: Any, caplog: Any
) -> None:
    if limit:
        monkeypatch.setenv("UMBEL_MAX_PARTICIPATIONS", limit)
    short = play(rounds=rounds[0], **changes)
    assert {often for often, _ in short.ledger.values()} == {1}
    resumed = play(rounds=rounds[1], resume=str(short.folder), **changes)
    assert max(often for often, _ in resumed.ledger.values()) == most
    assert "start from 0 again" in caplog.text


def test_simulated_clients_of_a_run_that_goes_on_have_lost_their_local_parameters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    local = {"model": "mlp inputs=2 hidden=3 outputs=1", "loss": "mse", "local": "3.*"}
    short = play(rounds=1, **local)
    assert "new local parameters" not in caplog.text
    for changes in ({"start_from": str(short.folder), "seed": 1}, {"resume": str(short.folder), "rounds": 2}):
        caplog.clear()
        play(**{"rounds": 1} | local | changes)
        assert "new local parameters" in caplog.text


def test_a_run_that_was_killed_twice_in_a_round_goes_on() -> None:
    """Each time everybody releases again: the history then knows of more releases than the participations do."""
    everybody = {"clients_per_round": 100}
    name = interrupted(3, "latest.safetensors", **everybody)
    interrupted(1, "participations.jsonl", resume=name, **everybody)
    resumed = play(resume=name, **everybody)
    assert {often for often, _ in resumed.ledger.values()} == {7}, "six rounds, and what was charged stays charged"
    assert [entry["number"] for entry in resumed.history] == [*range(7)]


# --- a run that starts from what another has found


class Start(Callback):
    """Keeps the hypotheses that a run starts from."""

    seen: ClassVar[NDArray[np.float64]]

    def begin(self) -> None:
        Start.seen = flatten(self.run.state.hypotheses)


@pytest.mark.parametrize("hypotheses", [2, 3])
def test_a_run_starts_from_the_best_hypotheses_of_another_and_draws_those_beyond(
    whole: AppRun, hypotheses: int, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"seed": 1, "hypotheses": hypotheses}
    with caplog.at_level(logging.INFO, "flwr"):
        run = play(start_from=str(whole.folder), rounds=1, observers=f"{__name__}:Start", **changes)
    found, drawn = np.split(Start.seen, [2])
    np.testing.assert_array_equal(found, flatten(whole.arrays("hypotheses")))
    assert f"starts from hypotheses of {whole.folder}; its guarantee does not count what clients spent" in caplog.text
    assert "the guarantee does not count what clients spent there" in (run.folder / "report.html").read_text()
    assert isinstance(run.grid, ListeningGrid)
    chosen = run.grid.rounds.keys() & {"restart-0", "restart-1"}
    if hypotheses == 2:
        assert run.history[0]["loss"] == whole.history[whole.history[-1]["best_round"]]["loss"]
        assert not chosen, "there is nothing to choose among"
    else:
        model = Setup.parse(paper_run() | changes).model
        sets = [draw_hypotheses(model, 3, seed=1, restart=restart) for restart in range(SHORT["restarts"])]
        assert drawn[0].tolist() in [flatten(one)[2].tolist() for one in sets]


@pytest.mark.parametrize(("settings", "name"), [("start_from", "start-from"), ("resume", "resume")])
def test_what_a_run_cannot_begin_with_is_said_before_any_work(umbel_home: Path, settings: str, name: str) -> None:
    with raises(ConfigError, "config.no-run", "nowhere", name):
        play(**{settings: "nowhere"})
    assert not (umbel_home / "runs").exists(), "nothing is left behind"


# --- sites with data of their own


def sites(path: Path, count: int, **entries: Any) -> list[dict[str, Any]]:
    """Node configurations of sites that split one dataset among themselves."""
    common = {"data-path": str(SYNTHETIC), "role": "split"} | {key.replace("_", "-"): v for key, v in entries.items()}
    return [{**common, "place": f"{i}/{count}", "ledger-path": str(path / f"ledger-{i}.jsonl")} for i in range(count)]


def test_sites_that_allow_the_runs_seed_give_what_a_simulation_gives(whole: AppRun, tmp_path: Path) -> None:
    deployed = play(sites=sites(tmp_path, 3, insecure_seed="true"))
    for name in ("hypotheses", "latest"):
        np.testing.assert_array_equal(deployed.arrays(name)["weight"], whole.arrays(name)["weight"], strict=True)
    # Grids absorb the rounding in which a site's engine and a simulation's differ; exact losses do not.
    for one, other in zip(deployed.history, whole.history, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=1e-6), key


def test_sites_that_do_not_draw_noise_that_nobody_knows(tmp_path: Path) -> None:
    simulated, deployed = play(rounds=1), play(rounds=1, sites=sites(tmp_path, 3))
    loss = simulated.history[0]["loss"]
    assert deployed.history[0]["loss"] == pytest.approx(loss, rel=1e-6), "the same initial hypotheses"
    assert (deployed.arrays("latest")["weight"] != simulated.arrays("latest")["weight"]).all()


def test_a_site_that_its_environment_sets_up_keeps_the_hypothesis_that_fits_each_client_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    for name, value in (("ROLE", "split"), ("INSECURE_SEED", "true"), ("KEEP_MODEL", str(own))):
        monkeypatch.setenv(f"UMBEL_{name}", value)
    run = play(rounds=2, sites=[{"data-path": str(SYNTHETIC)}])
    found, dataset = flatten(run.arrays("hypotheses")), open_dataset(SYNTHETIC)
    assert len(list(own.iterdir())) == 200
    for number in (0, 57, 150):
        x, y = dataset.client(number)
        best = found[np.argmin([np.square(x @ theta - y).mean() for theta in found])]
        kept = safetensors.numpy.load_file(own / f"client-{number}.safetensors")
        np.testing.assert_array_equal(kept["weight"][0], best.astype(np.float32))


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (None, RunState.COMPLETED),
        ("it is enough", RunState.STOPPED),
        (SystemExit(0), RunState.STOPPED),  # as Flower stops it
        (FleetError("no site answers", code="nodes.missing"), RunState.FAILED),
    ],
)  # fmt: skip
def test_a_run_at_sites_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Any, state: RunState
) -> None:
    states = set()

    def after_exchange(self: Released, round: int, stages: dict[str, float]) -> Any:
        assert self.run.folder is not None
        states.add(self.run.folder.read_status().state)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(Released, "after_exchange", after_exchange)
    with pytest.raises(type(outcome)) if isinstance(outcome, BaseException) else nullcontext():
        play(sites=sites(tmp_path, 1), rounds=2)
    assert states == {RunState.RUNNING}
    [folder] = all_runs()
    assert RunFolder(folder).read_status().state is state
