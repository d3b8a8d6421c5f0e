"""The docs say what the code does, where that can be checked."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from umbel import strategies
from umbel.privacy.gate.policy import Policy
from umbel.protocol.old_names import SETTINGS
from umbel.research.experiments.__main__ import app

DOCS = Path(__file__).resolve().parent.parent / "docs"


def table(file: str, head: str) -> list[list[str]]:
    """Return the rows of a Markdown table, which is the one that begins with a given line."""
    lines = (DOCS / file).read_text(encoding="utf-8").splitlines()
    start = lines.index(head)
    assert re.fullmatch(r"[|-]+", lines[start + 1])
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def test_every_key_of_a_sites_policy_stands_in_the_docs_with_its_default() -> None:
    rows = table("privacy.md", "| key | default | meaning |")
    assert [row[:2] for row in rows] == [[f"`{name}`", f"`{default}`"] for name, default, _, _ in Policy.table()]
    assert all(len(row) == 3 and len(row[2]) > 5 for row in rows), "and says what it means"


def test_no_key_goes_by_its_old_name() -> None:
    rows = table("privacy.md", "| key | default | meaning |")
    assert not {cell for row in rows for cell in row for old in SETTINGS if f"`{old}`" in cell}


def test_the_tests_that_the_docs_name_are_there() -> None:
    named = {
        (path, test)
        for file in DOCS.glob("*.md")
        for path, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", file.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    for path, test in named:
        source = (DOCS.parent / path).read_text(encoding="utf-8")
        assert f"def {test or 'test_'}" in source, f"{path}::{test}"


def test_each_party_stands_in_the_docs_with_what_stops_it() -> None:
    rows = table("privacy.md", "| party | what it may do | what stops it | shown by |")
    assert [row[0] for row in rows] == ["server", "site", "network", "other clients", "researcher", "image builder"]
    assert all(len(row) == 4 and "`tests/" in row[3] for row in rows)


def test_every_strategy_stands_in_the_docs_with_its_options_and_their_defaults() -> None:
    rows = {
        row[0].strip("`"): row[1:]
        for row in table("strategies.md", "| strategy | options and defaults | what it does |")
    }
    assert [*rows] == [*strategies.STRATEGIES, "flower:Class", "package.module:Class"]
    for name, kind in strategies.STRATEGIES.items():
        options = " ".join(f"{field.name}={field.default}" for field in dataclasses.fields(kind.Options))
        assert rows[name][0].strip("`") == (options or "none"), name


def test_every_experiment_stands_in_the_readme() -> None:
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    names = {command.name for command in app.registered_commands} - {"page"}
    named = re.findall(r"^umbel experiment (\w+)(?: +# or (\w+))?", readme, re.MULTILINE)
    assert {name for pair in named for name in pair if name} == names
