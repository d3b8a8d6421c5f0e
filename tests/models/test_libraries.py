"""Models of libraries by name, and options after a name; what a library would download is refused.

That their models train is in test_strangers.py.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from tests.helpers.errors import raises
from umbel import models
from umbel.protocol.errors import ConfigError, ModelError


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A library in place of timm, and what it is asked for."""
    asked: list[dict[str, Any]] = []

    def create_model(name: str, **options: Any) -> nn.Module:
        asked.append({"name": name} | options)
        return nn.Linear(2, int(options.get("num_classes", 1)))

    library = ModuleType("timm")
    library.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", library)
    models._load.cache_clear()
    return asked


def test_options_are_numbers_where_they_look_like_it(timm: list[dict[str, Any]]) -> None:
    model = models.load("timm:rose num_classes=3 drop_rate=0.1 act=relu sizes=(1,2) global_pool=None", "cross-entropy")
    assert timm[0] == {
        "name": "rose", "pretrained": False, "num_classes": 3, "drop_rate": 0.1, "act": "relu", "sizes": (1, 2),
        "global_pool": None,
    }  # fmt: skip
    assert model.num_parameters == 9
    assert model.name.startswith("timm:rose num_classes=3")


def test_a_factory_of_ones_own_has_options_too() -> None:
    assert models.load("torch.nn:Linear in_features=4 out_features=2 bias=False", "mse").num_parameters == 8


@pytest.mark.parametrize(
    "option", ["pretrained=True", "weights=DEFAULT", "weights_backbone=DEFAULT", "checkpoint_path=sent.pth"]
)
def test_weights_come_from_a_file_alone(option: str, timm: list[dict[str, Any]]) -> None:
    with raises(ModelError, "model.download"):
        models.load(f"timm:rose {option}", "mse")
    assert not timm


@pytest.mark.parametrize("name", ["timm:hf-hub:rose/garden", "timm:rose/garden", "timm:", "timm:../rose"])
def test_a_name_leads_nowhere_else(name: str, timm: list[dict[str, Any]]) -> None:
    with raises(ConfigError, "config.model-name", f"'{name}'", "'"):
        models.load(name, "mse")
    assert not timm


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    models._load.cache_clear()
    with raises(ConfigError, "config.missing-library", "'timm:rose'"):
        models.load("timm:rose", "mse")


@pytest.mark.parametrize("words", ["width", "width=1 width=2", "=3"])
def test_options_that_are_none_are_told(words: str) -> None:
    with raises(ConfigError, "config.option-pairs", "'torch.nn:Linear'"):
        models.load(f"torch.nn:Linear {words}", "mse")


def test_an_option_that_a_factory_does_not_have_is_told() -> None:
    with raises(ModelError, "model.not-built", "TypeError", "'width'"):
        models.load("torch.nn:Linear in_features=1 out_features=1 width=3", "mse")


def test_a_folder_of_transformers_brings_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with raises(ConfigError, "config.model-options", "trust_remote_code"):
        models.load("transformers:AutoModel config=/sent trust_remote_code=True", "mse")
