"""Outputs of a model in readable form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.datasets import manifest
from umbel import models
from umbel.client.prediction import present_outputs


@pytest.mark.parametrize(
    ("outputs", "loss", "classes", "shown"),
    [
        *(([[0.1, 0.2, 0.3], [2.0, -1.0, 0.0]], loss, "ABC", ["C", "A"]) for loss in ("cross-entropy", "mse")),
        # A model may have more outputs than the data have classes, as one from a library.
        ([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]], "cross-entropy", "AB", ["3", "B"]),
    ],
)
def test_a_class_appears_by_name_or_number(outputs: Any, loss: str, classes: str, shown: list[str]) -> None:
    model = models.load(f"linear inputs=2 outputs={len(outputs[0])}", loss)
    data = manifest(1, units={"target": {"name": "ward", "categories": [*classes]}})
    assert present_outputs(model, torch.tensor(outputs), data) == shown


def test_several_numbers_stay_numbers() -> None:
    model = models.load("linear inputs=2 outputs=3", "mse")
    assert np.shape(present_outputs(model, torch.ones(1, 3), manifest(1, units={"target": {"scale": 2}}))) == (1, 3)
