"""Options after the name of a factory.

That models of libraries train is in test_strangers.py.
"""

from __future__ import annotations

import pytest

from tests.helpers.errors import raises
from umbel import models
from umbel.protocol.errors import ConfigError, ModelError


def test_options_are_numbers_where_they_look_like_it() -> None:
    name = "torch.nn:Linear in_features=4 out_features=2 bias=False device=None"
    assert models.load(name, "mse").num_parameters == 8
    assert [models._value(text) for text in ("3", "0.1", "relu", "(1,2)", "None")] == [3, 0.1, "relu", (1, 2), None]


@pytest.mark.parametrize("words", ["width", "width=1 width=2", "=3"])
def test_options_that_are_none_are_told(words: str) -> None:
    with raises(ConfigError, "config.option-pairs", "'torch.nn:Linear'"):
        models.load(f"torch.nn:Linear {words}", "mse")


def test_an_option_that_a_factory_does_not_have_is_told() -> None:
    with raises(ModelError, "model.not-built", "TypeError", "'width'"):
        models.load("torch.nn:Linear in_features=1 out_features=1 width=3", "mse")
