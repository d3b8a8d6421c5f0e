"""The guarantee for a row, by hand and against dp-accounting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from tests.helpers.ledgers import proven, proven_rows
from umbel.privacy.accounting.accountant import compose
from umbel.privacy.accounting.guarantee import guarantee, secure_report, site_release
from umbel.privacy.accounting.plan import row_noise_for
from umbel.privacy.accounting.rows import (
    LEAST_PRICE,
    needed_budget,
    row_gap,
    row_guarantee,
    rows_to_date,
    within_row_budget,
)
from umbel.privacy.mechanisms.gaussian import GaussianLoss, calibrate
from umbel.privacy.mechanisms.sampled_gaussian import cut_delta, step_losses
from umbel.protocol.release import Clipping, Kind, Release, RowPrivacy

CLIENT = Release(Kind.TRAIN, 10, 4.0, Clipping.PUBLIC)
"""A release with a guarantee for clients alone: pure epsilon 2 n / nu = 5."""


def rows(sigma: float = 1.0, rate: float = 0.02, steps: int = 100, **changes: object) -> Release:
    """Return the release of a model that was trained by DP-SGD and leaves as it is."""
    bare = Release(Kind.TRAIN, 10, 0.0, Clipping.PUBLIC)
    return replace(bare.trained_by(RowPrivacy(1.0, sigma, rate, 10.0, steps)), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "times"),
    [(1.0, 0.01, 100, 10), (0.6, 0.05, 20, 5), (2.0, 0.1, 300, 1), (1.0, 0.5, 5, 2)],
)
def test_steps_of_all_rounds_cost_what_dp_accounting_says(sigma: float, rate: float, steps: int, times: int) -> None:
    found = proven_rows({rows(sigma, rate, steps): times}, 1e-5)
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    event = dp_accounting.SelfComposedDpEvent(step, steps * times)
    exact = PLDAccountant(value_discretization_interval=1e-4).compose(event).get_epsilon(1e-5)
    assert found.epsilon == pytest.approx(exact, rel=1e-3)
    assert found.pure == math.inf
    orders = [order / 2 for order in range(5, 200)]
    assert found.epsilon < RdpAccountant(orders).compose(event).get_epsilon(1e-5), "a looser bound"


def test_without_sampling_steps_are_one_normal_noise() -> None:
    """16 steps of noise 8 reveal as much as one of noise 2, for which the analytic calibration knows epsilon."""
    found = proven_rows({rows(8.0, 1.0, 4): 4}, 1e-5)
    assert calibrate(found.epsilon, 1e-5, 1.0) == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("noise_multiplier", [1e-300, 5e-324])
def test_noise_so_small_that_its_price_overflows_has_a_figure(noise_multiplier: float) -> None:
    release = replace(CLIENT, noise_multiplier=noise_multiplier)
    found = proven_rows({release: 3})
    assert found.epsilon > 1e300
    assert rows_to_date({release: 3}, 1e-5) > 1e300
    assert rows_to_date({replace(release, mechanism="gaussian"): 3}, 1e-5) == math.inf


def test_a_choice_among_a_number_that_is_not_on_record_counts_as_one_between_two() -> None:
    for release in (CLIENT, rows()):
        unknown, two = (replace(release, hypotheses=k, choice_epsilon=0.75) for k in (0, 2))
        assert proven_rows({unknown: 3}) == proven_rows({two: 3})
        assert rows_to_date({unknown: 3}, 1e-5) == rows_to_date({two: 3}, 1e-5) < math.inf


def test_a_release_that_hides_rows_alone_has_no_guarantee_for_the_client() -> None:
    assert guarantee({rows(): 1}) is None
    assert row_guarantee({rows(): 1}) is not None


def test_noise_that_hides_a_client_hides_its_rows() -> None:
    for release in (CLIENT, secure_report(5.0), site_release(replace(CLIENT, hypotheses=3, choice_epsilon=1.0))):
        assert proven_rows({release: 3}) == proven({release: 3})


def test_with_both_a_release_costs_a_row_the_smaller_of_both() -> None:
    alone = proven_rows({rows(): 1})
    both = {noise: proven_rows({rows(noise_multiplier=noise): 1}) for noise in (4.0, 400.0)}
    client = proven({replace(CLIENT, noise_multiplier=400.0): 1})
    assert client.epsilon < alone.epsilon < 5
    assert both[4.0].epsilon == alone.epsilon
    assert both[400.0].epsilon == client.epsilon
    assert both[4.0].pure == 5, "which noise in training has none of"


def test_cheap_noise_for_the_client_pays_for_no_steps_beside_releases_that_count_by_their_steps() -> None:
    """Local parameters go from one release to the next, and only the steps of all hide rows in them."""
    near, cheap, alone = rows(0.5, 1.0, 100), rows(20.0, 1.0, 1), proven_rows({rows(0.5, 1.0, 100): 1}, 1e-5)
    both = replace(near, noise_multiplier=1e6)
    client, mixed, steps = (
        proven_rows(account, 1e-5) for account in ({both: 2}, {both: 1, cheap: 1}, {near: 1, cheap: 1})
    )
    assert client.epsilon == 2 * LEAST_PRICE
    assert mixed == steps
    assert mixed.epsilon > alone.epsilon > 100
    assert rows_to_date({both: 1, cheap: 1}, 1e-5) == rows_to_date({near: 1, cheap: 1}, 1e-5) > 100
    assert not within_row_budget({both: 1, cheap: 1}, Fraction(100), 1e-5)
    assert within_row_budget({both: 2}, Fraction(1), 1e-5), "by what both cost the client"


def test_a_random_choice_costs_a_row_its_whole_epsilon() -> None:
    quiet = rows(1000.0, 0.001, 1, hypotheses=2, choice_epsilon=1.5)
    found = proven_rows({quiet: 1}, 1e-5)
    assert found.epsilon == pytest.approx(1.5, abs=0.01)


def test_an_open_choice_leaves_rows_no_guarantee() -> None:
    """Which hypothesis fits best depends on all rows, and each round's model tells it."""
    assert row_gap(rows(hypotheses=2)) == "the choice among 2 hypotheses is open"
    assert row_guarantee({rows(hypotheses=2): 1}) is None
    assert row_guarantee({rows(hypotheses=0): 1}) is None, "a number that is not on record"


