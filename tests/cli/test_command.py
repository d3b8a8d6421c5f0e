"""The command `umbel`: what it lists, and what it imports for that."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import umbel
from tests.helpers.cli import said
from tests.helpers.cli import umbel as told_by
from tests.helpers.sources import ROOT
from umbel.cli.main import COMMANDS, LAB, PANELS
from umbel.protocol.project import OWN_PATH


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_explains_itself(name: str) -> None:
    assert f"umbel {name}" in said(name, "--help")
    assert PANELS.keys() == COMMANDS.keys() | LAB.keys()


def test_a_users_modules_lie_here_or_where_the_process_was_that_started_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(OWN_PATH, "/there")
    said("config")
    assert os.environ[OWN_PATH] == f"{tmp_path}{os.pathsep}/there"


@pytest.mark.parametrize(("words", "meant"), [("experimant", "experiment"), ("data shw", "show")])
def test_a_misspelt_command_is_told_its_name_once(words: str, meant: str) -> None:
    code, told = told_by(*words.split())
    assert (code, told.count(f"'{meant}'")) == (2, 1)


HEAVY = ("torch", "flwr", "pandas", "numpy", "matplotlib", "scipy")


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import umbel; dir(umbel)", HEAVY),
        ("from umbel.__main__ import app; app(['--help'], standalone_mode=False)", ("torch", "flwr")),
        ("import umbel; umbel.from_dataframe, umbel.write_dataset", ("torch",)),
        (
            "import umbel.cli.commands.run, umbel.simulation.in_process, umbel.simulation.worth",
            ("pandas", "matplotlib", "scipy"),
        ),
        ("import umbel; umbel.load, umbel.export; umbel.run(rounds=1, restarts=1, baselines=False)", ("pandas",)),
    ],
)
def test_what_takes_long_to_import_comes_when_it_is_needed(code: str, absent: tuple[str, ...]) -> None:
    code = f"import sys; {code}; print(sorted({set(absent)} & sys.modules.keys()))"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip().splitlines()[-1] == "[]"


def test_python_has_every_name() -> None:
    for name in umbel.__all__:
        assert getattr(umbel, name).__name__ == name
    assert {*umbel.__all__} <= {*dir(umbel)}
    for name in ("GroupPrivacy", "Mechanism", "Model", "Callback"):
        assert getattr(umbel, name).__doc__, name
    with pytest.raises(AttributeError, match="from_nothing"):
        _ = umbel.from_nothing


def test_an_image_without_package_metadata_knows_its_version_and_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, version = metadata.distribution, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    def without_umbel(name: str) -> metadata.Distribution:
        if name == "umbel":
            raise metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(metadata, "distribution", without_umbel)
    assert said("--version") == f"umbel {version}\n"
    said("init", tmp_path / "study")
    assert f'"umbel>={version}"' in (tmp_path / "study" / "pyproject.toml").read_text()
    assert f"Flower {there('flwr').version}" in told_by("doctor")[1]


def test_data_and_runs_are_not_for_all_to_write_to(tmp_path: Path) -> None:
    os.umask(0)
    said("runs", "list")
    (folder := tmp_path / "made").mkdir()
    assert folder.stat().st_mode & 0o777 == 0o775, "the group's right is the user's to give"
