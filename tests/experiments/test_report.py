"""A report can be made from what a run left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from typer.testing import CliRunner

import client.app
import server.app
from experiments.__main__ import app
from experiments.runs import Spec, finish
from experiments.sweep import _save
from federation import Manifest, offsets_of, write_federation
from server.observer import Observer, Section
from simulation.grid import InProcessGrid
from simulation.in_process import run_config


def report(run: Path) -> Any:
    return CliRunner().invoke(app, ["report", str(run)])


def run_app(home: Path, **changes: Any) -> Path:
    """Do a run of the app and return its folder."""
    config = run_config("synthetic", **changes)
    server.app.app(InProcessGrid(client.app.app, config), Context(1, 1, {}, RecordDict(), config))
    (folder,) = (home / "runs").iterdir()
    return folder


@pytest.fixture
def run(umbel_home: Path) -> Path:
    """A run of the app."""
    return run_app(umbel_home, rounds=12, observers=f"{__name__}:Talkative")


class Talkative(Observer):
    """Has something for the report."""

    def section(self) -> Section:
        """Return it."""
        return Section("What I saw", ("Little.",))


@pytest.fixture
def unvalidated(umbel_home: Path, tmp_path: Path) -> Path:
    """A run of the app on a federation in which nobody validates."""
    x = np.random.default_rng(0).uniform(-1, 1, (16, 2)).astype(np.float32)
    split = {"train": 8, "validation": 0}
    manifest = Manifest(name="few", clients=8, split=split, model="linear", loss="mse")
    write_federation(tmp_path / "few", manifest, x, x.sum(1), offsets_of([2] * 8))
    return run_app(umbel_home, federation=str(tmp_path / "few"), rounds=2)


@pytest.mark.parametrize("kind", ["run", "unvalidated"])
def test_it_is_the_report_that_the_run_itself_writes(kind: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(kind)
    written = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    done = report(run)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(run / "report.html")
    assert (run / "report.html").read_bytes() == written
    assert ("What I saw" in written.decode()) == (kind == "run")


def test_a_run_that_was_interrupted_says_so(run: Path) -> None:
    lines = (run / "history.jsonl").read_text().splitlines(keepends=True)
    (run / "history.jsonl").write_text("".join(lines[:7]))
    (run / "outcome.json").write_text(json.dumps({"stopped": ""}))
    assert report(run).exit_code == 0
    assert "it was interrupted" in (run / "report.html").read_text()


def test_a_run_of_a_sweep_gets_one_too(tmp_path: Path) -> None:
    spec = Spec("one", run_config("synthetic", rounds=7, patience=2))
    result = _save(spec, finish(spec.config), "", tmp_path)
    assert report(result.folder).exit_code == 0
    page = (result.folder / "report.html").read_text()
    assert "no better hypotheses in 2 validations" in page or "all 7 rounds done" in page


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    done = report(tmp_path)
    assert done.exit_code == 1
    assert "give the folder of one run" in done.stderr
    assert list(tmp_path.iterdir()) == []
