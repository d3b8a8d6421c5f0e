"""A group of commands that are imported on use: listing them needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click
import typer
from typer.core import TyperArgument, TyperGroup
from typer.utils import get_params_from_function

from umbel.protocol.cli import fail
from umbel.protocol.project import to_install


def lazy(
    known: Callable[[], Mapping[str, str]],
    load: Callable[[str], typer.Typer],
    elsewhere: Mapping[str, str] | None = None,
    panels: Mapping[str, str] | None = None,
) -> type[TyperGroup]:
    """Return the class of a group.

    `known` returns a one-sentence description of each command, by name, and `load` a command by its name. The others
    are the packages that add further commands, and the titles above commands in the help.
    """

    class Lazy(TyperGroup):
        def list_commands(self, ctx: click.Context) -> list[str]:
            return list(known())

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            if cmd_name not in known():
                return None
            listed = click.Command(cmd_name, help=known()[cmd_name])
            listed.rich_help_panel = (panels or {}).get(cmd_name)  # type: ignore[attr-defined]  # read by Typer
            return listed

        def resolve_command(
            self, ctx: click.Context, args: list[str]
        ) -> tuple[str | None, click.Command | None, list[str]]:
            there, asked = known(), args[0] if args else ""
            if asked not in there and (package := (elsewhere or {}).get(asked)):
                text = f"{ctx.command_path} {asked} is in another package: pip install {package}"
                fail(f"{text} [config.not-installed]", 2)
            self.commands = {name: click.Command(name) for name in there}  # for "did you mean"
            name, command, rest = super().resolve_command(ctx, args)
            return name, self._load(name) if name and command else None, rest

        @staticmethod
        def _load(name: str) -> click.Command:
            try:
                command: Any = typer.main.get_command(load(name))
            except ModuleNotFoundError as error:
                if not (packages := to_install((error.name or "").partition(".")[0])):
                    raise
                fail(f"{error.name} is not installed: pip install {packages} [config.not-installed]", 2)
            command.name = name
            _restore_help(command)
            return command  # type: ignore[no-any-return]

    return Lazy


def _restore_help(command: Any) -> None:
    """Give arguments their help again: click 8.5 discards it, with the releases of typer that Flower accepts."""
    for inner in getattr(command, "commands", {}).values():
        _restore_help(inner)
    told = get_params_from_function(command.callback) if command.callback else {}
    for one in command.params:
        if isinstance(one, TyperArgument) and one.name in told and not one.help:
            one.help = told[one.name].default.help
