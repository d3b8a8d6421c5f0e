"""A plan with the numbers of a run config, its model and its dataset."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from flwr.common.config import parse_config_args
from typer.testing import CliRunner

import umbel
from tests.helpers.datasets import manifest
from tests.helpers.errors import ended
from umbel.cli.main import app
from umbel.data import offsets_of, write_dataset

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "hospital-epsilon-4.toml"


def write(folder: Path, scale: float) -> None:
    """Write hospitals whose charges are all so many times as high."""
    x = np.random.default_rng(0).uniform(-1, 1, (400, 3)).astype(np.float32)
    own = manifest(140, 60, model="mlp", loss="rmse")
    write_dataset(folder, own, x, scale * np.abs(x.sum(1, keepdims=True)), offsets_of([2] * 200))


@pytest.fixture
def hospitals(umbel_home: Path) -> None:
    write(umbel_home / "data" / "hospital", 1)


def run(*command: str, name: str = "plan") -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [name, *command])
    return done.exit_code, done.output


def test_the_numbers_come_from_the_config_and_its_dataset(hospitals: None) -> None:
    """n = 11 and k = 5: 2 * 11/nu + 1 = 4 at nu = 7.333."""
    code, output = run(str(CONFIG), "target-epsilon=4", "--delta", "0", name="price")
    assert code == 0, output
    for text in ("│ 7.33", "│ choice-epsilon", "median 1, most 1"):
        assert text in output


def test_a_plan_tells_nothing_about_rows(umbel_home: Path, tmp_path: Path) -> None:
    """A clip norm of clients' updates would be a release without noise that no ledger counts."""
    told = []
    for scale in (1, 1000):
        (home := tmp_path / str(scale)).mkdir()
        config = home / "config.toml"
        write(home / "hospital", scale)
        config.write_text(CONFIG.read_text().replace('"hospital"', f'"{home / "hospital"}"'), encoding="utf-8")
        told.append(run(str(config), "target-epsilon=4", name="price"))
    assert told[0] == told[1]
    assert told[0][0] == 0


def test_a_config_that_hides_rows_alone_names_the_command_that_plans_it(umbel_home: Path, tmp_path: Path) -> None:
    write(umbel_home / "data" / "own", 1)
    config = tmp_path / "rows.toml"
    config.write_text(
        'dataset = "own"\nprotect = "rows"\nclipping = "update"\nnoise-multiplier = 0.0\nchoice-epsilon = 0.5\n'
        'rows = "clip=1 noise=2 rate=1 batch=4"\nlocal-steps = 5\n'
        "rounds = 2\nhypotheses = 2\n",
        encoding="utf-8",
    )
    ended(*run(str(config), name="price"), "config.hides-rows", "--row-epsilon")


def test_a_whole_run_that_hides_rows_is_planned_and_written(umbel_home: Path, tmp_path: Path) -> None:
    """Python plans the same."""
    write(umbel_home / "data" / "own", 1)
    file = tmp_path / "rows.toml"
    code, output = run("own", "--row-epsilon", "3", "--rows", "4", "rounds=2", "--out", str(file))
    assert code == 0, output
    assert "for each row of a client" in output
    assert 'protect="rows" budget="inf" row-budget="' in output
    planned = tomllib.loads(file.read_text(encoding="utf-8"))
    assert planned == umbel.plan("own", row_epsilon=3, rows=4, rounds=2).values
    assert (planned["protect"], planned["rounds"]) == ("rows", 2)
    assert "batch=4.0" in planned["rows"]
    ended(*run("own", "--rows", "4"), "config.missing-figure", "row-epsilon")
    ended(*run("own", "--rows", "4", "--row-epsilon", "3", "row-rate=1"), "config.unknown-key", "row-rate")


def test_a_config_without_a_dataset_is_named(hospitals: None) -> None:
    code, output = run(str(CONFIG.with_name("hospital-sites.toml")), "target-epsilon=4", name="price")
    assert code == 2
    assert 'dataset = ""' in output


@pytest.mark.parametrize(("delta", "warned"), [("1e-3", False), ("1.1e-3", True)])
def test_a_delta_that_may_give_a_client_away_is_warned_of(delta: str, warned: bool) -> None:
    """A tenth of 1/100."""
    figures = "parameters=2 hypotheses=2 clients=100 clients-per-round=10 noise-multiplier=9 rounds=2"
    code, output = run(*figures.split(), "--delta", delta, name="price")
    assert code == 0, output
    assert ("take a delta well below 0.01" in output) is warned


def test_a_planned_run_is_written_and_run(umbel_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.simulation.client_planner.DROWNED", (1e9, 1e9))
    write(umbel_home / "data" / "mine", 1)
    file = tmp_path / "private.toml"
    code, told = run("mine", "--epsilon", "4", "--out", str(file), "rounds=2")
    assert code == 0, told
    assert told.splitlines()[-1].startswith(f"Next: umbel run {file}, or")
    assert parse_config_args([str(file)]) == tomllib.loads(file.read_text(encoding="utf-8")), "flwr run takes it"
    assert file.read_text().startswith("# Planned: pure epsilon 4 for a client over the whole run, with 2 rounds")
    done = CliRunner().invoke(app, ["run", str(file)], prog_name="umbel")
    assert done.exit_code == 0, done.output
    code, printed = run("mine", "--epsilon", "4", "rounds=2")
    assert "noise-multiplier = " in printed
    code, printed = run("mine", "--epsilon", "4", "rounds=2", "--release", "secure", "--sites", "3")
    assert code == 0, printed
    assert 'strategy = "secure-average"' in printed
    assert 'mechanism = "discrete-gaussian"' in printed
    assert "--nodes" in printed


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("rounds=2 --epsilon 4", "config.missing-figure", "name a configuration"),
        ("mine rounds=2 --row-epsilon 3", "config.missing-figure", "and rows"),
        ("rounds=2 --rows 4 --row-epsilon 3", "config.missing-figure", "name a configuration"),
        ("mine other --epsilon 4", "config.two-configurations", "'other'"),
        ("mine --epsilon 4 --out nowhere/private.toml", "config.unwritable", "nowhere"),
        ("mine --epsilon 4 --out private.txt", "config.unwritable", "flwr run"),
    ],
)
def test_what_is_no_plan_of_a_run_is_told(
    umbel_home: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: str, part: str
) -> None:
    monkeypatch.setattr("umbel.simulation.client_planner.DROWNED", (1e9, 1e9))
    write(umbel_home / "data" / "mine", 1)
    told = run(*words.split())
    ended(*told, code, part)
