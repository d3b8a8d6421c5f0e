"""How much memory the server takes for a round's releases, with the replies that they came in."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message
from numpy.typing import NDArray

from tests.helpers.forks import in_own_process
from tests.helpers.grids import PaperGrid
from tests.helpers.paper import paper_task
from tests.helpers.replies import training_reply
from tests.helpers.scripted import on
from umbel import strategies
from umbel.nodes.fleet import Fleet
from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.records import from_array_record
from umbel.strategies.base import HypothesisStrategy

pytestmark = pytest.mark.rest

# A reply is so long that its memory is the system's again as soon as it is let go.
N, CLIENTS = 400_000, 100
RELEASES = 4 * N * CLIENTS  # bytes
TASK = paper_task(noise_multiplier=1.0, batch_size=0)
_STATUS = Path("/proc/self/status")


def answers(grid: PaperGrid, messages: list[Message], step: float) -> list[Message]:
    """Return what nodes say whose clients are of two kinds."""
    replies, noise = [], np.random.default_rng(0).integers(-4, 5, N).astype(np.float32) / 64
    for message in messages:
        rows = noise + np.array(grid.asked(message), np.float32)[:, None] % 2
        content = training_reply({"weight": rows}, [1] * len(rows), step=step)
        replies.append(Message(content, reply_to=message))
    return replies


def memory(field: str) -> int:
    """Return VmRSS, what this process has of the machine's memory, or VmHWM, the most that it had; in bytes."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="utf-8").splitlines())
    return 1024 * int(lines[field].split()[0])


@pytest.mark.skipif(not _STATUS.exists(), reason="only Linux says what memory a process has")
@pytest.mark.parametrize(
    ("make", "nodes", "step"),
    [(strategies.GroupPrivacy, 3, 0.0), (strategies.GroupPrivacy, 1, 1 / 64), (strategies.FedAvg, 1, 0.0)],
    ids=["group-privacy, 3 nodes", "group-privacy, 16 bits", "fedavg, 1 node"],
)
def test_a_round_takes_less_than_two_copies_of_its_releases(
    make: Callable[..., HypothesisStrategy], nodes: int, step: float
) -> None:
    k = 2 if make is strategies.GroupPrivacy else 1
    came, most, following = in_own_process(_round, make, nodes, step, k)
    assert came > 0.45 * RELEASES, "the replies are a part of it"
    np.testing.assert_allclose(following, [0, 1] if k > 1 else [0.5], atol=0.01)
    assert most < 2 * RELEASES, f"{most / RELEASES:.2f} copies"


def _round(
    make: Callable[..., HypothesisStrategy], nodes: int, step: float, k: int
) -> tuple[int, int, NDArray[np.float64]]:
    """Do a round; return the bytes of its replies, the most that it took, and the mean of each next hypothesis."""
    grid, strategy = (
        PaperGrid.simulated(train=CLIENTS, nodes=nodes),
        on(Fleet(clients_per_round=CLIENTS), make(hypotheses=k)),
    )
    sent = np.linspace(0, 1, k, dtype=np.float32)[:, None] * np.ones(N, np.float32)
    asked = strategy.nodes.ask_training(1, Hypotheses({"weight": sent}), TASK, grid)
    strategy.asked["train"], messages = asked, asked.messages
    gc.collect()
    before = memory("VmRSS")
    replies = answers(grid, messages, step)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # from here on the most is counted
    came = memory("VmRSS") - before
    following, _ = strategy.aggregate_train(1, replies)
    most = memory("VmHWM") - before
    assert following is not None
    return came, most, from_array_record(following)["weight"].mean(axis=1)
