"""What composes is never below an independent lower bound, and close above it.

Each bracket is by other mathematics than the accountant's: closed forms, exact sums over outcomes, and losses
rounded down to a grid of their own (`tests.privacy.mechanisms.reference`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from tests.helpers.examples import examples
from tests.privacy.mechanisms.reference import (
    Masses,
    add,
    delta_of,
    epsilon_of,
    laplace_cdf,
    rounded_down,
)
from umbel.privacy.accounting import accountant
from umbel.privacy.accounting.accountant import compose
from umbel.privacy.mechanisms import Gaussian, Laplace
from umbel.privacy.mechanisms.base import Loss, Matrix
from umbel.privacy.mechanisms.choice import RandomisedResponse
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.privacy.mechanisms.laplace_loss import LaplaceLoss

DELTA = 1e-5
# Shifts at which one release is neither free nor hopeless.
SHIFTS = {1: 0.8, 2: 1.0, 3: 0.5, 11: 11 / 3, 210: 5.0, 6000: 60.0, 1_200_000: 1000.0}


@dataclass(frozen=True)
class Hidden(Loss):
    """A loss that the accountant knows nothing else about, so that it goes by the grid."""

    inner: Loss

    @property
    def mean(self) -> float:
        return self.inner.mean

    @property
    def deviation(self) -> float:
        return self.inner.deviation

    @property
    def largest(self) -> float:
        return self.inner.largest

    def delta(self, epsilons: Matrix) -> Matrix:
        return self.inner.delta(epsilons)


def bracketed(epsilon: float, lower: float, above: float = 0.02) -> None:
    assert lower * (1 - 1e-6) <= epsilon <= lower * (1 + above)


def laplace_masses(n: int, interval: float) -> Masses:
    """Losses of one release at SHIFTS[n], rounded down; those far in the lower tail are left out."""
    shift = SHIFTS[n]
    mu = shift / math.sqrt(n)
    high = min(shift, mu**2 / 2 + 9 * mu) if n > 100 else shift
    return rounded_down(lambda losses: laplace_cdf(n, shift, losses), max(-shift, -9 * mu), high, interval)


# --- brackets


@pytest.mark.parametrize(
    ("n", "times"), [*((n, 3) for n in SHIFTS), *((n, 300) for n in (1, 2, 11, 1_200_000)), (11, 30)]
)
def test_laplace_releases(n: int, times: int) -> None:
    epsilon = compose({LaplaceLoss(n, SHIFTS[n]): times}, DELTA)
    # Rounding down takes half an interval a release, here 0.5 % of epsilon; on the line, all of the atom's stay.
    interval = 0.01 * epsilon / times
    if n == 1:
        interval = SHIFTS[n] / math.ceil(SHIFTS[n] / interval)
    sums = add([(laplace_masses(n, interval), times)])
    bracketed(epsilon, epsilon_of(lambda x: delta_of(sums, x), DELTA, 2 * epsilon))


@pytest.mark.parametrize("mu", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("times", [1, 100, 10_000])
def test_gaussian_releases_on_the_grid(mu: float, times: int) -> None:
    """Their sum is N(T mu^2/2, T mu^2), whatever the grid makes of each."""
    root = mu * math.sqrt(times)

    def closed_form(x: float) -> float:
        return float(stats.norm.sf(x / root - root / 2) - np.exp(x + stats.norm.logsf(x / root + root / 2)))

    expected = epsilon_of(closed_form, DELTA, root**2 / 2 + 10 * root)
    assert compose({GaussianLoss(mu): times}, DELTA) == pytest.approx(expected, rel=1e-6)
    bracketed(compose({Hidden(GaussianLoss(mu)): times}, DELTA), expected, 0.005)


def response_sums(epsilon: float, k: int, times: int) -> list[tuple[float, float]]:
    """Every sum of losses with its probability: a times +epsilon and b times -epsilon, a multinomial."""
    total = math.exp(epsilon) + k - 1
    logs = [epsilon - math.log(total), -math.log(total), math.log((k - 2) / total) if k > 2 else -math.inf]
    sums = []
    for a, b in itertools.product(range(times + 1), repeat=2):
        rest = times - a - b
        if rest >= 0 and (k > 2 or rest == 0):
            log = special.gammaln(times + 1) - special.gammaln([a + 1, b + 1, rest + 1]).sum()
            log += a * logs[0] + b * logs[1] + (rest * logs[2] if rest else 0)
            sums.append(((a - b) * epsilon, math.exp(log)))
    return sums


@pytest.mark.parametrize(("own", "k"), [(0.1, 2), (0.5, 3), (1.0, 10), (4.0, 5), (3.0, 10_000)])
@pytest.mark.parametrize("times", [1, 2, 40])
def test_choices(own: float, k: int, times: int) -> None:
    sums = response_sums(own, k, times)

    def exact(x: float) -> float:
        return sum(p * -math.expm1(min(x - loss, 0)) for loss, p in sums)

    expected = epsilon_of(exact, DELTA, own * times)
    bracketed(compose({RandomisedResponse(own, k): times}, DELTA), expected, 0.005)


def test_releases_of_every_kind_together() -> None:
    """20 of 6000 numbers, 10 of 2, 10 choices, and 5 Gaussian ones that count as one."""
    kinds: dict[Loss, int] = {
        LaplaceLoss(6000, SHIFTS[6000]): 20,
        LaplaceLoss(2, SHIFTS[2]): 10,
        RandomisedResponse(0.8, 4): 10,
        GaussianLoss(0.4): 5,
    }
    epsilon = compose(kinds, DELTA)
    interval = 0.01 * epsilon / 41
    root = 0.4 * math.sqrt(5)
    choice = RandomisedResponse(0.8, 4)
    total = math.exp(0.8) + 3
    steps = [(-0.8, 1 / total), (0.0, 2 / total), (0.8, math.exp(0.8) / total)]
    assert choice.largest == 0.8

    def response(losses: Matrix) -> Matrix:
        return sum(p * (losses >= at) for at, p in steps) + np.zeros_like(losses)

    sums = add(
        [
            (laplace_masses(6000, interval), 20),
            (laplace_masses(2, interval), 10),
            (rounded_down(response, -0.8 - interval, 0.8, interval), 10),
            (rounded_down(stats.norm(root**2 / 2, root).cdf, -6.0, 9.0, interval), 1),
        ]
    )
    bracketed(epsilon, epsilon_of(lambda x: delta_of(sums, x), DELTA, 2 * epsilon))


# --- the shape of the result


@settings(max_examples=examples(15), deadline=None)
@given(
    st.sampled_from([1, 2, 11, 6000]),
    st.floats(0.05, 5.0),
    st.integers(1, 50),
    st.sampled_from([Laplace, Gaussian]),
    st.floats(-9, -2),
)
def test_more_costs_more(n: int, root: float, times: int, kind: type, log_delta: float) -> None:
    """More releases, less noise, a greater distance or a smaller delta never cost less, up to the grid's 0.5 %."""
    at = 10**log_delta
    nu = math.sqrt(n) / root if kind is Laplace else 1 / root
    base = compose({kind(nu).loss(n, 1.0): times}, at)
    for more in (
        compose({kind(nu).loss(n, 1.0): 2 * times}, at),
        compose({kind(nu / 1.5).loss(n, 1.0): times}, at),
        compose({kind(nu).loss(n, 1.5): times}, at),
        compose({kind(nu).loss(n, 1.0): times}, at / 10),
        compose({kind(nu).loss(n, 1.0): times, RandomisedResponse(0.5, 3): 2}, at),
    ):
        assert more >= base * (1 - 0.005)


