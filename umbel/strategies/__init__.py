"""Strategies by name: built in, Flower's as ``flower:Class``, or your own as ``package.module:Class``."""

from __future__ import annotations

from umbel.protocol.errors import ConfigError
from umbel.protocol.plugins import load_class, parse_options
from umbel.protocol.run_config import AUTO, RunConfig
from umbel.protocol.uncalled import refuse_uncalled
from umbel.strategies.base import Clients, HypothesisStrategy
from umbel.strategies.fedavg import FedAvg
from umbel.strategies.group_privacy import GroupPrivacy
from umbel.strategies.how_many import HowMany
from umbel.strategies.ifca import IFCA
from umbel.strategies.recommender import Recommender
from umbel.strategies.robust import GeometricMedian, TrimmedMean
from umbel.strategies.secure_average import SecureAverage
from umbel.strategies.site_average import SiteAverage
from umbel.strategies.stock import PREFIX, Stock, adapted

__all__ = [
    "IFCA",
    "STRATEGIES",
    "FedAvg",
    "GeometricMedian",
    "GroupPrivacy",
    "HypothesisStrategy",
    "Recommender",
    "SecureAverage",
    "SiteAverage",
    "Stock",
    "TrimmedMean",
    "load",
    "make",
]

STRATEGIES: dict[str, type[HypothesisStrategy]] = {
    "group-privacy": GroupPrivacy,
    "trimmed-mean": TrimmedMean,
    "geometric-median": GeometricMedian,
    "fedavg": FedAvg,
    "ifca": IFCA,
    "recommender": Recommender,
    "site-average": SiteAverage,
    "secure-average": SecureAverage,
}


_INSTEAD = {
    "aggregate_train": "train",
    "aggregate_fit": "train",
    "aggregate_evaluate": "validate",
    "configure_fit": "configure_train",
    "evaluate": "validate",
    "start": "train",
}
"""Methods of Flower's strategies that a run of umbel never calls, and those that it calls."""


def load(name: str) -> type[HypothesisStrategy]:
    """Return the strategy class `name`.

    Raises
    ------
    ConfigError
        If there is none, or it is not a `HypothesisStrategy`, or one that groups no releases; the text lists the
        choices. Also if it has a public method that nothing calls (`umbel.protocol.uncalled.refuse_uncalled`).
    """
    if name == "fedprox":
        text = 'there is no strategy "fedprox"; set strategy = "fedavg", and optimizer = "sgd proximal=0.1"'
        raise ConfigError(text, code="config.unknown-name")
    if name.startswith(PREFIX):
        return adapted(name.removeprefix(PREFIX))
    kind = load_class("strategy", name, STRATEGIES, HypothesisStrategy)
    if all(getattr(kind, one) is getattr(HypothesisStrategy, one) for one in ("assign", "learn", "train")):
        text = f"strategy {name!r} does not say which hypothesis each release belongs to"
        fix = "define assign, or derive the class from umbel.strategies.GroupPrivacy"
        raise ConfigError(f"{text}; {fix}", code="config.no-assign")
    refuse_uncalled("strategy", kind, HypothesisStrategy, _INSTEAD)
    return kind


def make(run: RunConfig, fleet: Clients) -> HypothesisStrategy:
    """Return the strategy of a run config, with its options and a run's clients."""
    kind = load(run.strategy_name)
    strategy = kind(
        fleet,
        hypotheses=run.most_hypotheses,
        min_releases=run.min_releases,
        radius=run.schedule,
        options=parse_options(kind.Options, run.strategy_options, "strategy"),
    )
    if run.hypotheses == AUTO and strategy.fixed_hypotheses is None:
        strategy.how_many = HowMany.for_run(run)
    return strategy
