"""Server optimizers, by hand: what each makes of the mean update of a cluster, round by round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.errors import raises
from umbel import strategies
from umbel.protocol.errors import ConfigError
from umbel.protocol.releases import Releases
from umbel.protocol.run_config import RunConfig
from umbel.server.nodes.fleet import Fleet
from umbel.strategies import FedAdagrad, FedAdam, FedAvgM, FedYogi
from umbel.strategies.server_step import AdagradOptions, AdaptiveOptions, MomentumOptions, ServerStep

KINDS = (FedAvgM, FedAdam, FedYogi, FedAdagrad)
# Two clients whose mean is 4 away, and two whose mean is 2 away the other way.
FIRST, SECOND = [[3.0], [5.0]], [[-1.0], [-3.0]]


def moved(strategy: ServerStep, group: list[list[float]], index: int = 0) -> float:
    """Return where a hypothesis at 0 goes."""
    return float(strategy.combine(np.array(group), np.zeros(1), index)[0])


def test_momentum_adds_a_share_of_the_last_step() -> None:
    strategy = FedAvgM(Fleet(), hypotheses=2, options=MomentumOptions(rate=0.5, momentum=0.75))
    assert moved(strategy, FIRST) == 2, "half of 4"
    assert moved(strategy, SECOND) == 0.5, "half of .75 * 4 - 2"
    assert strategy.state["momentum"].tolist() == [[1], [0]]


def test_without_momentum_and_at_rate_1_it_is_the_average() -> None:
    strategy = FedAvgM(Fleet(), options=MomentumOptions(rate=1.0, momentum=0.0))
    assert [moved(strategy, group) for group in (FIRST, SECOND)] == [4, -2]


@pytest.mark.parametrize(
    ("kind", "second", "then"),
    [
        # tau = 1, from 1; the squares are 16 and 4, and three quarters of the second moment stay.
        (FedAdam, 0.75 * 1 + 0.25 * 16, 0.75 * 4.75 + 0.25 * 4),
        # A quarter of a square at a time: up, as 16 is more than 1, and down, as 4 is less than 5.
        (FedYogi, 1 + 0.25 * 16, 5 - 0.25 * 4),
    ],
)
def test_a_step_is_the_first_moment_over_the_root_of_the_second(kind: Any, second: float, then: float) -> None:
    strategy = kind(Fleet(), options=AdaptiveOptions(rate=0.5, beta1=0.5, beta2=0.75, tau=1.0))
    assert moved(strategy, FIRST) == pytest.approx(0.5 * 2 / (second**0.5 + 1))
    # The first moment is half of 2 and half of -2.
    assert moved(strategy, SECOND) == pytest.approx(0.0)
    assert moved(strategy, FIRST) != 0
    strategy = kind(Fleet(), options=AdaptiveOptions(rate=0.5, beta1=0.0, beta2=0.75, tau=1.0))
    moved(strategy, FIRST)
    assert moved(strategy, SECOND) == pytest.approx(0.5 * -2 / (then**0.5 + 1))


def test_adagrad_forgets_no_square() -> None:
    strategy = FedAdagrad(Fleet(), options=AdagradOptions(rate=3.0, tau=2.0))
    assert moved(strategy, FIRST) == pytest.approx(3 * 4 / ((4 + 16) ** 0.5 + 2))
    assert moved(strategy, SECOND) == pytest.approx(3 * -2 / ((4 + 16 + 4) ** 0.5 + 2))


@pytest.mark.parametrize("kind", KINDS)
def test_each_cluster_has_an_optimizer_of_its_own(kind: Any) -> None:
    alone, beside = kind(Fleet(), hypotheses=2), kind(Fleet(), hypotheses=2)
    expected = [moved(alone, FIRST, 0), moved(alone, SECOND, 0)]
    found = [moved(beside, FIRST, 0)]
    moved(beside, [[100.0]], 1)
    found.append(moved(beside, SECOND, 0))
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_needs_only_the_means_of_its_clusters(kind: Any) -> None:
    sent, random = np.array([[0.0, 0, 0], [9, 9, 9]], np.float32), np.random.default_rng(0)
    labels = np.array([0, 1, 1, 0, 1])
    releases = sent[labels] + random.normal(size=(5, 3)).astype(np.float32)
    strategy, beside = kind(Fleet(), hypotheses=2), kind(Fleet(), hypotheses=2)
    for one in (strategy, beside):
        one.fleet.sent = {"weight": sent}
    assert strategy.averages, "so that no group is copied"
    found = strategy.learn(1, Releases(releases, np.arange(5), None, 5, 0)).following["weight"]
    groups = [releases[labels == j].astype(float) for j in (0, 1)]
    expected = [beside.combine(group, sent[j].astype(float), j) for j, group in enumerate(groups)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_what_was_kept(kind: Any) -> None:
    whole, killed = kind(Fleet(), hypotheses=2), kind(Fleet(), hypotheses=2)
    expected = [moved(whole, group) for group in (FIRST, SECOND, FIRST)][2]
    for group in (FIRST, SECOND):
        moved(killed, group)
    resumed = kind(Fleet(), hypotheses=2)
    resumed.state = {name: value.copy() for name, value in killed.state.items()}
    assert moved(resumed, FIRST) == expected


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("fedavgm", "momentum=1", (ConfigError, "config.option-value", "1")),
        ("fedadam", "rate=0", (ConfigError, "config.option-value", "0")),
        ("fedadam", "tau=inf", (ConfigError, "config.option-value")),
        ("fedadagrad", "beta2=0.9", (ConfigError, "config.unknown-option")),
    ],
)
def test_options_that_cannot_be_used_are_named(name: str, options: str, reason: Any) -> None:
    with raises(*reason):
        strategies.make(RunConfig(strategy=f"{name} {options}"), Fleet())
