"""Noise that nobody can predict; statistics with a false alarm of 1e-6 each."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tests.helpers.noise import sample
from umbel.privacy.gate import randomness
from umbel.privacy.gate.randomness import SecureGenerator


@pytest.fixture
def fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys from a fixed seed, so that a statistical test says the same every time."""
    keys = np.random.default_rng(11)
    monkeypatch.setattr(randomness.secrets, "token_bytes", keys.bytes)


def test_random_numbers_are_uniform_from_0_up_to_1(fixed_keys: None) -> None:
    """As numpy's are: 0 may come out, 1 never. They decide who hides its choice, and behind what."""
    numbers = SecureGenerator().random(300_001)
    assert numbers.shape == (300_001,)
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    assert stats.kstest(numbers, "uniform").pvalue > 1e-6
    assert stats.kstest(numbers**1.02, "uniform").pvalue < 1e-6, "a law that is a little off is found out"
    assert stats.pearsonr(numbers[:-1], numbers[1:]).pvalue > 1e-6


@pytest.mark.parametrize(("bits", "number"), [(b"\x00", 0.0), (b"\xff", 1 - 2.0**-53)])
def test_the_ends_of_the_range_of_random_numbers(monkeypatch: pytest.MonkeyPatch, bits: bytes, number: float) -> None:
    generator = SecureGenerator()

    class Stream:
        """A key stream of the same bits throughout."""

        def update(self, data: bytes) -> bytes:
            return bits * len(data)

    monkeypatch.setattr(generator, "_stream", Stream())
    assert generator.random(3).tolist() == [number] * 3


def test_normals_are_normal(fixed_keys: None) -> None:
    assert stats.kstest(SecureGenerator().standard_normal(300_001), "norm").pvalue > 1e-6


def test_normals_are_independent_of_their_neighbours(fixed_keys: None) -> None:
    """Box-Muller makes pairs; neither neighbours nor partners, nor their squares, may correlate."""
    normals = SecureGenerator().standard_normal(200_000)
    for lag in (1, 2, 100_000 % (1 << 15), 1 << 15):
        for values in (normals, normals**2):
            assert stats.pearsonr(values[:-lag], values[lag:]).pvalue > 1e-6


@pytest.mark.parametrize("shape", [0.5, 1.0, 1.5, 6.0])
def test_gammas_are_gamma(fixed_keys: None, shape: float) -> None:
    generator = SecureGenerator()
    draws = [generator.standard_gamma(shape) for _ in range(20_000)]
    assert stats.kstest(draws, "gamma", args=(shape,)).pvalue > 1e-6


def test_a_gamma_of_many_blocks_has_the_right_mean(fixed_keys: None) -> None:
    """Shape 100,000 has mean 100,000 and standard deviation 316; five of them."""
    assert SecureGenerator().standard_gamma(100_000.0) == pytest.approx(100_000, abs=5 * 317)


@pytest.mark.parametrize("shape", [0.0, -1.0, 0.3])
def test_other_shapes_are_refused(shape: float) -> None:
    with pytest.raises(ValueError, match="multiple of 1/2"):
        SecureGenerator().standard_gamma(shape)


def test_the_mechanism_draws_from_it_as_from_numpy(fixed_keys: None) -> None:
    generator = SecureGenerator()
    norms = [float(np.linalg.norm(sample(11, 2.0, generator))) for _ in range(20_000)]
    assert stats.kstest(norms, "gamma", args=(11, 0, 0.5)).pvalue > 1e-6


def test_no_two_generators_agree_and_no_seed_reaches_them() -> None:
    np.random.seed(0)  # noqa: NPY002 - what a server might try
    first = SecureGenerator().standard_normal(4)
    np.random.seed(0)  # noqa: NPY002
    assert not np.array_equal(first, SecureGenerator().standard_normal(4))
