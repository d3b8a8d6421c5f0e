"""What all mechanisms have in common: their number, their price, and the ball they clip to."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mechanisms import Gaussian, Laplace, Mechanism
from mechanisms.base import Matrix, clip, exact, price


@pytest.mark.parametrize("kind", [Laplace, Gaussian])
@pytest.mark.parametrize("nu", [0.0, -1.0, math.nan, math.inf])
def test_a_noise_multiplier_is_finite_and_above_zero(kind: type[Mechanism], nu: float) -> None:
    with pytest.raises(ValueError, match="the noise multiplier must be finite and above 0"):
        kind(nu)


def test_a_number_is_the_decimal_that_people_write() -> None:
    assert exact(0.1) == Fraction(1, 10)
    assert exact(3) == 3
    assert exact(1e-300) == Fraction(1, 10**300)
    assert exact(np.float64(2.5)) == Fraction(5, 2)


def test_a_simple_price_is_exact() -> None:
    assert price(Fraction(11), Fraction(3)) == Fraction(11, 3)
    assert price(Fraction(1), Fraction(1000)) == Fraction(1, 1000)
    # Two of 0.1 cost what people think they do.
    assert Laplace(0.1).pure(1, 1) * 2 == 20


def test_a_price_that_is_not_simple_is_rounded_up() -> None:
    assert price(Fraction(1), Fraction(1001)) == Fraction(math.ceil(2**32 / 1001), 2**32)
    assert price(Fraction(1), Fraction(10) ** 300) == Fraction(1, 2**32)


@given(st.integers(1, 2_400_000), st.floats(1e-300, 1e300))
def test_a_price_is_never_less_and_hardly_more(above: int, nu: float) -> None:
    cost, true = price(Fraction(above), exact(nu)), Fraction(above) / exact(nu)
    assert true <= cost <= true + Fraction(1, 2**32)
    assert cost.denominator <= 2**32


@pytest.mark.parametrize("radius", [1.0, 0.1])
def test_updates_are_clipped_to_the_euclidean_ball(radius: float) -> None:
    updates = np.array([[3.0, 4.0], [0.03, 0.04], [0.0, 0.0]])
    expected = [[0.6 * radius, 0.8 * radius], [0.03, 0.04], [0.0, 0.0]]
    for mechanism in (Laplace(2.0), Gaussian(2.0)):
        with np.errstate(all="raise"):  # a norm of zero is nothing to divide by
            np.testing.assert_allclose(mechanism.constrain(updates, radius), expected, rtol=1e-15)


@given(
    hnp.arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 6)), elements=st.floats(-1e100, 1e100)),
    st.floats(1e-100, 1e100),
)
def test_clipped_rows_are_within_the_radius_and_keep_their_direction(updates: Matrix, radius: float) -> None:
    clipped = clip(updates, radius)
    norms = np.linalg.norm(updates, axis=1)
    long = norms > radius
    assert (np.linalg.norm(clipped, axis=1) <= radius * (1 + 1e-12)).all()
    np.testing.assert_array_equal(clipped[~long], updates[~long])
    np.testing.assert_allclose(clipped[long] / radius, updates[long] / norms[long, None], atol=1e-12)
