"""The noise has its mechanism's law, part by part, and a seed goes on meaning what it meant.

The statistical tests have fixed seeds and a false-alarm rate of at most 1e-6 each: had the seed been drawn
at random, a correct sampler would fail with that probability. For each there is a wrong sampler that it catches.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from umbel.privacy.mechanisms import Gaussian, Laplace, Mechanism
from umbel.privacy.mechanisms.base import Matrix

MECHANISMS = [Laplace(3.0), Gaussian(3.0)]


def generators(count: int, seed: int = 0) -> list[np.random.Generator]:
    """Equal seeds give equal draws, so that noises can be compared exactly."""
    return [np.random.default_rng([seed, row]) for row in range(count)]


# --- Laplace


def first_release(sizes: list[int], epsilons: Matrix, sources: list[np.random.Generator]) -> Matrix:
    """The draws that saved runs were made of, line by line."""
    n, shapes = sum(sizes), [(size + 1) / 2 for size in sizes]
    mixing, noise = np.empty(epsilons.shape), np.empty((len(epsilons), n))
    for row, source in enumerate(sources):
        for part, shape in enumerate(shapes):
            mixing[row, part] = source.standard_gamma(shape)
        noise[row] = source.standard_normal(n)
    scales = np.sqrt(mixing * 2.0) / epsilons
    noise *= scales if len(sizes) == 1 else np.repeat(scales, sizes, axis=1)
    return noise


@pytest.mark.parametrize("sizes", [[7], [2, 1, 4], [1] * 7, [1000]])
@pytest.mark.parametrize("nu", [2.3, 1e-9, 5.0])
def test_laplace_noise_is_to_the_bit_what_saved_runs_had(sizes: list[int], nu: float) -> None:
    radii = np.random.default_rng(2).uniform(0.01, 10, (3, len(sizes)))
    before = first_release(sizes, sizes / (nu * radii), generators(3))
    assert Laplace(nu).noise(sizes, radii, iter(generators(3))).tobytes() == before.tobytes()


@pytest.mark.parametrize(("n", "expected"), [(1, np.sqrt(2.0)), (3, 2 / 3), (8, 3 / 8)])
def test_the_deviation_of_laplace_noise(n: int, expected: float) -> None:
    """Variance (n + 1)(nu/n)^2 (Lemma 4.3); on the line that of the Laplace distribution, 2 nu^2."""
    assert Laplace(1.0).deviation(n) == pytest.approx(expected)


# --- Gaussian


def test_gaussian_noise_is_normals_times_multiplier_and_radius() -> None:
    noise = Gaussian(2.0).noise([2, 1], np.array([[5.0, 0.5], [1.0, 1.0]]), iter(generators(2)))
    for row, scales in enumerate(([10.0, 10.0, 1.0], [2.0, 2.0, 2.0])):
        assert (noise[row] == generators(2)[row].standard_normal(3) * scales).all()


# --- both


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_each_part_is_scaled_by_its_own_radius_and_drawn_for_itself(mechanism: Mechanism) -> None:
    """The parts' norms are independent (Spearman, false alarm 1e-6), and doubling a radius doubles its part."""
    radii = np.tile([1.0, 0.25], (20_000, 1))
    shared = np.random.default_rng(9)
    noise = mechanism.noise([2, 3], radii, iter([shared] * len(radii)))
    norms = [np.linalg.norm(noise[:, part], axis=1) for part in (slice(0, 2), slice(2, 5))]
    assert stats.spearmanr(*norms).pvalue > 1e-6
    few = mechanism.noise([2, 3], radii[:4], iter(generators(4)))
    doubled = mechanism.noise([2, 3], radii[:4] * [1.0, 2.0], iter(generators(4)))
    np.testing.assert_allclose(doubled, few * [1, 1, 2, 2, 2], rtol=1e-15)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_a_generator_is_used_up_before_the_next_is_asked_for(mechanism: Mechanism) -> None:
    """So a generator may be made, or seeded, from what the one before left."""
    source = np.random.default_rng(1)

    def seeded():  # type: ignore[no-untyped-def]
        for row in range(3):
            source.bit_generator.state = np.random.default_rng([0, row]).bit_generator.state
            yield source

    expected = mechanism.noise([3], np.ones((3, 1)), iter(generators(3)))
    assert (mechanism.noise([3], np.ones((3, 1)), seeded()) == expected).all()


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_noise_is_float64_also_where_it_is_tiny(mechanism: Mechanism) -> None:
    noise = type(mechanism)(1e-300).noise([1000], np.ones((1, 1)), iter(generators(1)))
    assert noise.dtype == np.float64
    assert (noise != 0).all()
