"""What a report is made from."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel import strategies
from umbel.privacy.accounting.guarantee import amount, guarantee, in_words
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Kind
from umbel.server.history import Round, State
from umbel.server.report.alarms import count_of
from umbel.server.report.style import STYLED
from umbel.server.snapshots import Snapshots
from umbel.server.summary import Summary


@dataclass(frozen=True)
class HeldOut:
    """How a run serves validation clients on rows that neither trained nor chose anything.

    Attributes
    ----------
    mean, worst_decile : float
        Of the model's metric over clients, and over the tenth of them that fares worst.
    clients : int
    """

    mean: float
    worst_decile: float
    clients: int


@dataclass(frozen=True)
class Measured:
    """What a simulation can measure on the rows of validation clients, which a server never sees.

    Attributes
    ----------
    held_out : HeldOut or None
        None where no client has rows enough.
    picked : sequence of int
        Validation clients that each hypothesis fits best; empty where there is no choice.
    own, all : sequence of float
        Mean loss of each hypothesis over these clients (nan where there are none), and over all.
    """

    held_out: HeldOut | None
    picked: Sequence[int] = ()
    own: Sequence[float] = ()
    all: Sequence[float] = ()


class View:
    """What a report is made from, and what is worked out from it more than once.

    Parameters
    ----------
    name : str
        Of the run.
    summary : Summary
    state : State
    participations : ndarray of int
        How often each training client released.
    snapshots : Snapshots
    config : mapping
        The run config.
    measured : Measured, optional
    """

    def __init__(
        self,
        name: str,
        summary: Summary,
        state: State,
        participations: NDArray[np.int64],
        snapshots: Snapshots,
        config: Mapping[str, Any],
        measured: Measured | None = None,
    ) -> None:
        self.name, self.measured = name, measured
        self.summary, self.state, self.snapshots, self.config = summary, state, snapshots, config
        self.participations = participations
        self.k = len(next(iter(state.best.values())))
        self.history = [entry if _fits(entry, self.k) else _blank(entry, self.k) for entry in state.history]
        self.steady = [entry for entry in state.history if _fits(entry, self.k)]
        """The rounds of as many hypotheses as the run ended with; all, but where a strategy changes their number."""
        self.trained = [entry for entry in self.history if entry.asked]
        self.n = summary.model.num_parameters
        self.groups = np.array([entry.groups for entry in self.trained], np.int64).reshape(len(self.trained), self.k)
        busiest = np.argsort(-self.groups.sum(axis=0), kind="stable")[:STYLED]
        self.shown: list[int] = list(range(self.k)) if self.k <= STYLED else sorted(int(j) for j in busiest)
        self.sanitised = summary.release.noise_multiplier > 0
        self.by_site = summary.release.kind is Kind.SITE
        median = float(np.median(participations)) if len(participations) else 0.0
        self.often = median, int(participations.max(initial=0))
        """How often the median client and the busiest one released."""
        median_guarantee, maximum_guarantee = (guarantee({summary.release: math.ceil(often)}) for often in self.often)
        self.guarantees = median_guarantee, maximum_guarantee
        """What is guaranteed to the median client, and to the busiest; None where that is nothing."""

    @property
    def title(self) -> str:
        """What was learnt, how, and with which model."""
        data = self.summary.manifest.name if self.summary.manifest else "each site's own data"
        return f"{data}, {self.config.get('strategy')}, {self.summary.model.name}"

    @property
    def began(self) -> str:
        """When the run began, as its name says; empty where it does not."""
        found = re.match(r"\d{8}-\d{6}(?=-)", self.name)
        with suppress(ValueError):
            return time.strftime("%d %B %Y, %H:%M:%S", time.strptime(found[0], "%Y%m%d-%H%M%S")) if found else ""
        return ""

    @property
    def best(self) -> Round | None:
        """The round that started from the best hypotheses; None without validation."""
        return next((entry for entry in self.history if entry.number == self.state.best_round), None)

    @property
    def disclosed(self) -> bool:
        """Whether training clients said which hypothesis they chose."""
        with suppress(ConfigError):
            return strategies.load(str(self.config.get("strategy"))).discloses_choice
        return False

    def epsilons(self) -> tuple[str, str]:
        """Return the guarantee of the median client, and of the busiest, as text; "none" where there is none."""
        (_, median), (_, maximum) = map(in_words, self.guarantees)
        return median, maximum

    def paper(self) -> tuple[str, str]:
        """Return the paper's budget of the median client, and of the busiest, as text; "none" where it counts none."""
        median, maximum = (amount(self.summary.release.paper_spend(times)) for times in self.often)
        return median, maximum

    def multiplier(self) -> str:
        """Return nu as text."""
        return f"{self.summary.release.noise_multiplier:g}"

    def metric_differs(self) -> bool:
        """Return whether the metric is another than the loss."""
        return self.summary.model.metric.name.lower() != self.summary.loss_name.lower()

    def best_when(self) -> str:
        """Return after how much training the best hypotheses came."""
        done = self.state.best_round - 1
        return f"after {count_of(done, 'round')} of training" if done else "before any training"


def _fits(entry: Round, k: int) -> bool:
    """Return whether a round was of k hypotheses."""
    return len(entry.nearest) == (k if k > 1 else 0) and (not entry.asked or len(entry.groups) == k)


def _blank(entry: Round, k: int) -> Round:
    """Return a round of other hypotheses as one in which none of the k was there."""
    groups = [0] * k if entry.asked else []
    return replace(entry, groups=groups, nearest=[math.nan] * (k if k > 1 else 0))
