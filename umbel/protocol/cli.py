"""Helpers that every command of umbel shares.

A command reports an error in one line that begins with "Error:", and its exit code depends on the error's kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console

from umbel.protocol import logs
from umbel.protocol.errors import UmbelError
from umbel.protocol.home import disk_error

PASSES_ON = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
"""Settings of a command that passes unknown options on."""


@contextmanager
def errors_in_one_line(*others: type[Exception]) -> Iterator[None]:
    """End the command with one line for any `UmbelError`, for an error of the operating system, and for `others`."""
    reported: tuple[type[Exception], ...] = (UmbelError, OSError, *others)
    try:
        yield
    except reported as error:
        if isinstance(error, OSError) and not isinstance(error, UmbelError):
            error = disk_error(error, error.filename or "a file") or error
        fail(str(error), error.exit_code if isinstance(error, UmbelError) else 1)


class _Commands(typer.Typer):
    """Commands that report errors in one line. Their tracebacks, which may end up in a log, show no values."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(add_completion=False, pretty_exceptions_show_locals=False, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Return the decorator of a command."""
        add = super().command(name, **settings)
        return lambda main: add(errors_in_one_line()(main))


def command_line(main: Callable[..., None], **settings: Any) -> typer.Typer:
    """Return the command for a function; also a decorator."""
    command = _Commands()
    command.command(**settings)(main)
    return command


def command_group(told: str) -> typer.Typer:
    """Return a group of commands with the description `told`."""
    return _Commands(suggest_commands=False, no_args_is_help=True, help=told)


def console() -> Console:
    """Return the console for tables."""
    # Redirected output has no terminal width to fit, and a cut cell would be wrong.
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=200)


def printable(text: str) -> str:
    """Return text from a server without the control characters that a terminal acts on."""
    # Each character once: a page has millions.
    return text.translate({ord(one): "?" for one in set(text) if not (one.isprintable() or one == "\n")})


def csv_cell(value: object) -> object:
    """Return a cell of a CSV file that no spreadsheet reads as a formula; numbers stay as they are, also in a text."""
    if not isinstance(value, str) or value[:1] not in _FORMULAS or _NUMBER.fullmatch(value):
        return value
    return f"'{value}"


_FORMULAS = tuple("=+-@\t\r")
_NUMBER = re.compile(r"[+-]\d+(\.\d+)?")


def fail(reason: str, exit_code: int = 1) -> NoReturn:
    """Print one line of error, of JSON where the log is, and exit."""
    typer.echo(logs.error(printable(reason)), err=True)
    raise typer.Exit(exit_code) from None
