"""The cost of a planned run for its clients, and the noise that a wanted guarantee needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from umbel.privacy.accounting.guarantee import (
    DELTA,
    MEANINGFUL,
    Guarantee,
    guarantee,
    pure_cost,
    released_by,
    with_before,
)
from umbel.privacy.accounting.rows import row_guarantee
from umbel.privacy.mechanisms import load
from umbel.privacy.mechanisms.gaussian import calibrate
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import LAPLACE, Release, ReleaseBy, participation

_CHOICE_SHARE, _LARGEST_CHOICE = 0.25, 2.0
_LEAST = 1e-4  # smallest wanted epsilon; a smaller one needs too much noise to learn anything
_RARE = 1e-3  # probability that a client takes part more often than planned
_DIGITS = 4  # of a computed noise multiplier
_NOTHING = 1e-300  # in place of an epsilon of 0, which has no logarithm
_MANY = 0.1  # product of delta and a number above which delta protects too few of so many
_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6  # noise multipliers of rows among which a search looks
_CLOSE = 1e-4  # of such a noise multiplier, relative


@dataclass(frozen=True)
class Task:
    """The parts of a training task that determine its noise."""

    parameters: int  # n
    hypotheses: int  # k
    clients: int  # that train
    clients_per_round: int  # U
    mechanism: str = LAPLACE
    by: ReleaseBy = ReleaseBy.CLIENT  # who adds the noise
    sites: int = 1  # if each adds noise to the sum of its clients' updates
    before: Release | None = None  # of each client, once, which a wanted guarantee covers too

    def __post_init__(self) -> None:
        for name in ("parameters", "hypotheses", "clients"):
            if getattr(self, name) < 1:
                raise impossible(name, "at least 1", getattr(self, name))
        if not 1 <= self.clients_per_round <= self.clients:
            raise impossible("clients-per-round", f"between 1 and the {self.clients} clients", self.clients_per_round)
        load(self.mechanism)

    def noise_left(self, noise_multiplier: float) -> float:
        """Return the root mean square norm of the noise left in a hypothesis after averaging, in clip norms.

        This assumes equally many clients for each hypothesis.
        """
        norm = load(self.mechanism)(noise_multiplier).deviation(self.parameters) * math.sqrt(self.parameters)
        each = self.clients_per_round / self.hypotheses
        if self.by is ReleaseBy.CLIENT:
            return norm / math.sqrt(each)
        return norm * math.sqrt(self.sites if self.by is ReleaseBy.SITE else 1) / each


@dataclass(frozen=True)
class Plan:
    """The figures of a planned run."""

    task: Task
    noise_multiplier: float
    choice_epsilon: float
    delta: float  # of the guarantees; 0 for a pure epsilon
    median_participations: int
    max_participations: int  # of all clients, in 99.9 % of runs

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise impossible("noise-multiplier", "a finite number above 0", self.noise_multiplier)
        if not 0 <= self.choice_epsilon < math.inf:
            raise impossible("choice-epsilon", "a finite number of at least 0", self.choice_epsilon)
        if not 0 <= self.delta < 1:
            raise impossible("delta", "at least 0 and below 1", self.delta)

    @property
    def release(self) -> Release:
        """The release of one participation, with a public clip norm."""
        task, choice = self.task, self.choice_epsilon
        own = participation(
            task.parameters, task.hypotheses, self.noise_multiplier, mechanism=task.mechanism, choice_epsilon=choice
        )
        return released_by(task.by, own)

    @property
    def median(self) -> Guarantee | None:
        """The median client's guarantee between any two of its data sets; None if there is none."""
        return self._guarantee(self.median_participations)

    @property
    def maximum(self) -> Guarantee | None:
        """The guarantee of the client with the most participations."""
        return self._guarantee(self.max_participations)

    def _guarantee(self, participations: int) -> Guarantee | None:
        return guarantee(with_before({self.release: participations}, self.task.before), self.delta)

    @property
    def noise_left(self) -> float:
        """See `Task.noise_left`."""
        return self.task.noise_left(self.noise_multiplier)

    @property
    def largest_curvature_step(self) -> float:
        """Step size times curvature must stay below this for stable rounds."""
        return 2 / (1 + self.noise_left**2)

    @property
    def warnings(self) -> list[str]:
        """Explanations of figures that mean trouble."""
        found = []
        if (most := self.maximum) is not None and most.epsilon > MEANINGFUL:
            found.append(
                f"The busiest client may spend epsilon {most.epsilon:,.0f}. Above {MEANINGFUL} a guarantee "
                "proves next to nothing, even if the noise stops particular attacks. Use a smaller model, more noise, "
                "or fewer rounds."
            )
        if self.noise_left > 1:
            found.append(
                f"The noise left in a hypothesis after averaging is {self.noise_left:.2g} times the update. "
                "If learning is too slow, ask more clients a round, or use fewer hypotheses or less noise."
            )
        return [*found, *large_delta(self.delta, self.task.clients, "clients")]


