"""The cost of a planned run for its clients, and the noise that a wanted guarantee needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from umbel.privacy.accounting.guarantee import DELTA, MEANINGFUL, Guarantee, guarantee, site_release
from umbel.privacy.accounting.rows import row_guarantee
from umbel.privacy.mechanisms import load
from umbel.privacy.mechanisms.gaussian import calibrate
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import LAPLACE, Release, RowPrivacy, exact, participation

_CHOICE_SHARE, _LARGEST_CHOICE = 0.25, 2.0
_LEAST = 1e-4  # smallest wanted epsilon; a smaller one needs too much noise to learn anything
_RARE = 1e-3  # probability that a client takes part more often than planned
_DIGITS = 4  # of a computed noise multiplier
_NOTHING = 1e-300  # in place of an epsilon of 0, which has no logarithm


@dataclass(frozen=True)
class Task:
    """The parts of a training task that determine its noise.

    Attributes
    ----------
    parameters : int
        n.
    hypotheses : int
        k.
    clients, clients_per_round : int
        Training clients, and U.
    mechanism : str
    sites : int
        Number of sites that release sums of their clients' updates; 0 if each client releases its own.
    """

    parameters: int
    hypotheses: int
    clients: int
    clients_per_round: int
    mechanism: str = LAPLACE
    sites: int = 0

    def __post_init__(self) -> None:
        for name in ("parameters", "hypotheses", "clients"):
            if getattr(self, name) < 1:
                raise impossible(name, "at least 1", getattr(self, name))
        if not 1 <= self.clients_per_round <= self.clients:
            raise impossible("clients-per-round", f"between 1 and the {self.clients} clients", self.clients_per_round)
        load(self.mechanism)

    def release(self, noise_multiplier: float, choice_epsilon: float) -> Release:
        """Return the release of one participation, with a public clip norm."""
        release = participation(
            self.parameters,
            self.hypotheses,
            noise_multiplier,
            mechanism=self.mechanism,
            choice_epsilon=choice_epsilon,
        )
        return site_release(release) if self.sites else release

    def noise_left(self, noise_multiplier: float) -> float:
        """Return the root mean square norm of the noise left in a hypothesis after averaging, in clip norms.

        This assumes equally many clients for each hypothesis.
        """
        norm = load(self.mechanism)(noise_multiplier).deviation(self.parameters) * math.sqrt(self.parameters)
        each = self.clients_per_round / self.hypotheses
        return norm * math.sqrt(self.sites) / each if self.sites else norm / math.sqrt(each)


@dataclass(frozen=True)
class Plan:
    """The figures of a planned run.

    Attributes
    ----------
    release : Release
        Of a participation, with a public clip norm.
    median_participations, max_participations : int
        Participations of the median client, and the maximum over all clients in 99.9 % of runs.
    median, maximum : Guarantee or None
        Their guarantees between any two data sets of a client; None if there is none.
    noise_left : float
        See `Task.noise_left`.
    largest_curvature_step : float
        Step size times curvature must stay below this for stable rounds.
    """

    release: Release
    median_participations: int
    max_participations: int
    median: Guarantee | None
    maximum: Guarantee | None
    noise_left: float
    largest_curvature_step: float

    @property
    def warnings(self) -> list[str]:
        """Explanations of figures that mean trouble."""
        found = []
        if self.maximum is not None and self.maximum.epsilon > MEANINGFUL:
            found.append(
                f"The busiest client may spend epsilon {self.maximum.epsilon:,.0f}. Above {MEANINGFUL} a guarantee "
                "proves next to nothing, even if the noise stops particular attacks. Use a smaller model, more noise, "
                "or fewer rounds."
            )
        if self.noise_left > 1:
            found.append(
                f"The noise left in a hypothesis after averaging is {self.noise_left:.2g} times the update. "
                "If learning is too slow, ask more clients a round, or use fewer hypotheses or less noise."
            )
        return found


def plan(
    task: Task,
    noise_multiplier: float,
    choice_epsilon: float,
    rounds: int,
    delta: float = DELTA,
    limit: float = math.inf,
) -> Plan:
    """Return the figures of a run.

    Every round draws `clients_per_round` of `clients` without replacement, so a client's
    participations are Binomial(rounds, clients_per_round / clients). In 99.9 % of runs no client has more than
    `max_participations`. Nor has one more than `limit`, if the run sets a maximum.

    Raises
    ------
    ConfigError
        If a figure is impossible; the text names it.
    """
    if rounds < 1:
        raise impossible("rounds", "at least 1", rounds)
    from scipy import stats  # the import takes half a second

    count = stats.binom(rounds, task.clients_per_round / task.clients)
    # Even for dependent clients, the probability that any has more is at most the sum of theirs.
    most = int(count.isf(_RARE / task.clients))
    median, most = (int(min(times, limit)) for times in (count.median(), most))
    return _figures(task, noise_multiplier, choice_epsilon, median, most, delta)


def plan_for(task: Task, target: float, delta: float, participations: int, choice_epsilon: float | None = None) -> Plan:
    """Return the figures of a run with as little noise as the wanted guarantee allows.

    Parameters
    ----------
    task : Task
    target : float
        Maximum epsilon between any two data sets of a client, over all its participations.
    delta : float
        Delta of that guarantee; 0 for a pure epsilon.
    participations : int
        Maximum participations of a client.
    choice_epsilon : float, optional
        By default `usual_choice`.

    Raises
    ------
    ConfigError
        If a figure is impossible, or no noise reaches the target; the text names it.
    """
    if not _LEAST <= target < math.inf:
        raise impossible("epsilon", f"a finite number of at least {_LEAST}", target)
    if participations < 1:
        raise impossible("participations", "at least 1", participations)
    if choice_epsilon is None:
        choice_epsilon = usual_choice(target, participations)
    _check_numbers(1.0, choice_epsilon, delta)
    nu = _noise_for(task, target, delta, participations, choice_epsilon)
    return _figures(task, nu, choice_epsilon, participations, participations, delta)


def usual_choice(target: float, participations: int) -> float:
    """Return a choice-epsilon: a quarter of a participation's share of the wanted epsilon, and at most 2."""
    return min(_CHOICE_SHARE * target / participations, _LARGEST_CHOICE)


