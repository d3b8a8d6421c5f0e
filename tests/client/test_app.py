"""The ClientApp answers what a server may ask, computes what it should, and else says "refused" and no more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

import client.node
from client.app import app
from federation import BUNDLED, Manifest, offsets_of, open_federation, write_federation
from protocol.arrays import Arrays
from protocol.messages import (
    ARRAYS,
    CONFIG,
    COUNTS,
    SCORES,
    VERSION,
    Demand,
    Hosting,
    evaluate_request,
    query,
    train_request,
)
from protocol.records import from_array_record, to_array_record
from simulation.grid import InProcessGrid

Config = dict[str, Any]

SYNTHETIC = open_federation(BUNDLED / "synthetic.json")
# Two hypotheses close to the two truths, (5, 6) and (4, -4.5), and one far from both.
HYPOTHESES = np.array([[5, 5], [4, -4], [0, 0]], np.float32)


def ask(grid: InProcessGrid, kind: str, content: RecordDict, node: int = 0) -> Message:
    """Return the reply of a grid's node to a message."""
    ids = list(grid.get_node_ids())
    (reply,) = grid.send_and_receive([Message(content, ids[node], kind, group_id="1")])
    return reply


def train(grid: InProcessGrid, *clients: int, hypotheses: Arrays | None = None, **changes: Any) -> Message:
    """Ask clients to train: one epoch in batches of 4 without noise, unless changed."""
    asked: Config = {
        "round": 1,
        "local_epochs": 1,
        "step_size": 0.1,
        "batch_size": 4,
        "noise_multiplier": 0.0,
    } | changes
    arrays = hypotheses or {"weight": HYPOTHESES[:, None]}
    return ask(grid, "train", train_request(to_array_record(arrays), Demand(clients=clients, **asked)))


def evaluate(grid: InProcessGrid, *clients: int, hypotheses: Arrays | None = None) -> Message:
    """Ask clients to score hypotheses."""
    arrays = hypotheses or {"weight": HYPOTHESES[:, None]}
    return ask(grid, "evaluate", evaluate_request(to_array_record(arrays), 1, clients))


def hosting(grid: InProcessGrid, node: int = 0) -> Hosting:
    """Return what a node says of itself."""
    return Hosting.from_record(ask(grid, "query", query(), node).content.metric_records[COUNTS])


def releases(reply: Message) -> NDArray[Any]:
    """Return what clients of the linear model released, a row each."""
    assert not reply.has_error(), reply
    weight: NDArray[Any] = from_array_record(reply.content.array_records[ARRAYS])["weight"][:, 0]
    return weight


def scores(reply: Message) -> tuple[list[float], list[float]]:
    """Return the losses and the metrics of a reply."""
    assert not reply.has_error(), reply
    record: Any = reply.content.metric_records[SCORES]
    return record["loss"], record["metric"]


