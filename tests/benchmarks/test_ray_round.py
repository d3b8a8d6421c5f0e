"""The parts of a round add up to the round."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

import umbel.client.app
import umbel.server.app
from benchmarks import ray_round
from benchmarks.measure import console
from umbel.protocol.home import umbel_home
from umbel.simulation.grid import InProcessGrid

pytestmark = pytest.mark.rest


def test_a_clock_notes_the_parts_of_each_round_that_trains(run_config: dict[str, Any]) -> None:
    config = run_config | {"rounds": 3, "patience": 0, "observers": "benchmarks.ray_round:Clock"}
    umbel.server.app.app(InProcessGrid(umbel.client.app.app, config, 2), Context(1, 0, {}, RecordDict(), config))
    (folder,) = (umbel_home() / "runs").iterdir()
    rounds = np.array(json.loads((folder / "clock.json").read_text(encoding="utf-8")))
    assert rounds.shape == (3, len(ray_round.PARTS))
    # In one process an answer is made while the message is handed over, so that one part is negative and none is lost.
    took = [json.loads(line)["seconds"] for line in (folder / "history.jsonl").open(encoding="utf-8")][:3]
    assert (rounds.sum(axis=1) >= np.array(took) - 0.001).all()


def test_medians_of_the_parts_are_shown() -> None:
    with console.capture() as printed:
        ray_round.show([[0.001, 0.0, 0.08, 0.01, 0.002], [0.003, 0.0, 0.1, 0.01, 0.002]], alone=0.0029)
    assert "in Ray: 104 ms" in printed.get()
    assert "90.0" in printed.get()
    assert "80.0 to 100.0" in printed.get()
    assert "takes 2.9 ms in one process" in printed.get()
