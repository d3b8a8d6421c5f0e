"""What every command of umbel has in common.

It reports what went wrong in one line that begins with "Error:", with an exit code by kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console

from umbel.protocol.errors import UmbelError

PASSES_ON = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
"""Settings of a command that takes options that it does not know, to pass them on."""


@contextmanager
def errors_in_one_line(*others: type[Exception]) -> Iterator[None]:
    """End the command with one line for any `UmbelError`, for an error of the operating system, and for `others`."""
    reported: tuple[type[Exception], ...] = (UmbelError, OSError, *others)
    try:
        yield
    except reported as error:
        fail(str(error), error.exit_code if isinstance(error, UmbelError) else 1)


def command_line(main: Callable[..., None], **settings: Any) -> typer.Typer:
    """Return the command that a function is. A traceback, which may end in a log, shows no values."""
    command = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    command.command(**settings)(main)
    return command


def command_group(told: str) -> typer.Typer:
    """Return a group of commands, which `told` describes."""
    return typer.Typer(
        add_completion=False,
        suggest_commands=False,
        no_args_is_help=True,
        pretty_exceptions_show_locals=False,
        help=told,
    )


def console() -> Console:
    """Return where tables are printed."""
    # Redirected, a table has no terminal's width to fit, and a cut cell would be a wrong one.
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=200)


def printable(text: str) -> str:
    """Return text that a server wrote as it is, without what a terminal acts on."""
    return "".join(one if one.isprintable() or one == "\n" else "?" for one in text)


def csv_cell(value: object) -> object:
    """Return a cell of a CSV file which no spreadsheet takes for a formula; numbers stay as they are."""
    return f"'{value}" if isinstance(value, str) and value[:1] in _FORMULAS else value


_FORMULAS = tuple("=+-@\t\r")


def fail(reason: str, exit_code: int = 1) -> NoReturn:
    """End the command with one line."""
    typer.echo(f"Error: {printable(reason)}", err=True)
    raise typer.Exit(exit_code) from None