@pytest.mark.parametrize("kind", [Kind.SITE, Kind.SECURE])
def test_sums_by_hypothesis_cost_a_row_what_they_cost_the_client(kind: Kind) -> None:
    """The noise of training does not hide in which of the sums a client is."""
    both = rows(noise_multiplier=4.0, mechanism="gaussian", kind=kind)
    several = replace(both, hypotheses=2)
    one, many = proven_rows({both: 1}), proven_rows({several: 1})
    client = proven({several: 1})
    assert one.epsilon == pytest.approx(proven_rows({rows(): 1}).epsilon)
    assert many.epsilon == client.epsilon


def test_releases_without_any_noise_leave_no_guarantee() -> None:
    exact = replace(CLIENT, noise_multiplier=0.0)
    assert row_gap(exact) == "there is no noise"
    assert row_guarantee({rows(): 1, exact: 1}) is None
    assert proven_rows({rows(): 1, exact: 0}) == proven_rows({rows(): 1})
    assert row_gap(rows().without_noise()), "a server that knows the seed knows also who was drawn"


def test_a_budget_for_rows_counts_every_release() -> None:
    account = {rows(): 5, secure_report(20.0): 2}
    spent = rows_to_date(account, 1e-5)
    planned = proven_rows(account, 1e-5)
    assert planned.epsilon < spent < 3 * planned.epsilon
    assert within_row_budget(account, Fraction(spent), 1e-5)
    assert not within_row_budget(account, Fraction(planned.epsilon), 1e-5)
    assert not within_row_budget({**account, rows(): 15}, Fraction(spent), 1e-5)
    assert not within_row_budget(account, Fraction(10**9), 0.0), "training has no pure epsilon"
    assert not within_row_budget({**account, replace(CLIENT, noise_multiplier=0.0): 1}, Fraction(10**9), 1e-5)
    assert within_row_budget({CLIENT: 3}, Fraction(15), 0.0)
    assert not within_row_budget({CLIENT: 4}, Fraction(15), 0.0)


