"""Strategies by name: built in, or your own as ``package.module:Class``."""

from __future__ import annotations

from attacks.pac_attack import PacAttack
from protocol.plugins import import_by_name
from strategies.base import HypothesisStrategy, RadiusSchedule
from strategies.fedavg import FedAvg
from strategies.group_privacy import GroupPrivacy
from strategies.ifca import IFCA
from strategies.recommender import Recommender

__all__ = [
    "IFCA",
    "STRATEGIES",
    "FedAvg",
    "GroupPrivacy",
    "HypothesisStrategy",
    "PacAttack",
    "RadiusSchedule",
    "Recommender",
    "load",
]

STRATEGIES: dict[str, type[HypothesisStrategy]] = {
    "group-privacy": GroupPrivacy,
    "fedavg": FedAvg,
    "ifca": IFCA,
    "recommender": Recommender,
    "pac-attack": PacAttack,
}


def load(name: str) -> type[HypothesisStrategy]:
    """Return the strategy class called `name`.

    Raises
    ------
    ValueError
        When there is none, or it is no `HypothesisStrategy`; the text lists what there is.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    if ":" not in name:
        raise ValueError(f"unknown strategy {name!r}; choose from {', '.join(STRATEGIES)} or give package.module:Class")
    strategy = import_by_name(name)
    if not (isinstance(strategy, type) and issubclass(strategy, HypothesisStrategy)):
        raise ValueError(f"strategy {name!r} is no class built on strategies.base.HypothesisStrategy")
    return strategy
