"""A proved figure exceeds the truth as rarely as its confidence says, and comes near it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel_lab.attacks.audit.bounds import ALARM, Verdict, most
from umbel_lab.attacks.defences.claims import bound, judged

pytestmark = pytest.mark.rest

RUNS, AT_MOST = 200, 18
"""In 200 audits at 95 % confidence, more than 18 too large bounds have a probability of half a per cent."""


def coins(generator: np.random.Generator, canaries: int) -> np.ndarray:
    return 2 * generator.integers(2, size=canaries) - 1


@pytest.mark.parametrize("epsilon", [0.5, 2.0, None])
def test_a_mechanism_is_seldom_proved_worse_than_it_is(epsilon: float | None) -> None:
    """Randomised response, whose epsilon is exact, and Gaussian noise at a delta of 1e-2 (2.2 for mu = 1)."""
    grid = np.linspace(0, 5, 5001)
    true = grid[np.argmax(GaussianLoss(1.0).delta(grid) <= 0.01)] if epsilon is None else epsilon
    generator, exceeded = np.random.default_rng(5), 0
    for _ in range(RUNS):
        thrown = coins(generator, 400)
        if epsilon is None:
            scores, delta = thrown / 2 + generator.standard_normal(400), 0.01
        else:
            kept = generator.random(400) < 1 / (1 + math.exp(-epsilon))
            scores, delta = np.where(kept, thrown, -thrown).astype(float), 0.0
        shown = bound(scores, thrown, delta, true, 0.95)
        exceeded += shown.shown > true
        assert shown.verdict is not Verdict.EXCEEDS
    assert exceeded <= AT_MOST


def test_without_noise_the_bound_is_the_most_that_canaries_can_prove_and_without_a_signal_it_is_0() -> None:
    thrown = coins(np.random.default_rng(7), 1000)
    found = bound(thrown.astype(float), thrown, 0.0, 1.0, 0.95)
    assert found.shown == pytest.approx(most(judged(1000)))
    assert found.shown <= math.log(1000)
    assert (found.chance < ALARM, found.verdict) == (True, Verdict.EXCEEDS)
    assert bound(np.zeros(1000), thrown, 0.0, 0.0, 0.95).shown == 0
