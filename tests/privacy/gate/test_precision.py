"""What 32-bit numbers can carry."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.errors import raises
from umbel.privacy.gate.releases import check_noise, min_radius, resolution, round_to_grid
from umbel.privacy.mechanisms import Gaussian, Laplace, Mechanism
from umbel.protocol.errors import Refused
from umbel.protocol.release import NOISE_STEPS


def test_the_resolution_is_that_of_the_largest_hypothesis() -> None:
    assert resolution(np.array([[0.0, -1.5], [0.25, 1.0]])) == 2.0**-23
    assert resolution(np.array([[1000.0]])) == 2.0**-14


@pytest.mark.parametrize("largest", [2.0**127, 3.2e38, float(np.finfo(np.float32).max)])
def test_the_largest_numbers_of_all_have_a_resolution(largest: float) -> None:
    """A server may send them, and what a client releases must then be numbers still."""
    assert resolution(np.array([[0.0, -largest]])) == 2.0**104


def test_the_least_radius_by_hand() -> None:
    """n = 3: the standard deviation is nu r 2/3, so 16 steps of 2**-23 take r = 24 * 2**-23 / nu."""
    assert min_radius(Laplace(2.0).deviation(3), 2.0**-23) == pytest.approx(12 * 2.0**-23)


@given(st.integers(1, 2_000_000), st.floats(1e-3, 100), st.floats(1e-6, 10), st.floats(1e-3, 1e3))
def test_rounding_moves_a_value_by_less_than_the_noise(n: int, nu: float, radius: float, largest: float) -> None:
    spacing = float(np.spacing(np.float32(largest)))
    deviation = Laplace(nu).deviation(n)
    radius = max(radius, min_radius(deviation, spacing))
    values = np.random.default_rng(n).uniform(-largest, largest, 50)
    moved = np.abs(round_to_grid(values, deviation * radius, spacing) - values)
    noise = nu * radius * math.sqrt(n + 1) / n
    assert moved.max() <= noise / NOISE_STEPS * (0.5 + 1e-9)


def test_rounded_values_are_multiples_of_a_public_step_and_exact_in_32_bits() -> None:
    values = np.random.default_rng(0).uniform(-1, 1, 1000)
    rounded = round_to_grid(values, Laplace(3.0).deviation(11) * 0.01, 2.0**-24)
    step = np.diff(np.unique(rounded)).min()
    assert math.log2(step).is_integer()
    assert np.array_equal(rounded / step, np.rint(rounded / step))
    assert np.array_equal(rounded.astype(np.float32).astype(np.float64), rounded)


def test_a_large_model_with_little_noise_leaves_no_coordinate_without_noise() -> None:
    """At n = 1.2 million, nu = 1e-3 and radius .01, a cast to 32 bits swallows the noise of many.

    With the radius raised, the share of unchanged coordinates is that of a noise within half a
    step, which for 16 steps a standard deviation is at most .025.
    """
    n, nu, generator = 1_206_590, 1e-3, np.random.default_rng(3)
    weights = generator.uniform(-0.6, 0.6, n)
    spacing = resolution(weights[None])

    mechanism = Laplace(nu)

    def unchanged(radius: float, rounded: bool) -> float:
        [drawn] = mechanism.noise([n], np.array([[radius]]), iter([generator]))
        noisy = weights.astype(np.float32).astype(np.float64) + drawn
        deviation = mechanism.deviation(n) * radius
        out = round_to_grid(noisy, deviation, spacing) if rounded else noisy
        reference = round_to_grid(weights, deviation, spacing) if rounded else weights
        return float(np.mean(out.astype(np.float32) == reference.astype(np.float32)))

    assert unchanged(0.01, rounded=False) > 0.1
    assert unchanged(min_radius(mechanism.deviation(n), spacing), rounded=True) < 0.03


NUMBERS = st.floats(min_value=sys.float_info.min, max_value=sys.float_info.max)


@given(st.sampled_from([Laplace, Gaussian]), st.sampled_from([1, 2, 11, 1_206_590]), NUMBERS, NUMBERS)
def test_noise_that_passes_the_check_can_be_rounded(
    mechanism: type[Mechanism], n: int, noise_multiplier: float, radius: float
) -> None:
    try:
        check_noise(mechanism(noise_multiplier), n, radius)
    except Refused:
        return
    noise = mechanism(noise_multiplier).deviation(n) * radius
    assert 0 < noise < math.inf
    assert 0 < n / (noise_multiplier * radius) < math.inf
    assert np.isfinite(round_to_grid(np.ones(1), noise, 1e-7)).all()


@pytest.mark.parametrize(("nu", "radius"), [(1e200, 1e200), (1e-200, 1e-200), (3.0, math.inf), (1e307, 1.0)])
def test_noise_beyond_64_bits_is_refused(nu: float, radius: float) -> None:
    with raises(Refused, "refused.noise-out-of-range"):
        check_noise(Laplace(nu), 1000, radius)


@pytest.mark.parametrize(("nu", "radius"), [(5.0, 1e38), (1e12, 1e-6), (1e-3, 1e-6)])
def test_large_and_small_noise_pass(nu: float, radius: float) -> None:
    check_noise(Laplace(nu), 1_206_590, radius)
