"""Figure 5 comes with a table, by one command."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.lab.attacks.conftest import write_strokes
from tests.lab.experiments.conftest import read_csv
from umbel_lab.attacks import reconstruct
from umbel_lab.experiments.__main__ import app


@pytest.mark.slow
def test_the_dlg_command(umbel_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconstruct, "deep_leakage", partial(reconstruct.deep_leakage, iterations=5))
    write_strokes(umbel_home / "data" / "femnist", "femnist")
    done = CliRunner().invoke(app, ["dlg", "--quick"])
    assert done.exit_code == 0, done.output
    folder = umbel_home / "experiments" / "dlg-quick"
    assert done.stdout.strip() == str(folder / "table.md")
    assert {"figure-5.svg", "figure-5.png", "made.toml"} <= {file.name for file in folder.iterdir()}
    rows = read_csv(folder)
    assert [row["attack"] for row in rows] == ["mean image", "DLG", "rank one", "last bias"]
    assert "## One image by noise" in (folder / "table.md").read_text()
