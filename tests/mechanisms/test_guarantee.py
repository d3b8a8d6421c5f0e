"""What releases guarantee together between any two data sets of a client, by hand where hands suffice."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mechanisms.accountant import compose
from mechanisms.choice import RandomisedResponse
from mechanisms.gaussian import GaussianLoss
from mechanisms.guarantee import adaptive, amount, gap, guarantee, in_words, pure_cost, pure_spent
from mechanisms.laplace import Laplace
from protocol.release import Kind, RadiusMode, Release


def private(n: int = 11, nu: float = 10.0, **changes: Any) -> Release:
    """Return a release with a public radius, among five hypotheses and with choice-epsilon 1."""
    values: dict[str, Any] = {"hypotheses": 5, "choice_epsilon": 1.0} | changes
    return Release(Kind.TRAIN, n, nu, RadiusMode.PUBLIC, **values)


OPEN = private(choice_epsilon=0.0)
HEURISTIC = replace(private(), radius_mode=RadiusMode.UPDATE)
BARE = private(nu=0.0)


def test_a_participation_costs_twice_n_over_nu_and_the_choice() -> None:
    """Clipped updates lie within two radii: 2 * 11/10 + 1."""
    assert pure_cost(private()) == Fraction(32, 10)
    assert pure_cost(private(hypotheses=1, choice_epsilon=0.0)) == Fraction(22, 10)


def test_a_report_costs_n_over_nu_since_the_radius_is_the_diagonal_of_all_reports() -> None:
    assert pure_cost(Release(Kind.REPORT, 2, 4.0, RadiusMode.PUBLIC)) == Fraction(1, 2)


def test_releases_of_all_kinds_add_up() -> None:
    report = Release(Kind.REPORT, 2, 4.0, RadiusMode.PUBLIC)
    assert pure_spent({private(): 3, report: 2}) == Fraction(96, 10) + 1
    found = guarantee({private(): 3, report: 2})
    assert found is not None
    assert found.pure == pytest.approx(10.6)
    assert found.epsilon <= found.pure


@pytest.mark.parametrize(
    ("release", "why"),
    [
        (OPEN, "the choice among 5 hypotheses is open"),
        (replace(OPEN, hypotheses=0), "the choice among several hypotheses is open"),
        (HEURISTIC, "the radius is the norm of the client's own update"),
        (BARE, "there is no noise"),
    ],
)
def test_one_release_without_a_guarantee_leaves_none_at_all(release: Release, why: str) -> None:
    """And none is never 0."""
    assert gap(release) == why
    assert guarantee({release: 1}) is None
    assert guarantee({private(): 1, release: 1}) is None
    assert pure_spent({private(): 1, release: 1}) == math.inf
    assert adaptive({private(): 1, release: 1}, 1e-5, 10.0, 1.0) == math.inf
    assert in_words(guarantee({release: 1})) == ("none", "none")


def test_who_released_nothing_has_spent_nothing() -> None:
    for releases in ({}, {private(): 0}, {OPEN: 0}):
        found = guarantee(releases)
        assert found is not None
        assert (found.pure, found.epsilon) == (0.0, 0.0)


def test_at_delta_noise_and_choice_are_composed_as_two_losses() -> None:
    found = guarantee({private(): 4}, 1e-5)
    assert found is not None
    losses = {Laplace(10.0).loss(11, 2): 4, RandomisedResponse(1.0, 5): 4}
    assert found.epsilon == compose(losses, 1e-5)
    assert found.epsilon < found.pure


def test_the_figures_of_planning() -> None:
    """nu = 10 without the choice: 2.2 a participation, and at delta 1e-5 1.93, 3.32, 5.41, 8.61 for 1, 2, 4, 8."""
    release = private(hypotheses=1, choice_epsilon=0.0)
    for times, epsilon in ((1, 1.93), (2, 3.32), (4, 5.41), (8, 8.61)):
        found = guarantee({release: times}, 1e-5)
        assert found is not None
        assert found.epsilon == pytest.approx(epsilon, abs=0.01)


def test_gaussian_noise_has_no_pure_epsilon_and_composes_exactly() -> None:
    """Four releases of nu = 4 two radii apart are one of mu = 2 * 2/4 = 1."""
    release = private(1_206_590, 4.0, mechanism="gaussian", hypotheses=1, choice_epsilon=0.0)
    found = guarantee({release: 4}, 1e-5)
    assert found is not None
    assert found.pure == math.inf
    assert found.epsilon == pytest.approx(compose({GaussianLoss(1.0): 1}, 1e-5), rel=1e-9)
    assert in_words(found) == ("none", amount(found.epsilon))


def test_the_radius_plays_no_part() -> None:
    assert guarantee({private(radius=0.5): 3, private(radius=0.1): 2}) == guarantee({private(): 5})


# --- whatever a server picks as it goes


def test_what_a_server_picks_counts_as_the_least_noise_that_the_site_accepts() -> None:
    """Ten releases of nu = 20 where 10 would have been accepted cost what ten of nu = 10 do, if that is less."""
    found = adaptive({private(nu=20.0): 10}, 1e-5, 10.0, 1.0)
    least = private(nu=10.0, hypotheses=2)
    worst = guarantee({least: 10}, 1e-5)
    assert worst is not None
    assert found == pytest.approx(worst.epsilon)
    own = guarantee({private(nu=20.0): 10}, 1e-5)
    assert own is not None
    assert found > own.epsilon


def test_the_pure_sum_counts_where_it_is_smaller() -> None:
    assert adaptive({private(nu=1000.0): 1}, 1e-5, 1.0, 1.0) == Fraction(22, 1000) + 1


def test_without_a_limit_on_the_choice_only_the_pure_sum_is_left() -> None:
    assert adaptive({private(): 10}, 1e-5, 10.0, math.inf) == 32


def test_releases_of_another_sort_than_the_first_count_by_their_pure_epsilon() -> None:
    """Which sort comes first was picked before anything was seen; how the others mix was not."""
    report = Release(Kind.REPORT, 2, 4.0, RadiusMode.PUBLIC)
    alone = adaptive({private(): 10}, 1e-5, 10.0, 1.0)
    assert adaptive({private(): 10, report: 3}, 1e-5, 10.0, 1.0) == pytest.approx(float(alone) + 1.5)
    assert adaptive({report: 3, private(): 10}, 1e-5, 10.0, 1.0) == pytest.approx(32 + 1.5, abs=0.3)


accounts = st.lists(
    st.tuples(st.sampled_from([1, 11]), st.sampled_from([5.0, 10.0, 40.0]), st.sampled_from([0.5, 1.0])),
    min_size=1,
    max_size=4,
)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(accounts, st.integers(1, 6))
def test_it_is_never_less_than_what_was_released_nor_more_than_the_pure_sum(
    kinds: list[tuple[int, float, float]], times: int
) -> None:
    account = {private(n, nu, choice_epsilon=epsilon): times for n, nu, epsilon in kinds}
    found = guarantee(account, 1e-5)
    assert found is not None
    assert found.epsilon * (1 - 1e-6) <= adaptive(account, 1e-5, 5.0, 1.0) <= pure_spent(account)
