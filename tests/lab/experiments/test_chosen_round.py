"""The round that is chosen by means with noise: what is compared, and what the table makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from umbel_lab.experiments import chosen_round
from umbel_lab.experiments.chosen_round import EPSILONS, LAST

pytestmark = pytest.mark.rest


@pytest.fixture
def config(run_config: dict[str, Any]) -> dict[str, Any]:
    return run_config | {"rounds": 4, "restarts": 1, "clip-norm": 2.0, "clipping": "public", "choice-epsilon": 1.0}


def test_noise_moves_the_choice_and_nothing_that_is_learnt(config: dict[str, Any]) -> None:
    measures = chosen_round.play(config).measures
    assert measures["validations"] == 5
    chosen = [measures[f"{epsilon:g}"] for epsilon in EPSILONS]
    exact = chosen_round._choose(config, {})
    losses = [entry.loss for entry in exact.history]
    assert measures["exact"] == min(losses)
    assert measures[LAST] == losses[-1]
    assert set(chosen) <= set(losses), "each is the exact loss of a round of the same run"


def test_little_noise_chooses_as_exact_losses_do(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_round, "EPSILONS", (1e6,))
    monkeypatch.setattr(chosen_round, "BOUND", 100.0)
    measures = chosen_round.play(config).measures
    assert measures["1e+06"] == measures["exact"]
