"""The command `umbel`: what it lists, and what it imports for that."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import umbel
from umbel.cli.main import COMMANDS, app
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
    assert CliRunner().invoke(app, ["keys"], prog_name="umbel").exit_code == 0
    assert os.environ[OWN_PATH] == f"{tmp_path}{os.pathsep}/there"


@pytest.mark.parametrize(
    ("words", "meant"), [(["experimant"], "experiment"), (["data", "lst"], "list"), (["site", "strat"], "start")]
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
    with pytest.warns(FutureWarning, match="write_dataset"):
        assert umbel.write_federation is umbel.write_dataset, "the name of umbel 0.1"


def test_the_list_of_commands_takes_no_pytorch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from umbel.__main__ import app;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        "print([name for name in ('torch', 'flwr') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "[]"
