"""Models are found by name, each with its loss; what cannot be trained is refused with the reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.helpers.errors import raises
from tests.helpers.models import write_module
from umbel import models
from umbel.client.learner import learner_for
from umbel.data import Manifest
from umbel.protocol.errors import ConfigError, ModelError
from umbel.protocol.run_config import RunConfig

Write = Callable[[str], str]
NARROW = "torch.nn:Linear in_features=3 out_features=2"
PLANE = "linear inputs=2 outputs=1"
L1 = "torch.nn.functional:l1_loss"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A function that writes a module next to the user's own code and returns its name."""
    return partial(write_module, tmp_path, monkeypatch)


# --- by name


def test_a_loss_may_be_asked_for() -> None:
    model = models.load("cnn", "rmse")
    assert (model.loss.name, model.metric.name) == ("rmse", "accuracy")
    assert models.load("cnn").loss.name == "cross-entropy", "the model's own is left as it is"


@pytest.mark.parametrize(("loss", "metric"), [("mse", "rmse"), ("rmse", "rmse"), ("cross-entropy", "accuracy")])
def test_a_factory_may_return_a_network(loss: str, metric: str) -> None:
    model = models.load(NARROW, loss)
    assert (model.name, model.loss.name, model.metric.name) == (NARROW, loss, metric)
    assert model.shapes == {"weight": (2, 3), "bias": (2,)}
    assert (model.initial(0)["weight"] != model.initial(1)["weight"]).any(), "each draw builds the network anew"


def test_a_factory_may_return_a_model_with_its_own_loss_and_patterns(write: Write) -> None:
    source = (
        "def odd():\n"
        "    network = lambda: nn.Linear(3, 1)\n"
        "    return models.Model('', network, models.LOSSES['rmse'], models.METRICS['rmse'], local=('bias',))"
    )
    name = write(source) + ":odd"
    model = models.load(name)
    assert (model.name, model.loss.name, model.local_shapes) == (name, "rmse", {"bias": (1,)})
    assert models.load(name, "mse").loss.name == "mse"
    with raises(ModelError, "model.nothing-shared"):
        models.load(name, frozen="weight")


def made_for(model: str, loss: str = "", **entries: str) -> Manifest:
    split = {"train": 1, "validation": 0}
    return Manifest(name="made", clients=1, split=split, model=model, loss=loss, **entries)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "loss", "manifest", "chosen"),
    [
        ("", "", made_for("mlp", "cross-entropy"), ("mlp", "cross-entropy")),  # both of the dataset
        ("", "", made_for("mlp"), ("mlp", "rmse")),  # its model's own loss
        ("", "mse", made_for("mlp", "cross-entropy"), ("mlp", "mse")),  # its model under the run's loss
        ("linear", "", made_for("mlp", "cross-entropy"), ("linear", "mse")),  # the run's model brings its own loss
        ("linear", "rmse", made_for("mlp", "cross-entropy"), ("linear", "rmse")),  # both of the run
        (NARROW, "", made_for("mlp", "cross-entropy"), (NARROW, "cross-entropy")),  # a module of one's own has none
        (NARROW, "mse", made_for("mlp", "cross-entropy"), (NARROW, "mse")),
        (f"{PLANE} scale=10,20", "", made_for(PLANE, "log"), (f"{PLANE} scale=10,20", "log")),  # in other units
        ("linear inputs=2 outputs=2", "", made_for(PLANE, "log"), ("linear inputs=2 outputs=2", "cross-entropy")),
    ],
)
def test_the_run_chooses_before_the_dataset(model: str, loss: str, manifest: Manifest, chosen: tuple[str, str]) -> None:
    loaded = models.load_for(RunConfig(model=model, loss=loss), manifest)
    assert (loaded.name, loaded.loss.name) == chosen


def test_what_the_manifest_says_of_parameters_is_of_its_own_model_alone() -> None:
    manifest = made_for("mlp", local="2.*")
    for model, local in (("", {"2.weight", "2.bias"}), ("mlp", {"2.weight", "2.bias"}), ("linear", set())):
        assert set(models.load_for(RunConfig(model=model), manifest).local_shapes) == local
    asked = models.load_for(RunConfig(frozen="0.*", local="2.bias"), made_for("mlp"))
    assert (asked.shapes, asked.local_shapes) == ({"2.weight": (1, 2)}, {"2.bias": (1,)})


