"""Mechanisms by name."""

from __future__ import annotations

import pytest

from tests.helpers.errors import raises
from umbel.privacy.mechanisms import MECHANISMS, Gaussian, Laplace, load
from umbel.protocol.errors import ConfigError


def test_a_mechanism_is_found_under_its_own_name() -> None:
    assert {name: kind.name for name, kind in MECHANISMS.items()} == {name: name for name in MECHANISMS}
    assert load("laplace") is Laplace
    assert load("gaussian") is Gaussian


def test_your_own_mechanism_is_imported() -> None:
    assert load("umbel.privacy.mechanisms.gaussian:Gaussian") is Gaussian


@pytest.mark.parametrize(
    ("name", "code"), [("lapalce", "unknown-name"), ("umbel.privacy.mechanisms.gaussian:GaussianLoss", "not-built-on")]
)
def test_what_is_no_mechanism_is_an_error(name: str, code: str) -> None:
    with raises(ConfigError, f"config.{code}", name):
        load(name)
