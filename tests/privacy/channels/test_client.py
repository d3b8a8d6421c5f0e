"""The noise has the law of the paper, and every update gets as much of it as its radius asks for.

The statistical tests have fixed seeds and a false-alarm rate of at most 1e-6 each: had the seed
been drawn at random, a correct sampler would fail with that probability. There is one test a
claim and dimension, and for each claim a proof of power: plausible wrong samplers, which the same
test with the same number of draws catches.

Notation: rho in R^n is a noise of density proportional to exp(-eps |rho|), U = rho / |rho|.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from tests.helpers.errors import raises
from tests.helpers.messages import stacked, task_of
from tests.helpers.noise import sanitise
from tests.helpers.sites import simulated
from umbel.privacy.channels import Place
from umbel.privacy.channels.client import ClientSanitiser
from umbel.privacy.mechanisms import Gaussian, Laplace, Mechanism
from umbel.privacy.mechanisms.base import Matrix, NoiseSource
from umbel.privacy.mechanisms.sanitise import NOISE_STEPS, check_noise, min_radius, resolution, round_to_grid
from umbel.privacy.mechanisms.sanitise import sanitise as release
from umbel.protocol.errors import Refused
from umbel.protocol.release import Clipping

FALSE_ALARM = 1e-6
EPSILON = 0.7
DRAWS = {1: 20_000, 2: 20_000, 11: 20_000, 1000: 2_500}

Sampler = Callable[[int, int, np.random.Generator], Matrix]
"""(draws, n, generator) -> noise vectors (draws, n) at EPSILON."""


# --- claims: each takes noise vectors (draws, n) at EPSILON and returns a p-value


def norm_is_gamma(noise: Matrix) -> float:
    """|rho| ~ Gamma(n, 1/eps): Kolmogorov-Smirnov."""
    n = noise.shape[1]
    return float(stats.kstest(np.linalg.norm(noise, axis=1), stats.gamma(n, scale=1 / EPSILON).cdf).pvalue)


def direction_is_uniform(noise: Matrix) -> float:
    """For a fixed unit vector v, (1 + U.v)/2 ~ Beta((n-1)/2, (n-1)/2): Kolmogorov-Smirnov.

    For n = 1 the direction is a sign, which is + in half of the draws: exact binomial test.
    """
    n = noise.shape[1]
    if n == 1:
        return float(stats.binomtest(int((noise > 0).sum()), len(noise), 0.5).pvalue)
    v = np.random.default_rng(n).standard_normal(n)
    projection = (noise @ v) / (np.linalg.norm(noise, axis=1) * np.linalg.norm(v))
    return float(stats.kstest((1 + projection) / 2, stats.beta((n - 1) / 2, (n - 1) / 2).cdf).pvalue)


def no_axis_is_special(noise: Matrix) -> float:
    """E sum U_i^4 = 3/(n+2): z-test; noise that knows the axes has another value.

    Its exact variance: E U_1^8 = 105/D and E U_1^4 U_2^4 = 9/D with D = n(n+2)(n+4)(n+6), so
    E (sum U_i^4)^2 = n 105/D + n(n-1) 9/D = (9n + 96)/((n+2)(n+4)(n+6)), less the squared mean.
    (n = 2: 3/4 and 1/32.)
    """
    n = noise.shape[1]
    fourth = (noise**4).sum(axis=1) / (noise**2).sum(axis=1) ** 2
    second_moment = (9 * n + 96) / ((n + 2) * (n + 4) * (n + 6))
    z = (fourth.mean() - 3 / (n + 2)) / np.sqrt((second_moment - (3 / (n + 2)) ** 2) / len(fourth))
    # The mean of a skewed variable is only nearly normal: at so many draws the first Edgeworth term changes the tail
    # at 1e-6 by less than a factor of two, by which this is more than the two-sided value.
    return float(min(1.0, 2 * 2 * stats.norm.sf(abs(z))))


CLAIMS = {claim.__name__: claim for claim in (norm_is_gamma, direction_is_uniform, no_axis_is_special)}


@lru_cache
def drawn(n: int) -> Matrix:
    """Noise from the mechanism, the same for every claim about it."""
    generator = np.random.default_rng(20 + n)
    return Laplace(n / EPSILON).noise([n], np.ones((DRAWS[n], 1)), iter([generator] * DRAWS[n]))


# On a line there is but one axis: the sum of fourth powers is 1 always.
@pytest.mark.parametrize(
    ("claim", "n"), [(claim, n) for claim in CLAIMS for n in DRAWS if (claim, n) != ("no_axis_is_special", 1)]
)
def test_the_noise_has_the_law_of_the_paper(claim: str, n: int) -> None:
    """Lemma 4.3. False-alarm rate 1e-6 for each claim and n."""
    assert CLAIMS[claim](drawn(n)) > FALSE_ALARM


# --- proofs of power: wrong samplers, each a mistake that has been made somewhere (tools/mutants.toml has another)


def unit(vectors: Matrix) -> Matrix:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def independent(m: int, n: int, g: np.random.Generator) -> Matrix:
    """The mechanism for the 1-norm, with the right variance of a component, (n+1)/eps^2."""
    return g.laplace(scale=np.sqrt((n + 1) / 2) / EPSILON, size=(m, n))


def exponential(m: int, n: int, g: np.random.Generator) -> Matrix:
    """A norm of density exp(-eps r), without the r^(n-1) of a sphere's surface."""
    return unit(g.standard_normal((m, n))) * g.exponential(1 / EPSILON, (m, 1))


