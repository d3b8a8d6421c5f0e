"""A group of commands that imports one when it is called: a list of them all takes no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click
import typer
from typer.core import TyperGroup

from umbel.protocol.cli import fail


def lazy(known: Callable[[], Mapping[str, str]], load: Callable[[str], typer.Typer], extra: str) -> type[TyperGroup]:
    """Return the class of a group.

    Parameters
    ----------
    known : callable
        Returns what each command does, in a sentence, by its name.
    load : callable
        Returns a command by its name.
    extra : str
        The extra of umbel that has what a command may import besides.
    """

    class Lazy(TyperGroup):
        def list_commands(self, ctx: click.Context) -> list[str]:
            return list(known())

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            return click.Command(cmd_name, help=known()[cmd_name]) if cmd_name in known() else None

        def resolve_command(
            self, ctx: click.Context, args: list[str]
        ) -> tuple[str | None, click.Command | None, list[str]]:
            self.commands = {name: click.Command(name) for name in known()}  # for "did you mean"
            name, command, rest = super().resolve_command(ctx, args)
            return name, self._load(name) if name and command else None, rest

        @staticmethod
        def _load(name: str) -> click.Command:
            try:
                command: Any = typer.main.get_command(load(name))
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] == "umbel":
                    raise
                fail(f"{error.name} is not installed: pip install 'umbel[{extra}]' [config.not-installed]", 2)
            command.name = name
            return command  # type: ignore[no-any-return]

    return Lazy