def test_releases_that_cost_the_same_each_count() -> None:
    """A server may name another mechanism in each task, which changes nothing where a model has no noise."""
    alike = {rows(mechanism=f"package:Mechanism{i}"): 1 for i in range(50)}
    assert rows_to_date(alike, 1e-5) == pytest.approx(rows_to_date({rows(): 50}, 1e-5))
    budget = Fraction(least_budget({rows(): 49}))
    assert within_row_budget({rows(): 49}, budget, 1e-5)
    assert not within_row_budget(alike, budget, 1e-5)


def least_budget(account: Mapping[Release, int], dearest: Release | None = None) -> float:
    """Return the smallest row budget at delta 1e-5 that covers an account, to a thousandth."""
    low, high = 1e-3, 1e3
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        fits = within_row_budget(account, Fraction(middle), 1e-5, dearest)
        low, high = (low, middle) if fits else (middle, high)
    return high


GRID = [
    (0.5, 1.0, 5, 4, 1), (0.5, 0.02, 50, 1, 1), (1.0, 0.005, 60, 2, 1), (1.0, 0.1, 1, 1, 1), (3.0, 0.3, 4, 1, 2),
    (3.0, 0.02, 5, 7, 2), (8.0, 0.1, 10, 10, 1), (8.0, 0.05, 20, 20, 3),
]  # fmt: skip
"""Plans: epsilon, rate, steps, participations, hypotheses."""


@pytest.mark.parametrize(("epsilon", "rate", "steps", "times", "k"), GRID)
def test_a_site_whose_limits_are_those_of_a_plan_needs_little_more_budget_than_the_plan_says(
    epsilon: float, rate: float, steps: int, times: int, k: int
) -> None:
    choice = {"hypotheses": k, "choice_epsilon": epsilon / (4 * times) if k > 1 else 0.0}
    release = rows(
        row_noise_for(lambda sigma: rows(sigma, rate, steps, **choice), times, epsilon), rate, steps, **choice
    )
    found = proven_rows({release: times}, 1e-5)
    told = found.epsilon
    assert told < needed_budget(release, times, 1e-5) <= 1.05 * told
    assert within_row_budget({release: times}, Fraction(1.05 * told), 1e-5, release)
    assert not within_row_budget({release: times}, Fraction(0.99 * told), 1e-5, release)
    assert not within_row_budget({release: 2 * times}, Fraction(1.05 * told), 1e-5, release)


def test_a_site_with_wider_limits_needs_more_budget_but_less_than_the_odometer_says() -> None:
    for sigma, rate, steps, times, most in ((1, 0.02, 100, 2, 1.6), (2, 0.1, 300, 1, 1.2)):
        release = rows(sigma, rate, steps)
        told = proven_rows({release: times})
        assert told.epsilon < least_budget({release: times}) < most * told.epsilon
        assert least_budget({release: times}) < rows_to_date({release: times}, 1e-5)


DEAREST = rows(1.0, 0.1, 10, hypotheses=2, choice_epsilon=0.1)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"row_noise_multiplier": 9.0, "row_rate": 0.01, "row_steps": 1, "choice_epsilon": 0.01}, True),
        ({"hypotheses": 1, "choice_epsilon": 0.0}, True),
        ({"noise_multiplier": 5.0}, True),
        ({"row_noise_multiplier": 0.99}, False),
        ({"row_rate": 0.11}, False),
        ({"row_steps": 11}, False),
        ({"choice_epsilon": 0.11}, False),
    ],
)
def test_a_participation_counts_as_the_dearest_only_if_it_reveals_no_more(
    changes: dict[str, float], counts: bool
) -> None:
    """A release that would make the account 1.3 times as dear by Renyi divergences, and not by their number."""
    budget = Fraction(1.01 * needed_budget(DEAREST, 20, 1e-5))
    asked = replace(DEAREST, **changes)  # type: ignore[arg-type]
    assert within_row_budget({DEAREST: 19, asked: 1}, budget, 1e-5, DEAREST) is counts
    assert not within_row_budget({DEAREST: 20, asked: 1}, budget, 1e-5, DEAREST)


