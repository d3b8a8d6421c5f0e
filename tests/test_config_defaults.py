"""The run config's defaults stand in its class; pyproject.toml's table is written from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.sources import ROOT
from tools.defaults import main, with_table

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_a_table_that_differs_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(PYPROJECT.replace("step-size = 0.1", "step-size = 0.2"), encoding="utf-8")
    main(path)
    assert path.read_text(encoding="utf-8") == PYPROJECT, "run make config"


def test_a_file_without_the_table_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"tool\.flwr\.app\.config"):
        with_table("[project]\n")
