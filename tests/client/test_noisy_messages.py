"""Noisy messages (PAC paper, Eq. 3): Gaussian noise on what a client changed, or on all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from tests.helpers.cohorts import generators
from umbel.client.work import noisy_messages

FALSE_ALARM = 1e-6


def messages(everywhere: bool, sigma: float = 0.5, seed: int = 0, items: int = 400) -> NDArray[Any]:
    """Return the noise in the messages of two clients; the first changed the even items, the second item 1."""
    before = np.random.default_rng(9).standard_normal((items, 8)).astype(np.float32)
    # The second client started from another hypothesis.
    trained = np.stack([before, before + 7])
    trained[0, ::2, 3] += 1
    trained[1, 1] += 1
    hypotheses = {"items": np.stack([before + 7, before])}
    noisy = noisy_messages({"items": trained}, hypotheses, np.array([1, 0]), sigma, generators(2, seed), everywhere)
    return noisy["items"] - trained


def test_rows_that_did_not_change_get_no_noise() -> None:
    noise = messages(everywhere=False)
    assert np.flatnonzero(noise[0].any(axis=1)).tolist() == list(range(0, 400, 2))
    assert np.flatnonzero(noise[1].any(axis=1)).tolist() == [1]
    assert noise[0, ::2].all(), "every component of a row that changed is noised"


def test_a_site_may_have_noise_on_all_rows_each_clients_own() -> None:
    first, second = messages(everywhere=True)
    assert first.all()
    assert (first != second).all()


@pytest.mark.parametrize("everywhere", [False, True])
def test_noise_is_normal_of_the_asked_deviation(everywhere: bool) -> None:
    """N(0, .5^2) a component. False-alarm rate 1e-6 for each case."""
    noise = messages(everywhere, items=2000)
    noised = noise[noise != 0]
    assert len(noised) >= 8_000
    assert stats.kstest(noised, stats.norm(scale=0.5).cdf).pvalue > FALSE_ALARM


def test_messages_leave_what_was_trained_alone() -> None:
    trained = np.zeros((1, 4, 2), np.float32)
    noisy_messages({"items": trained}, {"items": trained + 1}, np.array([0]), 1.0, generators(1), everywhere=True)
    assert not trained.any()


def test_each_array_of_a_model_is_noised_by_its_own_rows() -> None:
    """A bias is rows of one number, and a single number is a row."""
    shapes = {"weight": (3, 2, 2), "bias": (3,), "scale": ()}
    before = {name: np.zeros((1, *shape), np.float32) for name, shape in shapes.items()}
    trained = {name: np.repeat(value, 2, axis=0) for name, value in before.items()}
    trained["weight"][0, 1, 0, 0] = trained["bias"][0, 2] = trained["scale"][1] = 1
    noisy = noisy_messages(trained, before, np.array([0, 0]), 0.5, generators(2), everywhere=False)
    noised = {name: (noisy[name] != value).tolist() for name, value in trained.items()}
    some, none = [[True] * 2] * 2, [[False] * 2] * 2
    assert noised["weight"] == [[none, some, none], [none] * 3]
    assert noised["bias"] == [[False, False, True], [False] * 3]
    assert noised["scale"] == [False, True]