def towards_corners(m: int, n: int, g: np.random.Generator) -> Matrix:
    return unit(g.uniform(-1, 1, (m, n))) * g.gamma(n, 1 / EPSILON, (m, 1))


def never_negative(m: int, n: int, g: np.random.Generator) -> Matrix:
    return unit(g.uniform(0, 1, (m, n))) * g.gamma(n, 1 / EPSILON, (m, 1))


@pytest.mark.parametrize(
    ("claim", "wrong", "n"),
    [
        (norm_is_gamma, independent, 11),  # at n = 2 and 1000 the norms are too alike; the fourth powers tell
        *((norm_is_gamma, exponential, n) for n in (2, 1000)),
        *((direction_is_uniform, never_negative, n) for n in (1, 2, 1000)),
        *((no_axis_is_special, wrong, n) for wrong in (independent, towards_corners) for n in (2, 1000)),
    ],
)
def test_a_wrong_sampler_is_caught(claim: Callable[[Matrix], float], wrong: Sampler, n: int) -> None:
    assert claim(wrong(DRAWS[n], n, np.random.default_rng(3))) < FALSE_ALARM


# --- sanitise


def generators(count: int, seed: int = 0) -> list[np.random.Generator]:
    """Equal seeds give equal draws, so that noises can be compared exactly."""
    return [np.random.default_rng([seed, row]) for row in range(count)]


def test_without_noise_each_layer_is_clipped_to_the_radius_by_itself() -> None:
    updates = np.array([[3.0, 4.0, 0.5]])
    sanitised = sanitise(updates, 0.0, 1.0, "public", generators(1), [slice(0, 2), slice(2, 3)])
    np.testing.assert_allclose(sanitised, [[0.6, 0.8, 0.5]], rtol=1e-15)


def test_each_row_of_many_is_noised_within_its_own_radius() -> None:
    """|noise| ~ Gamma(k, nu r_i / k) for each row i of k = 8, r_i its norm or the floor.

    False-alarm rate 1e-6, for 6,000 rows of each of four norms and for the direction of the noise.
    """
    norms, k, nu, floor = np.tile([0.0, 0.01, 0.5, 7.0], 6000), 8, 3.0, 0.1
    directions = np.random.default_rng(4).standard_normal((len(norms), k))
    rows = norms[:, None] * directions / np.linalg.norm(directions, axis=1, keepdims=True)
    parts = [slice(begin, begin + k) for begin in range(0, rows.size, k)]
    noise = (sanitise(rows.reshape(1, -1), nu, floor, "update", generators(1), parts) - rows.reshape(1, -1)).reshape(
        -1, k
    )
    lengths = np.linalg.norm(noise, axis=1) / np.maximum(norms, floor)
    for norm in np.unique(norms):
        assert stats.kstest(lengths[norms == norm], stats.gamma(k, scale=nu / k).cdf).pvalue > FALSE_ALARM / 5
    cosines = (noise * directions).sum(axis=1) / np.linalg.norm(noise, axis=1) / np.linalg.norm(directions, axis=1)
    # The square of a coordinate of a uniform direction is Beta(1/2, (k - 1)/2).
    assert stats.kstest(cosines**2, stats.beta(0.5, (k - 1) / 2).cdf).pvalue > FALSE_ALARM / 5


