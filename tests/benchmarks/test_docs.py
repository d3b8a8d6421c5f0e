"""The figures in docs/benchmarks.md are what the commands printed that stand there."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
TABLES = sorted((ROOT / "benchmarks" / "tables").glob("*.txt"))
assert TABLES


@pytest.mark.parametrize("table", TABLES, ids=[table.stem for table in TABLES])
def test_a_table_stands_in_the_page_as_the_command_wrote_it(table: Path) -> None:
    text = table.read_text(encoding="utf-8")
    command, _, printed = text.partition("\n\n")
    assert command.startswith("$ python ")
    assert f"--out benchmarks/tables/{table.name}" in command
    assert command.replace("$ python", ".venv/bin/python") in PAGE
    assert printed.strip() in PAGE
