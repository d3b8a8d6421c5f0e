"""Every command reports what went wrong in one line, with exit code 1."""

from __future__ import annotations

import pytest
import typer

from protocol.cli import errors_in_one_line, fail
from protocol.errors import FederationError, UmbelError


@pytest.mark.parametrize("error", [UmbelError("too small"), FederationError("too small"), OSError("too small")])
def test_an_error_of_umbels_or_the_systems_is_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, errors_in_one_line():
        raise error
    assert ended.value.exit_code == 1
    assert capsys.readouterr() == ("", "Error: too small\n")


def test_an_error_of_programming_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), errors_in_one_line():
        raise KeyError("x")
    assert capsys.readouterr() == ("", "")


def test_a_command_may_report_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), errors_in_one_line(KeyError):
        raise KeyError("x")
    assert capsys.readouterr().err == "Error: 'x'\n"


def test_a_command_may_fail_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        fail("no such thing")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "Error: no such thing\n"
