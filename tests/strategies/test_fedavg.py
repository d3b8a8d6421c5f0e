"""Federated averaging: one hypothesis, the mean of all releases."""

from __future__ import annotations

from tests.helpers.scripted import on
from tests.strategies.conftest import one_round
from umbel.nodes.fleet import Fleet
from umbel.strategies.fedavg import FedAvg


def test_a_round_averages_the_releases_each_counting_once() -> None:
    strategy = on(Fleet(clients_per_round=3), FedAvg(hypotheses=7))
    assert strategy.hypotheses == 1, "whatever is asked"
    following, counts = one_round(strategy, [(7, 7, 7)], {0: (1, 0, 3), 1: (2, 0, 3), 2: (6, 9, 3)}, nodes=2)
    assert following.tolist() == [[3, 3, 3]]
    assert counts["groups"] == [3]
