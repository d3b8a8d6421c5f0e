"""A strategy is found by its name, or by where it can be imported from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.helpers.errors import raises
from umbel import strategies
from umbel.protocol.errors import ConfigError
from umbel.protocol.plugins import LAB, refuse_uncalled
from umbel.protocol.run_config import RunConfig
from umbel.strategies.fedavg import FedAvg
from umbel.strategies.group_privacy import GroupPrivacy
from umbel.strategies.ifca import IFCA
from umbel.strategies.recommender import Recommender
from umbel.strategies.robust import GeometricMedian, TrimmedMean
from umbel.strategies.secure_average import SecureAverage
from umbel.strategies.site_average import SiteAverage


def test_the_built_in_strategies_have_names() -> None:
    kinds = {
        "group-privacy": GroupPrivacy, "trimmed-mean": TrimmedMean, "geometric-median": GeometricMedian,
        "fedavg": FedAvg, "ifca": IFCA, "recommender": Recommender,
        "site-average": SiteAverage, "secure-average": SecureAverage,
    }  # fmt: skip
    assert {name: kind.__name__ for name, kind in kinds.items()} == strategies.STRATEGIES
    assert {name: strategies.load(name) for name in kinds} == kinds
    assert strategies.load("umbel.strategies.ifca:IFCA") is IFCA
    with raises(ConfigError, "config.unknown-name", "fedmax", *strategies.STRATEGIES):
        strategies.load("fedmax")
    with raises(ConfigError, "config.unknown-name", "fedprox", "fedavg", "strategy"):  # a term in training
        strategies.load("fedprox")


@pytest.mark.parametrize("name", ["cfl", "r-dpcfl"])
def test_a_strategy_of_the_lab_is_named_with_its_place(name: str) -> None:
    with raises(ConfigError, "config.unknown-name", name, "pip install umbel-lab", LAB[name]):
        strategies.load(name)
    assert issubclass(strategies.load(LAB[name]), strategies.HypothesisStrategy)


class Idle(strategies.HypothesisStrategy):
    """A strategy that forgets to group releases."""


INSTANCE = GroupPrivacy()


@pytest.mark.parametrize(
    ("name", "code", "parts"),
    [
        ("nowhere.to.be:Found", "config.import", ("nowhere.to.be:Found",)),
        ("umbel.strategies:Missing", "config.import", ("umbel.strategies", "Missing")),
        ("umbel.strategies:", "config.import", ("umbel.strategies",)),
        (":IFCA", "config.import", ()),
        (".ifca:IFCA", "config.import", (".ifca",)),
        ("flwr.serverapp.strategy:FedAvg", "config.not-built-on", ("FedAvg",)),
        (f"{__name__}:INSTANCE", "config.not-built-on", ("INSTANCE",)),
        (f"{__name__}:Idle", "config.no-assign", (f"{__name__}:Idle", "GroupPrivacy")),
    ],
)
def test_what_is_no_strategy_is_named(name: str, code: str, parts: tuple[str, ...]) -> None:
    with raises(ConfigError, code, *parts):
        strategies.load(name)


@pytest.mark.parametrize("name", ["fedavg", "ifca", "recommender"])
def test_the_papers_other_strategies_have_no_options(name: str) -> None:
    strategies.make(RunConfig(strategy=name))
    with raises(ConfigError, "config.unknown-option", "strategy"):
        strategies.make(RunConfig(strategy=f"{name} x=1"))


MISNAMED = """
import numpy as np
from dataclasses import dataclass
from functools import cached_property
from umbel.strategies import FedAvg, GroupPrivacy


class Fit(GroupPrivacy):
    def aggregate_fit(self, server_round, results, failures):
        return super().aggregate_fit(server_round, results, failures)


class Typo(GroupPrivacy):
    def combines(self, group, hypothesis, index):
        return group.max(axis=0)


class Child(Typo):
    pass


class Flowers(GroupPrivacy):
    def evaluate(self, server_round, arrays):
        return None


class Property(GroupPrivacy):
    @property
    def first_hypothesis(self):
        return 1


class Right(FedAvg):
    Options = dataclass(frozen=True)(type("Options", (), {}))
    scale = 2

    @property
    def first_hypotheses(self):
        return 1

    def combine(self, group, hypothesis, index):
        self.longest = self.spread(group) + self.width
        return self.scale * helped(self, group)

    def spread(self, group):
        return group.std()

    def centre(self, group):
        return group.mean(axis=0)

    @cached_property
    def width(self):
        return 1

    @staticmethod
    def largest(group):
        return max(group)

    def _unused(self):
        pass


def helped(strategy, group):
    return strategy.centre(group) + Right.largest(group)

"""

DISPATCHING = """
from umbel.strategies import GroupPrivacy


class Dispatching(GroupPrivacy):
    def combine(self, group, hypothesis, index):
        return getattr(self, f"combine_{index}")(group)

    def combine_0(self, group):
        return group.mean(axis=0)

    def combine_1(self, group):
        return group.max(axis=0)
"""


@pytest.fixture(scope="module")
def misnamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of a module with strategies of a user's."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "umbel_test_misnamed.py").write_text(MISNAMED)
    (folder / "umbel_test_dispatching.py").write_text(DISPATCHING)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "umbel_test_misnamed"


@pytest.mark.parametrize(
    ("kind", "method", "near"),
    [
        ("Fit", "aggregate_fit", "aggregate_train"),
        ("Typo", "combines", "combine"),
        ("Child", "combines", "combine"),
        ("Flowers", "evaluate", "aggregate_evaluate"),
        ("Property", "first_hypothesis", "first_hypotheses"),
    ],
)
def test_a_method_that_nothing_calls_is_refused_by_name(misnamed: str, kind: str, method: str, near: str) -> None:
    with raises(ConfigError, "config.uncalled-method", f"{misnamed}:", f" {method},", f"mean {near}?"):
        strategies.load(f"{misnamed}:{kind}")


def test_a_module_may_hold_refused_classes_beside_the_chosen_one(misnamed: str) -> None:
    """Its helpers are used by itself, by a function of its module, or are private, or it computes their names."""
    assert strategies.load(f"{misnamed}:Right").__name__ == "Right"
    strategies.load("umbel_test_dispatching:Dispatching")


def test_a_class_whose_code_cannot_be_read_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("umbel_test_compiled")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(MISNAMED, "compiled", "exec"), vars(module))
    strategies.load(f"{module.__name__}:Typo")


@pytest.mark.parametrize("name", strategies.STRATEGIES)
def test_no_strategy_of_umbels_has_a_method_that_nothing_calls(name: str) -> None:
    refuse_uncalled("strategy", strategies.load(name), strategies.HypothesisStrategy)
