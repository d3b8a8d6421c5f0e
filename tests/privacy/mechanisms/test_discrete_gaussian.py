"""Noise on a grid: drawn exactly, added exactly, and never worth more than its zCDP says."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.helpers.errors import raises
from tests.helpers.examples import examples
from tests.helpers.noise import NoNoise
from umbel.privacy.mechanisms import DiscreteGaussian
from umbel.privacy.mechanisms.discrete_gaussian import ConcentratedLoss, _guide, _table, draw, to_grid
from umbel.privacy.mechanisms.sanitise import sanitise
from umbel.protocol.errors import Refused
from umbel.protocol.release import Clipping


class Scripted(NoNoise):
    """A source of given words, after which nothing may be drawn."""

    def __init__(self, *words: int) -> None:
        self._bytes = b"".join(word.to_bytes(8, "little") for word in words)

    def bytes(self, length: int) -> bytes:
        assert len(self._bytes) >= length, "more was drawn than it takes"
        found, self._bytes = self._bytes[:length], self._bytes[length:]
        return found


# --- drawn exactly


@pytest.mark.parametrize("scale", [1.0, 2.7, 300.7])
def test_a_table_holds_the_first_bits_of_the_probabilities(scale: float) -> None:
    """By sums with 1,000 bits."""
    first, table = _table(scale, 64)
    with mpmath.workprec(1000):
        reach = math.ceil(30 * scale)
        masses = [mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * mpmath.mpf(scale) ** 2)) for x in range(-reach, reach + 1)]
        total, below = mpmath.fsum(masses), mpmath.mpf(0)
        limits = []
        for mass in masses:
            below += mass
            limits.append(int(mpmath.floor(mpmath.ldexp(below / total, 64))))
    start = first + reach
    assert table == limits[start : start + len(table)]
    assert limits[start - 1] == 0
    assert limits[start + len(table)] == 2**64 - 1


def test_a_table_is_computed_with_more_bits_until_rounding_cannot_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _table(300.7, 64)
    monkeypatch.setattr("umbel.privacy.mechanisms.discrete_gaussian._GUARD", 82)  # two bits above the lost ones
    assert _table.__wrapped__(300.7, 64) == right


def test_a_word_between_two_limits_decides_by_itself() -> None:
    first, table = _table(2.7, 64)
    middle = -first
    assert draw(2.7, 1, Scripted(table[middle] - 1)) == [0]
    assert draw(2.7, 1, Scripted(table[middle - 1] + 1)) == [0]


def test_a_word_that_is_a_limit_is_decided_by_more_bits() -> None:
    first, table = _table(2.7, 64)
    limit = table[-first]
    assert draw(2.7, 1, Scripted(limit, 0)) == [0]
    assert draw(2.7, 1, Scripted(limit, 2**64 - 1)) == [1]
    longer, more = _table(2.7, 128)
    tie = more[-longer] & (2**64 - 1)
    assert draw(2.7, 1, Scripted(limit, tie, 0)) == [0], "and by still more where these are its own"


def test_the_ends_are_open() -> None:
    """A word of zeros or ones lies among numbers of chances below 2^-64, which more bits tell apart."""
    first, table = _table(2.7, 64)
    assert draw(2.7, 1, Scripted(0, 2**40)) < first
    assert draw(2.7, 1, Scripted(0, 2**64 - 1)) <= first
    assert draw(2.7, 1, Scripted(2**64 - 1, 2**64 - 2**40)) > first + len(table)


@pytest.mark.parametrize("scale", [1.0, 2.7, 300.7, 9000.5])
def test_a_guide_finds_what_a_search_of_the_table_finds(scale: float) -> None:
    """For words on both sides of each limit, at both ends, and anywhere."""
    limits = np.array(_table(scale, 64)[1], np.uint64)
    most, generator = np.uint64(2**64 - 1), np.random.default_rng(0)
    near = generator.integers(0, 2**20, 1000, dtype=np.uint64)
    words = [limits, limits - np.uint64(1), limits + np.uint64(1), near, most - near, np.array([0, most], np.uint64)]
    words.append(generator.integers(0, 2**64, 100_000, dtype=np.uint64))
    for some in words:
        assert np.array_equal(_guide(scale).places(some), np.searchsorted(limits, some, side="right"))


def test_many_draws_are_decided_in_blocks_and_last_of_all_the_undecided() -> None:
    """A word that is a limit takes one more, after those of all blocks."""
    _, table = _table(2.7, 64)
    words = np.random.default_rng(0).integers(0, 2**64, 40_000, dtype=np.uint64)
    expected = draw(2.7, len(words), Scripted(*words.tolist()))
    middle = next(iter(np.flatnonzero(expected == 0)))
    words[middle] = table[-_table(2.7, 64)[0]]
    found = draw(2.7, len(words), Scripted(*words.tolist(), 2**64 - 1))
    assert found[middle] == 1
    assert np.array_equal(np.delete(found, middle), np.delete(expected, middle))


def test_draws_have_the_law() -> None:
    """A false alarm in 10,000 of these tests, by chi-square."""
    draws = draw(3.3, 200_000, np.random.default_rng(0))
    values = np.arange(-12, 13)
    chances = np.exp(-(values**2) / (2 * 3.3**2)) / np.exp(-(np.arange(-99, 100) ** 2) / (2 * 3.3**2)).sum()
    found = np.array([(draws == value).sum() for value in values])
    rest = np.append(chances, 1 - chances.sum()) * len(draws)
    assert stats.chisquare(np.append(found, len(draws) - found.sum()), rest).pvalue > 1e-4


# --- added exactly


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.floats(0.01, 30), st.floats(1e-3, 1e3), st.integers(1, 40))
def test_an_update_is_moved_to_the_grid_within_the_radius(seed: int, nu: float, radius: float, n: int) -> None:
    mechanism = DiscreteGaussian(nu)
    updates = np.random.default_rng(seed).standard_normal((3, n)) * radius * [[0.1], [1.0], [100.0]]
    moved = mechanism.constrain(updates, radius)
    step, scale = mechanism._grid(radius, n)
    assert math.frexp(step)[0] == 0.5, "a power of two"
    assert Fraction(scale) * Fraction(step) >= Fraction(nu) * Fraction(radius)
    assert (moved == np.rint(moved / step) * step).all()
    for row in moved:
        assert sum(Fraction(float(x)) ** 2 for x in row) <= Fraction(radius) ** 2
    if np.linalg.norm(updates[0]) + step * math.sqrt(n) < radius:
        assert (np.abs(moved[0] - updates[0]) <= step / 2).all(), "a short update is moved to the nearest point"


@pytest.mark.parametrize(("n", "nu"), [(7, 20.0), (25_450, 48.0), (1_200_000, 2.0)])
def test_an_update_of_many_small_numbers_does_not_get_lost_on_the_grid(n: int, nu: float) -> None:
    """Rounded towards zero on a grid for the noise alone, all numbers of the second one would be 0."""
    updates = np.random.default_rng(n).standard_normal((2, n)) * [[1.0], [0.01]]
    moved = DiscreteGaussian(nu).constrain(updates, 3.0)
    clipped = updates * np.minimum(1, 3.0 / np.linalg.norm(updates, axis=1))[:, None]
    kept = (moved * clipped).sum(1) / np.square(clipped).sum(1)
    assert 0.9 < kept[0] <= 1.001, "nothing but what the radius takes"
    assert (np.linalg.norm(moved, axis=1) <= 3.0).all()


def test_noise_for_which_no_grid_is_fine_enough_is_refused() -> None:
    with raises(Refused, "refused.noise-out-of-range", "1,200,000"):
        DiscreteGaussian(100.0).constrain(np.ones((1, 1_200_000)), 3.0)


def test_an_update_that_is_too_long_when_rounded_is_made_shorter() -> None:
    """(1.6, 1.6) has the norm 2.26. Rounded it is (2, 2), of 2.83, and by hand (1, 1) is the longest inside."""
    assert to_grid(np.array([[1.6, 1.6]]), 2.3, 1.0).tolist() == [[1.0, 1.0]]
    assert to_grid(np.array([[1.6, 1.4]]), 2.3, 1.0).tolist() == [[2.0, 1.0]]
    assert to_grid(np.array([[0.7]]), 0.8, 1.0).tolist() == [[0.0]]


def test_update_and_noise_add_up_without_rounding() -> None:
    mechanism, radius = DiscreteGaussian(2.0), 0.3
    updates = np.random.default_rng(1).standard_normal((2, 5))
    noisy = sanitise(mechanism, updates, radius, Clipping.PUBLIC, [np.random.default_rng(seed) for seed in (2, 3)])
    step, scale = mechanism._grid(radius, 5)
    expected = [draw(scale, 5, np.random.default_rng(seed)) for seed in (2, 3)]
    steps = mechanism.constrain(updates, radius) / step
    assert (noisy / step == steps + expected).all()
    assert mechanism.deviation(5) * radius == pytest.approx(scale * step)


def test_counts_lie_on_the_grid_too() -> None:
    for nu in (0.5, 20.0, 1000.0):
        step, _ = DiscreteGaussian(nu)._grid(DiscreteGaussian(nu).count_radius(0.0), 1)
        assert (1 / step).is_integer()


def test_noise_of_too_many_steps_is_refused() -> None:
    with raises(Refused, "refused.noise-out-of-range", "100000"):
        DiscreteGaussian(1e5).noise([1], np.ones((1, 1)), iter([np.random.default_rng()]))


# --- what it is worth


@pytest.mark.parametrize("rho", [1e-4, 0.02, 0.5, 8.0])
def test_delta_is_the_best_over_orders(rho: float) -> None:
    epsilons = np.array([0.0, 0.1, 1.0, 5.0, 30.0])
    orders = 1 + np.geomspace(1e-6, 1e6, 400_001)[:, None]
    logs = (orders - 1) * (orders * rho - epsilons) + orders * np.log1p(-1 / orders) - np.log(orders - 1)
    expected = np.exp(np.minimum(logs.min(0), 0))
    assert ConcentratedLoss(rho).delta(epsilons) == pytest.approx(expected, rel=1e-6, abs=1e-300)


@pytest.mark.parametrize("shift", [(1,), (3,), (2, 1), (5, 5)])
@pytest.mark.parametrize("scale", [1.0, 4.3])
def test_noise_moved_by_whole_steps_tells_no_more(shift: tuple[int, ...], scale: float) -> None:
    """The exact delta, summed over all outcomes that have a chance."""
    values = np.arange(-math.ceil(12 * scale), math.ceil(12 * scale) + 1)
    here, loss = np.ones(1), np.zeros(1)
    for move in shift:
        mass = np.exp(-(values**2) / (2 * scale**2))
        here = np.outer(here, mass / mass.sum()).ravel()
        loss = np.add.outer(loss, ((values - move) ** 2 - values**2) / (2 * scale**2)).ravel()
    bound = ConcentratedLoss(sum(move**2 for move in shift) / (2 * scale**2))
    for epsilon in (0.0, 0.3, 1.0, 3.0):
        exact = float((here * -np.expm1(np.minimum(epsilon - loss, 0))).sum())
        assert exact <= bound.delta(np.array([epsilon]))[0] + 1e-15