def test_reports_have_a_fixed_quarter_of_a_row_budget() -> None:
    report = Release(Kind.REPORT, 2, 4.0, Clipping.PUBLIC)
    need = needed_budget(DEAREST, 20, 1e-5)
    account = {DEAREST: 20, report: 6}
    assert not within_row_budget(account, Fraction(1.2 * need), 1e-5, DEAREST)
    assert within_row_budget(account, Fraction(1.34 * need), 1e-5, DEAREST, reports=True)
    assert not within_row_budget({**account, report: 60}, Fraction(1.34 * need), 1e-5, DEAREST, reports=True)
    assert not within_row_budget(account, Fraction(1.3 * need), 1e-5, DEAREST, reports=True)


@pytest.mark.parametrize(("sigma", "rate"), [(0.5, 1e-9), (1e160, 0.5), (1e308, 1e-9), (1e308, 1.0)])
def test_extreme_steps_that_a_server_may_ask_for_have_an_account(sigma: float, rate: float) -> None:
    """A ledger that no one could read would tell nothing about other releases. The first would need 20 GB."""
    found = proven_rows({rows(sigma, rate, 1000): 3}, 1e-5)
    assert found.epsilon == pytest.approx(compose({GaussianLoss(LEAST_PRICE): 3}, 1e-5), rel=1e-2)
    assert 0 < rows_to_date({rows(sigma, rate, 1000): 3}, 1e-5) < 3


def test_a_million_rare_steps_cost_nearly_what_their_normal_limit_costs() -> None:
    """The chi-squared divergence of a step is q^2 (e - 1). On too fine a grid, rounding errors would add far more."""
    found = compose({loss: 10**6 * count for loss, count in step_losses(1.0, 1e-6, 1).items()}, 1e-5)
    limit = compose({GaussianLoss(1e3 * 1e-6 * math.sqrt(math.e - 1)): 1}, 1e-5)
    assert limit < found < 1.2 * limit


def test_steps_that_no_memory_holds_have_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> float:
        raise MemoryError

    monkeypatch.setattr("umbel.privacy.accounting.rows.compose", too_large)
    found = proven_rows({rows(1.0, 0.5, 7): 3}, 3e-5)
    assert math.isinf(found.epsilon)


# --- the least price, and what a cut sample costs


@pytest.mark.parametrize("cheap", [{"sigma": 1e5}, {"sigma": 1e300}, {"rate": 1e-9}, {"sigma": 1e5, "rate": 1.0}])
@pytest.mark.parametrize("client", [0.0, 1e12])
def test_a_release_that_hides_rows_has_a_least_price_and_a_budget_ends_any_search(
    cheap: dict[str, float], client: float
) -> None:
    release = rows(**cheap, noise_multiplier=client)  # type: ignore[arg-type]
    one, hundred = proven_rows({release: 1}), proven_rows({release: 100})
    # Normal noise of a mu of .01 a time, which is .1 for a hundred; a pure epsilon of .01 is less for a single one.
    normal, tenfold = (compose({GaussianLoss(mu): 1}, 1e-5) for mu in (0.01, 0.1))
    assert [one.epsilon, hundred.epsilon] == pytest.approx([0.01 if client else normal, tenfold], rel=1e-2)
    assert within_row_budget({release: 10}, Fraction(1), 1e-5)
    assert not within_row_budget({release: 1000}, Fraction(1), 1e-5)


def test_a_sample_that_is_cut_costs_its_part_of_delta() -> None:
    """(1 + e^epsilon) T / 1e60; nothing without sampling, where no sample is cut."""
    assert cut_delta(0.5, 100, 0.0) == pytest.approx(2e-58)
    assert cut_delta(0.5, 100, 3.0) == pytest.approx((1 + math.exp(3)) * 1e-58)
    assert cut_delta(1.0, 100, 3.0) == 0
    assert cut_delta(0.5, 100, 5000.0) > 1


def test_an_epsilon_so_large_that_cut_samples_take_all_of_delta_is_none() -> None:
    steps = rows(0.05, 0.9, 1)
    found = proven_rows({steps: 1}, 1e-5)
    assert compose(step_losses(0.05, 0.9, 1), 1e-5) > 200
    assert found.epsilon == math.inf
    assert rows_to_date({steps: 1}, 1e-5) == math.inf
