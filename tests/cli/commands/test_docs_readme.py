"""What README says to type for a table is typed, on a table without preparation."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from tests.helpers import commands
from tests.helpers.sources import ROOT
from umbel.cli.main import app

README = (ROOT / "README.md").read_text(encoding="utf-8")


def table(clients: int) -> pd.DataFrame:
    """Costs rise with age, and smokers cost more; no column says which numbers it may hold."""
    draw, rows = np.random.default_rng(0), 10 * clients
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


@pytest.mark.rest
def test_the_lines_for_a_table_work_as_they_stand(
    tmp_path: Path, umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table(1500).to_csv("stays.csv", index=False)
    new = table(20)
    new.drop(columns="cost").to_csv("new.csv", index=False)
    (block,) = [one for one in commands.blocks(README, "bash") if "data import" in one]
    told = []
    for line in block.splitlines():
        _, *words = shlex.split(line, comments=True)
        done = CliRunner().invoke(app, words, prog_name="umbel")
        assert done.exit_code == 0, f"{line}\n{done.output}"
        told.append(done.output)
    assert len(told) == 3
    assert "Guarantee, between any two data sets of a client: epsilon " in told[1]
    assert "It counts the question about ranges" in told[1]
    errors = pd.read_csv("predicted.csv")["prediction"] - new["cost"]
    assert np.sqrt((errors**2).mean()) < 0.7 * new["cost"].std()
