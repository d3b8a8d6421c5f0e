"""What umbel is timed against does the same rounds."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict

from benchmarks import empty_client, in_process, whole_rounds
from tests.helpers.messages import SIMULATED, of_node, to_node
from umbel.data import open_dataset
from umbel.simulation.in_process import play


def test_plain_pytorch_learns_what_umbel_learns(tmp_path: Path) -> None:
    """Without noise, each client in one step: k-means starts at the hypotheses, and so finds who chose which."""
    config = whole_rounds.config_of("cnn", tmp_path, clients=3, rounds=1, device="cpu")
    config |= {"noise-multiplier": 0.0, "batch-size": 100}
    data, start = open_dataset(Path(config["dataset"])), in_process.Laps(lambda run: run.state.hypotheses)
    learnt = play(config, observers=[start]).state.hypotheses
    networks = whole_rounds.networks_of("cnn", torch.device("cpu"))
    for j, one in enumerate(networks):
        one.load_state_dict({name: torch.from_numpy(value[j]) for name, value in start.notes[0].items()})
    whole_rounds.bare_round(networks, [data.client(c) for c in range(3)], config)
    for name, value in learnt.items():
        np.testing.assert_allclose(value, [one.state_dict()[name].numpy() for one in networks], atol=1e-5)


def test_the_large_network_is_resnet18() -> None:
    network = whole_rounds.ResNet18()
    assert sum(value.numel() for value in network.parameters()) == 11_173_962
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_an_empty_client_computes_its_first_reply_of_a_kind_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if Ray copies the app for each message."""
    asked: list[str] = []

    def umbels(message: Message, context: Context) -> Message:
        asked.append(message.metadata.message_type)
        return Message(RecordDict({"number": MetricRecord({"of": len(asked)})}), reply_to=message)

    monkeypatch.setattr(empty_client, "umbels", umbels)
    monkeypatch.setattr(empty_client, "_replies", {})
    context, found = of_node(SIMULATED), list[Any]()
    for kind in ("query", "train", "train", "train", "evaluate", "evaluate"):
        reply = pickle.loads(pickle.dumps(empty_client.app))(to_node(RecordDict(), kind), context)
        found.append(reply.content["number"]["of"])
    assert (asked, found) == (["query", "train", "evaluate"], [1, 2, 2, 2, 3, 3])