@pytest.mark.parametrize(
    ("method", "spread"),
    [("noise", lambda rows: rows[0]), ("noise", lambda rows: rows[:, :1]), ("constrain", lambda rows: rows[0])],
    ids=["one row of noise for all", "one number for a row", "the first update for all"],
)
def test_a_mechanism_that_numpy_would_spread_over_clients_is_refused(
    method: str, spread: Callable[[Matrix], Matrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(Laplace, method)
    monkeypatch.setattr(Laplace, method, lambda *arguments: spread(right(*arguments)))
    with raises(Refused, "refused.mechanism-shape"):
        release(Laplace(5.0), np.eye(3), 1.0, Clipping.PUBLIC, generators(3))


# --- what 32-bit numbers can carry


def test_the_resolution_is_that_of_the_largest_hypothesis() -> None:
    """The largest numbers of all have one too: a server may send them, and what leaves must be numbers still."""
    assert resolution(np.array([[0.0, -1.5], [0.25, 1.0]])) == 2.0**-23
    assert resolution(np.array([[1000.0]])) == 2.0**-14
    assert resolution(np.array([[0.0, -3.2e38]])) == resolution(np.array([[np.finfo(np.float32).max]])) == 2.0**104


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


# --- why the radius of an update is a heuristic: the noise tells how long the update is


def test_releases_under_the_update_radius_exceed_the_papers_claim() -> None:
    """Two clients, n = 2 and nu = 5, have updates of norm 1 and 1/2. False-alarm rate 1e-6.

    By the paper's account their releases are alike within eps d = n/(nu/2) * 1/2 = .4, which would keep the total
    variation under (e^.4 - 1)/(e^.4 + 1) = .197. The true one is .368, which an attacker reaches that compares
    densities: eps^2/(2 pi) exp(-eps |x - update|) at eps = n/(nu |update|) each.
    """
    draws, full, half = 40_000, np.array([1.0, 0.0]), np.array([0.5, 0.0])

    def density(points: Matrix, center: Matrix, epsilon: float) -> NDArray[np.float64]:
        return epsilon**2 / (2 * np.pi) * np.exp(-epsilon * np.linalg.norm(points - center, axis=-1))

    rates = []
    for seed, update in enumerate((half, full)):
        sources = [np.random.default_rng([11, seed])] * draws
        left = sanitise(np.tile(update, (draws, 1)), 5.0, 0.01, Clipping.UPDATE, sources)
        rates.append((density(left, half, 0.8) > density(left, full, 0.4)).mean())
    # Of the difference of two frequencies: 4.9 standard deviations, at most.
    slack = 4.9 * math.sqrt(2 * 0.25 / draws)
    assert rates[0] - rates[1] == pytest.approx(0.3677, abs=slack)
    assert rates[0] - rates[1] > math.tanh(0.4 / 2) + slack


# --- threads


class Waiting:
    """Sources that wait until two of them draw at the same time."""

    def __init__(self) -> None:
        self.pair = threading.Barrier(2)

    def of(self, client: int) -> NoiseSource:
        generator = np.random.default_rng(client)

        class Source:
            def standard_normal(_, size: int) -> Matrix:
                self.pair.wait()
                return generator.standard_normal(size)

        return cast(NoiseSource, Source())


def released(sources: Iterator[NoiseSource], threads: int) -> NDArray[np.float32]:
    """Return the releases of four clients with three numbers each."""
    layout = {"weight": (3,)}
    task = task_of(tuple(range(4)), clipping="public", clip_norm=1.0, noise_multiplier=1.0, mechanism="gaussian")
    sanitiser = ClientSanitiser.of(Place(simulated()), stacked(np.zeros((1, 3)), layout), task)
    trained = stacked(np.arange(12).reshape(4, 3), layout)
    return sanitiser.sanitised(trained, np.zeros(4, np.int64), sources, threads).matrix


def test_threads_sanitise_clients_at_the_same_time_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.privacy.channels.client._BLOCK", 3)
    one_by_one = released(map(np.random.default_rng, range(4)), 1)
    assert released(map(Waiting().of, range(4)), 2).tolist() == one_by_one.tolist()


def test_large_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread needs several times the memory of a client's release."""
    monkeypatch.setattr("umbel.privacy.channels.client._BLOCK", 3)
    monkeypatch.setattr("umbel.privacy.channels.client._AT_ONCE", 5)
    shared = np.random.default_rng(0)  # only one may draw
    monkeypatch.setattr("umbel.privacy.channels.client.ThreadPoolExecutor", None)
    released(iter([shared] * 4), 8)
