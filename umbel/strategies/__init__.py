"""Strategies by name: built in, Flower's as ``flower:Class``, or your own as ``package.module:Class``."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from umbel.protocol.errors import ConfigError
from umbel.strategies.base import HypothesisStrategy
from umbel.strategies.rounds import Callback, Stop

if TYPE_CHECKING:
    from umbel.protocol.run_config import RunConfig

STRATEGIES = {
    "group-privacy": "GroupPrivacy",
    "trimmed-mean": "TrimmedMean",
    "geometric-median": "GeometricMedian",
    "fedavg": "FedAvg",
    "ifca": "IFCA",
    "recommender": "Recommender",
    "site-average": "SiteAverage",
    "secure-average": "SecureAverage",
}
"""Built-in strategies: the class of each name."""
# Each is imported when it is first named: most need no more than Flower and NumPy, and some do.
_HOMES = {kind: name.replace("-", "_") for name, kind in STRATEGIES.items()}
_HOMES |= {"TrimmedMean": "robust", "GeometricMedian": "robust", "Stock": "stock"}

__all__ = ["STRATEGIES", "Callback", "HypothesisStrategy", "Stop", "load", "make", *_HOMES]

PREFIX = "flower:"
"""Before the name of one of Flower's strategies (`umbel.strategies.stock`)."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def load(name: str) -> type[HypothesisStrategy]:
    """Return the strategy class `name`.

    Raises
    ------
    ConfigError
        If there is none, or it is not a `HypothesisStrategy`, or one that groups no releases; the text lists the
        choices. Also if it has a public method that nothing calls (`umbel.protocol.plugins.refuse_uncalled`).
    """
    from umbel.protocol.plugins import load_class, refuse_uncalled

    if name == "fedprox":
        text = 'there is no strategy "fedprox"; set strategy = "fedavg", and optimizer = "sgd proximal=0.1"'
        raise ConfigError(text, code="config.unknown-name")
    if name.startswith(PREFIX):
        from umbel.strategies.stock import adapted

        return adapted(name.removeprefix(PREFIX))
    built_in = {title: getattr(sys.modules[__name__], kind) for title, kind in STRATEGIES.items()}
    kind = load_class("strategy", name, built_in, HypothesisStrategy)
    if all(getattr(kind, key) is getattr(HypothesisStrategy, key) for key in ("assign", "learn", "aggregate_train")):
        text = f"strategy {name!r} does not say which hypothesis each release belongs to"
        fix = "define assign, or derive the class from umbel.strategies.GroupPrivacy"
        raise ConfigError(f"{text}; {fix}", code="config.no-assign")
    refuse_uncalled("strategy", kind, HypothesisStrategy, _INSTEAD)
    return kind


_INSTEAD = {"aggregate_fit": "aggregate_train", "configure_fit": "configure_train", "evaluate": "aggregate_evaluate"}
"""Methods that Flower's strategies had, and those that are called."""


def make(run: RunConfig) -> HypothesisStrategy:
    """Return the strategy of a run config, with its options."""
    from umbel.protocol.options import parse_options
    from umbel.protocol.run_config import AUTO
    from umbel.strategies.how_many import HowMany

    kind = load(run.strategy_name)
    options: Any = parse_options(kind.Options, run.strategy_options, "strategy")
    strategy = kind(hypotheses=run.most_hypotheses, min_releases=run.min_releases, **vars(options))
    if run.hypotheses == AUTO and strategy.fixed_hypotheses is None:
        strategy.how_many = HowMany.for_run(run)
    return strategy
