"""Outputs of a model in readable form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from umbel import models
from umbel.client.prediction import present_outputs
from umbel.data import Manifest


@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_a_class_appears_by_name_whatever_the_loss(loss: str) -> None:
    model = models.load("linear inputs=2 outputs=3", loss)
    target = {"name": "ward", "categories": ["A", "B", "C"]}
    data = Manifest(name="stays", clients=1, split={"train": 1, "validation": 0}, units={"target": target})
    outputs = torch.tensor([[0.1, 0.2, 0.3], [2.0, -1.0, 0.0]])
    assert present_outputs(model, outputs, data) == ["C", "A"]


def test_a_class_without_a_name_appears_by_its_number() -> None:
    """Of a model with more outputs than the data have classes, as one from a library."""
    model = models.load("linear inputs=2 outputs=4", "cross-entropy")
    target = {"name": "ward", "categories": ["A", "B"]}
    data = Manifest(name="stays", clients=1, split={"train": 1, "validation": 0}, units={"target": target})
    outputs = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    assert present_outputs(model, outputs, data) == ["3", "B"]


def test_several_numbers_stay_numbers() -> None:
    model = models.load("linear inputs=2 outputs=3", "mse")
    data = Manifest(name="stays", clients=1, split={"train": 1, "validation": 0}, units={"target": {"scale": 2}})
    assert np.shape(present_outputs(model, torch.tensor([[0.1, 0.2, 0.3]]), data)) == (1, 3)
