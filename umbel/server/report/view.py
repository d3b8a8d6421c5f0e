"""The input of a report."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel import strategies
from umbel.privacy.accounting.guarantee import MEANINGFUL, amount, gap, guarantee
from umbel.privacy.accounting.rows import row_gap
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Kind
from umbel.protocol.words import count_of
from umbel.server.history import Round, State, fits, undecided
from umbel.server.report.figures import STYLED
from umbel.server.summary import Summary
from umbel.server.worth import Worth


@dataclass(eq=False)
class View:
    """The input of a report, and values derived from it that are needed more than once.

    Attributes
    ----------
    name : str
        Of the run.
    summary : Summary
    state : State
    participations : ndarray of int
        Number of releases of each training client.
    config : mapping
        The run config.
    worth : Worth, optional
        The run's worth, if it was measured.
    """

    name: str
    summary: Summary
    state: State
    participations: NDArray[np.int64]
    config: Mapping[str, Any]
    worth: Worth | None = None

    def __post_init__(self) -> None:
        state, release = self.state, self.summary.release
        self.k = k = len(next(iter(state.hypotheses.values())))
        self.n = self.summary.model.num_parameters
        self.history = [entry if fits(entry, k) else _blank(entry, k) for entry in state.history]
        self.steady = [entry for entry in state.history if fits(entry, k)]
        """The rounds with as many hypotheses as at the end; a strategy may change their number."""
        self.trained = [entry for entry in self.history if entry.asked]
        self.validated = [entry for entry in self.history if entry.loss is not None]
        self.best = next((entry for entry in self.history if entry.number == state.best_round), None)
        """The round that started from the best hypotheses; None without validation."""
        self.last_validated = self.validated[-1] if self.validated else None
        """The last round with validation; None without validation."""
        last, name = self.last_validated, self.summary.model.metric.name
        self.noise = self.summary.noise_of(last) if last else ""
        """Noise and clipping of the reports at the last validation, in words; empty for exact ones."""
        noisy = last is not None and last.report_noise > 0 and name != "rmse"
        self.noise_in_metric = f" (± {last.report_noise:.2g})" if last and noisy else ""
        self.undecided = undecided(self.history, state.best_round)
        """Number of other rounds that noise does not tell from the best."""
        self.groups = np.array([entry.groups for entry in self.trained], np.int64).reshape(len(self.trained), k)
        busiest = np.argsort(-self.groups.sum(axis=0), kind="stable")[:STYLED]
        self.shown: list[int] = list(range(k)) if k <= STYLED else sorted(int(j) for j in busiest)
        self.others = [j for j in range(k) if j not in self.shown]
        self.metric_differs = self.summary.model.metric.name.lower() != self.summary.loss_name.lower()
        """Whether the metric differs from the loss."""
        self.exact_reports = max((entry.exact_reports for entry in state.history), default=0)
        """Number of validation clients that reported without noise."""
        self.sanitised = release.noise_multiplier > 0
        self.together = release.kind is Kind.SECURE
        """Whether sites added their sums securely, so that the server read the sum of all."""
        self.by_site = release.kind is Kind.SITE or self.together
        self.gap = gap(release)
        """Why there is no guarantee; empty if there is one."""
        self.took_part = int((self.participations > 0).sum())
        median = float(np.median(self.participations)) if len(self.participations) else 0.0
        self.often = median, int(self.participations.max(initial=0))
        """Number of releases of the median client and of the busiest one."""
        ended = self.often[1], self.summary.left(state.history)
        self.once, self.of_client = guarantee({release: 1}, self.summary.delta), self.summary.of_client(*ended)
        """The guarantee to a client of one participation, and of the run; None where there is none."""
        self.why_counted = self.summary.why_counted(*ended)
        """Why the guarantee counts more releases than there were; empty if it does not."""
        self.plus = "" if self.of_client and self.of_client.is_pure else f", plus {self.summary.delta:g}"
        """The delta of the guarantee to a client, in words; empty for a pure epsilon."""
        self.weak = self.of_client is None or self.of_client.epsilon > MEANINGFUL
        self.row_gap = row_gap(release) if release.by_rows else ""
        """Why rows have no guarantee though noise in training hides them; empty if they have one."""
        self.of_row = self.summary.of_row(*ended)
        """The guarantee for a row of a client; None where there is none."""
        self.paper = [amount(release.paper_spend(times)) for times in self.often]
        """The paper's budget of the median client, and of the busiest; "none" if it gives no bound."""

    @property
    def title(self) -> str:
        """Data, strategy and model of the run."""
        data = self.summary.manifest.name if self.summary.manifest else "each site's own data"
        return f"{data}, {self.config.get('strategy')}, {self.summary.model.name}"

    @property
    def began(self) -> str:
        """The start of the run, from its name; empty if the name has no time."""
        start = re.match(r"\d{8}-\d{6}(?=-)", self.name)
        with suppress(ValueError):
            return time.strftime("%d %B %Y, %H:%M:%S", time.strptime(start[0], "%Y%m%d-%H%M%S")) if start else ""
        return ""

    @property
    def disclosed(self) -> bool:
        """Whether training clients disclosed their choices."""
        with suppress(ConfigError):
            return strategies.load(str(self.config.get("strategy"))).discloses_choice
        return False

    @property
    def last_when(self) -> str:
        """How much training the last validated hypotheses had."""
        done = self.last_validated.number - 1 if self.last_validated else 0
        return f"after {count_of(done, 'round')} of training" if done else "before any training"

    @property
    def best_when(self) -> str:
        """How much training the best hypotheses had."""
        done = self.state.best_round - 1
        return f"after {count_of(done, 'round')} of training" if done else "before any training"


def _blank(entry: Round, k: int) -> Round:
    """Return a round with another number of hypotheses as an empty round with k."""
    groups = [0] * k if entry.asked else []
    return replace(entry, groups=groups, nearest=[math.nan] * (k if k > 1 else 0))
