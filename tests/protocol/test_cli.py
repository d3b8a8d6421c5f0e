"""Every command reports what went wrong in one line, with the exit code of its kind."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from umbel.protocol.cli import PASSES_ON, csv_cell, errors_in_one_line, fail
from umbel.protocol.errors import DatasetError, UmbelError


def test_what_goes_wrong_is_one_line_but_an_error_of_programming(capsys: pytest.CaptureFixture[str]) -> None:
    """That keeps its traceback, unless a command reports it."""
    for error, code in ((UmbelError("too small"), 1), (DatasetError("too small"), 3), (OSError("too small"), 1)):
        with pytest.raises(typer.Exit) as ended, errors_in_one_line():
            raise error
        assert ended.value.exit_code == code
        assert capsys.readouterr() == ("", "Error: too small\n")
    with pytest.raises(typer.Exit) as ended:
        fail("no such thing")
    assert (ended.value.exit_code, capsys.readouterr().err) == (1, "Error: no such thing\n")
    with pytest.raises(KeyError), errors_in_one_line():
        raise KeyError("x")
    assert capsys.readouterr() == ("", "")
    with pytest.raises(typer.Exit), errors_in_one_line(KeyError):
        raise KeyError("x")
    assert capsys.readouterr().err == "Error: 'x'\n"


SCRIPT = """
from umbel.protocol.cli import csv_cell, command_line

def main() -> None:
    secret = "-".join(["sword", "fish"])
    print(1 / 0)

command_line(main)()
"""


def test_a_traceback_shows_no_values() -> None:
    """It may end in a log, and a value may be a secret."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "sword-fish" not in done.stderr


@pytest.mark.parametrize("passes_on", [True, False])
def test_a_command_passes_on_what_it_does_not_know_where_it_says_so(passes_on: bool) -> None:
    got: list[str] = []

    app = typer.Typer()

    @app.command(**PASSES_ON if passes_on else {})
    def main(context: typer.Context) -> None:
        got.extend(context.args)

    done = CliRunner().invoke(app, ["--port", "7"])
    assert (done.exit_code == 0) == passes_on
    assert got == (["--port", "7"] if passes_on else [])


def test_no_cell_of_a_table_is_a_formula() -> None:
    for text in ("=1+1", "+1+1", "-1+1", "-north", "@SUM(A1)", "\t=1", "\r=1", "=1", "-1\n"):
        assert csv_cell(text) == f"'{text}"
    for cell in ("north", -1.5, 3, None, "", "-1", "+2.5"):
        assert csv_cell(cell) == cell
