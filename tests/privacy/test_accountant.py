"""The formal guarantee, against closed forms, Monte Carlo, and published figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from privacy.accountant import Guarantee, formal, loss_cdf
from privacy.laplace import sample
from protocol.release import Kind, RadiusMode, Release

LOSSES = 5_000


def public(n: int, nu: float, **changes: Any) -> Release:
    return Release(**{"kind": Kind.TRAIN, "n": n, "noise_multiplier": nu, "radius_mode": RadiusMode.PUBLIC} | changes)


def one(n: int, nu: float, times: int, delta: float = 1e-5) -> Guarantee:
    return formal({public(n, nu): times}, delta)


def test_the_figures_for_the_hospital_network() -> None:
    """n = 11, nu = 3, 11 participations, delta = 1e-5: 40.3 pure, 19.9 by numerical composition."""
    guarantee = one(11, 3.0, 11)
    assert guarantee.pure == pytest.approx(121 / 3)
    assert guarantee.epsilon == pytest.approx(19.9, abs=0.05)


def test_the_figures_for_a_thousand_parameters() -> None:
    """n = 1000, nu = 100, 30 participations, delta = 1e-5: 300 pure, 8.5 numerically."""
    guarantee = one(1000, 100.0, 30)
    assert guarantee.pure == pytest.approx(300)
    assert guarantee.epsilon == pytest.approx(8.5, abs=0.1)


@pytest.mark.parametrize("delta", [1e-6, 1e-3, 0.05])
def test_one_parameter_is_the_laplace_mechanism(delta: float) -> None:
    """Its delta at epsilon is 1 - exp((epsilon - epsilon0)/2), so epsilon = epsilon0 + 2 ln(1 - delta)."""
    assert one(1, 0.5, 1, delta).epsilon == pytest.approx(2 + 2 * math.log1p(-delta), abs=2 / 2000)


@pytest.mark.parametrize("n", [1, 2, 3, 11, 1000])
def test_the_privacy_loss_has_the_distribution_of_simulated_losses(n: int) -> None:
    """Kolmogorov-Smirnov; false alarm 1e-6 each."""
    shift = min(n / 3, 20.0)
    generator = np.random.default_rng(5)
    noise = np.stack([sample(n, 1.0, generator) for _ in range(LOSSES)])
    moved = noise.copy()
    moved[:, 0] -= shift
    losses = np.linalg.norm(moved, axis=1) - np.linalg.norm(noise, axis=1)
    # Ties at the ends (the loss has atoms for n = 1) make the test conservative.
    inside = losses[np.abs(losses) < shift * (1 - 1e-9)]
    low, high, *chances = loss_cdf(n, shift, np.array([-shift, shift * (1 - 1e-9), *inside]))
    # What has this distribution is uniform on [0, 1] in its terms.
    assert stats.kstest((np.array(chances) - low) / (high - low), stats.uniform.cdf).pvalue > 1e-6


def test_a_wrong_loss_would_be_noticed() -> None:
    """The loss of another shift fails the test above."""
    generator = np.random.default_rng(5)
    noise = np.stack([sample(11, 1.0, generator) for _ in range(LOSSES)])
    moved = noise.copy()
    moved[:, 0] -= 3.0
    losses = np.linalg.norm(moved, axis=1) - np.linalg.norm(noise, axis=1)
    assert stats.kstest(losses, lambda values: loss_cdf(11, 3.3, np.clip(values, -3.3, 3.3))).pvalue < 1e-6


@pytest.mark.parametrize("n", [2, 3, 11])
def test_delta_is_what_simulated_losses_show(n: int) -> None:
    """E[(1 - exp(epsilon - L))+] over two participations; six standard errors, and never more than delta."""
    shift = n / 3.0
    guarantee = one(n, 3.0, 2, delta=0.01)
    generator = np.random.default_rng(7)
    total = np.zeros(500_000)
    for _ in range(2):
        mixing = generator.standard_gamma((n + 1) / 2, size=len(total)) * 2
        noise = generator.standard_normal((len(total), n)) * np.sqrt(mixing)[:, None]
        # Under P the noise is centred at 0; the loss is log P/Q.
        total += np.linalg.norm(noise - np.eye(1, n) * shift, axis=1) - np.linalg.norm(noise, axis=1)
    excess = np.maximum(1 - np.exp(guarantee.epsilon - total), 0)
    error = excess.std() / math.sqrt(len(excess))
    assert excess.mean() <= 0.01 + 6 * error, "the stated epsilon must not be too small"
    assert excess.mean() >= 0.009 - 6 * error, "nor far too large"


def test_releases_of_different_price_compose() -> None:
    both = formal({public(11, 3.0): 3, public(2, 2.0): 2}, 1e-5)
    first, second = one(11, 3.0, 3), one(2, 2.0, 2)
    assert both.pure == pytest.approx(first.pure + second.pure)
    assert max(first.epsilon, second.epsilon) < both.epsilon < both.pure


def test_more_participations_cost_more_and_never_more_than_pure() -> None:
    spent = [one(11, 3.0, times).epsilon for times in (0, 1, 2, 5, 20)]
    assert spent == sorted(spent)
    assert spent[0] == 0
    assert spent[1] <= 11 / 3


def test_two_radii_apart_costs_twice_as_much_pure() -> None:
    assert formal({public(11, 3.0): 4}, 1e-5, distance=2.0).pure == pytest.approx(2 * one(11, 3.0, 4).pure)


def test_the_radius_and_what_was_released_play_no_part() -> None:
    """A guarantee is in radii, and a report is a release like any other."""
    releases = {public(11, 3.0, radius=0.5): 3, public(11, 3.0, radius=0.1): 2, public(11, 3.0, kind=Kind.REPORT): 1}
    assert formal(releases, 1e-5) == one(11, 3.0, 6)


def test_who_released_nothing_has_spent_nothing() -> None:
    assert formal({}, 1e-5) == formal({public(11, 3.0): 0}, 1e-5) == Guarantee(0.0, 0.0, 1e-5)


@pytest.mark.parametrize("release", [public(11, 0.0), public(11, 3.0, radius_mode=RadiusMode.UPDATE)])
def test_nothing_is_guaranteed_without_noise_or_without_a_public_radius(release: Release) -> None:
    with pytest.raises(ValueError, match="without noise, or without a public radius, has no guarantee"):
        formal({public(11, 3.0): 1, release: 1}, 1e-5)