def test_without_any_name_the_models_are_listed() -> None:
    with raises(ModelError, "model.none"):
        models.load_for(RunConfig(loss="mse"), made_for("", "mse"))


# --- what cannot be trained


@pytest.mark.parametrize(
    ("name", "loss", "reason"),
    [
        ("linear", "regret", ("model.unknown-loss", "'regret'")),
        ("rose", "", ("model.unknown", "'rose'", *models.MODELS, "package.module:factory")),
        *((name, "", ("model.unknown", repr(name))) for name in ("linear-5x1", "factors-3", "cnn classes=3")),
        (NARROW, "", ("model.no-loss", f"'{NARROW}'")),
        ("garden.roses:factory", "mse", ("config.import", "'garden.roses'", "'garden.roses:factory'", "'garden'")),
        ("umbel.models:rose", "mse", ("config.import", "'umbel.models'", "'rose'")),
        # sizes, and other options
        ("linear inputs=5", "", ("config.missing-option", "outputs")),
        ("linear inputs=5 hidden=2 outputs=1", "", ("config.unknown-option", "hidden", "inputs, outputs")),
        ("linear inputs=0 outputs=1", "", ("config.option-value", "inputs", "'0'")),
        ("linear inputs=99999999 outputs=1", "", ("config.option-value", "inputs", "'99999999'")),
        ("mlp inputs=5 outputs=1", "", ("config.missing-option", "hidden")),
        ("mlp inputs=5 hidden=2,-1 outputs=1", "", ("config.option-value", "hidden", "'2,-1'")),
        ("mlp inputs=5 hidden= outputs=1", "", ("config.option-value", "hidden")),
        *((f"{PLANE} {units}", "", ("model.units",)) for units in ("offset=1", "scale=1,2,3", "scale=1,0")),
        *(
            (f"torch.nn:Linear {words}", "mse", ("config.option-pairs", "'torch.nn:Linear'"))
            for words in ("width", "width=1 width=2", "=3")
        ),
        (f"{NARROW} width=3", "mse", ("model.not-built", "TypeError", "'width'")),
    ],
)
def test_a_name_that_leads_to_no_model_is_told_with_the_reason(name: str, loss: str, reason: tuple[str, ...]) -> None:
    with raises(ConfigError if reason[0].startswith("config") else ModelError, *reason):
        models.load(name, loss)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import petals_of_no_package", ("config.import", "'petals_of_no_package'")),
        (
            "def factory():\n    net = nn.Linear(3, 2)\n"
            "    net.steps = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)\n    return net",
            ("model.not-float", "'steps'"),
        ),
        ("factory = nn.ReLU", ("model.no-parameters",)),
        ("def factory():\n    return 'a rose'", ("model.not-a-module", "torch.nn.Module", "models.Model")),
        ("def factory():\n    return nn.Linear(3, 2).double()", ("model.not-float", "float32", "'weight'", "'bias'")),
        (
            "def factory():\n    network = lambda: nn.Linear(2, 1).double()\n"
            "    return models.Model('inner', network, models.LOSSES['rmse'], models.METRICS['rmse'])",
            ("model.not-float", "float32"),
        ),
        ("def factory():\n    return nn.LazyLinear(2)", ("model.lazy", "'weight'", "'bias'")),
        ("def factory():\n    raise KeyError('weights')", ("model.not-built",)),
        ("factory = 3", ("model.factory",)),
        ("from os import system as factory", ("model.factory",)),
    ],
)
def test_a_factory_that_makes_no_network_is_named(write: Write, source: str, reason: tuple[str, ...]) -> None:
    name = write(source) + ":factory"
    kind = ConfigError if reason[0].startswith("config") else ModelError
    with raises(kind, *reason, name.partition(":")[0]):
        models.load(name, "mse")


