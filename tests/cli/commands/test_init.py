"""``umbel init`` writes a Flower app that runs as it is, also while umbel is on no index."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from benchmarks.flower import simulation
from tests.helpers.cli import refused, said
from tests.helpers.errors import raises
from tests.helpers.ports import free_port
from tests.helpers.sources import ROOT
from umbel.cli.commands.init import files, package_of
from umbel.protocol.errors import ConfigError
from umbel.protocol.flower import build_bundle
from umbel.protocol.run_config import RunConfig
from umbel.server.runs import find_run
from umbel.simulation.start import read_values

ALONE = {"UV_OFFLINE": "1", "UV_NO_CACHE": "1", "FLWR_TELEMETRY_ENABLED": "0"}
"""An environment in which uv reaches no index and finds nothing that it fetched before."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    said("init", tmp_path / "my-study")
    return tmp_path / "my-study"


def texts(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in files}


def test_it_writes_a_fixed_set_of_files_under_the_projects_name_which_its_bundle_carries(project: Path) -> None:
    found = texts(project)
    assert found.keys() == {path.replace("my_project", "my_study") for path in files()}
    assert not [path for path, text in found.items() if re.search("my_project|my-project|VERSION", text)]
    with zipfile.ZipFile(BytesIO(build_bundle(project))) as archive:
        names = set(archive.namelist())
    assert {"my_study/__init__.py", "my_study/model.py", "pyproject.toml"} < names
    assert not any(name.startswith("umbel/") for name in names), "it would hide the umbel that is installed"


def test_an_ordinary_flower_app_is_the_example_under_its_own_name(tmp_path: Path) -> None:
    said("init", tmp_path / "my-app", "--flower")
    found, modules = texts(tmp_path / "my-app"), ("__init__", "server_app", "client_app", "data")
    assert found.keys() == {"pyproject.toml", *(f"my_app/{name}.py" for name in modules)}
    for path, text in found.items():
        assert not re.search("flower_app|flower-app|my_project|sklearn", text), path
        original = ROOT / "examples" / "flower_app" / path.replace("my_app", "flower_app")
        assert text.count("\n") == original.read_text(encoding="utf-8").count("\n")
    build_bundle(tmp_path / "my-app")


def test_its_settings_are_a_run_with_a_guarantee(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    values = read_values("pyproject.toml")
    assert values.keys() <= RunConfig().entries().keys()
    assert values["model"] == "my_study.model:net"
    assert read_values(".") == values, "the folder stands for it, as for flwr run"
    (project / "manifest.json").touch()
    assert read_values(".") == {"dataset": str(project)}, "a dataset that was sent is no app"
    (project / "config.toml").touch()
    (project / "manifest.json").unlink()
    with raises(ConfigError, "config.is-a-run"):
        read_values(".")
    # n = 7 parameters of the linear model, pure epsilon 2 n / nu in one participation
    assert 2 * 7 / values["noise-multiplier"] * values["max-participations"] == 4.0


def test_flower_installs_neither_flower_nor_umbel_for_it(project: Path, tmp_path: Path) -> None:
    """Flower's own installer does its work without an index, as umbel may be on none."""
    code = (
        "from flwr.supercore.superexec.dependency_installer import install_app_dependencies as install\n"
        f"print(*install({str(project)!r}).rglob('*.dist-info'))"
    )
    env = os.environ | ALONE | {"FLWR_HOME": str(tmp_path / "flwr")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.rest
def test_it_runs_by_umbel_by_flower_and_in_its_own_test(
    project: Path, umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    words = [sys.executable, "-m", "umbel", "run", "pyproject.toml", "rounds=2", "--no-baselines"]
    subprocess.run(words, check=True, capture_output=True)
    first = find_run("last")
    with simulation({"UMBEL_HOME": str(umbel_home)}, free_port()) as flower:
        flower.run(project, {"rounds": 2}, 2)
    second = find_run("last")
    assert first != second
    name = "hypotheses.safetensors"
    assert (first / name).read_bytes() == (second / name).read_bytes(), "with any number of nodes"
    tested = subprocess.run([sys.executable, "-m", "pytest", "-q"], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout


@pytest.mark.parametrize(("name", "package"), [("study", "study"), ("My-Study-2", "my_study_2"), ("a" * 32, "a" * 32)])
def test_a_name_is_the_packages_too(name: str, package: str) -> None:
    assert package_of(name) == package


@pytest.mark.parametrize("name", ["my_study", "study.1", "a" * 33, "-study", "torch", "umbel", "json", "class", "2nd"])
def test_a_name_that_flower_or_python_does_not_take_is_refused(name: str) -> None:
    with raises(ConfigError, "config.project-name", name):
        package_of(name)


def test_a_folder_with_files_is_left_alone(project: Path) -> None:
    refused("config.project-exists", "init", project, parts=(project,))


def test_a_pyproject_without_a_table_for_flower_is_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text('[tool.other]\nrounds = "many"\n')
    assert read_values(file) == {}
