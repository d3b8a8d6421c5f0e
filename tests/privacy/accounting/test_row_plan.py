"""The noise in training that a guarantee for rows needs."""

from __future__ import annotations

from functools import partial

import pytest

from tests.helpers.errors import raises
from tests.helpers.ledgers import proven_rows
from umbel.privacy.accounting.plan import large_delta, row_noise_for
from umbel.privacy.mechanisms.gaussian import calibrate
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Release, RowPrivacy, participation


def release(sigma: float, rate: float = 0.1, steps: int = 10, hypotheses: int = 1, choice: float = 0.0) -> Release:
    rows = RowPrivacy(1.0, sigma, rate, 50.0, steps)
    return participation(3, hypotheses, 0.0, choice_epsilon=choice, rows=rows)


def spent(sigma: float, times: int) -> float:
    found = proven_rows({release(sigma): times})
    return found.epsilon


@pytest.mark.parametrize("target", [0.5, 3.0, 12.0])
def test_the_noise_reaches_the_target_and_less_does_not(target: float) -> None:
    sigma = row_noise_for(release, 20, target)
    assert spent(sigma, 20) <= target < spent(sigma * 0.998, 20)


def test_without_sampling_it_is_the_analytic_calibration() -> None:
    """100 steps of noise sigma reveal as much as one of sigma / 10."""
    sigma = row_noise_for(partial(release, rate=1.0, steps=5), 20, 1.0)
    assert sigma == pytest.approx(10 * calibrate(1.0, 1e-5, 1.0), rel=1e-3)


def test_a_choice_takes_its_share_of_the_target() -> None:
    assert row_noise_for(partial(release, hypotheses=3, choice=0.2), 5, 3.0) > row_noise_for(release, 5, 3.0)
    with raises(ConfigError, "config.unreachable-epsilon"):
        row_noise_for(partial(release, hypotheses=3, choice=2.0), 50, 0.5)
    with raises(ConfigError, "config.open-choice", "choice-epsilon"):
        row_noise_for(partial(release, hypotheses=2), 20, 3.0)


def test_a_delta_that_may_give_a_row_away_is_warned_of() -> None:
    assert large_delta(2e-4, 500, "rows") == []
    assert "500 rows outright" in large_delta(0.001, 500, "rows")[0]
