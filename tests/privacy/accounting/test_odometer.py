"""The odometer, by hand, by integration, and by simulating servers that choose as they go."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from umbel.privacy.accounting.accountant import compose
from umbel.privacy.accounting.odometer import ORDERS, clients_to_date, curve_of, to_date, within
from umbel.privacy.mechanisms.choice import RandomisedResponse
from umbel.privacy.mechanisms.discrete_gaussian import ConcentratedLoss
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.privacy.mechanisms.laplace import Laplace
from umbel.privacy.mechanisms.sampled_gaussian import SampledGaussianLoss
from umbel.protocol.release import Clipping, Kind, Release


def test_one_normal_release_by_hand() -> None:
    """a mu^2 / 2 + log(12 / delta) / (a - 1) is least at a = 6 among the orders, for mu = 1 and delta = 1e-5."""
    curve = curve_of({GaussianLoss(1.0): 1})
    by_hand = 6 / 2 + math.log(12 / 1e-5) / 5
    assert len(ORDERS) == 12
    assert to_date([(curve, 1)], math.inf, 1e-5) == pytest.approx(by_hand)


def test_the_pure_sum_is_the_figure_where_it_is_smaller() -> None:
    one = curve_of({RandomisedResponse(0.1, 2): 1})
    assert to_date([(one, 1)], 0.1, 1e-5) == 0.1
    assert to_date([(one, 1)], 0.1, 0.0) == 0.1
    assert to_date([], 0, 1e-5) == 0


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_divergences_of_randomised_response_are_those_of_its_two_probabilities(epsilon: float) -> None:
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    for order, found in zip(ORDERS, curve_of({RandomisedResponse(epsilon, 2): 1}), strict=True):
        both = order * math.log(p) + (1 - order) * math.log1p(-p), order * math.log1p(-p) + (1 - order) * math.log(p)
        exact = np.logaddexp(*both) / (order - 1)
        assert exact <= found <= 1.02 * exact


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.01), (0.7, 0.4), (4.0, 0.2)])
def test_divergences_of_a_step_bound_both_directions_by_integration(sigma: float, rate: float) -> None:
    found = curve_of({SampledGaussianLoss(sigma, rate): 1})
    for order, bound in zip(ORDERS[:5], found, strict=False):
        x = np.linspace(-15 * sigma, 1 + order + 15 * sigma, 400_001)
        without = stats.norm.logpdf(x, 0, sigma)
        mixture = np.logaddexp(math.log1p(-rate) + without, math.log(rate) + stats.norm.logpdf(x, 1, sigma))
        removed, added = (
            math.log(np.trapezoid(np.exp(order * one + (1 - order) * other), x)) / (order - 1)
            for one, other in ((mixture, without), (without, mixture))
        )
        assert bound == pytest.approx(removed, rel=1e-6, abs=1e-9)
        assert added <= bound * (1 + 1e-9) + 1e-9


def test_the_figure_is_no_smaller_than_the_one_for_tasks_fixed_in_advance() -> None:
    for loss in (GaussianLoss(0.4), ConcentratedLoss(0.1), SampledGaussianLoss(1.0, 0.05), Laplace(200.0).loss(50, 2)):
        assert loss is not None
        for times in (1, 30):
            spent = to_date([(curve_of({loss: 1}), times)], times * loss.largest, 1e-5)
            assert spent >= compose({loss: times}, 1e-5)


def test_it_only_rises_and_a_release_without_a_guarantee_leaves_none() -> None:
    release = Release(Kind.TRAIN, 50, 200.0, Clipping.PUBLIC)
    figures = [clients_to_date({release: times}, 1e-5) for times in range(40)]
    assert figures[0] == 0
    assert all(one < next_one for one, next_one in pairwise(figures))
    bare = Release(Kind.TRAIN, 50, 0.0, Clipping.PUBLIC)
    assert clients_to_date({release: 1, bare: 1}, 1e-5) == math.inf


RUNS, RELEASES, DELTA = 4000, 150, 0.1
ALARMS = int(stats.binom.ppf(1 - 1e-6, RUNS, DELTA))
"""More runs than this exceed their figure with a probability below 1e-6, if each does so with DELTA at most."""


@pytest.mark.parametrize("noise_multiplier", [1e154, 4e155, 1e308])
def test_noise_so_large_that_no_grid_holds_its_losses_has_a_figure(noise_multiplier: float) -> None:
    """A server may ask a site for sums with such noise, and its ledger must stay readable."""
    release = Release(Kind.SITE, 7, noise_multiplier, Clipping.PUBLIC, hypotheses=3, choice_epsilon=1.0)
    assert clients_to_date({release: 5}, 1e-5) == pytest.approx(5.0)


def test_it_holds_at_all_times_at_once_against_a_server_that_chooses_as_it_goes() -> None:
    """The server asks for less noise once it has learned more than expected, and stops when that suits it.

    A figure for tasks fixed in advance, at each moment for the releases so far, is exceeded in more than DELTA of runs.
    """
    generator = np.random.default_rng(7)
    quiet, loud = GaussianLoss(0.05), GaussianLoss(0.3)
    lost, times, exceeded, misread = (
        np.zeros(RUNS),
        np.zeros((RUNS, 2), int),
        np.zeros(RUNS, bool),
        np.zeros(RUNS, bool),
    )
    curves = [curve_of({loss: 1}) for loss in (quiet, loud)]
    for _ in range(RELEASES):
        expected = times @ np.array([quiet.mean, loud.mean])
        asks = (lost > expected).astype(int)
        mu = np.where(asks, loud.mu, quiet.mu)
        lost += generator.normal(mu**2 / 2, mu)
        times[np.arange(RUNS), asks] += 1
        kinds, which = np.unique(times, axis=0, return_inverse=True)
        spent = [to_date(zip(curves, own.tolist(), strict=True), math.inf, DELTA) for own in kinds]
        exceeded |= lost > np.array(spent)[which]
        total = np.sqrt(times @ np.array([quiet.mu**2, loud.mu**2]))
        misread |= lost > total**2 / 2 + total * stats.norm.isf(DELTA)
    assert exceeded.sum() <= ALARMS
    assert misread.sum() > ALARMS, "the loss at one time exceeds its quantile with DELTA, at some time more often"


def test_a_filter_of_normal_noise_by_hand() -> None:
    """At budget 3 and delta 1e-5 it tries the orders 8, 6 and 4; the first, with half of delta, accepts the most.

    8 mu^2 / 2 + log(2e5) / 7 + log(7 / 8) - log(8) / 7 is 3 for mu^2 = .4217.
    """
    by_hand = (3 - math.log(2e5) / 7 - math.log(7 / 8) + math.log(8) / 7) / 4
    assert by_hand == pytest.approx(0.4217, abs=1e-4)
    fits, exceeds = (GaussianLoss(math.sqrt(by_hand * factor)) for factor in (1 - 1e-9, 1 + 1e-9))
    assert within({fits: 1}, Fraction(3), 1e-5)
    assert not within({exceeds: 1}, Fraction(3), 1e-5)
    assert within({GaussianLoss(math.sqrt(by_hand / 10)): 9}, Fraction(3), 1e-5)


def test_a_filter_takes_infinite_divergences_for_no_budget() -> None:
    assert not within({GaussianLoss(1e200): 1}, Fraction(10**400), 1e-5)
    assert within({GaussianLoss(1.0): 1}, Fraction(10**400), 1e-5)


def test_a_budget_holds_against_a_server_that_chooses_as_it_goes_until_the_filter_refuses() -> None:
    """The mean of (1 - exp(budget - loss))+ over all runs is the delta of that budget."""
    generator, budget = np.random.default_rng(9), Fraction(2)
    steps = SampledGaussianLoss(0.9, 0.2), SampledGaussianLoss(2.0, 0.6)
    lost, times, asking = np.zeros(RUNS), np.zeros((RUNS, 2), int), np.ones(RUNS, bool)
    for _ in range(RELEASES):
        asks = (lost > 1.0).astype(int)
        after = times + np.eye(2, dtype=int)[asks]
        kinds, which = np.unique(after, axis=0, return_inverse=True)
        asking &= np.array([within(dict(zip(steps, one.tolist(), strict=True)), budget, DELTA) for one in kinds])[which]
        sigma, rate = (np.array([getattr(step, name) for step in steps])[asks] for name in ("noise_multiplier", "rate"))
        x = generator.normal(generator.random(RUNS) < rate, sigma)
        lost += np.where(asking, np.log1p(rate * np.expm1((x - 0.5) / sigma**2)), 0.0)
        times = np.where(asking[:, None], after, times)
    assert not asking.any()
    assert times.min(axis=0).max() > 0, "runs differ in what they were asked"
    excess = np.maximum(-np.expm1(float(budget) - lost), 0.0)
    assert 0 < excess.mean() <= DELTA + 5 * excess.std() / math.sqrt(RUNS)
