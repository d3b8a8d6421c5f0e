"""Clients of the PAC paper's trials: they are what the tables say, and all are attacked alike."""

from __future__ import annotations

import numpy as np

from umbel.client.cohort import LocalUpdate
from umbel.research.attacks.pac_attack import Estimate
from umbel.research.experiments.pac_trials import Trials, interactions


def test_a_trial_has_exactly_its_like_rate_and_each_item_once() -> None:
    clients = Trials.draw(5, 0.3, seed=1)
    labels = clients.cohort.targets.numpy().reshape(5, 40)
    numbers = clients.cohort.features.numpy().reshape(5, 40)
    assert (labels > 0).sum(axis=1).tolist() == [12] * 5
    assert all(len(set(own)) == 40 for own in numbers.tolist())


def test_items_that_nobody_labelled_may_be_left_out_where_zeros_are_sent() -> None:
    clients = Trials.draw(3, 0.3, seed=2)
    update = LocalUpdate(0, 0.1, 10, 1)
    whole, _, _ = next(interactions(clients, update, True, 0))
    narrow, _, _ = next(interactions(clients.narrowed(), update, True, 0))
    np.testing.assert_allclose(narrow.sum(axis=1), whole.sum(axis=1), rtol=1e-6)
    assert narrow.shape == (3, 40, 8)


def test_the_error_of_the_local_model_itself_is_0_and_of_its_opposite_1() -> None:
    clients = Trials.draw(2, 0.1, seed=3)
    estimates = [Estimate(8, spectral=False) for _ in range(2)]
    for estimate, own in zip(estimates, clients.local, strict=True):
        estimate.add(-own[None])  # items are pushed away from u
    assert clients.errors(estimates, clients.local).tolist() == [0, 0]
    assert clients.errors(estimates, -clients.local).tolist() == [1, 1]
