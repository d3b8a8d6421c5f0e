"""What docs/guides/data.md says to type is typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.data.importers.test_hub import COLUMNS, stand_in
from tests.helpers.paper import paper_run
from umbel.cli.commands.run import asked
from umbel.cli.main import app
from umbel.data import Column, Schema
from umbel.simulation import in_process

DOCS = Path(__file__).resolve().parents[3] / "docs" / "guides" / "data.md"
TEXT = DOCS.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    # The last section is about sites and thousands of clients (tests/simulation/test_ranges.py).
    text = TEXT.partition("\n## Ranges that")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the docs speak of."""
    draw = np.random.default_rng(0)
    frame = {
        "hospital": [f"h{row % 12}" for row in range(240)],
        "age": draw.integers(20, 90, 240),
        "ward": draw.choice(["A", "B", "C"], 240),
        "smoker": draw.choice(["yes", "no"], 240),
        "cost": draw.integers(3_000, 20_000, 240),
    }
    pd.DataFrame(frame).to_csv(tmp_path / "stays.csv", index=False)
    for name in ("anna/cat", "anna/dog", "bert/dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "photos" / name / "1.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(line: str, folder: Path) -> None:
    """Do what a line of a shell does; a run is a short one, in this process."""
    command, _, file = line.partition(" > ")
    name, *words = shlex.split(command)
    assert name == "umbel"
    if words[0] == "run":
        values: dict[str, Any] = paper_run() | asked(words[1:])[0] | {"rounds": 2, "device": "cpu"}
        assert (in_process.run(values) / "hypotheses.safetensors").is_file()
        return
    told = CliRunner().invoke(app, words, prog_name="umbel")
    assert told.exit_code == 0, f"{line}\n{told.output}"
    if file:
        (folder / file).write_text(told.stdout)


def test_every_command_works(here: Path) -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) >= 8
    for line in lines:
        typed(line, here)


@pytest.mark.parametrize("block", blocks("python"))
def test_every_piece_of_python_works(here: Path, umbel_home: Path, block: str) -> None:
    exec(block, {"dataset": stand_in(COLUMNS)})
    assert list((umbel_home / "data").glob("*/manifest.json"))


def test_the_schema_fits_the_table(here: Path) -> None:
    (block,) = blocks("toml")
    (here / "own.toml").write_text(block)
    typed("umbel data check stays.csv --schema own.toml", here)
    schema = Schema.read(here / "own.toml")
    assert schema.model == f"linear inputs={len(schema.units['features'])} outputs=1"


def test_every_entry_of_a_column_is_explained() -> None:
    table = TEXT[TEXT.index("| entry of a column") :]
    explained = re.findall(r"`([\w-]+)`", " ".join(line.split("|")[1] for line in table.splitlines() if "|" in line))
    assert explained == list(Column.names())
