"""Flower's FedAvg and its wrappers understand what leaves the Mods; that other strategies do is in test_gate.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)

import umbel
from umbel.simulation.grid import InProcessGrid

OPTIMUM = np.array([1.0, -2.0])
CLIENTS, ROUNDS = 20, 12


def loss(arrays: ArrayRecord, context: Context) -> float:
    return float(np.square(arrays["w"].numpy() - OPTIMUM).sum())


def train(msg: Message, context: Context) -> Message:
    """Go half of the way to the optimum, with a weight that would drown the others."""
    w = msg.content.array_records["arrays"]["w"].numpy()
    content = {"arrays": ArrayRecord({"w": Array(((w + OPTIMUM) / 2).astype(np.float32))})}
    metrics = MetricRecord({"num-examples": 10 ** (int(context.node_config["partition-id"]) % 9)})
    return Message(RecordDict({**content, "metrics": metrics}), reply_to=msg)


@pytest.mark.parametrize(
    "wrapper",
    [None, DifferentialPrivacyServerSideFixedClipping, DifferentialPrivacyClientSideFixedClipping],
)
def test_strategies_learn_from_noisy_models(wrapper: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flwr")
    strategy: Strategy = FedAvg(fraction_evaluate=0.0)
    if wrapper:
        strategy = wrapper(strategy, noise_multiplier=0.001, clipping_norm=1.0, num_sampled_clients=CLIENTS)
    before = [fixedclipping_mod] if wrapper is DifferentialPrivacyClientSideFixedClipping else []
    app = ClientApp(mods=[*before, umbel.ChooseHypothesis(loss), umbel.LaplaceMod(0.5, clip_norm=1.0, seed=0)])
    app.train()(train)
    start = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    result = strategy.start(InProcessGrid(app, {}, CLIENTS), start, num_rounds=ROUNDS)
    found = result.arrays["w"].numpy()
    assert caplog.text.count(f"Received {CLIENTS} results and 0 failures") >= ROUNDS
    assert np.linalg.norm(found - OPTIMUM) < 1.0, found
    metrics = result.train_metrics_clientapp
    assert not metrics or set(metrics[ROUNDS]) <= {"num-examples"}, "nothing else is there to aggregate"
