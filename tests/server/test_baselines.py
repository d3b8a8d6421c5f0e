"""A recommender's run says what baselines reach on the same rows."""

from __future__ import annotations

from typing import Any

from umbel.data import BUNDLED, open_dataset
from umbel.models.factors import baselines
from umbel.server.baselines import Baselines
from umbel.simulation.in_process import play

RECOMMENDER = {
    "strategy": "recommender", "dataset": "preferences", "noise-multiplier": 0.0, "restarts": 1, "rounds": 2,
    "clients-per-round": 20, "clip-norm-floor": 1e-6,
}  # fmt: skip


def test_the_report_has_the_rules_beside_what_the_items_reach(run_config: dict[str, Any]) -> None:
    observer = Baselines()
    run = play(run_config | RECOMMENDER, observers=[observer])
    section = observer.section()
    assert section is not None
    (text,) = section.paragraphs
    assert text.startswith("Validation right-sign of the best hypotheses ")
    assert f"of the last {run.state.history[-1].metric:.4f}. Baselines on the same rows: all liked" in text
    for name, value in baselines(open_dataset(BUNDLED / "preferences.json")).items():
        assert f"{name} {value:.4f}" in text


def test_of_other_models_nothing_is_said(run_config: dict[str, Any]) -> None:
    observer = Baselines()
    play(run_config | {"rounds": 1, "restarts": 1}, observers=[observer])
    assert observer.section() is None
