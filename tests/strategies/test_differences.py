"""How clients differ, read off releases: the noise is taken away, and what is left is known as well as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.errors import raises
from umbel.models.prior import Prior, positive
from umbel.privacy.mechanisms import load
from umbel.protocol.errors import ProtocolError
from umbel.protocol.release import Clipping, ReleaseBy
from umbel.protocol.releases import Sums
from umbel.protocol.tasks import TrainingSpec
from umbel.strategies.differences import add_releases, add_sums, covariance, noise_variance, prior_of

TASK = TrainingSpec(noise_multiplier=3.0, clipping=Clipping.PUBLIC, clip_norm=0.5)
TRUE = np.array([[2.0, 0.8, 0.0], [0.8, 1.0, 0.0], [0.0, 0.0, 0.1]])


def releases(count: int, seed: int, task: TrainingSpec = TASK) -> np.ndarray[Any, Any]:
    """Draw clients' parameters of covariance `TRUE`, and add the noise of a task."""
    generator = np.random.default_rng(seed)
    own = generator.multivariate_normal(np.ones(3), TRUE, size=count)
    sources = [np.random.default_rng([seed, c]) for c in range(count)]
    noise = load(task.mechanism)(task.noise_multiplier).noise([3], np.full((count, 1), task.clip_norm), iter(sources))
    return (own + noise).astype(np.float32)


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_the_covariance_of_what_was_trained_is_estimated_without_bias(mechanism: str) -> None:
    """The mean of 200 estimates of 50 releases; it would fail by chance in less than 1 of 1,000 runs (4 deviations)."""
    task = replace(TASK, mechanism=mechanism)
    noise = noise_variance(task, 3)
    assert noise is not None
    found = np.array([covariance(releases(50, seed, task), np.arange(50), noise) for seed in range(200)])
    deviations = found.std(0) / np.sqrt(len(found))
    assert (np.abs(found.mean(0) - TRUE) < 4 * deviations).all()
    assert noise > 10 * np.abs(found.mean(0) - TRUE).max(), "which the noise alone would be"


def test_what_is_no_covariance_becomes_the_nearest() -> None:
    """Of eigenvalues 3 and -1 the latter goes."""
    np.testing.assert_allclose(positive(np.array([[[1.0, 2.0], [2.0, 1.0]]])), [[[1.5, 1.5], [1.5, 1.5]]])
    np.testing.assert_array_equal(positive(np.array([[1.0, -2.0]])), [[1.0, 0.0]])


def test_it_is_trusted_as_far_as_there_are_releases() -> None:
    trusts = []
    for count in (4, 100, 5000):
        state: dict[str, Any] = {}
        add_releases(state, releases(count, 1), np.zeros(count, np.int64), np.zeros((1, 3)), TASK)
        prior = prior_of(state, 1)
        assert prior is not None
        trusts.append(prior.trust.item())
    assert 0 <= trusts[0] < 0.5 < trusts[1] < trusts[2]
    assert trusts[2] > 0.9


def test_rounds_add_up_and_each_hypothesis_has_its_own() -> None:
    """The round before counts half: 3 and 1 degrees of freedom, of variances 1 and 4."""
    task, state = replace(TASK, noise_multiplier=0.0), dict[str, Any]()
    first = np.array([[1.0], [-1.0], [1.0], [-1.0], [5.0]], np.float32)
    add_releases(state, first, np.array([0, 0, 0, 0, 1]), np.zeros((2, 1)), task)
    assert state["prior/covariances"].ravel() == pytest.approx([4 / 3, 0])
    second = np.array([[np.sqrt(2)], [-np.sqrt(2)]], np.float32)
    add_releases(state, second, np.array([0, 0]), np.zeros((2, 1)), task)
    assert state["prior/covariances"].ravel() == pytest.approx([(1.5 * 4 / 3 + 4) / 2.5, 0])
    assert prior_of(state, 2) is not None
    assert prior_of(state, 3) is None
    add_releases(state, second, np.array([0, 0]), np.zeros((3, 1)), task)
    assert state["prior/covariances"].ravel() == pytest.approx([4, 0, 0]), "of other hypotheses nothing is known"


