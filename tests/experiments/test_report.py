"""A report can be made from what a run left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from typer.testing import CliRunner

import client.app
import server.app
from experiments.__main__ import app
from experiments.runs import Spec, finish
from experiments.sweep import _save
from simulation.grid import InProcessGrid
from simulation.in_process import run_config


def report(run: Path) -> Any:
    return CliRunner().invoke(app, ["report", str(run)])


@pytest.fixture
def run(umbel_home: Path) -> Path:
    """A run of the app."""
    config = run_config("synthetic", rounds=12)
    server.app.app(InProcessGrid(client.app.app, config), Context(1, 1, {}, RecordDict(), config))
    (folder,) = (umbel_home / "runs").iterdir()
    return folder


def test_it_is_the_report_that_the_run_itself_writes(run: Path) -> None:
    written = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    done = report(run)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(run / "report.html")
    assert (run / "report.html").read_bytes() == written


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
