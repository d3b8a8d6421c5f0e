"""What releases guarantee together between any two data sets of a client, by hand where hands suffice."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.ledgers import proven
from tests.privacy.mechanisms.reference import Masses, add, delta_of, epsilon_of, laplace_cdf, rounded_down
from umbel.privacy.accounting.accountant import compose
from umbel.privacy.accounting.guarantee import (
    amount,
    gap,
    guarantee,
    in_words,
    pure_cost,
    pure_spent,
    secure_report,
    within_budget,
)
from umbel.privacy.accounting.odometer import clients_to_date
from umbel.privacy.mechanisms.choice import RandomisedResponse
from umbel.privacy.mechanisms.discrete_gaussian import ConcentratedLoss
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.privacy.mechanisms.laplace import Laplace
from umbel.protocol.release import Clipping, Kind, Release


def private(n: int = 11, nu: float = 10.0, **changes: Any) -> Release:
    """Return a release with a public radius, among five hypotheses and with choice-epsilon 1."""
    values: dict[str, Any] = {"hypotheses": 5, "choice_epsilon": 1.0} | changes
    return Release(Kind.TRAIN, n, nu, Clipping.PUBLIC, **values)


OPEN = private(choice_epsilon=0.0)
HEURISTIC = replace(private(), clipping=Clipping.UPDATE)
BARE = private(nu=0.0)


def test_a_participation_costs_twice_n_over_nu_and_the_choice() -> None:
    """Clipped updates lie within two radii: 2 * 11/10 + 1. The radius of a report is the diagonal of all reports."""
    assert pure_cost(private()) == Fraction(32, 10)
    assert pure_cost(private(hypotheses=1, choice_epsilon=0.0)) == Fraction(22, 10)
    assert pure_cost(Release(Kind.REPORT, 2, 4.0, Clipping.PUBLIC)) == Fraction(1, 2)


def test_releases_of_all_kinds_add_up() -> None:
    report = Release(Kind.REPORT, 2, 4.0, Clipping.PUBLIC)
    assert pure_spent({private(): 3, report: 2}) == Fraction(96, 10) + 1
    found = proven({private(): 3, report: 2})
    assert found.pure == pytest.approx(10.6)
    assert found.epsilon <= found.pure


@pytest.mark.parametrize(
    ("release", "why"),
    [
        (OPEN, "the choice among 5 hypotheses is open"),
        (replace(OPEN, hypotheses=0), "the choice among several hypotheses is open"),
        (HEURISTIC, "each update is clipped to its own norm, which proves nothing"),
        (BARE, "there is no noise"),
    ],
)
def test_one_release_without_a_guarantee_leaves_none_at_all(release: Release, why: str) -> None:
    """And none is never 0."""
    assert gap(release) == why
    assert in_words(guarantee({release: 1})) == ("none", "none")
    for account in ({release: 1}, {private(): 1, release: 1}):
        assert guarantee(account) is None
        assert pure_spent(account) == math.inf
        assert not within_budget(account, Fraction(10**9), 1e-5, 10.0, 1.0)


def test_who_released_nothing_has_spent_nothing() -> None:
    for releases in ({}, {private(): 0}, {OPEN: 0}):
        found = proven(releases)
        assert (found.pure, found.epsilon) == (0.0, 0.0)


def test_at_delta_noise_and_choice_are_composed_as_two_losses() -> None:
    found = proven({private(): 4}, 1e-5)
    losses = {Laplace(10.0).loss(11, 2): 4, RandomisedResponse(1.0, 5): 4}
    assert found.epsilon == compose(losses, 1e-5)
    assert found.epsilon < found.pure


def test_gaussian_noise_has_no_pure_epsilon_and_composes_exactly() -> None:
    """Four releases of nu = 4 two radii apart are one of mu = 2 * 2/4 = 1."""
    release = private(1_206_590, 4.0, mechanism="gaussian", hypotheses=1, choice_epsilon=0.0)
    found = proven({release: 4}, 1e-5)
    assert found.pure == math.inf
    assert found.epsilon == pytest.approx(compose({GaussianLoss(1.0): 1}, 1e-5), rel=1e-9)
    assert in_words(found) == ("none", amount(found.epsilon))


def test_the_radius_plays_no_part() -> None:
    assert proven({private(radius=0.5): 3, private(radius=0.1): 2}) == proven({private(): 5})


# --- a site's release among several hypotheses


@pytest.mark.parametrize(
    ("n", "nu", "choice", "times"), [(11, 20.0, 0.5, 20), (11, 20.0, 2.0, 5), (11, 4.0, 0.1, 3), (2, 4.0, 0.5, 1)]
)
def test_a_sites_release_costs_what_the_worse_of_two_moves_does(n: int, nu: float, choice: float, times: int) -> None:
    """Its client moves one sum by two radii, or two sums by one and two counts by one: by an independent account."""
    release = Release(Kind.SITE, n, nu, Clipping.PUBLIC, hypotheses=5, choice_epsilon=choice)
    found = proven({release: times}, 1e-5)
    interval = found.epsilon * 0.01 / times

    def masses(components: int, shift: float) -> Masses:
        return rounded_down(lambda x: laplace_cdf(components, shift, x), -shift, shift, interval)

    stays = add([(masses(n, 2 * n / nu), times)])
    moves = add([(masses(n, n / nu), 2 * times), (masses(1, choice / 2), 2 * times)])
    least = max(epsilon_of(lambda x, law=law: delta_of(law, x), 1e-5, 2 * found.pure) for law in (stays, moves))
    assert least * (1 - 1e-6) <= found.epsilon <= 1.05 * least
    assert found.pure == pytest.approx(times * (2 * n / nu + choice))


# --- whatever a server picks as it goes


def least_budget(
    releases: dict[Release, int], floor: float = 10.0, choice: float = 1.0, reports: bool = False
) -> float:
    """Return the least budget at delta 1e-5 that covers releases, in steps of .01."""
    low, high = 0, 10**6
    while high - low > 1:
        middle = (low + high) // 2
        fits = within_budget(releases, Fraction(middle, 100), 1e-5, floor, 1.0, reports)
        low, high = (low, middle) if fits else (middle, high)
    return high / 100


def test_what_a_server_picks_counts_as_the_least_noise_that_the_site_accepts() -> None:
    """Ten releases of nu = 20 where 10 would have been accepted cost what ten of nu = 10 do, if that is less."""
    least = proven({private(nu=10.0, hypotheses=2): 10}, 1e-5)
    own = proven({private(nu=20.0): 10}, 1e-5)
    assert own.epsilon < least_budget({private(nu=20.0): 10}) == pytest.approx(least.epsilon, abs=0.011)


def gaussian(nu: float, **changes: Any) -> Release:
    return private(1000, nu, mechanism="gaussian", **{"hypotheses": 1, "choice_epsilon": 0.0} | changes)


def test_gaussian_noise_is_priced_as_it_was_whatever_else_the_site_accepts() -> None:
    """8 at 1e-5 is mu = 1.665, so that (1.665 * 20/2)^2 = 277 releases of nu = 20 fit, at a least nu of 20 as of 1."""
    for floor in (1.0, 20.0):
        assert within_budget({gaussian(20.0): 277}, Fraction(8), 1e-5, floor, 1.0)
        assert not within_budget({gaussian(20.0): 278}, Fraction(8), 1e-5, floor, 1.0)


def test_gaussian_releases_share_one_account_of_squares() -> None:
    """Of a client and of a site, at any nu: 1/20^2 each for 200, and 1/10^2 each for 19, are those of 276."""
    mixed = {gaussian(20.0): 200, gaussian(10.0): 10, replace(gaussian(10.0, hypotheses=3), kind=Kind.SITE): 9}
    assert within_budget(mixed, Fraction(8), 1e-5, 1.0, 1.0)
    assert not within_budget(mixed | {gaussian(10.0): 11}, Fraction(8), 1e-5, 1.0, 1.0)


def test_reports_in_secure_sums_share_the_account_of_their_updates() -> None:
    """A client that only reports has one too. 100 reports at nu = 10 are rho = 100 (1/10)^2 / 2 = 1/2; a training of
    nu = 20 is (2/20)^2 / 2 = 1/200, so that 100 of them are as much."""
    report, update = secure_report(10.0), replace(gaussian(20.0), mechanism="discrete-gaussian", kind=Kind.SECURE)
    price = proven({report: 100})
    budget = Fraction(price.epsilon) + Fraction(1, 1000)
    assert within_budget({report: 100}, budget, 1e-5)
    assert not within_budget({report: 101}, budget, 1e-5)
    assert within_budget({report: 50, update: 50}, budget, 1e-5)
    assert not within_budget({update: 51, report: 50}, budget, 1e-5)
    assert not within_budget({report: 1}, Fraction(1000), 0.0)


def test_a_choice_beside_gaussian_noise_is_no_gaussian_release() -> None:
    """Its number is picked as the run goes, so that only a fixed sort covers it."""
    chosen = gaussian(20.0, hypotheses=5, choice_epsilon=0.1)
    alone = least_budget({chosen: 10}, 20.0, 0.1)
    assert alone < least_budget({chosen: 10}, 5.0, 0.1)
    assert not within_budget({chosen: 10, gaussian(20.0): 1}, Fraction(1000), 1e-5, 20.0, 0.1)
    assert not within_budget({gaussian(20.0): 1, chosen: 10}, Fraction(1, 2), 1e-5, 20.0, 0.1)


def test_the_pure_sum_counts_where_it_is_smaller() -> None:
    assert within_budget({private(nu=1000.0): 1}, Fraction(1022, 1000), 1e-5, 1.0, 1.0)
    assert not within_budget({private(nu=1000.0): 1}, Fraction(1021, 1000), 1e-5, 1.0, 1.0)


@pytest.mark.parametrize(("delta", "choice"), [(0.0, 1.0), (1e-5, math.inf)])
def test_without_delta_or_a_limit_on_the_choice_only_the_pure_sum_is_left(delta: float, choice: float) -> None:
    assert within_budget({private(): 10}, Fraction(32), delta, 10.0, choice)
    assert not within_budget({private(): 10}, Fraction(3199, 100), delta, 10.0, choice)


@pytest.mark.parametrize(
    "other",
    [
        Release(Kind.REPORT, 2, 400.0, Clipping.PUBLIC),
        private(12, nu=1e6),
        private(nu=1e6, hypotheses=1, choice_epsilon=0.0),
        private(nu=1e6, mechanism="gaussian"),
    ],
    ids=str,
)
def test_beside_the_first_sort_there_is_room_for_nothing_else(other: Release) -> None:
    """A server could turn to it at the moment when it has seen much by chance: then only the pure sum is proven."""
    alone = least_budget({private(): 10})
    assert alone < 32
    together = {private(): 10, other: 1}
    assert not within_budget(together, Fraction(32), 1e-5, 10.0, 1.0)
    if (cost := pure_spent(together)) < math.inf:
        assert within_budget(together, Fraction(cost), 1e-5, 10.0, 1.0)


def test_where_training_clients_report_a_quarter_is_set_apart_for_reports() -> None:
    """Whichever of the two comes first."""
    report = Release(Kind.REPORT, 2, 4.0, Clipping.PUBLIC)
    gaussian = private(1000, 4.0, mechanism="gaussian", hypotheses=1, choice_epsilon=0.0)
    alone = proven({gaussian: 4}, 1e-5)
    for account in ({gaussian: 4, report: 1}, {report: 1, gaussian: 4}):
        assert least_budget(account, 4.0, reports=True) == pytest.approx(alone.epsilon / 0.75, abs=0.011)
        assert least_budget(account, 4.0) == 10**4, "a site whose clients do not report sets nothing apart"
    assert least_budget({gaussian: 1, report: 20}, 4.0, reports=True) == 40.0, "a quarter must hold twenty reports"


@settings(derandomize=True, max_examples=examples(25), deadline=None)
@given(st.permutations([
    (private(), 3), (private(nu=20.0), 2), (private(12, nu=300.0), 1), (gaussian(20.0), 1), (secure_report(10.0), 2),
    (Release(Kind.REPORT, 2, 400.0, Clipping.PUBLIC), 1),
]), st.integers(1, 6))  # fmt: skip
def test_no_price_depends_on_the_order_of_releases(releases: list[tuple[Release, int]], many: int) -> None:
    account, ordered = dict(releases[:many]), dict(sorted(releases[:many], key=repr))
    assert proven(account, 1e-5) == proven(ordered, 1e-5)
    assert clients_to_date(account, 1e-5) == clients_to_date(ordered, 1e-5)
    assert least_budget(account, reports=True) == least_budget(ordered, reports=True)


def test_a_price_is_the_same_in_every_process() -> None:
    """Sets of releases, whose hashes are random, have another order in each."""
    code = (
        "from tests.privacy.accounting.test_guarantee import *; "
        "print(repr(guarantee({private(n, 9.0, hypotheses=1): 3 for n in (2, 5, 11, 31)}, 1e-5)))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


accounts = st.lists(
    st.tuples(st.sampled_from([1, 11]), st.sampled_from([5.0, 10.0, 40.0]), st.sampled_from([0.5, 1.0])),
    min_size=1,
    max_size=4,
)


@settings(derandomize=True, max_examples=examples(25), deadline=None)
@given(accounts, st.integers(1, 6))
def test_no_budget_is_less_than_what_was_released_and_the_pure_sum_always_is_one(
    kinds: list[tuple[int, float, float]], times: int
) -> None:
    account = {private(n, nu, choice_epsilon=epsilon): times for n, nu, epsilon in kinds}
    found = proven(account, 1e-5)
    assert within_budget(account, Fraction(pure_spent(account)), 1e-5, 5.0, 1.0)
    assert not within_budget(account, Fraction(found.epsilon * (1 - 1e-6)), 1e-5, 5.0, 1.0)


def test_discrete_gaussian_releases_have_an_account_of_their_own() -> None:
    """rho = (2/20)^2/2 each, of which 245 fit 8 at 1e-5; beside normal noise there is room for none."""
    discrete = replace(gaussian(20.0), mechanism="discrete-gaussian")
    fits = [within_budget({discrete: times}, Fraction(8), 1e-5, 1.0, 1.0) for times in (1, 244, 245, 246, 299)]
    assert fits == [True, True, True, False, False]
    assert compose({ConcentratedLoss(0.005 * 245): 1}, 1e-5) <= 8 < compose({ConcentratedLoss(0.005 * 246): 1}, 1e-5)
    assert not within_budget({gaussian(20.0): 1, discrete: 1}, Fraction(8), 1e-5, 1.0, 1.0)


@pytest.mark.parametrize("nu", [2.0, 8.0, 32.0])
@pytest.mark.parametrize(("times", "delta"), [(1, 1e-5), (20, 1e-5), (20, 1e-6)])
def test_discrete_gaussian_noise_costs_a_twentieth_to_a_ninth_more(nu: float, times: int, delta: float) -> None:
    """Docs say some 5 to 11 %: its account is by rho, and not exact."""
    exact = proven({gaussian(nu): times}, delta)
    discrete = proven({replace(gaussian(nu), mechanism="discrete-gaussian"): times}, delta)
    assert exact
    assert discrete
    assert 1.05 < discrete.epsilon / exact.epsilon < 1.11