def large_delta(delta: float, count: int, what: str) -> list[str]:
    """Return the warning of a delta that protects too few of a number of clients or rows, if it does."""
    if delta * count <= _MANY:
        return []
    text = f"At delta {delta:g} a mechanism may publish one of {count:,} {what} outright"
    return [f"{text}: take a delta well below {1 / count:.2g}."]


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
    return Plan(task, noise_multiplier, choice_epsilon, delta, median, most)


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
    draft = Plan(task, 1.0, choice_epsilon, delta, participations, participations)
    return replace(draft, noise_multiplier=_noise_for(draft, target))


def usual_choice(target: float, participations: int) -> float:
    """Return a choice-epsilon: a quarter of a participation's share of the wanted epsilon, and at most 2."""
    return min(_CHOICE_SHARE * target / participations, _LARGEST_CHOICE)


def impossible(name: str, rule: str, value: float) -> ConfigError:
    """Return the error of a figure that breaks a rule."""
    return ConfigError(f"{name} must be {rule}, got {value}", code="config.impossible-figure")


def _noise_for(draft: Plan, target: float) -> float:
    """Return the smallest noise multiplier, with a few digits, with which a plan reaches the target."""
    task, delta, times, choice = draft.task, draft.delta, draft.max_participations, draft.choice_epsilon

    def epsilon(nu: float) -> float:
        return _covered(replace(draft, noise_multiplier=nu).maximum).epsilon

    def excess(log_nu: float) -> float:
        return math.log(max(epsilon(math.exp(log_nu)), _NOTHING) / target)

    rest = target - (float(pure_cost(task.before)) if task.before and not delta else 0.0)
    share = rest / times - (choice if draft.release.chooses else 0.0)
    if rest <= 0:
        raise _unreachable(target, delta, times, choice)
    if not delta and share > 0 and (one := load(task.mechanism)(1.0).pure(task.parameters, 2)) is not None:
        exactly = rounded_up(float(one) / share)  # a pure price is proportional to 1 / nu
        if epsilon(exactly) <= target:
            return exactly
    # With much noise the loss is nearly normal with mu = 2 / (nu of a Gaussian), and vector Laplace noise of n
    # components behaves like Gaussian noise of deviation nu / sqrt(n).
    scale = load(task.mechanism)(1.0).deviation(task.parameters)
    guess = math.log(calibrate(target, max(delta, 1e-9), 2.0) * math.sqrt(times) / scale)
    low, high = guess - 0.5, guess + 0.5
    while excess(high) > 0:
        low, high = high, high + 1
        if high > guess + 60:
            raise _unreachable(target, delta, times, choice)
    while excess(low) < 0:
        low, high = low - 1, low
    from scipy.optimize import brentq  # the import takes a third of a second

    root: Any = brentq(excess, low, high, xtol=5e-4)
    return rounded_up(math.exp(root + 5e-4))


def _unreachable(target: float, delta: float, times: int, choice: float) -> ConfigError:
    return ConfigError(
        f"no noise reaches epsilon {target:g} at delta {delta:g} over {times} participations with choice-epsilon "
        f"{choice:g}; lower choice-epsilon, or give another delta or mechanism",
        code="config.unreachable-epsilon",
    )


def _covered(found: Guarantee | None) -> Guarantee:
    if found is None:
        raise ConfigError("choice-epsilon must be above 0: an open choice has no guarantee", code="config.open-choice")
    return found


def row_noise_for(
    release_of: Callable[[float], Release],
    times: int,
    target: float,
    delta: float = DELTA,
    before: Release | None = None,
) -> float:
    """Return nearly the smallest noise multiplier in training with which rows have a wanted guarantee.

    Parameters
    ----------
    release_of : callable
        Returns the release of a participation that trains with a noise multiplier, sigma.
    times : int
        Participations of a client.
    target, delta : float
        Maximum epsilon, and delta, between two data sets of a client that differ by one row.
    before : Release, optional
        A client's release before the run.

    Raises
    ------
    ConfigError
        If the choice of a hypothesis is open, or no noise reaches the target.
    """

    def epsilon(sigma: float) -> float:
        return _covered(row_guarantee(with_before({release_of(sigma): times}, before), delta)).epsilon

    low, high = _LEAST_NOISE, 1.0
    while epsilon(high) > target:
        low, high = high, 2 * high
        if high > _MOST_NOISE:
            raise ConfigError(
                f"no noise reaches epsilon {target:g} for rows at delta {delta:g}; lower choice-epsilon, or ask for "
                "fewer participations",
                code="config.unreachable-epsilon",
            )
    while high > low * (1 + _CLOSE):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon(middle) <= target else (middle, high)
    return rounded_up(high)


def rounded_up(nu: float) -> float:
    """Return the number rounded up to a few digits."""
    digits = _DIGITS - 1 - math.floor(math.log10(nu))
    rounded = round(nu, digits)
    return rounded if rounded >= nu else round(nu + 10.0**-digits, digits)
