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
from typer.testing import CliRunner

import umbel.client.app
import umbel.server.app
from umbel.cli.commands.runs import report as app
from umbel.data import Manifest, offsets_of, write_dataset
from umbel.server.result import Result
from umbel.server.run_folder import _digest
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import run_config
from umbel.simulation.sweep import Spec, _save, finish

pytestmark = pytest.mark.rest


def report(run: Path | str) -> Any:
    return CliRunner().invoke(app, [str(run)])


def run_app(home: Path, **changes: Any) -> Path:
    """Do a run of the app and return its folder."""
    config = run_config("synthetic", **changes)
    umbel.server.app.app(InProcessGrid(umbel.client.app.app, config), Context(1, 1, {}, RecordDict(), config))
    return max((home / "runs").iterdir(), key=lambda folder: folder.stat().st_mtime_ns)


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


@pytest.fixture
def unvalidated(umbel_home: Path, tmp_path: Path) -> Path:
    """A run of the app on a dataset in which nobody validates."""
    x = np.random.default_rng(0).uniform(-1, 1, (16, 2)).astype(np.float32)
    split = {"train": 8, "validation": 0}
    manifest = Manifest(name="few", clients=8, split=split, model="linear", loss="mse")
    write_dataset(tmp_path / "few", manifest, x, x.sum(1), offsets_of([2] * 8))
    return run_app(umbel_home, dataset=str(tmp_path / "few"), rounds=2)


@pytest.mark.parametrize("kind", ["run", "unvalidated"])
def test_it_is_the_report_that_the_run_itself_writes(kind: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(kind)
    written = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    done = CliRunner().invoke(app, [str(run), "--no-baselines"])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(run / "report.html")
    assert (run / "report.html").read_bytes() == written


@pytest.mark.usefixtures("blank_figures")
def test_of_what_sites_trained_on_nothing_is_measured_and_an_interrupted_run_says_so(run: Path) -> None:
    (node,) = json.loads((run / "nodes.json").read_text())
    (run / "nodes.json").write_text(json.dumps([node | {"first": -1, "step": -1}]))
    latest = run / "latest.safetensors"
    save_file(arrays := load_file(latest), latest, {"rounds": f"3 {_digest(arrays, '3')} new "})
    (run / "outcome.json").write_text(json.dumps({"stopped": ""}))
    assert report(run).exit_code == 0
    assert not (run / "worth.json").exists()
    assert "it was interrupted" in (run / "report.html").read_text()


@pytest.mark.usefixtures("blank_figures")
def test_a_run_of_a_sweep_gets_one_too(tmp_path: Path) -> None:
    spec = Spec("one", run_config("synthetic", rounds=7, patience=2))
    result = _save(spec, finish(spec.config), "", tmp_path)
    assert report(result.folder).exit_code == 0
    page = (result.folder / "report.html").read_text()
    assert "no better hypotheses in 2 validations" in page or "all 7 rounds done" in page


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    done = report(tmp_path)
    assert done.exit_code == 2
    assert "config.toml" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_names_more_clients_than_its_data_have_is_damaged(run: Path) -> None:
    with (run / "participations.jsonl").open("a") as file:
        file.write('{"99999": 3}\n')
    done = report(run)
    assert done.exit_code == 2
    assert "[config.run-damaged]" in done.stderr


@pytest.mark.usefixtures("blank_figures")
def test_what_a_run_of_flowers_was_worth_is_measured_with_its_report(run: Path) -> None:
    assert not (run / "worth.json").exists()
    assert report(run).exit_code == 0
    first = (run / "worth.json").read_bytes()
    assert "Was it worth it?" in (run / "report.html").read_text()
    (run / "worth.json").write_bytes(first.replace(b'"rounds": 6', b'"rounds": 5'))
    assert report(run).exit_code == 0, "of fewer rounds than there are now"
    assert (run / "worth.json").read_bytes() == first
    (run / "worth.json").write_text('{"level": 3}')
    done = report(run)
    assert done.exit_code == 2
    assert "[config.worth]" in done.stderr


@pytest.mark.usefixtures("blank_figures")
def test_of_other_data_than_the_runs_nothing_is_measured(run: Path) -> None:
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(re.sub(r'(?m)^data = ".*"$', 'data = "other"', config))
    assert report(run).exit_code == 0
    assert not (run / "worth.json").exists()


@pytest.mark.usefixtures("blank_figures")
def test_a_dataset_with_other_units_since_the_run_changes_none_of_its_figures(umbel_home: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (20, 2)).astype(np.float32)
    told = {"name": "few", "clients": 10, "split": {"train": 8, "validation": 2}, "model": "linear", "loss": "mse"}
    then = Manifest(**told, units={"target": {"scale": 1000.0, "unit": "dollars"}})
    write_dataset(tmp_path / "few", then, x, x.sum(1), offsets_of([2] * 10))
    run = run_app(umbel_home, dataset=str(tmp_path / "few"), rounds=1)
    before = Result(run)
    figures = before.last_loss, before.unit, before.guarantee
    shutil.rmtree(tmp_path / "few")
    now = Manifest(**told, units={"target": {"scale": 1.0, "unit": "cents"}})
    write_dataset(tmp_path / "few", now, x, 1000 * x.sum(1), offsets_of([2] * 10))
    after = Result(run)
    assert (after.last_loss, after.unit, after.guarantee) == figures
    assert after.unit == "dollars"
    assert report(run).exit_code == 0
    assert "cents" not in (run / "report.html").read_text()