def _figures(task: Task, nu: float, choice_epsilon: float, median: int, most: int, delta: float) -> Plan:
    _check_numbers(nu, choice_epsilon, delta)
    release = task.release(nu, choice_epsilon)
    left = task.noise_left(nu)
    return Plan(
        release=release,
        median_participations=median,
        max_participations=most,
        median=guarantee({release: median}, delta),
        maximum=guarantee({release: most}, delta),
        noise_left=left,
        largest_curvature_step=2 / (1 + left**2),
    )


def _check_numbers(nu: float, choice_epsilon: float, delta: float) -> None:
    if not 0 < nu < math.inf:
        raise impossible("noise-multiplier", "a finite number above 0", nu)
    if not 0 <= choice_epsilon < math.inf:
        raise impossible("choice-epsilon", "a finite number of at least 0", choice_epsilon)
    if not 0 <= delta < 1:
        raise impossible("delta", "at least 0 and below 1", delta)


def impossible(name: str, rule: str, value: float) -> ConfigError:
    """Return the error of a figure that breaks a rule."""
    return ConfigError(f"{name} must be {rule}, got {value}", code="config.impossible-figure")


def _noise_for(task: Task, target: float, delta: float, participations: int, choice_epsilon: float) -> float:
    """Return the smallest noise multiplier, with a few digits, that reaches the target."""

    def epsilon(nu: float) -> float:
        found = guarantee({task.release(nu, choice_epsilon): participations}, delta)
        if found is None:
            raise ConfigError(
                "choice-epsilon must be above 0: an open choice has no guarantee", code="config.open-choice"
            )
        return found.epsilon

    def excess(log_nu: float) -> float:
        return math.log(max(epsilon(math.exp(log_nu)), _NOTHING) / target)

    share = target / participations - (choice_epsilon if task.release(1.0, choice_epsilon).chooses else 0.0)
    if not delta and share > 0 and (one := load(task.mechanism)(1.0).pure(task.parameters, 2)) is not None:
        exactly = rounded_up(float(one) / share)  # a pure price is proportional to 1 / nu
        if epsilon(exactly) <= target:
            return exactly
    # With much noise the loss is nearly normal with mu = 2 / (nu of a Gaussian), and vector Laplace noise of n
    # components behaves like Gaussian noise of deviation nu / sqrt(n).
    scale = load(task.mechanism)(1.0).deviation(task.parameters)
    guess = math.log(calibrate(target, max(delta, 1e-9), 2.0) * math.sqrt(participations) / scale)
    low, high = guess - 0.5, guess + 0.5
    while excess(high) > 0:
        low, high = high, high + 1
        if high > guess + 60:
            raise ConfigError(
                f"no noise reaches epsilon {target:g} at delta {delta:g} over {participations} participations with "
                f"choice-epsilon {choice_epsilon:g}; lower choice-epsilon, or give another delta or mechanism",
                code="config.unreachable-epsilon",
            )
    while excess(low) < 0:
        low, high = low - 1, low
    from scipy.optimize import brentq  # the import takes a third of a second

    root: Any = brentq(excess, low, high, xtol=5e-4)
    return rounded_up(math.exp(root + 5e-4))


def rounded_up(nu: float) -> float:
    """Return the number rounded up to a few digits."""
    digits = _DIGITS - 1 - math.floor(math.log10(nu))
    rounded = round(nu, digits)
    return rounded if rounded >= nu else round(nu + 10.0**-digits, digits)


_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6  # noise multipliers among which a search looks
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
    low, high = _LEAST_NOISE, 1.0
    while epsilon_of(high) > target:
        low, high = high, 2 * high
        if high > _MOST_NOISE:
            return None
    while high > low * (1 + _CLOSE):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon_of(middle) <= target else (middle, high)
    return high
