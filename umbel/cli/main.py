"""The command ``umbel``."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import click
import typer
from typer.core import TyperGroup

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("umbel.cli.commands.run:app", "Run an experiment in simulation, on this machine or a Ray cluster."),
    "runs": ("umbel.cli.commands.runs:app", "What runs have left behind: list, show, compare, remove."),
    "predict": ("umbel.cli.commands.predict:app", "Clients that took no part pick their best hypothesis and predict."),
    "export": ("umbel.cli.commands.export:app", "A run's hypotheses as files that other programs read."),
    "report": ("umbel.cli.commands.report:app", "The report of a run, written anew."),
    "keys": (
        "umbel.cli.commands.keys:app",
        "Every key of the run config, or entry of a site's policy, with its meaning.",
    ),
    "plan": ("umbel.cli.commands.plan:app", "What a run would cost, or what noise a wanted guarantee takes."),
    "site": ("umbel.cli.commands.site:app", "Check a site's configuration and data before it goes online."),
    "ledger": ("umbel.cli.commands.ledger:app", "Read a site's ledger: what its clients have spent."),
    "log": ("umbel.cli.commands.log:app", "Read a site's log: what servers asked, and what the site decided."),
    "approvals": ("umbel.cli.commands.approvals:app", "What waits for a site's approval."),
    "data": ("umbel.cli.commands.data:app", "The datasets on this machine, and tables made into datasets."),
    "experiment": (
        "umbel.research.experiments.__main__:app",
        "The papers' tables and figures, and what a guarantee costs.",
    ),
    "attack": (
        "umbel.research.attacks.__main__:app",
        "What a curious or malicious server learns, and the claimed epsilon, audited.",
    ),
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
    # Where the user's own models and strategies are; last, so that nothing there stands before what is installed.
    sys.path.append(os.getcwd())
