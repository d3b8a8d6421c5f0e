"""The command ``umbel``: the place of each of its commands, which are imported on use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated

import typer

from umbel.cli.lazy import lazy
from umbel.protocol.project import LAB_PACKAGE, OWN_PATH, described

Table = Mapping[str, tuple[str, str]]
"""By name: the place of a command's `typer.Typer`, as module:name, and a one-sentence description."""


LAB = dict.fromkeys(("attack", "audit", "experiment"), LAB_PACKAGE)
"""Commands of another package, and how a hint says to install it."""


@cache
def installed() -> Table:
    """Return the commands that other packages add: each names a table as an entry point."""
    found: dict[str, tuple[str, str]] = {}
    for point in entry_points(group="umbel.commands"):
        with suppress(ModuleNotFoundError):  # a package of which only the metadata are left
            found |= point.load()
    return found


def _group(commands: Table, callback: Callable[..., None], whole: bool = False) -> typer.Typer:
    """Return a command with a table's subcommands; the callback's docstring describes them.

    The `whole` command also has those that other packages add.
    """

    def table() -> Table:
        return {**commands, **installed(), **commands} if whole else commands  # umbel's come first, and stay

    def known() -> dict[str, str]:
        return {name: told for name, (_, told) in table().items()}

    def load(name: str) -> typer.Typer:
        module, _, attribute = table()[name][0].partition(":")
        found: typer.Typer = getattr(import_module(module), attribute)
        return found

    group = typer.Typer(
        cls=lazy(known, load, elsewhere=LAB if whole else None, panels=PANELS if whole else None),
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


def _site() -> None:
    """Check and start a site, read its books, and decide on requests."""
    # Installed modules come before a site's own: its working folder may hold files from others.
    os.environ[OWN_PATH] = os.pathsep + os.environ.get(OWN_PATH, "")


def _parts(context: typer.Context) -> None:
    """Start one process of a site or of the server, in a separate container."""
    _umbel()
    if not (context.invoked_subcommand or "").startswith("server-"):
        _site()


def _runs() -> None:
    """List, show, compare, export and remove runs."""


COMMANDS: Table = {
    "run": ("umbel.cli.commands.run:app", "Run an experiment in simulation, in this process."),
    "plan": ("umbel.cli.commands.plan:plan", "Plan a whole run for a guarantee."),
    "ranges": ("umbel.cli.commands.ranges:app", "Ask clients for the ranges of columns, with a guarantee."),
    "price": ("umbel.cli.commands.plan:price", "Print a run's cost in privacy, or the noise for a guarantee."),
    "predict": ("umbel.cli.commands.predict:app", "Predict with a run, for clients old and new."),
    "runs": ("umbel.cli.main:runs", "List, show, compare, export and remove runs."),
    "data": ("umbel.cli.commands.data:app", "List and show datasets, and make more from recipes and tables."),
    "config": ("umbel.cli.commands.config:explain", "Explain the run config's keys, or a site policy's entries."),
    "init": ("umbel.cli.commands.init:app", "Write a Flower app in a new folder, ready for your model."),
    "doctor": ("umbel.cli.commands.doctor:app", "Check that this machine has what umbel needs, and say what to do."),
    "demo": ("umbel.cli.commands.demo:app", "Compare hospitals alone, together without privacy, and with a guarantee."),
    "site": ("umbel.cli.main:site", "Check and start a site, read its books, and decide on requests."),
    "bundle": ("umbel.client.bundle:app", "Print the hash that identifies this umbel, and write its bundle."),
    "server": ("umbel.cli.main:server", "Start the server, sign in to it, and print a run's status."),
    "certs": ("umbel.deploy.certs:app", "Make the certificates, secrets and keys of a server and its sites."),
    "sign": ("umbel.cli.commands.config:sign_config", "Sign a run's settings, for sites that list their researchers."),
}
PANELS = {
    **dict.fromkeys(
        ("run", "plan", "ranges", "price", "predict", "runs", "data", "config", "init", "doctor", "demo"), "Everyday"
    ),
    **dict.fromkeys(("site", "bundle"), "Site"),
    **dict.fromkeys(("server", "certs", "sign"), "Server"),
    **dict.fromkeys(LAB, "Lab"),
}
"""The title above each command in the help."""
RUNS: Table = {
    "list": ("umbel.cli.commands.runs:list_runs", "Print all runs under $UMBEL_HOME/runs, oldest first."),
    "show": ("umbel.cli.commands.runs:show", "Print a run's settings, results and cost in privacy, or several beside."),
    "report": ("umbel.cli.commands.runs:report", "Write a run's report."),
    "export": ("umbel.cli.commands.runs:export", "Write a run's hypotheses as files for other programs."),
    "rm": ("umbel.cli.commands.runs:rm", "Delete the folders of runs permanently."),
}
SERVER: Table = {
    "start": ("umbel.deploy.server:start", "Start Flower's SuperLink behind umbel's guard."),
    "status": ("umbel.cli.commands.runs:status", "Print a run's round, its sites, and the time left."),
    "login": ("umbel.deploy.server:login", "Store the operator's secret for a connection of flwr."),
}
SITE: Table = {
    "start": ("umbel.deploy.node:app", "Start a site's node on one machine: a SuperNode, and umbel's executor."),
    "check": ("umbel.client.commands:check", "Explain a site's configuration, and check it."),
    "policy": ("umbel.cli.commands.site:policy", "Explain a site's policy in words, and check its file."),
    "requests": ("umbel.cli.commands.site:requests", "List the requests that wait for approval."),
    "approve": ("umbel.cli.commands.site:approve", "Approve a request."),
    "refuse": ("umbel.cli.commands.site:refuse", "Refuse a request."),
    "journal": ("umbel.cli.commands.site:journal", "Check a site's journal, and print what clients have spent."),
    "log": ("umbel.cli.commands.site:log", "Print what servers asked, and what the site decided."),
    "backup": ("umbel.cli.commands.site:backup", "Copy the journal, also while the site runs."),
}
PARTS: Table = {
    "supernode": ("umbel.deploy.node:supernode", "Start a site's SuperNode, for an executor in another container."),
    "executor": ("umbel.deploy.executor:command", "Start only a site's executor, which runs the site's own app."),
    "metrics": ("umbel.console.metrics:app", "Print a site's metrics for Prometheus, or serve them."),
    "server-metrics": ("umbel.deploy.metrics:app", "Print a server's metrics for Prometheus, or serve them."),
    "server-executor": ("umbel.deploy.programs:app", "Start only the server's executor, which runs the ServerApps."),
}

app, runs, server = _group(COMMANDS, _umbel, whole=True), _group(RUNS, _runs), _group(SERVER, _server)
site, parts = _group(SITE, _site), _group(PARTS, _parts)
