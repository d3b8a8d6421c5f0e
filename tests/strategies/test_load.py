"""A strategy is found by its name, or by where it can be imported from."""

from __future__ import annotations

from pathlib import Path

import pytest

import strategies
from attacks.pac_attack import PacAttack
from strategies.fedavg import FedAvg
from strategies.group_privacy import GroupPrivacy
from strategies.ifca import IFCA
from strategies.recommender import Recommender

NOT_STRATEGIES = """
from flwr.serverapp.strategy import FedAvg
from strategies import GroupPrivacy

instance = GroupPrivacy()
"""


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("group-privacy", GroupPrivacy),
        ("fedavg", FedAvg),
        ("ifca", IFCA),
        ("recommender", Recommender),
        ("pac-attack", PacAttack),
    ],
)
def test_the_built_in_strategies_have_names(name: str, strategy: type) -> None:
    assert strategies.load(name) is strategy


def test_any_other_is_given_as_module_and_class() -> None:
    assert strategies.load("strategies.ifca:IFCA") is IFCA


def test_an_unknown_name_lists_what_there_is() -> None:
    known = "group-privacy, fedavg, ifca, recommender, pac-attack or give package.module:Class"
    with pytest.raises(ValueError, match=f"unknown strategy 'fedprox'; choose from {known}"):
        strategies.load("fedprox")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere.to.be:Found", "cannot import 'nowhere.to.be' of 'nowhere.to.be:Found'"),
        ("strategies:Missing", "'strategies' has no 'Missing'"),
        ("strategies:", "'strategies' has no ''"),
        (":IFCA", "cannot import '' of ':IFCA': give the module's full name"),
        (".ifca:IFCA", "cannot import '.ifca'"),
    ],
)
def test_what_cannot_be_imported_is_named(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        strategies.load(name)


@pytest.mark.parametrize("name", ["FedAvg", "instance"])
def test_a_strategy_of_flowers_own_or_an_instance_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "umbel_test_not_strategies.py").write_text(NOT_STRATEGIES)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"{name}' is no class built on strategies.base.HypothesisStrategy"):
        strategies.load(f"umbel_test_not_strategies:{name}")
