"""IFCA: a release belongs to the hypothesis that its client says it chose."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
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


def test_releases_go_where_the_clients_say() -> None:
    labels = IFCA(Fleet()).assign(np.zeros((3, 1)), np.zeros((2, 1)), np.array([1, 0, 1]))
    assert labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
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


@pytest.mark.parametrize(
    "choices",
    [None, 1, [0], [0, 1, 0], [0, 2], [0, -1], [0.0, 0.5], [0.0, float("inf")], [0.0, float("nan")], [0, 2**70]],
)
def test_a_reply_without_a_choice_for_each_release_is_dropped(choices: Any) -> None:
    grid = PaperGrid.simulated(train=4, nodes=2)
    strategy, messages = ask(grid)
    replies = grid.releases(messages, RELEASE.__getitem__, CHOICE.__getitem__)
    counts = replies[1].content.metric_records["released"]
    if choices is None:
        del counts["choices"]
    else:
        counts["choices"] = choices
    following, metrics = strategy.aggregate_train(1, replies)
    # The other node hosts clients 0 and 2, and both chose hypothesis 0.
    assert vectors(from_array_record(following)).tolist() == [[5, 5, 5], [10, 10, 10]]
    assert (metrics["releases"], metrics["lost-nodes"]) == (2, 1)
