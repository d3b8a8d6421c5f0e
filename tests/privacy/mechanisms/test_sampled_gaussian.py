"""The loss of a step of DP-SGD, against integrals and against dp-accounting."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import stats

from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.privacy.mechanisms.sampled_gaussian import SampledGaussianLoss, step_losses

EPSILONS = np.array([-3.0, -0.4, 0.0, 0.1, 0.5, 1.0, 2.5, 9.0])


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.01), (0.6, 0.3), (2.0, 0.9), (5.0, 0.001)])
def test_delta_is_the_larger_of_adding_and_removing_by_integration(sigma: float, rate: float) -> None:
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 200_001)
    without = stats.norm.pdf(x, 0, sigma)
    mixture = (1 - rate) * without + rate * stats.norm.pdf(x, 1, sigma)
    for epsilon, delta in zip(EPSILONS, SampledGaussianLoss(sigma, rate).delta(EPSILONS), strict=True):
        both = [
            np.trapezoid(np.maximum(one - math.exp(abs(epsilon)) * other, 0), x)
            for one, other in ((mixture, without), (without, mixture))
        ]
        size = max(both)
        assert delta == pytest.approx(size if epsilon >= 0 else 1 - math.exp(epsilon) * (1 - size), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.02), (0.7, 0.2)])
def test_one_step_has_the_delta_that_dp_accounting_says(sigma: float, rate: float) -> None:
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    theirs = PLDAccountant().compose(event)
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        delta = float(SampledGaussianLoss(sigma, rate).delta(np.array([epsilon]))[0])
        assert delta == pytest.approx(theirs.get_delta(epsilon), rel=1e-3, abs=1e-12)


def test_without_sampling_a_step_is_normal_noise_at_a_distance_of_one_clip_norm() -> None:
    assert step_losses(2.0, 1.0, 7) == {GaussianLoss(0.5): 7}
    nearly = SampledGaussianLoss(2.0, 1 - 1e-12).delta(EPSILONS)
    assert nearly == pytest.approx(GaussianLoss(0.5).delta(EPSILONS), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("sigma", [0.01, 0.1, 50.0])
@pytest.mark.parametrize("rate", [1e-9, 0.5, 0.999])
def test_extreme_settings_have_a_finite_delta_between_0_and_1(sigma: float, rate: float) -> None:
    loss = SampledGaussianLoss(sigma, rate)
    found = loss.delta(np.array([0.0, 1.0, 50.0, 800.0]))
    assert np.all((found >= 0) & (found <= 1))
    assert np.all(np.diff(found) <= 0)
    assert math.isfinite(loss.deviation)
