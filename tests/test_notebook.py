"""The notebook in docs/ runs from top to bottom."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.rest

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "start" / "first-hour.ipynb"


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
        if ".write(" in "".join(cell["source"]):  # a reader runs cells again
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "Guarantee: none, because there is no noise." in said
    assert re.search(r"Guarantee, between any two data sets of a client: pure epsilon (3\.9|4)", said)
    with_guarantee = names["both"]["pure epsilon 4"]
    for other in ("the best constant", "each client alone", "all rows pooled"):
        assert with_guarantee["this run, fitted per client"] < 0.5 * with_guarantee[other]
    assert len(list((umbel_home / "runs").iterdir())) == 2
