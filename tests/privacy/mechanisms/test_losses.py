"""The privacy losses of the Laplace and the Gaussian mechanism, against other mathematics and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from tests.privacy.mechanisms.reference import laplace_delta
from umbel.privacy.mechanisms import Gaussian, Laplace
from umbel.privacy.mechanisms.base import Loss
from umbel.privacy.mechanisms.choice import RandomisedResponse
from umbel.privacy.mechanisms.gaussian import GaussianLoss, calibrate
from umbel.privacy.mechanisms.laplace_loss import LaplaceLoss


def delta(loss: Loss, epsilon: float) -> float:
    return float(loss.delta(np.array([epsilon]))[0])


# --- Laplace


@pytest.mark.parametrize("shift", [1e-3, 1.0, 50.0, 1e6])
def test_one_component_is_the_laplace_mechanism_on_the_line(shift: float) -> None:
    """Its delta is 1 - exp((epsilon - shift)/2), for negative epsilon as well."""
    loss = LaplaceLoss(1, shift)
    for share in (-0.5, 0.0, 0.3, 0.999):
        assert delta(loss, share * shift) == pytest.approx(-math.expm1((share - 1) * shift / 2), rel=1e-12)
    assert delta(loss, 2 * shift) == 0
    assert delta(loss, -2 * shift) == pytest.approx(-math.expm1(-2 * shift), rel=1e-12)


@pytest.mark.parametrize(
    ("n", "shift", "tolerance"),
    [(n, shift, 1e-12) for n in (2, 3, 4, 11) for shift in (1e-3, 0.1, 1.0, 8.0)]
    + [(210, shift, 1e-11) for shift in (0.1, 1.0, 30.0)]
    # The reference's own errors grow with n.
    + [(6000, 100.0, 1e-10), (6000, 3.0, 1e-10), (1_200_000, 1000.0, 1e-7), (1_200_000, 5000.0, 1e-7)],
)
def test_delta_is_what_the_norm_and_the_angle_of_the_noise_give(n: int, shift: float, tolerance: float) -> None:
    loss = LaplaceLoss(n, shift)
    for sigmas in (-1.0, 0.5, 2.0, 4.0):
        epsilon = min(loss.mean + sigmas * loss.deviation, 0.99 * shift)
        assert delta(loss, epsilon) == pytest.approx(laplace_delta(n, shift, np.array([epsilon]))[0], abs=tolerance)


def test_a_tail_keeps_its_digits() -> None:
    """For three components the density of the loss is elementary: exp(L/2) (c + 1 - (L/s)^2), c = (4/s)(1 + 2/s)."""
    s = 8.0

    def density(x: float) -> float:
        return math.exp(x / 2) * (4 / s * (1 + 2 / s) + 1 - (x / s) ** 2)

    total = integrate.quad(density, -s, s, epsabs=0, epsrel=1e-12)[0]

    def excess(x: float, epsilon: float) -> float:
        return -math.expm1(epsilon - x) * density(x)

    for epsilon in (0.5, 7.0, 7.999, 7.999999):
        part = integrate.quad(excess, epsilon, s, (epsilon,), epsabs=0, epsrel=1e-12)[0]
        assert delta(LaplaceLoss(3, s), epsilon) == pytest.approx(part / total, rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 11, 6000, 1_200_000])
@pytest.mark.parametrize("shift", [1e-3, 1.0, 1e3, 1e6])
def test_no_warning_and_no_surprise_at_any_scale(n: int, shift: float) -> None:
    """delta falls from 1 to 0, is convex in exp(epsilon), and not above that of pure epsilon = shift."""
    loss = LaplaceLoss(n, shift)
    with np.errstate(all="raise", under="ignore"):
        epsilons = np.unique(np.clip(loss.mean + loss.deviation * np.linspace(-8, 8, 200), -shift, shift))
        deltas = loss.delta(epsilons)
    assert (np.diff(deltas) <= 1e-12).all()
    assert ((deltas >= 0) & (deltas <= 1 + 1e-12)).all()
    # Slopes in exp(epsilon), times that at the point in between.
    steps, falls = np.diff(epsilons), np.diff(deltas)
    assert (falls[1:] / np.expm1(steps[1:]) - falls[:-1] / -np.expm1(-steps[:-1]) >= -1e-12 / steps[1:]).all()
    # (e^s - e^x)/(e^s + 1) is delta of randomised response between two, which no mechanism of pure s exceeds.
    for epsilon, value in zip(epsilons[::20], deltas[::20], strict=True):
        assert value <= delta(RandomisedResponse(shift, 2), epsilon) + 1e-12


@given(st.sampled_from([1, 2, 3, 11, 6000]), st.floats(0.01, 100), st.floats(-1, 1))
def test_losses_are_symmetric(n: int, shift: float, share: float) -> None:
    """delta(-x) = 1 - e^-x + e^-x delta(x): adding and removing are the same."""
    for loss in (LaplaceLoss(n, shift), GaussianLoss(shift)):
        at, opposite = loss.delta(np.array([share * shift, -share * shift]))
        expected = -np.expm1(-share * shift) + np.exp(-share * shift) * at
        assert opposite == pytest.approx(expected, rel=1e-9, abs=1e-12 * (1 + np.exp(-share * shift)))


def test_pure_epsilon_is_the_distance_over_nu_exactly() -> None:
    assert Laplace(0.1).pure(11, 2) == 220
    assert Laplace(3).pure(11, 1) * 3 == 11
    assert Laplace(1e-300).pure(1_200_000, 2) == 2_400_000 * 10**300
    assert 0 < float(Laplace(1e300).pure(1_200_000, 2)) < 1e-9
    assert Gaussian(1.0).pure(11, 2) is None


@pytest.mark.parametrize("nu", [5e-324, 1e-300, 1e300])
@pytest.mark.parametrize("n", [1, 2, 1_200_000])
def test_a_loss_exists_at_the_limits(nu: float, n: int) -> None:
    assert 0 <= Laplace(nu).loss(n, 2.0).largest < math.inf
    assert Gaussian(nu).loss(n, 2.0).mean >= 0


def test_inputs_that_are_the_same_cost_nothing() -> None:
    for mechanism in (Laplace(3.0), Gaussian(3.0)):
        loss = mechanism.loss(11, 0.0)
        assert (loss.mean, loss.deviation, loss.largest) == (0, 0, 0)
        np.testing.assert_allclose(loss.delta(np.array([-1.0, 0.0, 1.0])), [1 - math.exp(-1), 0, 0], atol=1e-15)


# --- Gaussian


@pytest.mark.parametrize("mu", [0.01, 1.0, 20.0])
def test_gaussian_delta_is_the_integral_over_the_loss(mu: float) -> None:
    loss = GaussianLoss(mu)
    law = stats.norm(loss.mean, loss.deviation)
    for sigmas in (-3.0, 0.0, 2.0, 5.0):
        epsilon = loss.mean + sigmas * mu
        breaks = [epsilon, epsilon + min(1, mu), max(epsilon, loss.mean) + 6 * mu, max(epsilon, loss.mean) + 20 * mu]
        expected = sum(
            integrate.quad(lambda x: -math.expm1(epsilon - x) * law.pdf(x), *ends, epsabs=1e-13)[0]  # noqa: B023
            for ends in itertools.pairwise(breaks)
        )
        assert delta(loss, epsilon) == pytest.approx(expected, abs=1e-11)


def test_gaussian_delta_does_not_overflow() -> None:
    assert delta(GaussianLoss(1000.0), 500_000.0) == pytest.approx(0.5, abs=1e-3)
    assert delta(GaussianLoss(0.1), 1e6) == 0


@given(st.floats(1e-3, 1e4), st.floats(-12, -0.1), st.floats(0.1, 10))
def test_calibrated_noise_has_the_delta_asked_for(epsilon: float, log_delta: float, distance: float) -> None:
    wanted = 10**log_delta
    nu = calibrate(epsilon, wanted, distance)
    assert delta(Gaussian(nu).loss(5, distance), epsilon) <= wanted
    assert delta(Gaussian(nu * (1 - 1e-8)).loss(5, distance), epsilon) > wanted * (1 - 1e-9)


def test_calibration_by_a_published_figure() -> None:
    """(1, 1e-5) at sensitivity 1 takes sigma = 3.7306 (Balle and Wang's analytic mechanism)."""
    assert calibrate(1.0, 1e-5, 1.0) == pytest.approx(3.7306, abs=1e-4)
    assert calibrate(1.0, 1e-5, 2.0) == pytest.approx(2 * calibrate(1.0, 1e-5, 1.0))
