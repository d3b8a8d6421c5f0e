"""`umbel price` and `umbel plan`: figures of a run config, its model and its dataset, and plans of whole runs.

Whether the figures are right `tests/privacy/accounting/test_plan.py` and `tests/simulation/test_planner.py` check.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from flwr.common.config import parse_config_args

import umbel
from tests.helpers.cli import refused, said
from tests.helpers.datasets import manifest
from tests.helpers.sources import ROOT
from umbel.data import offsets_of, write_dataset

CONFIG = ROOT / "configs" / "hospital-epsilon-4.toml"
FIGURES = "parameters=11 hypotheses=5 clients=2062 clients-per-round=100"
FEW = "parameters=2 hypotheses=2 clients=100 clients-per-round=10 noise-multiplier=9 rounds=2"


def write(folder: Path, scale: float = 1.0) -> None:
    """Write hospitals whose charges are all so many times as high."""
    x = np.random.default_rng(0).uniform(-1, 1, (400, 3)).astype(np.float32)
    own = manifest(140, 60, model="mlp", loss="rmse")
    write_dataset(folder, own, x, scale * np.abs(x.sum(1, keepdims=True)), offsets_of([2] * 200))


@pytest.fixture(autouse=True)
def home(umbel_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with data, of which no plan is refused for its noise; and files beside which commands work."""
    monkeypatch.setattr("umbel.simulation.client_planner.DROWNED", (1e9, 1e9))
    for name in ("hospital", "mine"):
        write(umbel_home / "data" / name)
    (tmp_path / "rows.toml").write_text(
        'dataset = "mine"\nprotect = "rows"\nclipping = "update"\nnoise-multiplier = 0.0\nchoice-epsilon = 0.5\n'
        'rows = "clip=1 noise=2 rate=1 batch=4"\nlocal-steps = 5\nrounds = 2\nhypotheses = 2\n',
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    return umbel_home


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        # n = 11 and k = 5: 2 * 11/nu + 1 = 4 at nu = 7.333.
        (f"{CONFIG} target-epsilon=4 --delta 0", ("│ 7.33", "median 1, most 1")),
        # An open choice has no guarantee.
        (f"{FIGURES} noise-multiplier=3 rounds=100", ("median 5, most 18", "median none, most none")),
        # One participation costs 2 * 11/3 + 1 = 8.333, five of them 41.67, and eighteen 150.
        (f"{FIGURES} noise-multiplier=3 rounds=100 choice-epsilon=1", ("median 41.67, most 150",)),
        (f"{FIGURES} target-epsilon=8 participations=4", ("median 4, most 4", "epsilon at delta 1e-05")),
        # A tenth of 1 / 100 may give a client away.
        (f"{FEW} --delta 1.1e-3", ("delta well below 0.01",)),
    ],
)
def test_price_tells_the_guarantee_or_works_out_its_noise(words: str, lines: tuple[str, ...]) -> None:
    told = said("price", *words.split())
    assert not [line for line in lines if line not in told], told
    assert "well below" not in said("price", *FEW.split(), "--delta", "1e-3")


def test_a_plan_tells_nothing_about_rows(home: Path, tmp_path: Path) -> None:
    """A clip norm of clients' updates would be a release without noise that no ledger counts."""
    told = set()
    for scale in (1, 1000):
        write(tmp_path / str(scale) / "hospital", scale)
        config = tmp_path / str(scale) / "config.toml"
        config.write_text(CONFIG.read_text().replace('"hospital"', f'"{config.with_name("hospital")}"'))
        told.add(said("price", config, "target-epsilon=4"))
    assert len(told) == 1


def test_a_whole_run_that_hides_rows_is_planned_and_written(tmp_path: Path) -> None:
    """Python plans the same."""
    file = tmp_path / "private.toml"
    told = said("plan", "mine", "--row-epsilon", "3", "--rows", "4", "rounds=2", "--out", file)
    assert 'protect="rows" budget="inf" row-budget="' in told
    planned = tomllib.loads(file.read_text(encoding="utf-8"))
    assert planned == umbel.plan("mine", row_epsilon=3, rows=4, rounds=2).values
    assert (planned["protect"], planned["rounds"], "batch=4.0" in planned["rows"]) == ("rows", 2, True)


def test_a_planned_run_is_written_and_run(tmp_path: Path) -> None:
    file, words = tmp_path / "private.toml", ("plan", "mine", "--epsilon", "4", "rounds=2")
    assert said(*words, "--out", file).splitlines()[-1].startswith(f"Next: umbel run {file}, or")
    assert parse_config_args([str(file)]) == tomllib.loads(file.read_text(encoding="utf-8")), "flwr run takes it"
    assert file.read_text().startswith("# Planned: pure epsilon 4 for a client")
    said("run", file, "--no-baselines")
    assert "noise-multiplier = " in said(*words)
    printed = said(*words, "--release", "secure", "--sites", "3")
    assert 'strategy = "secure-average"' in printed
    assert 'mechanism = "discrete-gaussian"' in printed


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("plan rounds=2 --epsilon 4", "config.missing-figure", "name a configuration"),
        ("plan mine rounds=2 --row-epsilon 3", "config.missing-figure", "and rows"),
        ("plan mine --rows 4", "config.missing-figure", "row-epsilon"),
        ("plan mine --rows 4 --row-epsilon 3 row-rate=1", "config.unknown-key", "row-rate"),
        ("plan mine other --epsilon 4", "config.two-configurations", "'other'"),
        ("plan mine --epsilon 4 --out nowhere/private.toml", "config.unwritable", "nowhere"),
        ("plan mine --epsilon 4 --out private.txt", "config.unwritable", "flwr run"),
        ("price rows.toml", "config.hides-rows", "--row-epsilon"),
        (f"price {CONFIG.with_name('hospital-sites.toml')} target-epsilon=4", "config.no-dataset", 'dataset = ""'),
        (f"price {FIGURES} noise-multiplier=0 rounds=100", "config.impossible-figure", "noise-multiplier"),
    ],
)
def test_what_is_no_plan_of_a_run_is_told(words: str, code: str, part: str) -> None:
    refused(code, *words.split(), parts=(part,))
