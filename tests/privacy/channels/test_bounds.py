"""No honest release, and no honest loss, is out of bounds; what would move a model or a mean away is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.paper import paper_task
from umbel.privacy.channels.client import LARGEST_UPDATE, furthest, near
from umbel.privacy.channels.reports import pulled_in
from umbel.privacy.mechanisms import Gaussian, Laplace, Mechanism
from umbel.privacy.mechanisms.sanitise import min_radius, resolution, round_to_grid, sanitise
from umbel.protocol.release import Clipping

# --- releases


def honest(
    n: int, mechanism: Mechanism | None, radius: float, theta: np.ndarray, mode: Clipping, seed: int, m: int = 50
) -> Any:
    """Return what a site's gate makes of updates of all lengths."""
    rng = np.random.default_rng(seed)
    updates = rng.standard_normal((m, n)) * 10.0 ** rng.uniform(-6, 3, (m, 1))
    if mode is Clipping.UPDATE:
        updates *= np.minimum(1, LARGEST_UPDATE / np.linalg.norm(updates, axis=1, keepdims=True))
    finest = resolution(theta)
    if mechanism is not None:
        radius = max(radius, min_radius(mechanism.deviation(n), finest))
    noisy = sanitise(mechanism, updates, radius, mode, [rng] * m) + theta[rng.integers(len(theta), size=m)]
    if mechanism is not None:
        noisy = round_to_grid(noisy, mechanism.deviation(n) * radius, finest)
    return noisy.astype(np.float32).astype(np.float64)


@settings(max_examples=examples(50))
@given(
    st.sampled_from([1, 2, 3, 11, 500]),
    st.sampled_from([0.0, 0.1, 1.0, 5.0, 100.0]),
    st.sampled_from([0.01, 1.0, 50.0]),
    st.sampled_from([0.0, 1e-3, 1.0, 1e4]),
    st.sampled_from(Clipping),
    st.sampled_from([Laplace, Gaussian]),
    st.integers(0, 2**32 - 1),
)
def test_no_honest_release_is_left_out(
    n: int, nu: float, radius: float, scale: float, mode: Clipping, kind: type[Mechanism], seed: int
) -> None:
    theta = (np.random.default_rng(seed).standard_normal((3, n)) * scale).astype(np.float32).astype(np.float64)
    asked = paper_task(noise_multiplier=nu, mechanism=kind.name, clipping=mode, clip_norm=radius)
    mechanism = kind(nu) if nu > 0 else None
    assert near(honest(n, mechanism, radius, theta, mode, seed), theta, furthest(asked, theta)).all()


@pytest.mark.parametrize("n", [2, 11, 1000, 10**6])
def test_the_bound_of_a_public_radius_is_a_few_times_the_noise(n: int) -> None:
    """The noise has a mean norm of nu r; the more parameters, the closer to it."""
    reach = furthest(paper_task(noise_multiplier=5.0, clipping="public", clip_norm=2.0), np.zeros((2, n)))
    ratio = reach / (2.0 * (1 + 5.0))
    assert 1 < ratio < {2: 20, 11: 6, 1000: 1.4, 10**6: 1.1}[n]


def test_the_key_stands_for_the_longest_update() -> None:
    theta = np.zeros((2, 3))
    public = paper_task(noise_multiplier=0.0, clipping="public", clip_norm=2.0)
    assert furthest(public, theta) == pytest.approx(2.0, rel=1e-5)
    assert furthest(public, theta, 7.0) == pytest.approx(7.0, rel=1e-5), "for a site whose own floor is higher"
    assert furthest(paper_task(noise_multiplier=0.0), theta) == pytest.approx(1e6, rel=1e-5)
    assert furthest(paper_task(noise_multiplier=0.0), theta, 30.0) == pytest.approx(30.0, rel=1e-5)
    layers = furthest(paper_task(noise_multiplier=1.0, noise_per="layer"), theta, 30.0)
    assert layers > furthest(paper_task(noise_multiplier=1.0), theta, 30.0), "each layer has noise of its own"


def test_a_bound_does_not_grow_with_hypotheses_that_were_moved() -> None:
    """Or a hostile node would go further each round."""
    assert furthest(paper_task(noise_multiplier=5.0), np.full((2, 3), 1e8)) < 1.01 * furthest(
        paper_task(noise_multiplier=5.0), np.zeros((2, 3))
    )


def test_what_is_near_one_of_the_hypotheses_is_near() -> None:
    theta = np.array([[0.0, 0.0], [1e8, 1e8]])
    vectors = np.array([[3.0, 4.0], [1e8 + 3, 1e8 + 4], [1e8 + 3, 1e8 + 5], [3.4e38, 0.0], [5e7, 5e7]])
    assert near(vectors, theta, 5.0).tolist() == [True, True, False, False, False]
    assert near(np.zeros((0, 2)), theta, 5.0).tolist() == []


# --- losses

LOSSES = st.lists(st.floats(0.3, 3), min_size=3, max_size=40).map(np.array)


@given(LOSSES, st.integers(0, 2**32 - 1))
def test_losses_of_honest_clients_keep_their_mean_to_the_bit(losses: np.ndarray, seed: int) -> None:
    spread = np.random.default_rng(seed).lognormal(0, 0.4, 200)
    for values in (0.3 + losses * 0.5, spread, -spread):
        assert pulled_in(values) is values


@given(LOSSES, st.floats(-3e38, 3e38), st.integers(0, 40))
def test_one_client_moves_the_mean_by_little_more_than_its_share(losses: np.ndarray, lie: float, place: int) -> None:
    m, there = len(losses) + 1, np.insert(losses, place % (len(losses) + 1), lie)
    found = pulled_in(there).mean()
    assert losses.mean() * (m - 1) / m <= found * (1 + 1e-9), "it can say 0, and no less"
    assert found <= losses.mean() + 25 * losses.max() / m


@pytest.mark.parametrize("liars", [1, 2, 3, 4])
def test_up_to_one_client_in_five_counts_as_ten_times_the_honest_scale(liars: int) -> None:
    honest = np.full(20, 0.8) + np.linspace(-0.02, 0.02, 20)
    lied = np.concatenate([honest[liars:], np.full(liars, 1e38)])
    assert pulled_in(lied).mean() - honest.mean() == pytest.approx(liars * 10 * 0.8 / 20, abs=0.03)


@pytest.mark.parametrize("lie", [-3e38, 3e38, 0.0, -1.0])
def test_one_client_in_three_does_not_freeze_the_best(lie: float) -> None:
    """It lies in the first round alone: later rounds are better all the same."""
    first = pulled_in(np.array([4.0, lie, 5.0])).mean()
    assert first > np.mean([1.0, 1.1, 1.2])


def test_losses_that_may_be_negative_are_bounded_on_both_sides() -> None:
    margins = np.array([-3.0, -2.0, -1.0, 0.5, -2.5, -3e38])
    assert pulled_in(margins).min() == pytest.approx(-2.25 - 27.5)
    assert pulled_in(margins[:-1]) is not None


def test_where_most_losses_are_0_the_others_count() -> None:
    hinge = np.array([0.0] * 90 + [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert pulled_in(hinge) is hinge
    assert pulled_in(np.append(hinge, 3e38)).max() == pytest.approx(6.0)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 1e30], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
def test_of_two_nobody_knows_who_is_wrong_and_of_the_same_nobody_is(values: list[float]) -> None:
    assert pulled_in(np.array(values)).tolist() == values
