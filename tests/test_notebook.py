"""The notebook in docs/ runs from top to bottom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "first-hour.ipynb"


@pytest.mark.slow
def test_it_runs_and_says_what_it_should(umbel_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(umbel_home / "ipython"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    umbel_home.mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "what it prints here may be another's result"
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(umbel_home)}}).execute()
    said = [text(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert "Guaranteed to a client: nothing" in "".join(said)
    assert "Guaranteed to a client, between any two of its data sets: epsilon" in "".join(said)
    assert len(list((umbel_home / "runs").iterdir())) == 2


def text(cell: Any) -> str:
    """Return what a cell printed, and its value as text."""
    return "".join(
        str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", "")) for output in cell.outputs
    )
