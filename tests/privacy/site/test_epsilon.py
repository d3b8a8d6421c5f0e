"""An auditor's lower bound on epsilon, from samples alone, against what is stated."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from tests.helpers.noise import sanitise
from umbel.privacy.mechanisms.randomness import streams

# Enough for the bound to come above the halves and ones below; it proves less from as many draws where n is larger.
DRAWS = {1: 40_000, 2: 40_000, 3: 60_000}
FALSE_ALARM = 1e-6


RADIUS = 0.5


def releases(update: NDArray[np.float64], nu: float, seed: int) -> NDArray[np.float64]:
    """Return many releases of one update within the public radius, from the mechanism itself."""
    [generator] = streams(seed, "audit", 0, [0])
    draws = DRAWS[len(update)]
    return sanitise(np.tile(update, (draws, 1)), nu, RADIUS, "public", [generator] * draws)


def proves(n: int, nu: float, length: float = RADIUS / 2) -> float:
    """Return what releases of an update of that length and of its opposite prove."""
    axis = np.eye(1, n)[0]
    return lower_bound(releases(length * axis, nu, 1), releases(-length * axis, nu, 2), axis)


def lower_bound(first: NDArray[np.float64], second: NDArray[np.float64], statistic: NDArray[np.float64]) -> float:
    """Return the epsilon that samples from two inputs prove, wrongly with a chance of at most 1e-6.

    An event is chosen on one half of the samples, as the one that proves most, and counted on the
    other. `statistic` is the direction in which the two differ.
    """
    half = len(first) // 2
    a, b = first @ statistic, second @ statistic
    candidates = np.quantile(a[:half], np.linspace(0.001, 0.999, 200))
    chosen = candidates[np.argmax(proved(a[:half], b[:half], candidates)), None]
    return float(proved(a[half:], b[half:], chosen)[0])


def proved(a: NDArray[np.float64], b: NDArray[np.float64], thresholds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what being above each threshold proves: Clopper-Pearson bounds on two probabilities bound their ratio."""
    above = [len(values) - np.searchsorted(np.sort(values), thresholds, side="right") for values in (a, b)]
    low = stats.beta.ppf(FALSE_ALARM / 2, above[0], len(a) - above[0] + 1)
    high = stats.beta.ppf(1 - FALSE_ALARM / 2, above[1] + 1, len(b) - above[1])
    return np.log(low / high)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_public_radius_keeps_what_it_states(n: int) -> None:
    """Updates one radius apart are told apart by at most n / nu; nu = n, so by at most 1."""
    assert 0.5 < proves(n, nu=n) <= 1.0, "with less the audit would not notice anything"


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
def test_the_audit_catches_a_mechanism_with_half_the_noise(n: int) -> None:
    assert proves(n, nu=n / 2) > 1.0


@pytest.mark.slow
def test_clipping_keeps_any_two_updates_within_two_radii() -> None:
    """However long the updates are, they cost at most 2 n / nu apart."""
    assert 1.0 < proves(2, nu=2.0, length=1e6) <= 2.0
