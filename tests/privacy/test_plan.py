"""The planner's figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from privacy.plan import plan

HOSPITAL: dict[str, Any] = {
    "n": 11, "noise_multiplier": 3.0, "hypotheses": 5, "clients": 2062,
    "clients_per_round": 100, "rounds": 100, "delta": 1e-5,
}  # fmt: skip


def test_a_participation_costs_n_over_nu() -> None:
    assert plan(**HOSPITAL).cost == pytest.approx(11 / 3)


def test_expected_participations_are_those_of_simulated_runs() -> None:
    generator = np.random.default_rng(1)
    medians, maxima = [], []
    for _ in range(50):
        counts = np.zeros(2062, int)
        for _ in range(100):
            counts[generator.choice(2062, 100, replace=False)] += 1
        medians.append(np.median(counts))
        maxima.append(counts.max())
    figures = plan(**HOSPITAL)
    assert figures.median_participations == np.median(medians)
    assert figures.max_participations == pytest.approx(np.mean(maxima), abs=0.6)


def test_if_all_are_asked_in_every_round_all_take_part_in_every_round() -> None:
    figures = plan(**HOSPITAL | {"clients": 100})
    assert (figures.median_participations, figures.max_participations) == (100, 100)


def test_noise_after_averaging_by_hand() -> None:
    """One release has root mean square norm nu r sqrt((n+1)/n); twenty averaged, a twentieth of its square."""
    assert plan(**HOSPITAL).noise_to_update == pytest.approx(3 * math.sqrt(12 / 11 / 20))


def test_the_stability_limit_by_hand() -> None:
    assert plan(**HOSPITAL).largest_curvature_step == pytest.approx(2 / (1 + 9 * 12 / 11 / 20))


def test_a_model_of_a_million_parameters_gets_a_warning_in_words() -> None:
    [warning] = plan(**HOSPITAL | {"n": 1_206_590, "hypotheses": 2, "noise_multiplier": 1.0}).warnings
    assert "proves nothing" in warning


def test_a_small_model_with_few_rounds_gets_none() -> None:
    assert plan(**HOSPITAL | {"rounds": 20}).warnings == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n": 0}, "parameters must be at least 1"),
        ({"hypotheses": 0}, "hypotheses must be at least 1"),
        ({"clients_per_round": 3000}, "between 1 and the 2062 clients"),
        ({"delta": 0.0}, "delta must be between 0 and 1"),
        ({"noise_multiplier": 0.0}, "noise-multiplier must be a finite number above 0"),
        ({"noise_multiplier": math.nan}, "noise-multiplier must be a finite number above 0"),
    ],
)
def test_figures_that_cannot_be_are_named(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plan(**HOSPITAL | change)
