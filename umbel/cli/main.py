"""The command ``umbel``."""

from __future__ import annotations

import os
from importlib import import_module

import typer

from umbel.cli.lazy import lazy
from umbel.protocol.project import OWN_PATH

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("umbel.cli.commands.run:app", "Run an experiment in simulation, on this machine or a Ray cluster."),
    "runs": ("umbel.cli.commands.runs:app", "What runs have left behind: list, show, compare, remove."),
    "predict": ("umbel.cli.commands.predict:app", "Clients that took no part pick their best hypothesis and predict."),
    "export": ("umbel.cli.commands.export:app", "A run's hypotheses as files that other programs read."),
    "report": ("umbel.cli.commands.report:app", "The report of a run, written again."),
    "keys": (
        "umbel.cli.commands.keys:app",
        "Every key of the run config, or entry of a site's policy, with its meaning.",
    ),
    "plan": ("umbel.cli.commands.plan:app", "What a run would cost, or what noise a wanted guarantee takes."),
    "site": ("umbel.cli.commands.site:app", "Check a site before it goes online, and start it."),
    "ledger": ("umbel.cli.commands.ledger:app", "Read a site's ledger: what its clients have spent."),
    "log": ("umbel.cli.commands.log:app", "Read a site's log: what servers asked, and what the site decided."),
    "approvals": ("umbel.cli.commands.approvals:app", "What waits for a site's approval."),
    "server": ("umbel.cli.commands.server:app", "Start the server, and sign in to it."),
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
"""By its name: where a command's `typer.Typer` is, as module:name, and what it does, in a sentence."""


def _load(name: str) -> typer.Typer:
    module, _, attribute = COMMANDS[name][0].partition(":")
    found: typer.Typer = getattr(import_module(module), attribute)
    return found


_Commands = lazy(lambda: {name: told for name, (_, told) in COMMANDS.items()}, _load, "research")
app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def _umbel() -> None:
    """Personalised and private federated learning."""
    os.environ[OWN_PATH] = os.getcwd()  # the user's own models and strategies