def test_of_many_parameters_only_variances_are_known() -> None:
    state: dict[str, Any] = {}
    drawn = np.random.default_rng(0).normal(size=(20, 300)).astype(np.float32)
    add_releases(state, drawn, np.zeros(20, np.int64), np.zeros((1, 300)), replace(TASK, noise_multiplier=0.0))
    np.testing.assert_allclose(state["prior/covariances"][0], drawn.astype(float).var(0, ddof=1), rtol=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"clipping": Clipping.UPDATE},  # the paper's clip norm is each client's own
        *({"row_clip_norm": 1.0, "row_noise_multiplier": 2.0, "row_rate": 0.5, "row_batch": 5.0, "local_steps": 2,
           "noise_multiplier": nu} for nu in (0.0, 3.0)),
        {"noise_multiplier": 0.0, "message_noise": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_where_the_noise_is_not_known_nothing_is(changes: dict[str, Any]) -> None:
    state: dict[str, Any] = {}
    add_releases(state, releases(5, 0), np.zeros(5, np.int64), np.zeros((1, 3)), replace(TASK, **changes))
    assert not state
    assert prior_of(state, 1) is None


def test_what_is_not_known_is_the_same_in_all_directions() -> None:
    prior = Prior(np.zeros((1, 2, 2)), np.zeros(1))
    np.testing.assert_array_equal(prior.matrices, [np.eye(2) / 2])
    np.testing.assert_array_equal(prior.diagonals, [[0.5, 0.5]])
    public = np.array([[[0.9, 0.1], [0.1, 0.1]]])
    np.testing.assert_array_equal(prior.with_public(public), public)


def test_a_prior_travels_and_is_checked() -> None:
    prior = Prior(np.array([[[2.0, 1.0], [1.0, 1.0]]]), np.array([0.5]))
    read = Prior.read(prior.arrays, 1, 2)
    np.testing.assert_allclose(read.covariances, prior.covariances, atol=1e-6)
    np.testing.assert_array_equal(read.trust, prior.trust)
    wrong: list[dict[str, Any]] = [
        {},
        {"covariances": np.ones((1, 3, 3))},
        {"covariances": np.full((1, 2, 2), np.nan)},
        {"trust": np.array([2.0])},
        {"trust": np.array([np.nan])},
        {"covariances": np.ones((2, 2))},
    ]
    for changes in wrong:
        with raises(ProtocolError, "protocol.prior"):
            Prior.read(prior.arrays | changes if changes else {}, 1, 2)


# --- from secure sums

SUMMED = replace(
    TASK, noise_multiplier=2.0, clip_norm=8.0, mechanism="discrete-gaussian", release_by=ReleaseBy.SECURE, moments=True
)


def sums(count: int, seed: int, task: TrainingSpec = SUMMED) -> Sums:
    """Draw clients' updates of covariance `TRUE`, and return what a secure sum with second moments shows of them."""
    generator = np.random.default_rng(seed)
    own = generator.multivariate_normal(np.ones(3), TRUE, size=count)
    assert np.linalg.norm(own, axis=1).max() < task.clip_norm
    noise = task.noise_multiplier * task.clip_norm
    square = generator.normal(size=(3, 3)) * noise * task.clip_norm
    square = np.triu(square, 1) + np.triu(square, 1).T + np.diag(np.diag(square)) * np.sqrt(2)
    total = own.sum(axis=0) + generator.normal(size=3) * noise
    counts = np.array([[count + generator.normal() * np.sqrt(2) * task.noise_multiplier]])
    return Sums(total[None, None], counts, np.arange(count), count, 0, np.arange(0), (own.T @ own + square)[None])


def test_the_covariance_in_sums_is_estimated_without_bias_and_the_error_is_known() -> None:
    """Over 300 sums of 400 clients: the mean within 4 standard errors, and the squared error within a third of what the
    estimate says of itself."""
    found, errors = [], []
    for seed in range(300):
        state: dict[str, Any] = {}
        add_sums(state, sums(400, seed), SUMMED)
        found.append(state["prior/covariances"][0])
        errors.append(state["prior/errors"][0])
    deviations = np.std(found, axis=0) / np.sqrt(len(found))
    # The count's noise, of 1 in 140, biases by its square.
    assert (np.abs(np.mean(found, axis=0) - TRUE) < 4 * deviations + 1e-3).all()
    measured = np.square(np.array(found) - TRUE).sum(axis=(1, 2)).mean()
    assert measured == pytest.approx(np.mean(errors), rel=0.33)


def test_sums_over_many_clients_are_trusted_and_over_few_say_nothing() -> None:
    few, many = dict[str, Any](), dict[str, Any]()
    add_sums(few, sums(4, 1), SUMMED)
    assert prior_of(few, 1) is None
    add_sums(many, sums(20_000, 1), SUMMED)
    prior = prior_of(many, 1)
    assert prior is not None
    assert prior.trust.item() > 0.9
    np.testing.assert_allclose(prior.matrices[0], TRUE / np.trace(TRUE), atol=0.1)
