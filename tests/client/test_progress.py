"""A node's own log tells how far a round has come, and no reply does."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from tests.helpers.messages import asked, releases, scores, task_of
from tests.helpers.nodes import ask
from umbel.client import progress
from umbel.client.app import app
from umbel.protocol.project import ENGINE
from umbel.protocol.tasks import EvaluationSpec
from umbel.simulation.grid import InProcessGrid

HYPOTHESES = {"weight": np.array([[[5, 5]], [[4, -4]]], np.float32)}
CLIENTS = (4, 3, 7)
_LINE = re.compile(r"(?P<when>.*): (?P<done>\d+) of (?P<clients>\d+) (?P<what>.*), about (?P<left>.*) left")


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int, int, str]]:
    """Return what the lines about progress say, without the time."""
    lines = [found for text in caplog.messages if (found := _LINE.fullmatch(text))]
    return [(one["when"], int(one["done"]), int(one["clients"]), one["what"]) for one in lines]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Have a line for each step of progress."""
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, "flwr"):
        yield


def test_a_line_comes_every_ten_seconds_with_the_time_left(caplog: pytest.LogCaptureFixture) -> None:
    clock = iter([0.0, 6.0, 12.0, 18.0, 24.0, 30.0])

    def compute(some: slice) -> None:
        for share in (0.2, 0.4, 0.6, 0.8, 1.0):
            progress.at(share)

    with caplog.at_level(logging.INFO, "flwr"):
        progress.watched("round 3: {done} of {clients} clients trained", 5, compute, lambda: next(clock))(slice(0, 5))
    assert caplog.messages == [
        "round 3: 2 of 5 clients trained, about 18 s left",
        "round 3: 4 of 5 clients trained, about 6 s left",
    ], "not every step, and not the last: the round's own line follows"


def test_parts_add_up_and_outside_of_a_round_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    clock = iter([0.0, *(20.0 * i for i in range(1, 9))])

    def compute(some: slice) -> None:
        for begin in (0.0, 0.5):
            with progress.part(begin, begin + 0.5):
                progress.at(0.5)
                progress.at(1)

    with caplog.at_level(logging.INFO, "flwr"):
        by_client = progress.watched("{done} of {clients}", 8, compute, lambda: next(clock))
        by_client(slice(0, 4))
        by_client(slice(4, 8))
        compute(slice(0, 8))
    assert [int(text.split()[0]) for text in caplog.messages] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(("engine", "steps"), [("loop", {0, 1, 2}), ("batched", {1})])
def test_training_tells_how_many_clients_are_done(
    engine: str,
    steps: set[int],
    run_config: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENGINE, engine)
    reply = train(InProcessGrid(app, run_config))
    # Two of five parts are the choice between two hypotheses. The loop tells each client, the other engine each chunk.
    found = [line for line in told(caplog) if line[3] == "clients trained"]
    assert {(when, clients) for when, _, clients, _ in found} == {("round 1", 3)}
    assert {done for _, done, _, _ in found} == steps
    caplog.clear()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    quiet = train(InProcessGrid(app, run_config))
    assert told(caplog) == []
    assert list(reply.content) == list(quiet.content)
    np.testing.assert_array_equal(releases(reply)["weight"], releases(quiet)["weight"])


@pytest.mark.usefixtures("often", "looped")
def test_nodes_are_told_apart(run_config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    train(InProcessGrid(app, run_config, nodes=2), node=1)
    assert {when for when, *_ in told(caplog)} == {"round 1, node 2 of 2"}


@pytest.mark.usefixtures("often", "looped")
def test_scoring_tells_how_many_clients_are_done(run_config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    grid = InProcessGrid(app, run_config)
    reply = ask(grid, asked(HYPOTHESES, evaluation=EvaluationSpec(0, (100, 104, 109))), "evaluate")
    assert np.isfinite(scores(reply)).all()
    assert told(caplog) == [("before round 1", done, 3, "validation clients scored") for done in (1, 2)]


def train(grid: InProcessGrid, node: int = 0) -> Message:
    return ask(grid, asked(HYPOTHESES, task_of(CLIENTS, batch_size=4, noise_multiplier=0.0)), node=node)
