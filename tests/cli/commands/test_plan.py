"""A plan with the numbers of a run config, its model and its dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.helpers.datasets import manifest
from umbel.cli.main import app
from umbel.client.trial import first_update
from umbel.data import offsets_of, write_dataset
from umbel.server.setup import Setup
from umbel.simulation.in_process import run_config

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "hospital-epsilon-4.toml"


@pytest.fixture
def hospitals(umbel_home: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (400, 3)).astype(np.float32)
    own = manifest(140, 60, model="mlp", loss="rmse")
    write_dataset(umbel_home / "data" / "hospital", own, x, np.abs(x.sum(1, keepdims=True)), offsets_of([2] * 200))


def run(*command: str) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", *command])
    return done.exit_code, done.output


def test_the_numbers_come_from_the_config_and_its_dataset(hospitals: None) -> None:
    """n = 11 and k = 5: 2 * 11/nu + 1 = 4 at nu = 7.333."""
    code, output = run(str(CONFIG), "--target-epsilon", "4", "--delta", "0")
    assert code == 0, output
    for text in ("│ 7.33", "│ choice-epsilon", "│ radius ", "median 1, most 1", "With half the parameters"):
        assert text in output
    assert "twice the clients" not in output, "100 of 140 are asked"


def test_a_config_without_a_dataset_is_named(hospitals: None) -> None:
    code, output = run(str(CONFIG.with_name("hospital-sites.toml")), "--target-epsilon", "4")
    assert code == 2
    assert 'dataset = ""' in output


def test_the_first_update_is_that_of_the_clients_by_hand(umbel_home: Path) -> None:
    """From w = 0 a full-batch step s of squared error on rows (1, 0) -> 1 moves w by 2 s along the first axis."""
    x = np.tile(np.array([[1.0, 0.0]], np.float32), (6, 1))
    write_dataset(
        umbel_home / "data" / "ones", manifest(2, 1, model="linear", loss="mse"), x, np.ones(6), offsets_of([2] * 3)
    )
    config = run_config("synthetic", dataset="ones", hypotheses=1, step_size=0.25, batch_size=0, local_epochs=1)
    zeros = {"weight": np.zeros((1, 1, 2), np.float32)}
    setup = Setup.parse(config)
    dataset = setup.open_dataset()
    assert dataset is not None
    assert first_update(setup.config, setup.model, dataset, zeros) == pytest.approx(0.5)
