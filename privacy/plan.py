"""What a run would cost its clients, before anything is run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from privacy.accountant import Guarantee, formal
from protocol.release import Kind, RadiusMode, Release

# Beyond this, a factor of e**epsilon between what two inputs may lead to says nothing.
MEANINGFUL_EPSILON = 20.0


@dataclass(frozen=True)
class Plan:
    """The figures of a planned run.

    Attributes
    ----------
    cost : float
        Of one participation, n / nu, within one radius.
    median_participations, max_participations : int
        Participations: of the median client, and expected of the busiest.
    formal_median, formal_max : Guarantee
        What radius ``public`` guarantees them, one radius apart.
    any_median, any_max : Guarantee
        The same for any two updates, which clipping keeps within two radii.
    noise_to_update : float
        Root mean square norm of the noise left in a hypothesis, in radii, after averaging.
    largest_curvature_step : float
        Step size times curvature must stay below this for the rounds to be stable.
    """

    cost: float
    median_participations: int
    max_participations: int
    formal_median: Guarantee
    formal_max: Guarantee
    any_median: Guarantee
    any_max: Guarantee
    noise_to_update: float
    largest_curvature_step: float

    @property
    def warnings(self) -> list[str]:
        """What the figures mean, where they mean trouble."""
        found = []
        if self.formal_max.epsilon > MEANINGFUL_EPSILON:
            found.append(
                f"The busiest client spends epsilon {self.formal_max.epsilon:,.0f}. Above {MEANINGFUL_EPSILON:.0f} "
                "a guarantee rules out nothing: the noise may stop particular attacks, but it proves nothing. "
                "Use a smaller model, more noise, or fewer rounds."
            )
        if self.noise_to_update > 1:
            found.append(
                f"The noise left in a hypothesis after averaging is {self.noise_to_update:.2g} times the update. "
                "Ask more clients a round, or use fewer hypotheses or less noise, if learning is too slow."
            )
        return found


def plan(
    n: int,
    noise_multiplier: float,
    hypotheses: int,
    clients: int,
    clients_per_round: int,
    rounds: int,
    delta: float,
) -> Plan:
    """Return the figures of a run.

    Every round draws `clients_per_round` of `clients` without replacement, so a client's
    participations are Binomial(rounds, clients_per_round / clients). The expected maximum takes
    clients for independent. The releases are taken to be shared out equally among hypotheses.

    Parameters
    ----------
    n : int
        Number of parameters.
    noise_multiplier : float
        nu, above 0.
    hypotheses, clients, clients_per_round, rounds : int
    delta : float

    Raises
    ------
    ValueError
        When a figure cannot be; the text names it.
    """
    for name, value in (("parameters", n), ("hypotheses", hypotheses), ("clients", clients), ("rounds", rounds)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 1 <= clients_per_round <= clients:
        raise ValueError(f"clients-per-round must be between 1 and the {clients} clients, got {clients_per_round}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, got {delta}")
    release = Release(Kind.TRAIN, n, noise_multiplier, RadiusMode.PUBLIC)
    cost = release.cost if math.isfinite(noise_multiplier) else None
    if cost is None:
        raise ValueError(f"noise-multiplier must be a finite number above 0, got {noise_multiplier}")
    count = stats.binom(rounds, clients_per_round / clients)
    median = int(count.median())
    # E[max] is the sum over m of the chance that somebody has more than m.
    most = round(float(np.sum(1 - count.cdf(np.arange(rounds)) ** clients)))
    averaged = clients_per_round / hypotheses
    spread = noise_multiplier**2 * (n + 1) / n / averaged
    return Plan(
        cost=float(cost),
        median_participations=median,
        max_participations=most,
        formal_median=formal({release: median}, delta),
        formal_max=formal({release: most}, delta),
        any_median=formal({release: median}, delta, distance=2.0),
        any_max=formal({release: most}, delta, distance=2.0),
        noise_to_update=math.sqrt(spread),
        largest_curvature_step=2 / (1 + spread),
    )
