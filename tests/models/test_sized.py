"""Models whose options say their size; old names, with the size in the name, are understood."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.errors import raises
from tests.helpers.models import write_module
from umbel.data import Manifest
from umbel.models import load
from umbel.protocol.errors import ConfigError, ModelError
from umbel.protocol.run_config import RunConfig


@pytest.mark.parametrize(
    ("name", "loss", "shapes", "own"),
    [
        ("linear inputs=5 outputs=1", "", [(1, 5), (1,)], ("mse", "rmse")),
        ("linear inputs=5 outputs=3", "", [(3, 5), (3,)], ("cross-entropy", "accuracy")),
        ("linear inputs=5 outputs=1", "log", [(1, 5), (1,)], ("log", "right-sign")),
        ("linear inputs=5 outputs=3", "mse", [(3, 5), (3,)], ("mse", "rmse")),
        ("softmax features=20 classes=10", "", [(10, 20)], ("cross-entropy", "accuracy")),
        ("factors items=12 size=3", "", [(12, 3)], ("log", "right-sign")),
        (
            "mlp inputs=5 hidden=8,4 outputs=2",
            "",
            [(8, 5), (8,), (4, 8), (4,), (2, 4), (2,)],
            ("cross-entropy", "accuracy"),
        ),
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
    model = load("linear inputs=5 outputs=1", f"{module}:absolute")
    assert model.loss.name == model.metric.name == f"{module}:absolute"


def test_a_row_is_laid_out_flat() -> None:
    assert load("linear inputs=6 outputs=2").module(torch.zeros(4, 2, 3)).shape == (4, 2)


def test_a_hidden_layer_bends() -> None:
    mlp = load("mlp inputs=1 hidden=16 outputs=1").module
    with torch.no_grad():
        left, middle, right = mlp(torch.tensor([[-10.0], [0.0], [10.0]])).flatten()
    assert not torch.isclose(left + right, 2 * middle)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("linear inputs=5", ("config.missing-option", "outputs")),
        ("linear inputs=5 hidden=2 outputs=1", ("config.unknown-option", "hidden", "inputs, outputs")),
        ("linear inputs=0 outputs=1", ("config.option-value", "inputs", "'0'")),
        ("linear inputs=99999999 outputs=1", ("config.option-value", "inputs", "'99999999'")),
        ("mlp inputs=5 outputs=1", ("config.missing-option", "hidden")),
        ("mlp inputs=5 hidden=2,-1 outputs=1", ("config.option-value", "hidden", "'2,-1'")),
        ("mlp inputs=5 hidden= outputs=1", ("config.option-value", "hidden")),
    ],
)
def test_other_sizes_are_refused(name: str, wrong: tuple[str, ...]) -> None:
    with raises(ConfigError, *wrong):
        load(name)


@pytest.mark.parametrize("name", ["linear-5x2x1", "mlp-5x1", "factors-3", "cnn classes=3"])
def test_other_names_are_unknown(name: str) -> None:
    with raises(ModelError, "model.unknown", repr(name), "linear, mlp, cnn", "biased-factors"):
        load(name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("linear-5x1", "linear inputs=5 outputs=1"),
        ("mlp-5x16x8x1", "mlp inputs=5 hidden=16,8 outputs=1"),
        ("factors-12x3", "factors items=12 size=3"),
        ("biased-factors-12x3", "biased-factors items=12 size=3"),
        ("umbel.models.softmax:softmax20x10", "softmax features=20 classes=10"),
        ("models.softmax:softmax20x10", "softmax features=20 classes=10"),
    ],
)
def test_an_old_name_is_the_new_model(old: str, new: str) -> None:
    split = {"train": 1, "validation": 0}
    assert load(old).name == new
    assert RunConfig.parse({"model": old}).model == new
    assert (
        Manifest.read({"name": "old", "clients": 1, "split": split, "model": old}, Path("manifest.json")).model == new
    )
