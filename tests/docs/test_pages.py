"""What pages say to type is typed, in the order of the page, in a folder that has the files of which it speaks."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

import umbel
from tests.data.importers.test_hub import COLUMNS, stand_in
from tests.helpers import commands
from tests.helpers.learnt import learnt
from tests.helpers.paper import paper_run
from tests.helpers.sources import ROOT
from umbel.cli.commands.run import asked
from umbel.cli.main import app
from umbel.data import Column, Schema
from umbel.simulation import in_process

pytestmark = pytest.mark.rest

GUIDES = ROOT / "docs" / "guides"


def text(page: str) -> str:
    return (GUIDES / page).read_text(encoding="utf-8")


def lines(text: str, *verbs: str) -> list[str]:
    """Return the lines of a page's shell blocks that call umbel with one of some words."""
    found = [line.partition("    #")[0] for block in commands.blocks(text, "bash") for line in block.splitlines()]
    return [line for line in found if line.startswith(tuple(f"umbel {verb}" for verb in verbs))]


def typed(line: str, folder: Path) -> str:
    """Do what a line of a shell does, and return what it prints."""
    line, _, file = line.replace("RUN", "last").replace("DATASET", "stays").partition(" > ")
    told = CliRunner().invoke(app, shlex.split(line)[1:], prog_name="umbel")
    assert told.exit_code == 0, f"{line}\n{told.output}"
    if file:
        (folder / file).write_text(told.stdout)
    return told.output


def stays(clients: int, rows: int) -> pd.DataFrame:
    """Costs rise with age, and smokers cost more; no column says which numbers it may hold."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "hospital": [f"h{row % clients}" for row in range(rows)],
            "age": draw.integers(18, 95, rows),
            "ward": draw.choice(["A", "B", "C"], rows),
            "smoker": draw.choice(["yes", "no"], rows),
        }
    )
    noise = draw.normal(0, 500, rows)
    return frame.assign(cost=(2_000 + 90 * frame["age"] + 2_500 * (frame["smoker"] == "yes") + noise).round())


@pytest.fixture
def here(tmp_path: Path, umbel_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_readmes_three_lines_for_a_table(here: Path) -> None:
    stays(1500, 15_000).to_csv("stays.csv", index=False)
    new = stays(20, 200)
    new.drop(columns="cost").to_csv("new.csv", index=False)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, run, _ = [typed(line, here) for line in lines(readme, "data", "run", "predict")]
    assert "It counts the question about ranges" in run
    errors = pd.read_csv("predicted.csv")["prediction"] - new["cost"]
    assert np.sqrt((errors**2).mean()) < 0.7 * new["cost"].std()


def test_your_table(here: Path, umbel_home: Path) -> None:
    """All but its last section, which is about sites and thousands of clients (tests/simulation/test_ranges.py)."""
    page = text("data.md").partition("\n## Ranges that")[0]
    stays(12, 240).assign(cost=lambda frame: frame["cost"] + 1_000).to_csv("stays.csv", index=False)
    for name in ("anna/cat", "anna/dog", "bert/dog"):
        (here / "photos" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(here / "photos" / name / "1.png")
    for line in lines(page, "data", "run", "predict"):
        if line.startswith("umbel run"):  # a short one, in this process
            values: dict[str, Any] = paper_run() | asked(shlex.split(line)[2:])[0] | {"rounds": 2, "device": "cpu"}
            assert (in_process.run(values) / "hypotheses.safetensors").is_file()
        else:
            typed(line, here)
    for block in commands.blocks(page, "python"):
        exec(block, {"dataset": stand_in(COLUMNS)})
    assert {"stays", "wards", "mine", "digits", "texts", "photos"} <= {
        one.name for one in (umbel_home / "data").iterdir()
    }
    [block] = commands.blocks(page, "toml")
    (here / "own.toml").write_text(block)
    typed("umbel data check stays.csv --schema own.toml", here)
    schema = Schema.read(here / "own.toml")
    assert schema.model == f"linear inputs={len(schema.units['features'])} outputs=1"


def test_your_table_explains_every_entry_of_a_column() -> None:
    table = text("data.md").partition("| entry of a column")[2]
    explained = re.findall(r"`([\w-]+)`", " ".join(line.split("|")[1] for line in table.splitlines() if "|" in line))
    assert [name for name in explained if name in Column.names()] == list(Column.names())


@pytest.fixture
def run(here: Path, umbel_home: Path) -> Path:
    """A run of costs that rise with age in the north, and fall elsewhere."""
    page = text("runs.md")
    frame = stays(4, 80).assign(hospital=["north", "south", "east", "west"] * 20)
    frame["ward"] = frame["ward"].replace("C", "B")
    frame["cost"] = 10_000 + np.where(frame["hospital"] == "north", 100, -100) * (frame["age"] - 50)
    columns = {"cost": {"scale": 10_000, "unit": "dollars"}, "age": {"scale": 20, "offset": 50}}
    data = umbel.from_dataframe(frame, client="hospital", target="cost", columns=columns, validation=0.0)
    assert data.dataset.names[2] == "north", "whose file the page opens"
    data.write("stays")
    weight = np.zeros((2, 1, 4), np.float32)
    weight[:, 0, 0] = 0.2, -0.2
    best = {"1.weight": weight, "1.bias": np.ones((2, 1), np.float32)}
    learnt(umbel_home / "runs" / "20260101-stays", "", "", best, "stays", [[1, 3]])
    (here / "new.csv").write_text(next(commands.blocks(page, "")))
    return here


def test_a_table_is_predicted_as_the_page_of_runs_shows(run: Path) -> None:
    _, shown = commands.blocks(text("runs.md"), "")
    for line in lines(text("runs.md"), "predict"):
        typed(line, run)
        if "new.csv" in line:
            wanted, made = pd.read_csv(io.StringIO(shown)), pd.read_csv(run / "predicted.csv")
            same = ["client", "row", "hypothesis", "target"]
            pd.testing.assert_frame_equal(wanted[same], made[same])
            np.testing.assert_allclose(wanted["prediction"], made["prediction"], rtol=0.05)
    names: dict[str, Any] = {}
    exec(next(commands.blocks(text("runs.md"), "python")), names)
    assert len(names["predicted"]) == 3


@pytest.mark.slow
def test_what_is_exported_is_used_as_the_page_of_runs_shows(run: Path) -> None:
    for line in lines(text("runs.md"), "runs export"):
        typed(line, run)
    names: dict[str, Any] = {}
    _, onnx, _ = commands.blocks(text("runs.md"), "python")
    exec(onnx, names)
    asked_for = pd.DataFrame({"hospital": ["north"], "age": 70, "ward": "A", "smoker": True})
    [wanted] = umbel.load().predict(asked_for)["prediction"]
    assert names["cost"][0] == pytest.approx(wanted, rel=1e-5)
