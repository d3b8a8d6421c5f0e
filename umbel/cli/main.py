"""The command ``umbel``: where each of its commands is, which is imported when it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated

import typer

from umbel.cli.lazy import lazy
from umbel.protocol.project import OWN_PATH

Table = Mapping[str, tuple[str, str]]
"""By its name: where a command's `typer.Typer` is, as module:name, and what it does, in a sentence."""


def _group(commands: Table, callback: Callable[..., None], whole: bool = False) -> typer.Typer:
    """Return a command whose subcommands are those of a table; the callback's docstring says what they are for."""

    def load(name: str) -> typer.Typer:
        module, _, attribute = commands[name][0].partition(":")
        found: typer.Typer = getattr(import_module(module), attribute)
        return found

    group = typer.Typer(
        cls=lazy(lambda: {name: told for name, (_, told) in commands.items()}, load, "research"),
        add_completion=whole,
        suggest_commands=False,
        no_args_is_help=True,
        pretty_exceptions_show_locals=False,
    )
    group.callback()(callback)
    return group


def _umbel(
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--trust",
            metavar="MODULE[:NAME]",
            help="Code that a dataset or a run which you were sent may name. Umbel remembers it.",
        ),
    ] = None,
) -> None:
    """Personalised and private federated learning."""
    # The user's own models and strategies lie here, or where the process was that started this one.
    folders = [os.getcwd(), *filter(None, os.environ.get(OWN_PATH, "").split(os.pathsep))]
    os.environ[OWN_PATH] = os.pathsep.join(dict.fromkeys(folders))
    if names:
        from umbel.protocol.plugins import remember  # it imports Flower, which takes a second

        remember(names)


def _server() -> None:
    """Start the server, and sign in to it."""


def _site() -> None:
    """Check a site before it goes online, and start it."""
    # A site's own modules come after installed ones: its working folder may hold what others have sent.
    if own := os.environ.pop(OWN_PATH, ""):
        sys.path += [folder for folder in own.split(os.pathsep) if folder not in sys.path]


COMMANDS: Table = {
    "run": ("umbel.cli.commands.run:app", "Run an experiment in simulation, on this machine or a Ray cluster."),
    "runs": ("umbel.cli.commands.runs:app", "What runs have left behind: list, show, compare, remove."),
    "predict": ("umbel.cli.commands.predict:app", "Clients that took no part pick their best hypothesis and predict."),
    "export": ("umbel.cli.commands.export:app", "A run's hypotheses as files that other programs read."),
    "report": ("umbel.research.experiments.report:app", "The report of a run, written again."),
    "keys": (
        "umbel.cli.commands.keys:app",
        "Every key of the run config, or entry of a site's policy, with its meaning.",
    ),
    "plan": ("umbel.cli.commands.plan:app", "What a run would cost, or what noise a wanted guarantee takes."),
    "site": ("umbel.cli.main:site", "Check a site before it goes online, and start it."),
    "ledger": ("umbel.cli.commands.ledger:app", "Read a site's ledger: what its clients have spent."),
    "log": ("umbel.cli.commands.log:app", "Read a site's log: what servers asked, and what the site decided."),
    "approvals": ("umbel.cli.commands.approvals:app", "What waits for a site's approval."),
    "server": ("umbel.cli.main:server", "Start the server, and sign in to it."),
    "certs": ("umbel.deploy.certs:app", "Make the certificates, secrets and keys of a server and its sites."),
    "bundle": ("umbel.client.bundle:app", "The number by which a site knows this umbel, and its files for flwr run."),
    "data": ("umbel.cli.commands.data:app", "The datasets on this machine; recipes and tables that make more."),
    "experiment": (
        "umbel.research.experiments.__main__:app",
        "The papers' tables and figures, and what a guarantee costs.",
    ),
    "attack": (
        "umbel.research.attacks.__main__:app",
        "What a curious or malicious server learns, and the claimed epsilon, audited.",
    ),
}
SERVER: Table = {
    "start": ("umbel.deploy.server:start", "Start Flower's SuperLink with these options, and a guard in front of it."),
    "login": ("umbel.deploy.server:login", "Keep the operator's secret for a connection."),
}
SITE: Table = {
    "start": ("umbel.deploy.node:app", "Start a site's node on one machine: a SuperNode, and umbel's executor."),
    "supernode": ("umbel.deploy.supernode:app", "Start the SuperNode alone: the executor is in another container."),
    "executor": ("umbel.client.commands:executor", "Start the executor alone: it runs the site's own app."),
    "check": ("umbel.client.commands:check", "Say what a site's configuration means, and whether it can be used."),
}

app, server, site = _group(COMMANDS, _umbel, whole=True), _group(SERVER, _server), _group(SITE, _site)