def test_patterns_are_separated_by_spaces() -> None:
    model = models.load("mlp", frozen="0.bias  2.bias", local="2.weight")
    assert model.shapes == {"0.weight": (2, 3)}
    assert set(model.frozen_values) == {"0.bias", "2.bias"}
    assert model.local_shapes == {"2.weight": (1, 2)}
    assert models.load("mlp").num_parameters == 11, "the model by its name is left as it is"


# --- by name and size


@pytest.mark.parametrize(
    ("name", "loss", "shapes", "own"),
    [
        ("linear inputs=5 outputs=1", "", [(1, 5), (1,)], ("mse", "rmse")),
        ("linear inputs=5 outputs=3", "", [(3, 5), (3,)], ("cross-entropy", "accuracy")),
        ("linear inputs=5 outputs=1", "log", [(1, 5), (1,)], ("log", "accuracy")),
        ("linear inputs=5 outputs=3", "mse", [(3, 5), (3,)], ("mse", "rmse")),
        ("softmax features=20 classes=10", "", [(10, 20)], ("cross-entropy", "accuracy")),
        ("factors items=12 size=3", "", [(12, 3)], ("log", "accuracy")),
        ("mlp inputs=5 hidden=8,4 outputs=2", "mse", [(8, 5), (8,), (4, 8), (4,), (2, 4), (2,)], ("mse", "rmse")),
        # A loss of one's own is its own metric.
        ("linear inputs=5 outputs=1", L1, [(1, 5), (1,)], (L1, L1)),
        ("torch.nn:Linear in_features=4 out_features=2 bias=False device=None", "mse", [(2, 4)], ("mse", "rmse")),
    ],
)
def test_layers_loss_and_metric(name: str, loss: str, shapes: list[tuple[int, ...]], own: tuple[str, str]) -> None:
    model = models.load(name, loss)
    assert list(model.shapes.values()) == shapes
    assert (model.loss.name, model.metric.name) == own


def test_a_row_is_laid_out_flat_and_a_hidden_layer_bends() -> None:
    assert models.load("linear inputs=6 outputs=2").module(torch.zeros(4, 2, 3)).shape == (4, 2)
    mlp = models.load("mlp inputs=1 hidden=16 outputs=1").module
    left, middle, right = mlp(torch.tensor([[-10.0], [0.0], [10.0]])).detach().flatten()
    assert not torch.isclose(left + right, 2 * middle)


# --- what a name means may change in one process, as in a notebook


def test_a_model_that_is_defined_again_is_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ModuleType("umbel_test_notebook")
    monkeypatch.setitem(sys.modules, "umbel_test_notebook", mine)
    for width in (2, 3):
        exec(
            "from torch import nn\n"
            f"def net(inputs=1):\n    return nn.Linear(inputs, {width})\n"
            f"def loss(outputs, targets):\n    return {width} * (outputs - targets).abs()\n",
            vars(mine),
        )
        for name in ("umbel_test_notebook:net", "umbel_test_notebook:net inputs=1"):
            model = models.load(name, "umbel_test_notebook:loss")
            assert model.num_parameters == 2 * width
            assert model.loss.per_sample(torch.ones(1), torch.zeros(1)) == width
            assert models.load(name, "umbel_test_notebook:loss") is model, "made once"


def test_a_file_of_weights_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        torch.save({"1.weight": torch.full((1, 2), value), "1.bias": torch.zeros(1)}, tmp_path / "weights.pt")
        model = models.load("linear inputs=2 outputs=1", pretrained=str(tmp_path / "weights.pt"))
        assert (model.initial(1)["1.weight"] == value).all()
        assert (learner_for(model, "cpu").model.initial(1)["1.weight"] == value).all()


# --- units


def test_features_come_in_units_before_the_first_layer() -> None:
    model = models.load("linear inputs=2 outputs=1 offset=1,2 scale=10,20")
    assert model.num_parameters == 3, "constants are no parameters"
    parameters = {"2.weight": torch.tensor([[1.0, 1.0]]), "2.bias": torch.zeros(1)}
    assert model.apply(parameters, torch.tensor([[11.0, 42.0]])).item() == 3, "(11 - 1)/10 + (42 - 2)/20"
    assert models.load("mlp inputs=2 hidden=3 outputs=1 scale=10,20").loss.name == "mse"
