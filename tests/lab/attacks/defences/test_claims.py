"""A proved figure exceeds the truth as rarely as its confidence says, and comes near it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel_lab.attacks.audit.bounds import ALARM, Verdict, most
from umbel_lab.attacks.defences.claims import bound, directions, judged

pytestmark = pytest.mark.rest

RUNS, AT_MOST = 200, 18
"""In 200 audits at 95 % confidence, more than 18 too large bounds have a probability of half a per cent."""


def coins(generator: np.random.Generator, canaries: int) -> np.ndarray:
    return 2 * generator.integers(2, size=canaries) - 1


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_a_pure_mechanism_is_seldom_proved_worse_than_it_is(epsilon: float) -> None:
    """Randomised response, whose epsilon is exact."""
    generator, exceeded = np.random.default_rng(5), 0
    for _ in range(RUNS):
        thrown = coins(generator, 400)
        kept = generator.random(400) < 1 / (1 + math.exp(-epsilon))
        shown = bound(np.where(kept, thrown, -thrown).astype(float), thrown, 0.0, epsilon, 0.95)
        exceeded += shown.shown > epsilon
        assert shown.verdict is not Verdict.EXCEEDS
    assert exceeded <= AT_MOST


@pytest.mark.rest
def test_a_gaussian_mechanism_is_seldom_proved_worse_than_it_is() -> None:
    """At a delta of 1e-2, where the epsilon of mu = 1 is 2.2."""
    grid = np.linspace(0, 5, 5001)
    epsilon = grid[np.argmax(GaussianLoss(1.0).delta(grid) <= 0.01)]
    generator, exceeded = np.random.default_rng(6), 0
    for _ in range(RUNS):
        thrown = coins(generator, 400)
        exceeded += bound(thrown / 2 + generator.standard_normal(400), thrown, 0.01, epsilon, 0.95).shown > epsilon
    assert exceeded <= AT_MOST


def test_without_noise_the_bound_is_the_most_that_the_canaries_can_prove() -> None:
    thrown = coins(np.random.default_rng(7), 1000)
    found = bound(thrown.astype(float), thrown, 0.0, 1.0, 0.95)
    assert found.shown == pytest.approx(most(judged(1000)))
    assert found.shown <= math.log(1000)
    assert found.chance < ALARM
    assert found.verdict is Verdict.EXCEEDS


def test_releases_that_tell_nothing_prove_nothing() -> None:
    thrown = coins(np.random.default_rng(8), 1000)
    assert bound(np.zeros(1000), thrown, 0.0, 0.0, 0.95).shown == 0


def test_lines_are_unit_vectors() -> None:
    for unit in directions(8):
        assert np.linalg.norm(unit) == pytest.approx(1)
