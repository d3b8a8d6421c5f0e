"""Whole runs in this process: their configuration, and what ends them."""

from __future__ import annotations

import pytest

from protocol.errors import ConfigError
from simulation.in_process import run_config


def test_a_run_config_is_the_apps_with_the_file_over_it() -> None:
    config = run_config("hospital", noise_multiplier=1.0)
    assert config["federation"] == "hospital"
    assert config["noise-multiplier"] == 1.0
    assert config["device"] == "auto"


def test_a_key_that_the_app_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="noise-multiplayer"):
        run_config("hospital", noise_multiplayer=1.0)
