"""The bundle passes the checks of `flwr app publish` and `flwr app review`, as far as they need no account."""

from __future__ import annotations

import importlib
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from flwr.cli.config_utils import load_and_validate
from flwr.supercore.constant import MAX_FILE_BYTES
from typer.testing import CliRunner

from tests.helpers.sources import ROOT
from umbel.cli.commands.init import app as init
from umbel.client.bundle import app as bundle
from umbel.protocol.flower import build_bundle

# Flower exports a function of each module's name beside it.
build = importlib.import_module("flwr.cli.build")
publish = importlib.import_module("flwr.cli.app_cmd.publish")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that an operator would publish: umbel bundle --out umbel."""
    done = CliRunner().invoke(bundle, ["--out", str(tmp_path / "umbel")])
    assert done.exit_code == 0, done.output
    return tmp_path / "umbel"


def check(folder: Path) -> dict[str, Path]:
    """Make the checks of publishing, in its order, and return the files that would go."""
    config, warnings = load_and_validate(folder / "pyproject.toml", check_module=False)
    assert not warnings, warnings
    publish._validate_app_name(folder.name, "folder")
    description = config["project"]["description"]
    publish._validate_description(description)
    assert len(description) <= 200, "it would be asked about"
    files = publish._collect_file_paths(folder)
    publish._validate_files(files)
    return {str(file.relative_to(folder.resolve())): file for file in files}


def test_what_is_published_is_all_that_the_bundle_holds(folder: Path) -> None:
    with zipfile.ZipFile(BytesIO(build_bundle(ROOT))) as archive:
        held = {name for name in archive.namelist() if not name.startswith(".info/")}
    assert check(folder).keys() == held
    assert max(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= MAX_FILE_BYTES


def test_flower_builds_the_same_bundle_of_it(folder: Path) -> None:
    assert build.build_fab_from_disk(folder) == build_bundle(ROOT)


def test_a_project_of_umbel_init_passes_too(tmp_path: Path) -> None:
    project = tmp_path / "my-study"
    assert CliRunner().invoke(init, [str(project)]).exit_code == 0
    assert {"pyproject.toml", "my_study/model.py"} <= check(project).keys()
    assert build.build_fab_from_disk(project) == build_bundle(project)
