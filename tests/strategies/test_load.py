"""A strategy is found by its name, or by where it can be imported from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.errors import raises
from umbel import strategies
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig
from umbel.server.nodes.fleet import Fleet
from umbel.strategies.cfl import ClusteredFL
from umbel.strategies.fedavg import FedAvg
from umbel.strategies.group_privacy import GroupPrivacy
from umbel.strategies.ifca import IFCA
from umbel.strategies.r_dpcfl import RDPCFL
from umbel.strategies.recommender import Recommender
from umbel.strategies.robust import GeometricMedian, TrimmedMean
from umbel.strategies.secure_average import SecureAverage
from umbel.strategies.server_step import FedAdagrad, FedAdam, FedAvgM, FedYogi
from umbel.strategies.site_average import SiteAverage

NOT_STRATEGIES = """
from flwr.serverapp.strategy import FedAvg
from umbel.strategies import GroupPrivacy

instance = GroupPrivacy(None)
"""


def test_the_built_in_strategies_have_names() -> None:
    kinds = {
        "group-privacy": GroupPrivacy, "trimmed-mean": TrimmedMean, "geometric-median": GeometricMedian,
        "fedavg": FedAvg, "fedavgm": FedAvgM, "fedadam": FedAdam, "fedyogi": FedYogi, "fedadagrad": FedAdagrad,
        "ifca": IFCA, "cfl": ClusteredFL, "r-dpcfl": RDPCFL, "recommender": Recommender,
        "site-average": SiteAverage, "secure-average": SecureAverage,
    }  # fmt: skip
    assert kinds == strategies.STRATEGIES
    assert {name: strategies.load(name) for name in kinds} == kinds
    assert strategies.load("umbel.strategies.ifca:IFCA") is IFCA
    with raises(ConfigError, "config.unknown-name", "fedmax", *strategies.STRATEGIES):
        strategies.load("fedmax")


def test_a_term_in_training_is_no_strategy() -> None:
    with raises(ConfigError, "config.unknown-name", "fedprox", "fedavg", "strategy"):
        strategies.load("fedprox")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere.to.be:Found", (ConfigError, "config.import", "nowhere.to.be:Found")),
        ("umbel.strategies:Missing", (ConfigError, "config.import", "umbel.strategies", "Missing")),
        ("umbel.strategies:", (ConfigError, "config.import", "umbel.strategies")),
        (":IFCA", (ConfigError, "config.import")),
        (".ifca:IFCA", (ConfigError, "config.import", ".ifca")),
    ],
)
def test_what_cannot_be_imported_is_named(name: str, reason: Any) -> None:
    with raises(*reason):
        strategies.load(name)


@pytest.mark.parametrize("name", ["FedAvg", "instance"])
def test_a_strategy_of_flowers_own_or_an_instance_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "umbel_test_not_strategies.py").write_text(NOT_STRATEGIES)
    monkeypatch.syspath_prepend(tmp_path)
    with raises(ConfigError, "config.not-built-on", name):
        strategies.load(f"umbel_test_not_strategies:{name}")


def test_a_strategy_is_made_with_the_clients_that_the_run_asks_for() -> None:
    run = RunConfig(
        strategy="fedavg", hypotheses=5, clients_per_round=11, validation_clients_per_round=12, min_releases=4, seed=13,
        min_nodes=3, node_wait=14.0, quorum=0.5, max_clients_per_node=15, max_node_share=0.25, max_update_norm=16.0,
        validate_by="median", max_participations=0,
    )  # fmt: skip
    fleet = Fleet(run)
    strategy = strategies.make(run, fleet)
    assert strategy.fleet is fleet
    assert type(strategy) is FedAvg
    assert (strategy.hypotheses, strategy.min_releases, strategy.radius) == (1, 4, run.schedule)
    assert fleet.run is run


@pytest.mark.parametrize("name", ["fedavg", "ifca", "recommender"])
def test_the_papers_other_strategies_have_no_options(name: str) -> None:
    strategies.make(RunConfig(strategy=name), Fleet())
    with raises(ConfigError, "config.unknown-option", "strategy-options"):
        strategies.make(RunConfig(strategy=name, strategy_options="x=1"), Fleet())


class Idle(strategies.HypothesisStrategy):
    """A strategy that forgets to group releases."""


def test_a_strategy_that_groups_no_releases_is_refused_before_the_run() -> None:
    with raises(ConfigError, "config.no-assign", f"{__name__}:Idle", "GroupPrivacy"):
        strategies.load(f"{__name__}:Idle")