@pytest.mark.parametrize(
    "loss", [LaplaceLoss(11, 1.0), LaplaceLoss(1, 0.3), Hidden(GaussianLoss(0.3)), RandomisedResponse(0.4, 4)], ids=str
)
def test_every_release_more_costs_more(loss: Loss) -> None:
    """What a ledger has spent never falls, not even by the grid's excess."""
    spent = [compose({loss: times}, DELTA) for times in [*range(20), 99, 100, 101, 999, 1000, 1001, 10_000]]
    assert (np.diff(spent) > 0).all()


@settings(max_examples=examples(15), deadline=None)
@given(st.sampled_from([1, 2, 11, 6000, 1_200_000]), st.floats(1e-6, 1e7), st.integers(1, 10_000), st.floats(-12, -1))
def test_never_more_than_pure_and_never_nonsense(n: int, shift: float, times: int, log_delta: float) -> None:
    epsilon = compose({LaplaceLoss(n, shift): times}, 10**log_delta)
    assert 0 <= epsilon <= shift * times * (1 + 1e-12)


def test_at_delta_zero_largest_losses_add_up() -> None:
    assert compose({LaplaceLoss(11, 2.5): 3, RandomisedResponse(0.5, 4): 2}, 0.0) == 8.5
    assert compose({LaplaceLoss(11, 2.5): 3, GaussianLoss(1.0): 1}, 0.0) == math.inf
    # So small a delta that rounding would drown it.
    assert compose({LaplaceLoss(11, 2.5): 3}, 1e-16) == 7.5


