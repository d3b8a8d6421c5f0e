"""What all mechanisms have in common: a name, their number, and the ball they clip to."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.helpers.errors import raises
from umbel.privacy.mechanisms import MECHANISMS, Gaussian, Laplace, Mechanism, load
from umbel.privacy.mechanisms.base import Matrix, clip
from umbel.protocol.errors import ConfigError


@pytest.mark.parametrize("kind", [Laplace, Gaussian])
@pytest.mark.parametrize("nu", [0.0, -1.0, math.nan, math.inf])
def test_a_noise_multiplier_is_finite_and_above_zero(kind: type[Mechanism], nu: float) -> None:
    with pytest.raises(ValueError, match="the noise multiplier must be finite and above 0"):
        kind(nu)


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


def test_a_mechanism_is_found_under_its_own_name() -> None:
    assert {name: kind.name for name, kind in MECHANISMS.items()} == {name: name for name in MECHANISMS}
    assert load("laplace") is Laplace
    assert load("gaussian") is Gaussian


def test_your_own_mechanism_is_imported() -> None:
    assert load("umbel.privacy.mechanisms.gaussian:Gaussian") is Gaussian


@pytest.mark.parametrize(
    ("name", "code"), [("lapalce", "unknown-name"), ("umbel.privacy.mechanisms.gaussian:GaussianLoss", "not-built-on")]
)
def test_what_is_no_mechanism_is_an_error(name: str, code: str) -> None:
    with raises(ConfigError, f"config.{code}", name):
        load(name)
