"""``umbel site``: look at a site before it goes online, and start it."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from umbel.cli.commands.terminal import console
from umbel.protocol.cli import PASSES_ON, errors_in_one_line
from umbel.protocol.errors import SiteError
from umbel.protocol.flower import parse_config_args
from umbel.protocol.project import OWN_PATH
from umbel.protocol.run_config import RunConfig

app = typer.Typer(
    add_completion=False,
    suggest_commands=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Check a site before it goes online, and start it.",
)


@app.callback()
def _site() -> None:
    """Find a site's own modules after installed ones: its working folder may hold what others have sent."""
    if own := os.environ.pop(OWN_PATH, ""):
        sys.path += [folder for folder in own.split(os.pathsep) if folder not in sys.path]


@app.command(context_settings=PASSES_ON)
def start(context: typer.Context) -> None:
    """Start a site's node on one machine: a SuperNode with these options of Flower's, and umbel's executor."""
    from umbel.deploy import node, supernode

    with errors_in_one_line():
        arguments = node.start(context.args)
    supernode.run(arguments)


@app.command("supernode", context_settings=PASSES_ON)
def supernode_alone(context: typer.Context) -> None:
    """Start the SuperNode alone, with the options of flower-supernode: the executor is in another container."""
    from umbel.deploy import supernode

    supernode.run(context.args)


@app.command(context_settings=PASSES_ON)
def executor(context: typer.Context) -> None:
    """Start the executor alone, with the options of flower-superexec: it runs the site's own app."""
    from umbel.client import executor

    executor.run(context.args)


@app.command()
def check(
    node_config: Annotated[
        str, typer.Argument(metavar="NODE_CONFIG", help="As the node is given it: 'data-path=\"/data\" budget=8.0'.")
    ] = "",
    model: Annotated[str, typer.Option(help="The model of a run, where the data name none.")] = "",
    loss: Annotated[str, typer.Option(help="Its loss.")] = "",
) -> None:
    """Say what a site's configuration means, and whether its data, its ledger and its model can be used.

    What the environment sets (UMBEL_...) counts, as it does for the node.
    """
    with errors_in_one_line():
        try:
            entries = parse_config_args([node_config] if node_config else None)
        except (ValueError, SystemExit):
            entries = {}
        if node_config.strip() and not entries:
            raise SiteError(
                f"NODE_CONFIG must be name=value pairs, separated by spaces, got {node_config!r}", code="site.bad-pairs"
            )
        from umbel.client.bundle import Bundle
        from umbel.client.node import Node
        from umbel.privacy.gate.ledger import Ledger
        from umbel.privacy.gate.policy import Policy
        from umbel.privacy.gate.site import Site

        site = Site.of(entries)
        # An app that the site installed reads data in its own way.
        node = None if site.policy.app else Node.of(entries, RunConfig(dataset="", model=model, loss=loss).entries())
        if (ledger := site.ledger_path) is not None and ledger.exists():
            Ledger(ledger, whole=True)
    table = Table("", "", title="This site", show_header=False)
    if node is not None:
        data, name = node.dataset, node.dataset.manifest.name
        table.add_row("data", Text(f"{name}: {data.manifest.clients} clients, {len(data.features)} rows"))
        table.add_row("clients", f"{len(node.training)} train, {len(node.validation)} report")
        of = f"{node.model.name}, n = {node.model.num_parameters}, loss {node.model.loss.name}"
        table.add_row("model", Text(of))
    there = "a whole ledger" if ledger is not None and ledger.exists() else "made when it is first needed"
    table.add_row("ledger", Text(f"{there}: {ledger}"))
    table.add_row("runs of", Text(" ".join(site.policy.bundles) or str(Bundle.installed() or "no umbel that is known")))
    for name, default, _, meaning in Policy.table():
        field = name.replace("-", "_")
        if getattr(site.policy, field) != Policy.model_fields[field].default and name != "data-path":
            said = Text(f"{name} = {getattr(site.policy, field)}", style="bold")
            table.add_row(said, Text(f"{meaning} (by default {default})"))
    console().print(table)
    console().print("The site can go online. All other entries are as `umbel keys --site` has them.")
