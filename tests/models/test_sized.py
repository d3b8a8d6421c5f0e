"""Models whose name says their size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.models import write_module
from umbel.models import load
from umbel.protocol.errors import ModelError


@pytest.mark.parametrize(
    ("name", "loss", "shapes", "own"),
    [
        ("linear-5x1", "", [(1, 5), (1,)], ("mse", "rmse")),
        ("linear-5x3", "", [(3, 5), (3,)], ("cross-entropy", "accuracy")),
        ("linear-5x1", "log", [(1, 5), (1,)], ("log", "right-sign")),
        ("linear-5x3", "mse", [(3, 5), (3,)], ("mse", "rmse")),
        ("mlp-5x8x4x2", "", [(8, 5), (8,), (4, 8), (4,), (2, 4), (2,)], ("cross-entropy", "accuracy")),
    ],
)
def test_layers_loss_and_metric(name: str, loss: str, shapes: list[tuple[int, ...]], own: tuple[str, str]) -> None:
    model = load(name, loss)
    assert list(model.shapes.values()) == shapes
    assert (model.loss.name, model.metric.name) == own


def test_a_loss_of_ones_own_is_its_own_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = write_module(
        tmp_path, monkeypatch, "def absolute(outputs, targets):\n    return (outputs - targets).abs()"
    )
    model = load("linear-5x1", f"{module}:absolute")
    assert model.loss.name == model.metric.name == f"{module}:absolute"


def test_a_row_is_laid_out_flat() -> None:
    assert load("linear-6x2").module(torch.zeros(4, 2, 3)).shape == (4, 2)


def test_a_hidden_layer_bends() -> None:
    mlp = load("mlp-1x16x1").module
    with torch.no_grad():
        left, middle, right = mlp(torch.tensor([[-10.0], [0.0], [10.0]])).flatten()
    assert not torch.isclose(left + right, 2 * middle)


@pytest.mark.parametrize(
    "name", ["linear-5", "linear-5x2x1", "mlp-5x1", "linear-0x1", "mlp-5x-1x1", "linear-9999999x1"]
)
def test_other_sizes_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"unknown model '{name}'"):
        load(name)
