"""The command `umbel`: what it lists, and what it imports for that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import umbel
from tests.helpers.sources import ROOT
from umbel.cli.main import COMMANDS, LAB, PANELS, app
from umbel.protocol.project import OWN_PATH


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_explains_itself(name: str) -> None:
    module, _, attribute = COMMANDS[name][0].partition(":")
    assert isinstance(getattr(import_module(module), attribute), typer.Typer)
    told = CliRunner().invoke(app, [name, "--help"], prog_name="umbel")
    assert told.exit_code == 0
    assert f"umbel {name}" in told.output
    assert "--install-completion" not in told.output


def test_a_users_modules_lie_here_or_where_the_process_was_that_started_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(OWN_PATH, "/there")
    assert CliRunner().invoke(app, ["config"], prog_name="umbel").exit_code == 0
    assert os.environ[OWN_PATH] == f"{tmp_path}{os.pathsep}/there"


@pytest.mark.parametrize(
    ("words", "meant"), [(["experimant"], "experiment"), (["data", "shw"], "show"), (["site", "strat"], "start")]
)
def test_a_misspelt_command_is_told_its_name_once(words: list[str], meant: str) -> None:
    told = CliRunner().invoke(app, words, prog_name="umbel")
    assert told.exit_code == 2
    assert "Did you mean" in told.output
    assert told.output.count(f"'{meant}'") == 1


def test_what_python_imports_comes_when_it_is_asked_for() -> None:
    code = (
        "import sys, umbel;"
        "assert not {'torch', 'pandas', 'numpy', 'flwr'} & set(sys.modules);"
        "assert {'from_dataframe', 'write_dataset'} <= set(dir(umbel));"
        "print(umbel.from_dataframe.__module__, umbel.write_dataset.__module__, 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "umbel.data.importers.frames umbel.data.files False"
    for name in umbel.__all__:
        assert getattr(umbel, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'umbel' has no attribute 'from_nothing'"):
        _ = umbel.from_nothing


def test_a_run_loads_pandas_matplotlib_and_scipy_only_when_it_needs_them() -> None:
    """They take up to half a second each."""
    heavy = {"pandas", "matplotlib", "scipy"}
    code = (
        "import sys, umbel.cli.commands.run, umbel.simulation.in_process, umbel.simulation.worth;"
        f"print({heavy} & sys.modules.keys())"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "set()"


@pytest.mark.rest
def test_what_users_subclass_or_name_is_at_hand() -> None:
    for name in ("GroupPrivacy", "Mechanism", "Model", "Callback"):
        assert getattr(umbel, name).__doc__, name
    code = "import sys, umbel; umbel.Callback; umbel.Mechanism; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() in ("True", "False")


def test_the_help_groups_the_commands() -> None:
    told = CliRunner().invoke(app, ["--help"], prog_name="umbel").output
    assert re.findall(r"─ (\w+) ─", told) == ["Options", "Everyday", "Site", "Server", "Lab"]
    assert PANELS.keys() == COMMANDS.keys() | LAB.keys()


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["site", "start"], "--superlink --root-certificates --auth-supernode-private-key --node-config --port"),
        (["server", "start"], "--host --port --database --enable-supernode-auth --ssl-ca-certfile --control-secret"),
    ],
)
def test_the_help_lists_what_the_guide_uses_of_flowers_options(words: list[str], needed: str) -> None:
    told = CliRunner().invoke(app, [*words, "--help"], prog_name="umbel").output
    assert all(option in told for option in needed.split())


@pytest.mark.parametrize("columns", [60, pytest.param(200, marks=pytest.mark.rest)])
def test_no_help_has_raw_markup(columns: int) -> None:
    """Code between backticks, roles and stars are for documentation; a terminal prints them as they are."""
    runner = CliRunner(env={"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns)})

    def helps(words: list[str]) -> Iterator[tuple[list[str], str]]:
        told = runner.invoke(app, [*words, "--help"], prog_name="umbel").output
        yield words, told
        commands = re.split(r"─ (?:Commands|Everyday) ", told, maxsplit=1)[1:]
        for name in re.findall(r"^│ ([a-z][\w-]*) ", "".join(commands), re.MULTILINE):
            yield from helps([*words, name])

    found = dict((" ".join(words), told) for words, told in helps([]))
    assert {"run", "experiment frontier hospital", "data make hospital", "site start"} <= found.keys()
    raw = {name: re.findall(r".*(?:`|:[a-z]+:|\[/?[a-z]+\]\b|(?<!\w)\*\*\w).*", told) for name, told in found.items()}
    assert not {name: lines for name, lines in raw.items() if lines}


@pytest.mark.parametrize(
    ("words", "explained"),
    [
        (["predict"], {"run", "rows"}),
        (["data", "import"], {"file"}),
        (["runs", "show"], {"runs"}),
        (["price"], {"words"}),
        (["site", "approve"], {"digest"}),
    ],
)
def test_help_explains_each_argument(words: list[str], explained: set[str]) -> None:
    told = CliRunner(env={"COLUMNS": "250", "TERMINAL_WIDTH": "250"}).invoke(app, [*words, "--help"]).output
    panel = told.partition("─ Arguments ")[2].partition("╰")[0]
    rows = [re.split(r" {2,}", line.strip("│* ")) for line in panel.splitlines()[1:]]
    assert {row[0] for row in rows if len(row) > 2 and not row[2].startswith("[")} == explained


def test_an_image_without_package_metadata_knows_its_version_and_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, version = metadata.distribution, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    def without_umbel(name: str) -> metadata.Distribution:
        if name == "umbel":
            raise metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(metadata, "distribution", without_umbel)
    assert CliRunner().invoke(app, ["--version"]).output == f"umbel {version}\n"
    assert CliRunner().invoke(app, ["init", str(tmp_path / "study")]).exit_code == 0
    assert f'"umbel>={version}"' in (tmp_path / "study" / "pyproject.toml").read_text()
    told = CliRunner().invoke(app, ["doctor"])
    assert isinstance(told.exception, SystemExit | None)
    assert f"Flower {there('flwr').version}" in told.output


def test_the_list_of_commands_takes_no_pytorch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from umbel.__main__ import app;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        "print([name for name in ('torch', 'flwr') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "[]"


@pytest.mark.usefixtures("umbel_home")
def test_a_run_takes_no_pandas() -> None:
    code = (
        "import sys, umbel; umbel.load, umbel.export; umbel.run(rounds=1, restarts=1, baselines=False);"
        "print('pandas' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip().splitlines()[-1] == "False"


def test_data_and_runs_are_not_for_all_to_write_to(tmp_path: Path) -> None:
    os.umask(0)
    CliRunner().invoke(app, ["runs", "list"])
    (folder := tmp_path / "made").mkdir()
    assert folder.stat().st_mode & 0o777 == 0o775, "the group's right is the user's to give"
