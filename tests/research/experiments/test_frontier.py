"""Accuracy against epsilon: which runs there are, and what the table says of each."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.research.experiments.conftest import read_csv
from umbel.models import MODELS
from umbel.privacy.accounting.guarantee import guarantee, pure_cost
from umbel.protocol.release import Clipping, Kind, Release
from umbel.research.experiments import frontier
from umbel.research.experiments.frontier import CLIENT, HEURISTIC, ONE, OPEN, PLAIN, SITE, TASKS
from umbel.research.experiments.sweep import Result
from umbel.simulation.in_process import run_config


def release_of(config: dict[str, Any], n: int) -> Release:
    k = config["hypotheses"]
    return Release(
        Kind.TRAIN, n, config["noise-multiplier"], Clipping(config["clipping"]), mechanism=config["mechanism"],
        hypotheses=k, choice_epsilon=config["choice-epsilon"] if k > 1 else 0.0,
    )  # fmt: skip


@pytest.mark.parametrize("epsilon", TASKS["hospital"].epsilons)
def test_a_hospital_config_costs_the_epsilon_in_its_name(epsilon: int) -> None:
    """Pure, one participation a client, its choice included."""
    config = run_config(f"hospital-epsilon-{epsilon}")
    assert config["max-participations"] == 1
    cost = pure_cost(release_of(config, MODELS["mlp"].num_parameters))
    assert isinstance(cost, Fraction)
    assert 0.99 * epsilon <= cost <= epsilon


@pytest.mark.parametrize("epsilon", TASKS["qmnist-features"].epsilons)
def test_a_handwriting_config_costs_the_epsilon_in_its_name(epsilon: int) -> None:
    config = run_config(f"qmnist-features-epsilon-{epsilon}")
    found = guarantee({release_of(config, TASKS["qmnist-features"].parameters): config["max-participations"]}, 1e-5)
    assert found is not None
    assert 0.98 * epsilon <= found.epsilon <= epsilon


@pytest.mark.parametrize("name", TASKS)
def test_every_run_has_a_name_and_a_configuration_of_its_own(name: str, hospitals: Path, tmp_path: Path) -> None:
    specs = frontier.specs(tmp_path, seeds=2, task=name)
    assert len({spec.name for spec in specs}) == len(specs)
    assert {spec.config["seed"] for spec in specs} == {2000, 2001}
    # Hospitals are split anew by each seed; of handwriting several clients may be one writer.
    assert len({spec.config["dataset"] for spec in specs}) == (2 if name == "hospital" else 1)
    assert len({spec.arm for spec in specs}) == len(specs) / 2
    assert {arm for _, arm, _ in (spec.arm for spec in specs)} >= {SITE, ONE, HEURISTIC, PLAIN}


def test_the_table_tells_guarantees_and_none_where_there_is_none(hospitals: Path, tmp_path: Path) -> None:
    short = {"rounds": 2, "clients-per-round": 60}
    specs = frontier.specs(tmp_path, seeds=1, quick=True)
    results = [Result(spec, frontier.play(spec.config | short).measures, tmp_path) for spec in specs]
    frontier.tables(results, tmp_path)
    rows = {(row["arm"], row["label"]): row for row in read_csv(tmp_path)}
    assert rows[CLIENT, "epsilon 16"]["epsilon_text"] == rows[SITE, "epsilon 16"]["epsilon_text"] == "16"
    assert rows[ONE, "epsilon 16"]["epsilon_text"] == "16"
    assert rows[OPEN, "epsilon 16"]["epsilon_text"] == rows[HEURISTIC, "nu 3"]["epsilon_text"] == "none"
    assert rows[HEURISTIC, "nu 3"]["paper_text"] == "3.67", "11/3, once"
    assert rows[PLAIN, "k = 5"]["epsilon_text"] == rows[PLAIN, "k = 5"]["paper_text"] == "none"
    assert (tmp_path / "frontier.svg").exists()
    assert "between any two data sets of a client" in (tmp_path / "table.md").read_text()