def test_who_released_nothing_has_spent_nothing() -> None:
    assert compose({}, DELTA) == compose({LaplaceLoss(11, 2.0): 0, GaussianLoss(1.0): 0}, DELTA) == 0
    assert compose({LaplaceLoss(11, 0.0): 5, GaussianLoss(0.0): 5, RandomisedResponse(2.0, 1): 5}, DELTA) == 0


def test_equal_releases_are_the_same_however_they_are_told() -> None:
    assert compose({Laplace(3.0).loss(12, 1.0): 4}, DELTA) == compose({Laplace(6.0).loss(12, 2.0): 4}, DELTA)
    both = compose({GaussianLoss(3.0): 1, GaussianLoss(4.0): 1}, DELTA)
    assert both == pytest.approx(compose({GaussianLoss(5.0): 1}, DELTA), rel=1e-12)


def test_prices_beyond_all_bounds_are_added_up() -> None:
    assert compose({Laplace(1e-300).loss(11, 1.0): 2}, DELTA) == pytest.approx(2.2e301)
    assert compose({Laplace(5e-324).loss(11, 1.0): 2}, DELTA) == math.inf
    assert compose({Gaussian(1e-300).loss(11, 1.0): 2}, DELTA) == math.inf
    assert compose({Laplace(1e300).loss(11, 1.0): 2}, DELTA) < 1e-290
    with_huge = compose({LaplaceLoss(11, 1e12): 1, LaplaceLoss(11, 2.0): 4}, DELTA)
    assert with_huge == pytest.approx(1e12 + compose({LaplaceLoss(11, 2.0): 4}, DELTA), rel=1e-15)


def test_a_loss_that_is_rare_and_large() -> None:
    """A choice among 1e9: 500 times, one tells e^5 with probability 7.4e-5, which is above delta. 4.855 by hand:

    p (1 - e^(x - 5)) = delta with p = 500 e^5/(e^5 + 1e9).
    """
    p = 500 * math.exp(5) / 1e9
    expected = 5 + math.log1p(-DELTA / p)
    bracketed(compose({RandomisedResponse(5.0, 10**9): 500}, DELTA), expected, 0.005)


@pytest.mark.parametrize("loss", [GaussianLoss(1.0), LaplaceLoss(11, 11 / 3)])
def test_a_loss_on_a_grid_that_ends_before_its_largest_is_still_an_upper_bound(loss: Loss) -> None:
    """Losses beyond the grid count as infinite, by their delta at its end."""
    high = loss.mean + loss.deviation
    moved = accountant._distribution(loss, -high, high, high / 20)
    epsilons = np.linspace(0, 2 * high, 81)
    assert (np.array(moved.get_delta_for_epsilon(epsilons)) >= loss.delta(epsilons)).all()
    [beyond] = loss.delta(np.array([high]))
    assert moved.get_delta_for_epsilon(2 * high) == pytest.approx(beyond, rel=1e-6)
