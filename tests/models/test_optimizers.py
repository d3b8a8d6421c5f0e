"""Options after the name of an optimizer."""

from __future__ import annotations

from tests.helpers.errors import raises
from umbel.models.optimizers import descent_of
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig


def test_plain_descent_is_what_a_run_asks_for_that_says_nothing() -> None:
    assert descent_of(RunConfig().optimizer).plain
    assert not descent_of("sgd proximal=0.1").plain
    assert not descent_of("momentum").plain


def test_an_option_of_another_optimizer_or_without_effect_is_refused() -> None:
    with raises(ConfigError, "config.unknown-option", "momentum", "beta1", "beta2"):
        descent_of("adam momentum=0.9")
    with raises(ConfigError, "config.option-value", "nesterov", "momentum"):
        descent_of("sgd nesterov=true")
