"""The cost of a planned run for each row of a client, and the noise in training that a wanted guarantee needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from umbel.privacy.accounting.guarantee import DELTA, MEANINGFUL, Guarantee
from umbel.privacy.accounting.plan import impossible, rounded_up
from umbel.privacy.accounting.rows import row_guarantee
from umbel.protocol.errors import ConfigError
from umbel.protocol.prices import exact
from umbel.protocol.release import Release, RowPrivacy, participation

_LEAST, _MOST = 1e-2, 1e6  # noise multipliers among which a search looks
_CLOSE = 1e-4  # of a found noise multiplier, relative
_FEW_ROWS = 0.1
"""Product of delta and the number of rows above which delta protects too few of them."""


@dataclass(frozen=True)
class RowTask:
    """The parts of a training task that determine the guarantee of a row.

    Attributes
    ----------
    rows : int
        Rows of a typical client. They decide the batch, and not the guarantee.
    rate : float
        q, probability of each row to be drawn in a step.
    steps : int
        T, of a participation.
    participations : int
        Of a client.
    hypotheses, choice_epsilon : int, float
        k, and the epsilon of the randomised choice among them.
    """

    rows: int
    rate: float
    steps: int
    participations: int
    hypotheses: int = 1
    choice_epsilon: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rows", "steps", "participations", "hypotheses"):
            if getattr(self, name) < 1:
                raise impossible(name, "at least 1", getattr(self, name))
        if not 0 < self.rate <= 1:
            raise impossible("row-rate", "above 0 and at most 1", self.rate)
        if self.hypotheses > 1 and not self.choice_epsilon > 0:
            raise ConfigError(
                "choice-epsilon must be above 0: an open choice has no guarantee", code="config.open-choice"
            )

    @property
    def batch(self) -> float:
        """B, the expected number of rows in a step of a typical client."""
        return float(Fraction(self.rows) * exact(self.rate))

    def release(self, noise_multiplier: float) -> Release:
        """Return the release of one participation, which hides rows alone."""
        rows = RowPrivacy(1.0, noise_multiplier, self.rate, self.batch, self.steps)
        # DP-SGD costs the same for any number of parameters.
        return participation(1, self.hypotheses, 0.0, choice_epsilon=self.choice_epsilon, rows=rows)


@dataclass(frozen=True)
class RowPlan:
    """The figures of a planned run for a row.

    Attributes
    ----------
    task : RowTask
    noise_multiplier : float
        sigma.
    guarantee : Guarantee
        Between two data sets of a client that differ by one row, over all its participations.
    """

    task: RowTask
    noise_multiplier: float
    guarantee: Guarantee

    @property
    def warnings(self) -> list[str]:
        """Explanations of figures that mean trouble."""
        found, delta, rows = [], self.guarantee.delta, self.task.rows
        if self.guarantee.epsilon > MEANINGFUL:
            found.append(
                f"A row may spend epsilon {self.guarantee.epsilon:,.0f}. Above {MEANINGFUL} a guarantee proves next to "
                "nothing. Use more noise, a smaller row-rate, or fewer steps."
            )
        if delta * rows > _FEW_ROWS:
            text = f"At delta {delta:g} a mechanism may publish one of {rows:,} rows outright"
            found.append(f"{text}: take a delta well below {1 / rows:.2g}.")
        return found


def row_plan(task: RowTask, noise_multiplier: float, delta: float = DELTA) -> RowPlan:
    """Return the figures of a run with this noise in training; raise `ConfigError` if one is impossible."""
    if not 0 < noise_multiplier < math.inf:
        raise impossible("row-noise-multiplier", "a finite number above 0", noise_multiplier)
    if not 0 < delta < 1:
        raise impossible("delta", "above 0 and below 1", delta)
    found = row_guarantee({task.release(noise_multiplier): task.participations}, delta)
    assert found is not None, "the choice is hidden"
    return RowPlan(task, noise_multiplier, found)


def row_plan_for(task: RowTask, target: float, delta: float = DELTA) -> RowPlan:
    """Return the figures of a run with as little noise as a wanted epsilon allows.

    Raises
    ------
    ConfigError
        If a figure is impossible, or no noise reaches the target; the text names it.
    """
    if not 0 < target < math.inf:
        raise impossible("row-epsilon", "a finite number above 0", target)
    noise = least_noise(lambda sigma: row_plan(task, sigma, delta).guarantee.epsilon, target)
    if noise is None:
        raise ConfigError(
            f"no noise reaches epsilon {target:g} for rows at delta {delta:g}; lower choice-epsilon, or ask for "
            "fewer participations",
            code="config.unreachable-epsilon",
        )
    return row_plan(task, rounded_up(noise), delta)


def least_noise(epsilon_of: Callable[[float], float], target: float) -> float | None:
    """Return nearly the smallest noise multiplier with at most a target epsilon; None if none is enough.

    `epsilon_of` falls with the noise multiplier.
    """
    low, high = _LEAST, 1.0
    while epsilon_of(high) > target:
        low, high = high, 2 * high
        if high > _MOST:
            return None
    while high > low * (1 + _CLOSE):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon_of(middle) <= target else (middle, high)
    return high
