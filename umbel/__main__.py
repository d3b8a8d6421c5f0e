"""The command ``umbel``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click
import typer
from typer.core import TyperGroup

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("umbel.commands.run:app", "Run an experiment in simulation on this machine."),
    "experiment": ("experiments.__main__:app", "The papers' tables and figures, and what a guarantee costs."),
    "attack": ("attacks.__main__:app", "What a curious or malicious server learns, and the claimed epsilon, audited."),
}
"""By its name: where a command's `typer.Typer` is, as module:name, and what it does, in a sentence."""


class _Lazy(TyperGroup):
    """A group that imports a command when it is called: a list of them all takes no PyTorch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return click.Command(cmd_name, help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        self.commands = {name: click.Command(name) for name in COMMANDS}  # for "did you mean"
        name, command, rest = super().resolve_command(ctx, args)
        return name, _loaded(name) if name and command else None, rest


def _loaded(name: str) -> click.Command:
    module, _, attribute = COMMANDS[name][0].partition(":")
    app: typer.Typer = getattr(import_module(module), attribute)
    command: Any = typer.main.get_command(app)
    command.name = name
    return command  # type: ignore[no-any-return]


app = typer.Typer(cls=_Lazy, no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def _umbel() -> None:
    """Personalised and private federated learning."""


if __name__ == "__main__":
    app(prog_name="umbel")
