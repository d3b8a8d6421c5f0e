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


@pytest.mark.parametrize("name", ["cfl", "r-dpcfl"])
def test_a_strategy_of_the_lab_is_named_with_its_place(name: str) -> None:
    with raises(ConfigError, "config.unknown-name", LAB[name]):
        strategies.load(name)
    assert issubclass(strategies.load(LAB[name]), strategies.HypothesisStrategy)


class Idle(strategies.HypothesisStrategy):
    """A strategy that forgets to group releases."""


INSTANCE = GroupPrivacy()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *((name, "import") for name in ("nowhere.to.be:Found", "umbel.strategies:Missing", ".ifca:IFCA")),
        *((name, "not-built-on") for name in ("flwr.serverapp.strategy:FedAvg", f"{__name__}:INSTANCE")),
        (f"{__name__}:Idle", "no-assign"),
        ("fedmax", "unknown-name"),
        ("fedprox", "unknown-name"),  # a term in training
    ],
)
def test_what_is_no_strategy_is_refused(name: str, code: str) -> None:
    with raises(ConfigError, f"config.{code}", name):
        strategies.load(name)


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


@pytest.mark.parametrize("kind", ["Fit", "Typo", "Child", "Flowers", "Property"])
def test_a_method_that_nothing_calls_is_refused_with_the_name_that_it_may_mean(misnamed: str, kind: str) -> None:
    near = {"Fit": "aggregate_train", "Flowers": "aggregate_evaluate", "Property": "first_hypotheses"}
    with raises(ConfigError, "config.uncalled-method", near.get(kind, "combine")):
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
