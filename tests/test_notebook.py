"""The notebook in docs/ runs from top to bottom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "first-hour.ipynb"


@pytest.mark.slow
@pytest.mark.usefixtures("blank_figures")
def test_it_runs_and_says_what_it_should(
    umbel_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    umbel_home.mkdir()
    monkeypatch.chdir(umbel_home)
    cells = [one for one in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if one["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "what it prints here may be another's result"
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "Guaranteed to a client: nothing" in said
    assert "Guaranteed to a client, between any two of its data sets: epsilon" in said
    assert len(list((umbel_home / "runs").iterdir())) == 2
