"""Options after the name of a factory, and after that of an optimizer.

That models of libraries train is in test_strangers.py.
"""

from __future__ import annotations

import pytest

from tests.helpers.errors import raises
from umbel import models
from umbel.models.optimizers import descent_of
from umbel.protocol.errors import ConfigError, ModelError
from umbel.protocol.run_config import RunConfig


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


def test_plain_descent_is_what_a_run_asks_for_that_says_nothing() -> None:
    assert descent_of(RunConfig().optimizer).plain
    assert not descent_of("sgd proximal=0.1").plain
    assert not descent_of("momentum").plain


def test_an_option_of_another_optimizer_or_without_effect_is_refused() -> None:
    with raises(ConfigError, "config.unknown-option", "momentum", "beta1", "beta2"):
        descent_of("adam momentum=0.9")
    with raises(ConfigError, "config.option-value", "nesterov", "momentum"):
        descent_of("sgd nesterov=true")
