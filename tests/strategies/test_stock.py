"""Flower's own strategies on the releases of each cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.errors import raises
from tests.helpers.scripted import on
from tests.strategies.conftest import one_round
from umbel import strategies
from umbel.nodes.fleet import Fleet
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig
from umbel.server.setup import Setup
from umbel.strategies import Stock

SENT = [(0, 0, 0), (10, 10, 10)]
# Five releases near each of the hypotheses, in each of which one number is far from the others.
NEAR = [(1, 0, 2), (2, 1, 1), (0, 2, 0), (1, 1, 4), (1, -9, 3)]
RELEASE = dict(enumerate(NEAR)) | {i + 5: (10 + a, 10 - b, 10 + c) for i, (a, b, c) in enumerate(NEAR)}


def made(name: str, options: str = "", hypotheses: int = 2) -> Stock:
    run = RunConfig(strategy=f"{name} {options}".strip(), hypotheses=hypotheses, clients_per_round=10)
    strategy = on(Fleet(clients_per_round=10, max_participations=0), strategies.make(run))
    assert isinstance(strategy, Stock)
    return strategy


def rounds(strategy: Any, number: int, sent: Any = SENT, first: int = 1) -> NDArray[Any]:
    """Return the hypotheses after so many rounds in which each client releases what it always does."""
    for round in range(first, first + number):
        sent, _ = one_round(strategy, sent, RELEASE, round=round)
    return np.asarray(sent)


def test_flowers_average_is_ours() -> None:
    ours = on(Fleet(clients_per_round=10), strategies.GroupPrivacy())
    np.testing.assert_allclose(rounds(made("flower:FedAvg"), 1), rounds(ours, 1), rtol=1e-6)


FIRST, SECOND = np.array(NEAR, float), np.array([RELEASE[i] for i in range(5, 10)], float)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("FedAvg", "", [FIRST.mean(0), SECOND.mean(0)]),
        ("FedMedian", "", [np.median(FIRST, 0), np.median(SECOND, 0)]),
        # One of five is cut off at each end.
        ("FedTrimmedAvg", "beta=0.2", [np.sort(FIRST, 0)[1:4].mean(0), np.sort(SECOND, 0)[1:4].mean(0)]),
        # The squared distances from the first to its two nearest are 3 and 5, and no other's add up to less.
        ("Krum", "num-malicious-nodes=1", [(1, 0, 2), (11, 10, 12)]),
        # No momentum, and half of the way.
        ("FedAvgM", "server-learning-rate=0.5", [FIRST.mean(0) / 2, (10 + SECOND.mean(0)) / 2]),
    ],
)
def test_each_cluster_is_aggregated_by_itself(name: str, options: str, expected: Any) -> None:
    np.testing.assert_allclose(rounds(made(f"flower:{name}", options), 1), expected, rtol=1e-6)


def test_adam_steps_as_flowers_does() -> None:
    """Its first step goes from 0 by eta, nearly, times what corrects the bias of round 1."""
    found = rounds(made("flower:FedAdam", "eta=0.5 beta-1=0.5 beta-2=0.75 tau=1.0"), 1)
    update = FIRST.mean(0)
    eta = 0.5 * np.sqrt(1 - 0.75**2) / (1 - 0.5**2)
    np.testing.assert_allclose(found[0], eta * 0.5 * update / (np.sqrt(0.25 * update**2) + 1), rtol=1e-6)


STATEFUL = [
    ("FedAvgM", "server-momentum=0.5"), ("FedAdam", "eta=0.5"), ("FedYogi", ""), ("FedAdagrad", ""), ("FedMedian", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), STATEFUL)
def test_what_it_remembers_comes_back_as_arrays(name: str, options: str) -> None:
    whole = rounds(made(f"flower:{name}", options), 4)
    first = made(f"flower:{name}", options)
    half = rounds(first, 2)
    resumed = made(f"flower:{name}", options)
    resumed.state = {key: value.copy() for key, value in first.state.items()}
    assert all(isinstance(value, np.ndarray) for value in resumed.state.values())
    np.testing.assert_array_equal(rounds(resumed, 2, half, first=3), whole)


def test_a_cluster_of_which_it_makes_nothing_stays_as_it_was() -> None:
    found = rounds(made("flower:Bulyan", "num-malicious-nodes=1"), 1)
    assert found.tolist() == [list(hypothesis) for hypothesis in SENT], "five releases, and it needs seven"


# --- what is refused, before the run


def test_only_what_is_about_aggregation_is_an_option() -> None:
    assert made("flower:FedTrimmedAvg", "beta=0.1").options.beta == 0.1
    with raises(ConfigError, "config.unknown-option"):
        made("flower:FedTrimmedAvg", "fraction-train=0.5")
    with raises(ConfigError, "config.option-value"):
        made("flower:FedTrimmedAvg", "beta=much")


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("unknown-name", ["FedAdm", "Result", "Strategy"]),
        ("flower-strategy", ["FedProx", "QFedAvg", "FedXgbBagging", "DifferentialPrivacyServerSideFixedClipping"]),
        ("import", ["nowhere.to.be:Found"]),
    ],
)
def test_what_does_not_work_is_refused(code: str, names: list[str]) -> None:
    for name in names:
        with raises(ConfigError, f"config.{code}"):
            strategies.load(f"flower:{name}")


@pytest.mark.parametrize(
    ("strategy", "passes"),
    [
        *((strategy, True) for strategy in ("FedAdam eta=0.5", "FedYogi", "Krum", "FedTrimmedAvg")),
        *((strategy, False) for strategy in ("FedTrimmedAvg beta=0.7", "Bulyan num-malicious-nodes=9")),
    ],
)
def test_stock_strategies_pass_a_trial_before_the_run_or_end_it(strategy: str, passes: bool) -> None:
    with nullcontext() if passes else raises(ConfigError, "config.flower-strategy"):
        Setup.parse(RunConfig(strategy=f"flower:{strategy}").entries())


OWN = '''
from __future__ import annotations

from typing import TYPE_CHECKING

from flwr.serverapp.strategy import FedAvg, FedTrimmedAvg

if TYPE_CHECKING:
    from collections.abc import Callable


class Typed(FedTrimmedAvg):
    def __init__(self, beta: float = 0.4, told: Callable | None = None) -> None:
        super().__init__(beta=beta)


class Scaled(FedAvg):
    """Remembers how often it was asked."""

    def __init__(self, times: int = 2, **rest):
        super().__init__(**rest)
        self.times, self.asked = times, 0

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.asked += 1
        for name, value in arrays.items():
            arrays[name] = type(value)(value.numpy() * self.times)
        return arrays, metrics


class Chatty(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        config["temperature"] = 0.5
        return super().configure_train(server_round, arrays, config, grid)


class Hoarder(FedAvg):
    def aggregate_train(self, server_round, replies):
        self.seen = {1, 2}
        return super().aggregate_train(server_round, replies)


class Short(FedAvg):
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        arrays.pop(next(iter(arrays)))
        return arrays, metrics
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "umbel_test_flowers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "flower:umbel_test_flowers"
    sys.modules.pop("umbel_test_flowers", None)


def test_a_strategy_somebody_wrote_for_flower_runs(own: str) -> None:
    strategy = made(f"{own}:Scaled", "times=3")
    np.testing.assert_allclose(rounds(strategy, 1), [3 * FIRST.mean(0), 3 * SECOND.mean(0)], rtol=1e-6)
    assert json.loads(strategy.state["0/form"].tobytes()) == {"asked": {"value": 1}}


@pytest.mark.parametrize("name", ["Chatty", "Hoarder", "Short"])
def test_what_such_a_strategy_cannot_do_here_is_said_before_the_run(own: str, name: str) -> None:
    with raises(ConfigError, "config.flower-strategy"):
        Setup.parse(RunConfig(strategy=f"{own}:{name}").entries())


def test_a_strategy_may_import_types_for_type_checkers_alone(own: str) -> None:
    found = rounds(made(f"{own}:Typed", "beta=0.2"), 1)
    np.testing.assert_allclose(found, rounds(made("flower:FedTrimmedAvg", "beta=0.2"), 1))
    with raises(ConfigError, "config.unknown-option", "beta"):
        made(f"{own}:Typed", "told=1")
