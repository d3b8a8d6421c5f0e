"""What docs/guides/runs.md says to type is typed, and shows what it says."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import umbel
from tests.helpers.learnt import learnt
from umbel.cli.main import app

pytestmark = pytest.mark.rest

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "runs.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


@pytest.fixture
def here(tmp_path: Path, umbel_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's table, and a run: costs rise with age in the north, and fall elsewhere."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "hospital": ["north", "south", "east", "west"] * 20,
            "age": draw.integers(20, 90, 80),
            "ward": draw.choice(["A", "B"], 80),
            "smoker": draw.choice(["yes", "no"], 80),
        }
    )
    frame["cost"] = 10_000 + np.where(frame["hospital"] == "north", 100, -100) * (frame["age"] - 50)
    columns = {"cost": {"scale": 10_000, "unit": "dollars"}, "age": {"scale": 20, "offset": 50}}
    stays = umbel.from_dataframe(frame, client="hospital", target="cost", columns=columns, validation=0.0)
    assert stays.dataset.names[2] == "north", "whose file the page opens"
    stays.write("stays")
    weight = np.zeros((2, 1, 4), np.float32)
    weight[:, 0, 0] = 0.2, -0.2
    best = {"1.weight": weight, "1.bias": np.ones((2, 1), np.float32)}
    learnt(umbel_home / "runs" / "20260101-stays", "", "", best, "stays", [[1, 3]])
    (tmp_path / "new.csv").write_text(blocks("")[0])
    np.save(tmp_path / "rows.npy", np.zeros((2, 4), np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(line: str) -> str:
    words = shlex.split(line.replace("RUN", "last").replace("DATASET", "stays"))
    told = CliRunner().invoke(app, words[1:], prog_name="umbel")
    assert told.exit_code == 0, f"{line}\n{told.output}"
    return told.stdout


def test_a_table_is_predicted_as_shown(here: Path) -> None:
    first, *others = [line for block in blocks("bash") for line in block.splitlines() if " predict " in line]
    typed(first)
    shown, made = pd.read_csv(io.StringIO(blocks("")[1])), pd.read_csv(here / "predicted.csv")
    same = ["client", "row", "hypothesis", "target"]
    pd.testing.assert_frame_equal(shown[same], made[same])
    np.testing.assert_allclose(shown["prediction"], made["prediction"], rtol=0.05)
    for line in others:
        typed(line)
    assert isinstance(predicted := _done(blocks("python")[0])["predicted"], pd.DataFrame)
    assert len(predicted) == 3


@pytest.mark.slow
def test_what_is_exported_is_used_as_shown(here: Path) -> None:
    for line in (line for block in blocks("bash") for line in block.splitlines() if " export " in line):
        typed(line)
    (cost,) = _done(blocks("python")[1])["cost"]
    (wanted,) = umbel.load().predict(pd.DataFrame({"hospital": ["north"], "age": 70, "ward": "A", "smoker": True}))[
        "prediction"
    ]
    assert cost == pytest.approx(wanted, rel=1e-5)


def _done(block: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(block, names)
    return names
