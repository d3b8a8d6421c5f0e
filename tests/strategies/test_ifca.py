"""IFCA: a release belongs to the hypothesis that its client says it chose."""

from __future__ import annotations

import random
from typing import Any

import pytest
from flwr.app import ConfigRecord

from tests.helpers.grids import PaperGrid, stack, vectors
from umbel.protocol.messages import training_in
from umbel.protocol.records import from_array_record, to_array_record
from umbel.server.nodes.fleet import Fleet
from umbel.strategies.ifca import IFCA

TRAIN_CONFIG = ConfigRecord(
    {"local_epochs": 1, "step_size": 0.1, "batch_size": 10, "noise_multiplier": 0.0, "noise_per": "vector"}
)
HYPOTHESES = [(0, 0, 0), (10, 10, 10)]
# Both groups lie across both hypotheses: k-means would group these otherwise.
RELEASE = {0: (0, 0, 0), 1: (1, 1, 1), 2: (10, 10, 10), 3: (11, 11, 11)}
CHOICE = {0: 0, 1: 1, 2: 0, 3: 1}


def ask(grid: PaperGrid) -> tuple[IFCA, list[Any]]:
    """Return a strategy that has asked all four clients, and its messages."""
    strategy = IFCA(Fleet(clients_per_round=4))
    return strategy, strategy.configure_train(1, to_array_record(stack(HYPOTHESES)), TRAIN_CONFIG, grid)


def test_clients_are_asked_what_they_chose() -> None:
    _, (message,) = ask(PaperGrid.simulated(train=4))
    assert training_in(message.content).disclose_choice is True


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_round_averages_the_clients_that_chose_a_hypothesis(nodes: int) -> None:
    grid = PaperGrid.simulated(train=4, nodes=nodes)
    strategy, messages = ask(grid)
    replies = grid.releases(messages, RELEASE.__getitem__, CHOICE.__getitem__)
    random.Random(0).shuffle(replies)
    following, metrics = strategy.aggregate_train(1, replies)
    assert vectors(from_array_record(following)).tolist() == [[5, 5, 5], [6, 6, 6]]
    assert metrics["groups"] == [2, 2]


def test_choices_are_those_of_the_clients_that_released() -> None:
    grid = PaperGrid.simulated(train=4)
    strategy, messages = ask(grid)
    replies = grid.releases(messages, (RELEASE | {1: None, 2: None}).__getitem__, CHOICE.__getitem__)
    following, _ = strategy.aggregate_train(1, replies)
    assert vectors(from_array_record(following)).tolist() == [[0, 0, 0], [11, 11, 11]]
