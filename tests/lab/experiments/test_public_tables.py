"""Public tables: their import as the import itself advises, the run's commands, and the counts of verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.errors import raises
from umbel.data import open_dataset
from umbel.protocol.errors import ConfigError, SweepError
from umbel.server.worth import Level, Way
from umbel.simulation.measured import Spec
from umbel.simulation.proxy import feature_spans
from umbel.simulation.sweep import Result
from umbel_lab.experiments import page, public_tables

pytestmark = pytest.mark.rest


def test_a_table_is_imported_with_the_scales_and_ranges_that_a_first_import_prints(
    tmp_path: Path, umbel_home: Path
) -> None:
    path = public_tables.imported("breast-cancer", 2000, tmp_path)
    first, second = (open_dataset(one).manifest for one in (tmp_path / "first" / path.name, path))
    assert second.train == 24
    declared = [[span.declared for span in feature_spans(one, 30) or []] for one in (first, second)]
    assert declared == [[False] * 30, [True] * 30]


def test_a_package_that_is_missing_and_an_import_that_fails_are_named(
    tmp_path: Path, umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {"absent": ("absent", "data.rows", ""), "typo": ("sklearn", "datasets.load_breast_cancer", "--target no")}
    monkeypatch.setattr(public_tables, "TABLES", tables)
    with raises(ConfigError, "config.not-installed", "absent"):
        public_tables.imported("absent", 0, tmp_path)
    with raises(SweepError, "sweep.failed", "data.no-client"):
        public_tables.imported("typo", 0, tmp_path)


def _result(folder: Path, epsilon: float, seed: int, **measures: Any) -> Result:
    path = str(folder / "wide")
    spec = Spec.of(("wide", epsilon), {"dataset": path, "seed": seed, "epsilon": epsilon, "strategy": "group-privacy"})
    ways = {way.value: [0.5 + seed, 0.25] for way in (Way.CONSTANT, Way.OWN)}
    return Result(spec, {"seconds": 4.0, "metric": "accuracy", "verdict": "", "ways": ways} | measures, folder)


def test_levels_refusals_and_runs_that_gain_nothing_without_a_word_are_counted(
    tmp_path: Path, umbel_home: Path
) -> None:
    from tests.helpers.datasets import save_plane

    save_plane(tmp_path / "wide", 5, 2)
    gained, constant = {"level": Level.BETTER_THAN_ALONE.value}, {"level": Level.NOT_BETTER_THAN_CONSTANT.value}
    results = [
        _result(tmp_path, 0.0, 0, status=[0], **gained),
        _result(tmp_path, 0.0, 1, status=[0], **constant),
        _result(tmp_path, 8.0, 0, status=[2, 0], told="Error: too few", **gained),
        _result(tmp_path, 8.0, 1, status=[2], told="Error: too few", ways={}),
    ]
    public_tables.tables(results, tmp_path)
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "Of 4 runs 2 were refused, 1 were not shown to be better than a constant, 0 better" in text
    assert "1 better than both. 1 runs that gained nothing ended with exit code 0" in text
    rows = [line for line in text.splitlines() if line.startswith("| wide")]
    figures = [[cell.strip() for cell in line.split("|")[3:-1]] for line in rows[:2]]
    assert figures == [
        ["none", "1 (0.25)", "", "1 (0.25)", "better-than-alone (1); not-better-than-constant (1)", "0; 0"],
        ["8", "0.5 (0.25)", "", "0.5 (0.25)", "refused, then better-than-alone (1); refused (1)", "2, then 0; 2"],
    ]
    assert text.count("- wide: Error: too few") == 1


def test_no_saved_run_gained_nothing_without_a_word() -> None:
    text = (page.DOCS / "results" / "public-tables" / "table.md").read_text(encoding="utf-8")
    assert " 0 runs that gained nothing ended with exit code 0" in text


@pytest.mark.slow
def test_a_run_is_the_shells_command_and_follows_a_refusal(tmp_path: Path, umbel_home: Path) -> None:
    plain, private = (public_tables.play(spec.config).measures for spec in public_tables.specs(tmp_path, 1, quick=True))
    assert (plain["status"] == [0]) == Level(plain["level"]).worth_it
    assert plain["ways"]["made-own"][0] > plain["ways"]["constant"][0]
    assert private["status"][0] == 2
    assert "24 clients" in private["told"]
    assert len(private["status"]) == 1 + ("strategy=site-average" in private["told"])
