"""A report can be made from what a run left behind."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from safetensors.numpy import load_file, save_file

import umbel.client.app
import umbel.server.app
from tests.helpers.cli import refused, said
from tests.helpers.datasets import manifest
from umbel.data import offsets_of, write_dataset
from umbel.server.result import Result
from umbel.server.run_folder import _digest
from umbel.server.runs import find_run
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import run_config
from umbel.simulation.sweep import Spec, _save, finish

pytestmark = pytest.mark.rest


def run_app(home: Path, **changes: Any) -> Path:
    """Do a run of the app and return its folder."""
    config = run_config("synthetic", **changes)
    umbel.server.app.app(InProcessGrid(umbel.client.app.app, config), Context(1, 1, {}, RecordDict(), config))
    return max((home / "runs").iterdir(), key=lambda folder: folder.stat().st_mtime_ns)


def report(run: Path) -> str:
    """Make the report of a run, and return its page."""
    said("runs", "report", run)
    return (run / "report.html").read_text()


def write_few(folder: Path, train: int, validation: int, factor: float = 1.0, **entries: Any) -> str:
    """Write clients of two rows whose targets are the sums of their features, times a factor."""
    x = np.random.default_rng(0).uniform(-1, 1, (2 * (train + validation), 2)).astype(np.float32)
    own = manifest(train, validation, name="few", model="linear", loss="mse", **entries)
    write_dataset(folder, own, x, factor * x.sum(1), offsets_of([2] * (train + validation)))
    return str(folder)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the app, which tests take a copy of."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UMBEL_HOME", str(home))
        return run_app(home, rounds=5)


@pytest.fixture
def run(done: Path, umbel_home: Path) -> Path:
    """A run of the app."""
    return shutil.copytree(done, umbel_home / "runs" / done.name)


@pytest.mark.parametrize("validated", [True, False])
def test_it_is_the_report_that_the_run_itself_writes(
    validated: bool, request: pytest.FixtureRequest, umbel_home: Path, tmp_path: Path
) -> None:
    if validated:
        run = request.getfixturevalue("run")
    else:
        run = run_app(umbel_home, dataset=write_few(tmp_path / "few", 8, 0), rounds=2)
    written = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    assert said("runs", "report", run, "--no-baselines").strip() == str(run / "report.html")
    assert (run / "report.html").read_bytes() == written


@pytest.mark.usefixtures("blank_figures")
def test_of_what_sites_trained_on_nothing_is_measured_and_an_interrupted_run_says_so(run: Path) -> None:
    (node,) = json.loads((run / "nodes.json").read_text())
    (run / "nodes.json").write_text(json.dumps([node | {"first": -1, "step": -1}]))
    latest = run / "latest.safetensors"
    save_file(arrays := load_file(latest), latest, {"rounds": f"3 {_digest(arrays, '3')} new "})
    (run / "outcome.json").write_text(json.dumps({"stopped": ""}))
    assert "it was interrupted" in report(run)
    assert not (run / "worth.json").exists()


@pytest.mark.usefixtures("blank_figures")
def test_a_run_of_a_sweep_gets_one_too(tmp_path: Path) -> None:
    spec = Spec("one", run_config("synthetic", rounds=7, patience=2))
    page = report(_save(spec, finish(spec.config), "", tmp_path).folder)
    assert "no better hypotheses in 2 validations" in page or "all 7 rounds done" in page


def test_a_folder_without_a_run_and_one_of_too_many_clients_are_named(run: Path, tmp_path: Path) -> None:
    refused("config.no-run", "runs", "report", tmp_path, parts=("config.toml",))
    with (run / "participations.jsonl").open("a") as file:
        file.write('{"99999": 3}\n')
    refused("config.run-damaged", "runs", "report", run)


@pytest.mark.usefixtures("blank_figures")
def test_what_a_run_of_flowers_was_worth_is_measured_with_its_report_but_on_no_other_data(run: Path) -> None:
    file, config = run / "worth.json", run / "config.toml"
    assert not file.exists()
    assert "Was it worth it?" in report(run)
    first = file.read_bytes()
    file.write_bytes(first.replace(b'"rounds": 6', b'"rounds": 5'))
    report(run)  # of fewer rounds than there are now
    assert file.read_bytes() == first
    file.write_text('{"level": 3}')
    refused("config.worth", "runs", "report", run)
    file.unlink()
    config.write_text(re.sub(r'(?m)^data = ".*"$', 'data = "other"', config.read_text()))
    report(run)
    assert not file.exists()


@pytest.mark.usefixtures("blank_figures")
def test_a_dataset_with_other_units_since_the_run_changes_none_of_its_figures(umbel_home: Path, tmp_path: Path) -> None:
    few, figures = tmp_path / "few", []
    for scale, unit in ((1000.0, "dollars"), (1.0, "cents")):
        shutil.rmtree(few, ignore_errors=True)
        write_few(few, 8, 2, 1000 / scale, units={"target": {"scale": scale, "unit": unit}})
        run = find_run("last") if figures else run_app(umbel_home, dataset=str(few), rounds=1)
        result = Result(run)
        figures.append((result.last_loss, result.unit, result.guarantee))
    assert figures[0] == figures[1]
    assert figures[0][1] == "dollars"
    assert "cents" not in report(run)
