"""Federated averaging: one hypothesis, the mean of all releases."""

from __future__ import annotations

from flwr.app import ConfigRecord

from tests.helpers.grids import PaperGrid, stack, vectors
from umbel.protocol.records import from_array_record, to_array_record
from umbel.server.nodes.fleet import Fleet
from umbel.strategies.fedavg import FedAvg

TRAIN_CONFIG = ConfigRecord(
    {"local_epochs": 1, "step_size": 0.1, "batch_size": 10, "noise_multiplier": 0.0, "noise_per": "vector"}
)


def test_a_round_averages_the_releases_each_counting_once() -> None:
    release = {0: (1, 0, 3), 1: (2, 0, 3), 2: (6, 9, 3)}
    grid = PaperGrid.simulated(train=3, nodes=2)
    strategy = FedAvg(Fleet(clients_per_round=3), hypotheses=7)
    assert strategy.hypotheses == 1, "whatever is asked"
    messages = strategy.configure_train(1, to_array_record(stack([(7, 7, 7)])), TRAIN_CONFIG, grid)
    following, metrics = strategy.aggregate_train(1, grid.releases(messages, release.__getitem__))
    assert vectors(from_array_record(following)).tolist() == [[3, 3, 3]]
    assert metrics["groups"] == [3]