def assert_refused(reply: Message, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """The server reads "refused" and nothing else; the reason is in the node's own log."""
    assert reply.has_error()
    assert not reply.has_content()
    assert reply.error.reason == "refused"
    assert reason in caplog.text


def own_data(path: Path, train: int, validation: int, seconds: int = 0) -> Path:
    """Write clients of the linear model; client i has i + 1 rows of the first truth's plane."""
    clients = train + validation
    lengths = range(1, clients + 1)
    features = np.random.default_rng(0).uniform(-1, 1, (sum(lengths), 2)).astype(np.float32)
    manifest = Manifest("own", clients, {"train": train, "validation": validation}, model="linear")
    write_federation(path, manifest, features, features @ np.array([5, 6], np.float32), offsets_of(lengths))
    os.utime(path / "manifest.json", (seconds, seconds))
    return path


def rmse(number: int) -> NDArray[np.float64]:
    """Return the error of each of `HYPOTHESES` on a synthetic client."""
    x, y = SYNTHETIC.client(number)
    residuals = x.astype(float) @ HYPOTHESES.T.astype(float) - y[:, None]
    errors: NDArray[np.float64] = np.sqrt((residuals**2).mean(axis=0))
    return errors


# --- query


@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_nodes_tell_what_they_host(nodes: int, run_config: Config) -> None:
    grid = InProcessGrid(app, run_config, nodes)
    told = [hosting(grid, node) for node in range(nodes)]
    assert [(one.first, one.step) for one in told] == [(node, nodes) for node in range(nodes)]
    assert sum(one.train for one in told) == 100
    assert sum(one.validation for one in told) == 100


@pytest.mark.parametrize("version", [VERSION + 1, str(VERSION)])
def test_a_server_of_another_version_is_refused(
    version: int | str, run_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    grid = InProcessGrid(app, run_config)
    reply = ask(grid, "query", RecordDict({CONFIG: ConfigRecord({"version": version})}))
    assert_refused(reply, f"the server speaks protocol {version!r}, this node {VERSION}", caplog)


@pytest.mark.parametrize("content", [RecordDict(), RecordDict({CONFIG: ConfigRecord()})])
def test_a_server_without_a_version_is_refused(
    content: RecordDict, run_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    assert_refused(ask(InProcessGrid(app, run_config), "query", content), "umbel refused a query message", caplog)


# --- train


def test_a_client_trains_the_hypothesis_that_fits_it_best(run_config: Config) -> None:
    asked = (4, 3, 7)
    best = [int(rmse(number).argmin()) for number in asked]
    assert best == [1, 0, 1], "both truths are among them"
    # One step on the mean square of all rows: theta - s * 2 mean(residual * x).
    expected = []
    for number, j in zip(asked, best, strict=True):
        x, y = SYNTHETIC.client(number)
        theta = HYPOTHESES[j].astype(float)
        expected.append(theta - 0.1 * 2 * ((x @ theta - y)[:, None] * x).mean(axis=0))
    reply = train(InProcessGrid(app, run_config), *asked, batch_size=0)
    assert reply.content.metric_records[COUNTS]["released"] == [1, 1, 1]
    np.testing.assert_allclose(releases(reply), expected, rtol=1e-5)


def test_both_engines_release_the_same(run_config: Config) -> None:
    asked = {"local_epochs": 3, "batch_size": 3}
    loop, batched = (
        releases(train(InProcessGrid(app, run_config | {"engine": engine}), *range(100), **asked))
        for engine in ("loop", "batched")
    )
    np.testing.assert_allclose(batched, loop, rtol=1e-5)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_release_does_not_depend_on_the_node_that_computes_it(engine: str, run_config: Config) -> None:
    config = run_config | {"engine": engine}
    asked = {"batch_size": 3, "noise_multiplier": 5.0}
    whole = releases(train(InProcessGrid(app, config, nodes=1), *range(100), **asked))
    half = releases(train(InProcessGrid(app, config, nodes=2), *range(50), **asked))
    if engine == "loop":
        np.testing.assert_array_equal(half, whole[::2])
    else:
        np.testing.assert_allclose(half, whole[::2], rtol=1e-4)


def test_shuffles_and_noise_are_those_of_seed_and_round(run_config: Config) -> None:
    def once(seed: int, round: int) -> NDArray[Any]:
        grid = InProcessGrid(app, run_config | {"seed": seed})
        return releases(train(grid, 0, 1, batch_size=3, round=round))

    np.testing.assert_array_equal(once(0, 1), once(0, 1))
    assert (once(0, 1) != once(0, 2)).any()
    assert (once(0, 1) != once(1, 1)).any()


@pytest.mark.parametrize("clients", [(100,), (0, 150), (200,)])
def test_validation_clients_and_strangers_are_not_trained(
    clients: tuple[int, ...], run_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    reply = train(InProcessGrid(app, run_config), *clients)
    assert_refused(reply, f"clients [{clients[-1]}] are no training clients of this node (0 to 99)", caplog)


@pytest.mark.parametrize("name", ["engine", "device"])
def test_a_way_to_compute_that_does_not_exist_is_refused(
    name: str, run_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    grid = InProcessGrid(app, run_config | {name: "steam"})
    assert_refused(train(grid, 0), f"unknown {name} 'steam'", caplog)
    assert_refused(evaluate(grid, 100), f"unknown {name} 'steam'", caplog)


@pytest.mark.parametrize(
    "hypotheses",
    [
        {"weight": np.zeros((2, 1, 3), np.float32)},
        {"weight": np.zeros((2, 2), np.float32)},
        {"bias": np.zeros((2, 1, 2), np.float32)},
        {"weight": np.zeros((2, 1, 2), np.float32), "bias": np.zeros((2, 1), np.float32)},
    ],
    ids=["too wide", "too flat", "another name", "one more"],
)
def test_hypotheses_of_another_model_are_refused(
    hypotheses: Arrays, run_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    grid = InProcessGrid(app, run_config)
    assert_refused(train(grid, 0, hypotheses=hypotheses), "do not fit model 'linear'", caplog)
    caplog.clear()
    assert_refused(evaluate(grid, 100, hypotheses=hypotheses), "do not fit model 'linear'", caplog)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_message_without_hypotheses_is_refused(
    kind: str, run_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    demand = Demand(1, (0,), 1, 0.1, 10, 0.0).to_record()
    assert_refused(ask(InProcessGrid(app, run_config), kind, RecordDict({CONFIG: demand})), "hypotheses", caplog)


# --- evaluate


@pytest.mark.parametrize("engine", ["auto", "loop", "batched"])
def test_a_validation_client_reports_its_best_hypothesis(engine: str, run_config: Config) -> None:
    clients = [199, 100, 142]
    losses, metrics = scores(evaluate(InProcessGrid(app, run_config | {"engine": engine}), *clients))
    expected = [rmse(number).min() for number in clients]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert metrics == pytest.approx(expected, rel=1e-5)


def test_clients_are_counted_within_their_node(run_config: Config) -> None:
    grid = InProcessGrid(app, run_config, nodes=7)
    (loss,), _ = scores(evaluate(grid, 15))  # of node 0, which trains clients 0, 7, ..., 98
    assert loss == pytest.approx(rmse(105).min(), rel=1e-5)


def test_both_engines_report_the_same(run_config: Config) -> None:
    loop, batched = (
        scores(evaluate(InProcessGrid(app, run_config | {"engine": engine}), *range(100, 200)))
        for engine in ("loop", "batched")
    )
    np.testing.assert_allclose(batched, loop, rtol=1e-6)


def test_the_metric_is_that_of_the_hypothesis_of_lowest_loss(
    tmp_path: Path, run_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two classes from one feature, all rows of class 0. The first hypothesis says class 1 by a
    # hair everywhere; the second is right twice and very wrong once: more accurate, higher loss.
    source = (
        "import models\nfrom torch import nn\n"
        "def logistic():\n"
        "    network = lambda: nn.Linear(1, 2, bias=False)\n"
        "    return models.Model('', network, models.LOSSES['cross-entropy'], models.METRICS['accuracy'])\n"
    )
    (tmp_path / "logistic_of_the_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    manifest = Manifest("classes", 1, {"train": 0, "validation": 1}, model="logistic_of_the_test:logistic")
    features = np.array([[1], [1], [-1]], np.float32)
    write_federation(tmp_path / "classes", manifest, features, np.zeros(3, np.int64), offsets_of([3]))
    by_a_hair, confident = [[-0.001], [0.001]], [[5], [-5]]
    grid = InProcessGrid(app, run_config | {"federation": str(tmp_path / "classes")})
    for hypotheses in ([by_a_hair, confident], [confident, by_a_hair]):
        (loss,), (accuracy,) = scores(evaluate(grid, 0, hypotheses={"weight": np.array(hypotheses, np.float32)}))
        assert loss == pytest.approx(np.log(2), abs=1e-2)
        assert accuracy == pytest.approx(1 / 3), "only the row on the other side"


@pytest.mark.parametrize("clients", [(99,), (150, 0), (200,)])
def test_training_clients_and_strangers_are_not_evaluated(
    clients: tuple[int, ...], run_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    reply = evaluate(InProcessGrid(app, run_config), *clients)
    assert_refused(reply, f"clients [{clients[-1]}] are no validation clients of this node (100 to 199)", caplog)


@pytest.mark.parametrize(
    ("clients", "reason"),
    [
        ([], "with at least one entry"),
        ([100, 100], "each client may be asked once"),
        ([-1], "counted from 0"),
        ([100.0], "list of whole numbers"),
        ([True], "list of whole numbers"),
    ],
)
def test_evaluation_of_impossible_clients_is_refused(
    clients: list[Any], reason: str, run_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    content = evaluate_request(to_array_record({"weight": HYPOTHESES[:, None]}), 1, [100])
    content.config_records[CONFIG]["clients"] = clients
    assert_refused(ask(InProcessGrid(app, run_config), "evaluate", content), reason, caplog)


# --- a site with data of its own


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of three training and two validation clients."""
    return own_data(tmp_path / "own", train=3, validation=2, seconds=1)


def own_grid(run_config: Config, *paths: Path) -> InProcessGrid:
    """Return nodes that each have data of their own."""
    return InProcessGrid(app, run_config, node_configs=[{"data-path": str(path), "role": "split"} for path in paths])


def test_a_site_tells_counts_and_nothing_of_its_place(site: Path, tmp_path: Path, run_config: Config) -> None:
    other = own_data(tmp_path / "other", train=1, validation=4)
    grid = own_grid(run_config, site, other)
    assert [hosting(grid, node) for node in (0, 1)] == [Hosting(3, 2, -1, -1), Hosting(1, 4, -1, -1)]


def test_all_clients_of_a_site_train_and_validate(site: Path, run_config: Config) -> None:
    grid = own_grid(run_config, site)
    assert releases(train(grid, 0, 1, 2, noise_multiplier=5.0)).shape == (3, 2)
    losses, _ = scores(evaluate(grid, 3, 4, hypotheses={"weight": np.array([[[5, 6]]], np.float32)}))
    assert losses == pytest.approx([0, 0], abs=1e-5)


@pytest.mark.parametrize("named", ["synthetic", "nothing-by-this-name", "/no/such/folder", "another site"])
def test_a_site_never_opens_what_a_server_names(
    named: str, site: Path, tmp_path: Path, run_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = own_data(tmp_path / "other", train=5, validation=5)
    looked: list[str] = []
    monkeypatch.setattr(client.node, "find_federation", looked.append)
    config = run_config | {"federation": str(other) if named == "another site" else named}
    grid = own_grid(config, site)
    assert hosting(grid) == Hosting(3, 2)
    assert len(releases(train(grid, 2, noise_multiplier=5.0))) == 1
    assert len(scores(evaluate(grid, 4))[0]) == 1
    assert not looked


def test_in_simulation_the_federation_is_looked_up(run_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def find(name: str) -> Path:
        looked.append(name)
        return BUNDLED / "synthetic.json"

    monkeypatch.setattr(client.node, "find_federation", find)
    assert hosting(InProcessGrid(app, run_config)).train == 100
    assert looked == ["synthetic"]


def test_noise_at_a_site_does_not_follow_the_servers_seed(site: Path, run_config: Config) -> None:
    first, second = (releases(train(own_grid(run_config, site), 0, 1, 2, noise_multiplier=5.0)) for _ in range(2))
    # Single numbers may coincide, on the grid that they are rounded to.
    assert (first != second).any()


def test_data_that_change_are_read_again(site: Path, run_config: Config) -> None:
    grid = own_grid(run_config, site)
    assert hosting(grid) == Hosting(3, 2)
    own_data(site, train=1, validation=1, seconds=2)
    assert hosting(grid) == Hosting(1, 1)


def test_a_site_without_its_data_is_refused(
    tmp_path: Path, run_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    reply = ask(own_grid(run_config, tmp_path / "gone"), "query", query())
    assert_refused(reply, f"{tmp_path / 'gone'} is missing", caplog)
