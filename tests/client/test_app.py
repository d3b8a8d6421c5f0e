"""The ClientApp answers what a server may ask, computes what it should, and else says "refused" and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from tests.helpers.datasets import manifest
from tests.helpers.messages import asked, refused, released, releases, scores, task_of
from tests.helpers.models import draw_hypotheses
from tests.helpers.nodes import ask, serving
from umbel import models
from umbel.client.app import app
from umbel.data import BUNDLED, offsets_of, open_dataset, write_dataset
from umbel.protocol.arrays import Arrays
from umbel.protocol.messages import query
from umbel.protocol.project import ENGINE
from umbel.protocol.tasks import VERSION, EvaluationSpec
from umbel.simulation.grid import InProcessGrid

Config = dict[str, Any]

SYNTHETIC = open_dataset(BUNDLED / "synthetic.json")
# Two hypotheses close to the two truths, (5, 6) and (4, -4.5), and one far from both.
HYPOTHESES = np.array([[5, 5], [4, -4], [0, 0]], np.float32)


def train(grid: InProcessGrid, *clients: int, batch_size: int = 4) -> Message:
    """Ask clients to train: one epoch without noise."""
    task = task_of(clients, batch_size=batch_size, noise_multiplier=0.0)
    return ask(grid, asked({"weight": HYPOTHESES[:, None]}, task))


def evaluate(grid: InProcessGrid, *clients: int, hypotheses: Arrays | None = None) -> Message:
    return ask(grid, asked(hypotheses or {"weight": HYPOTHESES[:, None]}, None, EvaluationSpec(1, clients)), "evaluate")


def rows(reply: Message) -> NDArray[Any]:
    assert not reply.has_error(), reply
    weight: NDArray[Any] = releases(reply)["weight"][:, 0]
    return weight


def rmse(number: int) -> NDArray[np.float64]:
    x, y = SYNTHETIC.client(number)
    residuals = x.astype(float) @ HYPOTHESES.T.astype(float) - y[:, None]
    errors: NDArray[np.float64] = np.sqrt((residuals**2).mean(axis=0))
    return errors


# --- query


@pytest.mark.parametrize("version", [VERSION + 1, VERSION - 1, 8, str(VERSION), None])
def test_a_run_of_another_version_or_none_is_refused(
    version: int | str | None, run_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    record = ConfigRecord({} if version is None else {"version": version})
    reply = ask(InProcessGrid(app, run_config), RecordDict({"version": record}), "query")
    assert refused(reply)
    assert reply.error.reason == "refused [refused.version]"
    assert f"the run speaks protocol {version!r}, this site" in caplog.text, "in the node's own log alone"


# --- train


def test_a_client_trains_the_hypothesis_that_fits_it_best(run_config: Config) -> None:
    clients = (4, 3, 7)
    best = [int(rmse(number).argmin()) for number in clients]
    assert best == [1, 0, 1], "both truths are among them"
    # One step on the mean square of all rows: theta - s * 2 mean(residual * x).
    expected = []
    for number, j in zip(clients, best, strict=True):
        x, y = SYNTHETIC.client(number)
        theta = HYPOTHESES[j].astype(float)
        expected.append(theta - 0.1 * 2 * ((x @ theta - y)[:, None] * x).mean(axis=0))
    reply = train(InProcessGrid(app, run_config), *clients, batch_size=0)
    assert released(reply) == [1, 1, 1]
    np.testing.assert_allclose(rows(reply), expected, rtol=1e-5)


# --- evaluate


@pytest.mark.parametrize("engine", ["auto", "loop", "batched"])
def test_a_validation_client_reports_its_best_hypothesis(
    engine: str, run_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENGINE, engine)
    clients = [199, 100, 142]
    losses, metrics = scores(evaluate(InProcessGrid(app, run_config), *clients))
    expected = [rmse(number).min() for number in clients]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert metrics == pytest.approx(expected, rel=1e-5)


def test_a_model_that_blows_up_has_an_infinite_loss_and_not_none(run_config: Config) -> None:
    hypotheses = {"weight": np.array([[[3e38, -3e38]]], np.float32)}
    losses, metrics = scores(evaluate(InProcessGrid(app, run_config), 100, 101, hypotheses=hypotheses))
    assert losses == metrics == [np.inf, np.inf]


def test_the_metric_is_that_of_the_hypothesis_of_lowest_loss(tmp_path: Path, run_config: Config) -> None:
    # Two classes from one feature, all rows of class 0. The first hypothesis says class 1 by a
    # hair everywhere; the second is right twice and very wrong once: more accurate, higher loss.
    classes = manifest(0, 1, model="softmax features=1 classes=2")
    features = np.array([[1], [1], [-1]], np.float32)
    write_dataset(tmp_path / "classes", classes, features, np.zeros(3, np.int64), offsets_of([3]))
    by_a_hair, confident = [[-0.001], [0.001]], [[5], [-5]]
    grid = InProcessGrid(app, run_config | {"dataset": str(tmp_path / "classes")})
    for hypotheses in ([by_a_hair, confident], [confident, by_a_hair]):
        sent = {"linear.weight": np.array(hypotheses, np.float32)}
        (loss,), (accuracy,) = scores(evaluate(grid, 0, hypotheses=sent))
        assert loss == pytest.approx(np.log(2), abs=1e-2)
        assert accuracy == pytest.approx(1 / 3), "only the row on the other side"


# --- a site with data of its own


def test_a_site_without_its_data_is_refused(run_config: Config, caplog: pytest.LogCaptureFixture) -> None:
    grid = InProcessGrid(app, run_config, node_configs=[{"data-path": "/gone", "role": "split"}])
    assert refused(ask(grid, query(), "query"))
    assert "/gone is missing" in caplog.text


def a_site(path: Path, run_config: Config, model: str, features: NDArray[Any], lengths: list[int]) -> InProcessGrid:
    """Return a site whose clients train, and that uses the run's seed."""
    classes = models.load(model).loss.name == "cross-entropy"
    targets = np.arange(len(features)) % 10 if classes else np.linspace(-1, 1, len(features), dtype=np.float32)
    return serving(
        path, run_config, manifest(len(lengths), model=model), features, targets, lengths, role="train",
        insecure_seed=True, budget="inf", clipping="any", max_choice_epsilon="inf",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "shape", "lengths"),
    [
        ("mlp", (3,), [1 + c % 11 for c in range(90)]),
        ("softmax features=4 classes=10", (4,), [3, 70, 9]),
        ("cnn10", (28, 28), [2, 1, 3]),
    ],
)
def test_a_release_of_a_site_has_the_same_bits_in_any_company(
    model: str, shape: tuple[int, ...], lengths: list[int], tmp_path: Path, run_config: Config
) -> None:
    generator = np.random.default_rng(0)
    features = generator.standard_normal((sum(lengths), *shape)).astype(np.float32)
    grid = a_site(tmp_path, run_config, model, features, lengths)
    hypotheses = draw_hypotheses(models.load(model), 2)

    def release(*clients: int) -> list[bytes]:
        task = task_of(clients, batch_size=2, clipping="update", noise_multiplier=100.0)
        found = releases(ask(grid, asked(hypotheses, task))).values()
        return [b"".join(value[i].tobytes() for value in found) for i in range(len(clients))]

    everyone = release(*range(len(lengths)))
    some = [len(lengths) - 1, 1, 0]
    assert release(*some) == [everyone[c] for c in some]
    assert release(1) == [everyone[1]]
