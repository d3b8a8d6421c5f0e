"""Randomised response: its probabilities, its draws, and its loss.

The statistical tests have fixed seeds and a false-alarm rate of at most 1e-6 each.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from umbel.privacy.mechanisms.choice import OWN, RandomisedResponse, draw, keep_probability


@pytest.mark.parametrize(
    ("epsilon", "k", "expected"),
    [(math.log(3), 2, 0.5), (math.log(3), 4, 1 / 3), (0.0, 5, 0.0), (1e6, 7, 1.0), (math.inf, 7, 1.0)],
)
def test_keeping_by_hand(epsilon: float, k: int, expected: float) -> None:
    assert keep_probability(epsilon, k) == pytest.approx(expected, rel=1e-15)


@given(st.floats(1e-12, 700), st.integers(1, 10**9))
def test_keeping_makes_the_best_exp_epsilon_times_as_likely_as_another(epsilon: float, k: int) -> None:
    keep = keep_probability(epsilon, k)
    assert 0 < keep <= 1
    other = math.exp(-epsilon) / (1 + (k - 1) * math.exp(-epsilon))
    assert keep + other == pytest.approx(1 / (1 + (k - 1) * math.exp(-epsilon)), rel=1e-12)


class Scripted:
    """A source of given numbers, which counts how often it is asked."""

    def __init__(self, *numbers: float) -> None:
        self.numbers, self.asked = numbers, []

    def random(self, size: int) -> np.ndarray:
        self.asked.append(size)
        return np.array(self.numbers)


def test_a_choice_by_hand() -> None:
    """With e^epsilon = 3 and k = 4 a third is kept; the rest falls on k equal pieces of [0, 1)."""
    numbers = [(0.33, 0.9), (0.34, 0.0), (0.34, 0.49), (0.34, 0.5), (0.34, 1 - 2**-53)]
    sources = [Scripted(*pair) for pair in numbers]
    choices = draw(math.log(3), 4, sources)
    assert choices.tolist() == [OWN, 0, 1, 2, 3]
    assert choices.dtype == np.int64
    assert [source.asked for source in sources] == [[2]] * 5, "two numbers a client, whatever comes of them"


def test_choices_have_their_probabilities() -> None:
    """Chi-squared over OWN and each of k = 5: false alarm 1e-6; another epsilon is caught."""
    epsilon, k, m = 1.2, 5, 20_000
    source = np.random.default_rng(3)
    counts = np.bincount(draw(epsilon, k, [source] * m) + 1, minlength=k + 1)
    for assumed, right in ((epsilon, True), (1.4, False)):
        keep = keep_probability(assumed, k)
        expected = m * np.array([keep, *[(1 - keep) / k] * k])
        assert (stats.chisquare(counts, expected).pvalue > 1e-6) == right


@given(st.fractions(0, 5, max_denominator=10), st.integers(2, 6), st.fractions(-6, 6, max_denominator=10))
def test_delta_is_the_hockey_stick_of_the_probabilities(epsilon: Fraction, k: int, at: Fraction) -> None:
    """sum (P(j) - e^x Q(j))+ over the k answers, for two clients with different best ones."""
    p = np.exp(float(epsilon) * np.eye(k)[0])
    q = np.exp(float(epsilon) * np.eye(k)[1])
    expected = np.maximum(p / p.sum() - math.exp(at) * q / q.sum(), 0).sum()
    assert RandomisedResponse(float(epsilon), k).delta(np.array([float(at)]))[0] == pytest.approx(expected, abs=1e-14)


def test_a_choice_among_one_gives_nothing_away() -> None:
    loss = RandomisedResponse(3.0, 1)
    assert (loss.mean, loss.deviation, loss.largest) == (0, 0, 0)
    np.testing.assert_allclose(loss.delta(np.array([-1.0, 0.0, 2.0])), [1 - math.exp(-1), 0, 0], atol=1e-15)
