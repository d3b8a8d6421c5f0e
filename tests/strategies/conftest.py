"""What the tests of strategies share: a round on paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, MetricRecord
from numpy.typing import NDArray

from tests.helpers.grids import PaperGrid, stack, vectors
from umbel.protocol.messages import training_in
from umbel.protocol.records import from_array_record, to_array_record
from umbel.strategies.base import HypothesisStrategy


def one_round(
    strategy: HypothesisStrategy,
    sent: Any,
    release: Mapping[int, Any],
    choice: Mapping[int, int] | None = None,
    nodes: int = 1,
    round: int = 1,
) -> tuple[NDArray[Any], MetricRecord]:
    """Return the next hypotheses (k, n), and the counts, where all clients release these.

    Clients say what they chose where there is a `choice`, as they must have been asked to.
    """
    grid = PaperGrid.simulated(train=len(release), nodes=nodes)
    config = ConfigRecord({"local_epochs": 1, "step_size": 0.1, "batch_size": 10, "noise_multiplier": 5.0})
    strategy.allows_several = True
    messages = strategy.configure_train(round, to_array_record(stack(sent)), config, grid)
    for message in messages:
        task = training_in(message.content)
        assert task is not None
        assert task.disclose_choice == (choice is not None)
    replies = grid.releases(messages, release.__getitem__, *([choice.__getitem__] if choice else []))
    following, counts = strategy.aggregate_train(round, replies[::-1])
    assert following is not None
    assert counts is not None
    return vectors(from_array_record(following)), counts
