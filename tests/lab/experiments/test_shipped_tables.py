"""Tables that ship with packages are imported as the import itself advises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.errors import raises
from umbel.data import open_dataset
from umbel.protocol.errors import ConfigError, SweepError
from umbel.simulation.facts import feature_spans
from umbel_lab.experiments import shipped_tables

pytestmark = pytest.mark.rest


def test_a_table_is_imported_with_the_scales_and_ranges_that_a_first_import_prints(
    tmp_path: Path, umbel_home: Path
) -> None:
    path = shipped_tables.imported("breast-cancer", 2000, tmp_path)
    first, second = (open_dataset(one).manifest for one in (tmp_path / "first" / path.name, path))
    assert second.train == 24
    declared = [[span.declared for span in feature_spans(one, 30) or []] for one in (first, second)]
    assert declared == [[False] * 30, [True] * 30]


def test_a_package_that_is_missing_and_an_import_that_fails_are_named(
    tmp_path: Path, umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {"absent": ("absent", "data.rows", ""), "typo": ("sklearn", "datasets.load_breast_cancer", "--target no")}
    monkeypatch.setattr(shipped_tables, "TABLES", tables)
    with raises(ConfigError, "config.not-installed", "absent"):
        shipped_tables.imported("absent", 0, tmp_path)
    with raises(SweepError, "sweep.failed", "data.no-client"):
        shipped_tables.imported("typo", 0, tmp_path)
