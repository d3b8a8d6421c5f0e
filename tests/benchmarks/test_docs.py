"""The figures in docs/how/benchmarks.md are those of the commands that stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how" / "benchmarks.md").read_text(encoding="utf-8")
TABLES = sorted((ROOT / "benchmarks" / "tables").glob("*.txt"))
assert TABLES


def _figures(text: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*(?:e-\d+)?", text)


def _cells(text: str) -> str:
    """Return the cells of a page's tables but for heads."""
    rows = [row for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE) for row in table.splitlines()[2:]]
    return "\n".join(rows)


@pytest.mark.parametrize("table", TABLES, ids=[table.stem for table in TABLES])
def test_every_figure_of_a_pages_table_stands_in_what_the_command_wrote(table: Path) -> None:
    command, _, printed = table.read_text(encoding="utf-8").partition("\n\n")
    assert command.startswith("$ python ")
    assert f"--out benchmarks/tables/{table.name}" in command
    line = command.replace("$ python", ".venv/bin/python")
    assert line in PAGE
    section = PAGE.partition(line)[2].partition("\n## ")[0].partition("--out benchmarks/tables/")[0]
    found = _figures(_cells(section))
    assert len(found) >= 6
    assert not {*found} - {*_figures(printed)}
