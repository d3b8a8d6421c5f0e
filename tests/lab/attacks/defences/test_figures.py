"""A proved figure is seldom above the truth, a fit's interval has it, and formulas are those of the peers' own code."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from umbel.privacy.accounting.accountant import compose
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.protocol.project import source
from umbel_lab.attacks.audit.bounds import ALARM, Verdict, most
from umbel_lab.attacks.defences.claims import bound, judged
from umbel_lab.attacks.defences.laws import FIT_LEVEL, GAUSSIAN, LAPLACE, VECTOR, fit, joint, p_value, vector_scale

RUNS, AT_MOST = 200, 18
"""In 200 audits at 95 % confidence, more than 18 too large bounds have a probability of half a per cent."""


def coins(generator: np.random.Generator, canaries: int) -> np.ndarray:
    return 2 * generator.integers(2, size=canaries) - 1


@pytest.mark.rest
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


@pytest.mark.rest
def test_without_noise_the_bound_is_the_most_that_canaries_can_prove_and_without_a_signal_it_is_0() -> None:
    thrown = coins(np.random.default_rng(7), 1000)
    found = bound(thrown.astype(float), thrown, 0.0, 1.0, 0.95)
    assert found.shown == pytest.approx(most(judged(1000)))
    assert found.shown <= math.log(1000)
    assert (found.chance < ALARM, found.verdict) == (True, Verdict.EXCEEDS)
    assert bound(np.zeros(1000), thrown, 0.0, 0.0, 0.95).shown == 0


# --- only noise of a tested law is fitted


TRIALS = 300


def drawn(law: str, generator: np.random.Generator, k: int = 300) -> np.ndarray:
    return generator.standard_normal((2, k)) if law == GAUSSIAN else generator.laplace(size=(2, k))


@pytest.mark.parametrize(("law", "other"), [(GAUSSIAN, LAPLACE), (LAPLACE, GAUSSIAN)])
def test_a_right_law_is_rejected_as_often_as_stated_and_the_other_law_always(law: str, other: str) -> None:
    """More often than the 99.9 % quantile of the binomial law, by chance in one of a thousand runs."""
    generator = np.random.default_rng(1)
    rejected = sum(p_value(*(7 + 3 * drawn(law, generator)), law) <= FIT_LEVEL for _ in range(TRIALS))
    assert rejected <= stats.binom.ppf(0.999, TRIALS, FIT_LEVEL)
    assert all(p_value(*drawn(law, generator, 500), other) <= FIT_LEVEL for _ in range(20))


@pytest.mark.parametrize("law", [GAUSSIAN, LAPLACE])
def test_the_interval_has_the_truth_as_often_as_stated(law: str) -> None:
    generator = np.random.default_rng(3)
    fits = [fit(one + 1, other - 1, 0.05) for one, other in (drawn(law, generator) for _ in range(TRIALS))]
    right = [found for found in fits if found and found.law == law]
    assert len(right) > 0.9 * TRIALS
    assert sum(not found.low <= 2 <= found.high for found in right) <= stats.binom.ppf(0.999, len(right), 0.05)


def test_a_gaussian_of_known_distance_has_the_epsilon_of_its_formula() -> None:
    """Two clip norms in deviations of .4845, as LocalDpMod(1, 1, 10, 1e-5) draws: 25.4, in three rounds 55.3."""
    generator = np.random.default_rng(4)
    found = fit(*(0.48448 * drawn(GAUSSIAN, generator, 20_000) + np.array([[1.0], [-1.0]])), 0.05)
    assert found is not None
    assert found.epsilon(1e-5) == pytest.approx(25.44, rel=0.03)
    assert found.epsilon(1e-5, 3) == pytest.approx(55.27, rel=0.03)
    assert found.epsilon(0.0) == math.inf


@pytest.mark.parametrize(("law", "n"), [(GAUSSIAN, 8), (VECTOR, 8), (VECTOR, 3)])
def test_the_law_of_a_vector_is_told_by_its_norm(law: str, n: int) -> None:
    """Of 100 right ones at least 90 pass, and none passes for the other: a law is rejected at 1 % or less."""
    told = []
    for seed in range(100):
        generator = np.random.default_rng([5, seed])
        noise = generator.standard_normal((1000, n))
        if law == VECTOR:
            norms = generator.standard_gamma(n, 1000)
            noise *= (norms / np.linalg.norm(noise, axis=1))[:, None]
        told.append(joint(2.0 + 0.5 * noise))
    assert told.count(law) >= 90
    assert {*told} <= {law, ""}


def test_the_least_scale_of_a_vector_is_below_its_scale_as_often_as_stated() -> None:
    """A level of 0.1 leaves 5 % above: of 200, more than 20 have a probability of 0.2 %."""
    above = 0
    for seed in range(200):
        generator = np.random.default_rng([6, seed])
        noise = generator.standard_normal((1000, 4))
        noise *= (generator.standard_gamma(4, 1000) / np.linalg.norm(noise, axis=1))[:, None]
        above += vector_scale(noise, 0.1) > 1.0
    assert above <= 20


def test_noise_of_no_law_is_not_fitted() -> None:
    for values in (
        np.ones((2, 100)), np.arange(10.0).reshape(2, 5), np.tile([1.0, -1.0], (2, 100)), np.exp(np.ones((2, 9))),
    ):  # fmt: skip
        assert fit(*values, 0.05) is None
    for values in (np.random.default_rng(7).uniform(-1, 1, (1000, 8)), np.ones((1000, 8)), np.ones((10, 8))):
        assert joint(values) == ""


# --- what the peers' own code says


FOLDER = source("examples/audits")
STRATEGY = "DifferentialPrivacy{}Side{}Clipping"


def said(script: str) -> dict[str, float]:
    """Return the figures that a script prints."""
    command = [sys.executable, FOLDER / f"{script}.py"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    lines = [line.split() for line in done.stdout.splitlines() if len(line.split()) == 2]
    return {name: float(figure) for name, figure in lines}


@pytest.mark.slow
@pytest.mark.rest
def test_flowers_own_code_gives_the_formula_figures() -> None:
    """A noise multiplier of 1 puts two updates two deviations apart. Adaptive clipping counts with a fourth of it."""
    local, fixed, adaptive = (
        compose({GaussianLoss(mu): 1}, 1e-5) for mu in (2 / (2 * 11.736) ** 0.5, 2.0, 2.0 * 0.75**0.5)
    )
    sides = [(side, kind) for side in ("Client", "Server") for kind in ("Fixed", "Adaptive")]
    wanted = {STRATEGY.format(*one): fixed if one[1] == "Fixed" else adaptive for one in sides}
    assert said("flower_figures") == pytest.approx({"LocalDpMod": local, **wanted}, rel=0.02)


@pytest.mark.slow
@pytest.mark.rest
def test_umbels_own_code_gives_the_formula_figures() -> None:
    """Noise multiplier 8: of 8 values, Laplace noise costs 2 n / nu = 2."""
    wanted = {"gaussian": compose({GaussianLoss(0.25): 1}, 1e-5), "laplace": 2.0}
    assert said("umbel_figures") == pytest.approx(wanted, rel=0.02)
