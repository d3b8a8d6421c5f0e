"""The command ``umbel``: the place of each of its commands, which are imported on use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated

import typer

from umbel.cli.lazy import lazy
from umbel.protocol.project import OWN_PATH, described

Table = Mapping[str, tuple[str, str]]
"""By name: the place of a command's `typer.Typer`, as module:name, and a one-sentence description."""


def _group(commands: Table, callback: Callable[..., None], whole: bool = False) -> typer.Typer:
    """Return a command with a table's subcommands; the callback's docstring describes them."""

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


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"umbel {described()['version']}")
        raise typer.Exit


def _umbel(
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--trust",
            metavar="MODULE[:NAME]",
            help="Code that a received dataset or run may name. Umbel remembers it.",
        ),
    ] = None,
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Personalised and private federated learning."""
    os.umask(os.umask(0o077) | 0o002)  # data, runs and their folders are not world-writable
    # The user's own models and strategies are here, or in the folder of the process that started this one.
    folders = [os.getcwd(), *filter(None, os.environ.get(OWN_PATH, "").split(os.pathsep))]
    os.environ[OWN_PATH] = os.pathsep.join(dict.fromkeys(folders))
    if names:
        from umbel.protocol.plugins import remember  # it imports Flower, which takes a second

        remember(names)


def _server() -> None:
    """Start the server, sign in to it, and print a run's status."""


def _relay() -> None:
    """Start a relay, which hides the sender of each release from the server.

    People who do not run the server run it.
    """


def _site() -> None:
    """Check a site before it goes online, and start it."""
    # Installed modules come before a site's own: its working folder may hold files from others.
    os.environ[OWN_PATH] = os.pathsep + os.environ.get(OWN_PATH, "")


COMMANDS: Table = {
    "run": ("umbel.cli.commands.run:app", "Run an experiment in simulation, on this machine or a Ray cluster."),
    "demo": ("umbel.cli.commands.demo:app", "Compare hospitals alone, together without privacy, and with a guarantee."),
    "init": ("umbel.cli.commands.init:app", "Write a Flower app in a new folder, ready for your model."),
    "doctor": ("umbel.cli.commands.doctor:app", "Check that this machine has what umbel needs, and say what to do."),
    "runs": ("umbel.cli.commands.runs:app", "List, show, compare and remove runs."),
    "predict": ("umbel.cli.commands.predict:app", "Predict with a run, for clients old and new."),
    "export": ("umbel.cli.commands.export:app", "Write a run's hypotheses as files for other programs."),
    "report": ("umbel.research.experiments.report:app", "Write a run's report, alone or beside other runs."),
    "keys": (
        "umbel.cli.commands.keys:app",
        "Explain the keys of the run config, or the entries of a site's policy.",
    ),
    "plan": ("umbel.cli.commands.plan:app", "Print a run's cost in privacy, or the noise for a guarantee."),
    "site": ("umbel.cli.main:site", "Check a site before it goes online, and start it."),
    "ledger": ("umbel.cli.commands.ledger:app", "Read a site's ledger: what its clients have spent."),
    "log": ("umbel.cli.commands.log:app", "Read a site's log: what servers asked, and what the site decided."),
    "approvals": ("umbel.cli.commands.approvals:app", "List, approve and refuse requests to a site."),
    "sign": ("umbel.cli.commands.sign:app", "Sign a run's settings, for sites that list their researchers."),
    "policy": ("umbel.cli.commands.policy:app", "Explain a site's policy in words, and check its file."),
    "server": ("umbel.cli.main:server", "Start the server, sign in to it, and print a run's status."),
    "sites": ("umbel.cli.commands.sites:sites", "List the sites of a run, and why some are missing."),
    "relay": ("umbel.cli.main:relay", "Start a relay, which hides the sender of each release from the server."),
    "certs": ("umbel.deploy.certs:app", "Make the certificates, secrets and keys of a server and its sites."),
    "bundle": ("umbel.client.bundle:app", "Print the hash that identifies this umbel, and write its bundle."),
    "data": ("umbel.cli.commands.data:app", "List and describe datasets, and make more from recipes and tables."),
    "audit": (
        "umbel.cli.commands.audit:app",
        "Audit a Mod, filter or strategy wrapper of any package: is its claim true?",
    ),
    "experiment": (
        "umbel.research.experiments.__main__:app",
        "Reproduce the papers' tables and figures, and measure the cost of a guarantee.",
    ),
    "attack": (
        "umbel.research.attacks.__main__:app",
        "Run attacks by a curious or malicious server, and audit the claimed epsilon.",
    ),
}
SERVER: Table = {
    "start": ("umbel.deploy.server:start", "Start Flower's SuperLink behind umbel's guard."),
    "install": ("umbel.deploy.systemd:server", "Write a systemd unit that starts the server."),
    "executor": ("umbel.deploy.programs:app", "Start only the executor, which runs the ServerApps."),
    "login": ("umbel.deploy.server:login", "Store the operator's secret for a connection of flwr."),
    "status": ("umbel.cli.commands.sites:status", "Print a run's round, its sites, and the time left."),
    "metrics": ("umbel.deploy.metrics:app", "Print the metrics of runs and sites for Prometheus, or serve them."),
}
RELAY: Table = {
    "start": ("umbel.deploy.relay:app", "Start a relay, which keeps all in memory."),
    "install": ("umbel.deploy.systemd:relay", "Write a systemd unit that starts the relay."),
}
SITE: Table = {
    "start": ("umbel.deploy.node:app", "Start a site's node on one machine: a SuperNode, and umbel's executor."),
    "supernode": ("umbel.deploy.supernode:app", "Start only the SuperNode, for an executor in another container."),
    "executor": ("umbel.client.commands:executor", "Start only the executor, which runs the site's own app."),
    "install": ("umbel.deploy.systemd:site", "Write a systemd unit that starts the site's node."),
    "check": ("umbel.client.commands:check", "Explain a site's configuration, and check it."),
    "metrics": ("umbel.console.metrics:app", "Print a site's metrics for Prometheus, or serve them."),
}

app, server = _group(COMMANDS, _umbel, whole=True), _group(SERVER, _server)
relay, site = _group(RELAY, _relay), _group(SITE, _site)
