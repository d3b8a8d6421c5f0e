"""Only noise of a tested law is fitted, and the fit's interval has the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from umbel_lab.attacks.defences.laws import FIT_LEVEL, GAUSSIAN, LAPLACE, VECTOR, fit, joint, p_value, vector_scale

TRIALS = 300


def drawn(law: str, generator: np.random.Generator, k: int = 300) -> np.ndarray:
    return generator.standard_normal((2, k)) if law == GAUSSIAN else generator.laplace(size=(2, k))


@pytest.mark.parametrize(("law", "other"), [(GAUSSIAN, LAPLACE), (LAPLACE, GAUSSIAN)])
def test_a_right_law_is_rejected_as_often_as_stated_and_the_other_law_always(law: str, other: str) -> None:
    """More often than the 99.9 % quantile of the binomial law, by chance in one of a thousand runs."""
    generator = np.random.default_rng(1)
    rejected = sum(p_value(*(7 + 3 * drawn(law, generator)), law) <= FIT_LEVEL for _ in range(TRIALS))
    assert rejected <= stats.binom.ppf(0.999, TRIALS, FIT_LEVEL)
    assert all(p_value(*drawn(law, generator, 500), other) <= FIT_LEVEL for _ in range(20))


@pytest.mark.parametrize("law", [GAUSSIAN, LAPLACE])
def test_the_interval_has_the_truth_as_often_as_stated(law: str) -> None:
    generator = np.random.default_rng(3)
    fits = [fit(one + 1, other - 1, 0.05) for one, other in (drawn(law, generator) for _ in range(TRIALS))]
    right = [found for found in fits if found and found.law == law]
    assert len(right) > 0.9 * TRIALS
    assert sum(not found.low <= 2 <= found.high for found in right) <= stats.binom.ppf(0.999, len(right), 0.05)


def test_a_gaussian_of_known_distance_has_the_epsilon_of_its_formula() -> None:
    """Two clip norms in deviations of .4845, as LocalDpMod(1, 1, 10, 1e-5) draws: 25.4, in three rounds 55.3."""
    generator = np.random.default_rng(4)
    found = fit(*(0.48448 * drawn(GAUSSIAN, generator, 20_000) + np.array([[1.0], [-1.0]])), 0.05)
    assert found is not None
    assert found.epsilon(1e-5) == pytest.approx(25.44, rel=0.03)
    assert found.epsilon(1e-5, 3) == pytest.approx(55.27, rel=0.03)
    assert found.epsilon(0.0) == math.inf


@pytest.mark.parametrize(("law", "n"), [(GAUSSIAN, 8), (VECTOR, 8), (VECTOR, 3)])
def test_the_law_of_a_vector_is_told_by_its_norm(law: str, n: int) -> None:
    """Of 100 right ones at least 90 pass, and none passes for the other: a law is rejected at 1 % or less."""
    told = []
    for seed in range(100):
        generator = np.random.default_rng([5, seed])
        noise = generator.standard_normal((1000, n))
        if law == VECTOR:
            norms = generator.standard_gamma(n, 1000)
            noise *= (norms / np.linalg.norm(noise, axis=1))[:, None]
        told.append(joint(2.0 + 0.5 * noise))
    assert told.count(law) >= 90
    assert {*told} <= {law, ""}


def test_the_least_scale_of_a_vector_is_below_its_scale_as_often_as_stated() -> None:
    """A level of 0.1 leaves 5 % above: of 200, more than 20 have a probability of 0.2 %."""
    above = 0
    for seed in range(200):
        generator = np.random.default_rng([6, seed])
        noise = generator.standard_normal((1000, 4))
        noise *= (generator.standard_gamma(4, 1000) / np.linalg.norm(noise, axis=1))[:, None]
        above += vector_scale(noise, 0.1) > 1.0
    assert above <= 20


def test_noise_of_no_law_is_not_fitted() -> None:
    for values in (
        np.ones((2, 100)), np.arange(10.0).reshape(2, 5), np.tile([1.0, -1.0], (2, 100)), np.exp(np.ones((2, 9))),
    ):  # fmt: skip
        assert fit(*values, 0.05) is None
    for values in (np.random.default_rng(7).uniform(-1, 1, (1000, 8)), np.ones((1000, 8)), np.ones((10, 8))):
        assert joint(values) == ""
