"""Algorithm 1 on an ordinary Flower app: which noise the learning withstands. All draws have seeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import umbel
from tests.helpers.flower_app import EXAMPLE, modules
from umbel.simulation.grid import InProcessGrid

CLIENTS = 40


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with modules(EXAMPLE) as found:
        yield found


def distance(example: Any, nu: float, seed: int, epochs: int = 10, rounds: int = 30) -> float:
    """Return how far the farther optimum is from the nearest of the two models that are found."""

    def rows(context: Context) -> Any:
        return example.data.load_rows(1000 * seed + int(context.node_config["partition-id"]))

    def loss(arrays: ArrayRecord, context: Context) -> float:
        x, y = rows(context)
        return float(np.mean((x @ arrays["w"].numpy() - y) ** 2))

    app = ClientApp(mods=[umbel.ChooseHypothesis(loss), umbel.LaplaceMod(nu, seed=seed)])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        w, (x, y) = msg.content.array_records["arrays"]["w"].numpy(), rows(context)
        for _ in range(epochs):
            w = w - 0.1 * 2 * x.T @ (x @ w - y) / len(y)
        content = {"arrays": ArrayRecord({"w": Array(w.astype(np.float32))}), "metrics": MetricRecord({"loss": 0.0})}
        return Message(RecordDict(content), reply_to=msg)

    start = np.random.default_rng(seed).normal(size=(2, 2)).astype(np.float32)
    grid = InProcessGrid(app, {}, CLIENTS)
    result = umbel.GroupPrivacy().start(grid, ArrayRecord({"w": Array(start)}), num_rounds=rounds)
    found = result.arrays["w"].numpy()
    return float(np.linalg.norm(example.data.OPTIMA[:, None] - found, axis=2).min(1).max())


def test_both_optima_are_found_under_noise(example: Any) -> None:
    assert distance(example, 1.0, seed=0, rounds=15) < 0.3


@pytest.mark.rest(twin="tests/mods/test_stability.py::test_both_optima_are_found_under_noise")
@pytest.mark.parametrize(("nu", "nearest", "seeds"), [(0.3, 0.2, 5), (1.0, 0.3, 5), (2.0, 0.4, 5), (3.0, 0.6, 4)])
def test_both_optima_are_found_with_most_seeds(example: Any, nu: float, nearest: float, seeds: int) -> None:
    """In an independent simulation of 100 seeds: with all for nu = .3 and 1, 99 for 2, 82 for 3, and 7 for 4."""
    found = [distance(example, nu, seed) for seed in range(5)]
    assert sum(one < nearest for one in found) >= seeds, found


@pytest.mark.rest(twin="tests/mods/test_laplace.py::test_the_log_warns_when_updates_grow_from_round_to_round")
def test_more_noise_is_fed_back_and_the_log_says_so(example: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The noise of nu = 5 moves the models, so that the next updates are longer, and their noise as well."""
    found = [distance(example, 5.0, seed) for seed in range(3)]
    assert min(found) > 2, found
    assert "grow from round to round" in caplog.text
    caplog.clear()
    assert distance(example, 5.0, seed=0, epochs=1) < 2, "one epoch moves less"
    assert "grow from round to round" not in caplog.text
