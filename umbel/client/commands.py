"""``umbel site check``, which imports PyTorch only when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from umbel.protocol.cli import command_line, console, errors_in_one_line, printable
from umbel.protocol.errors import UmbelError
from umbel.protocol.run_config import RunConfig


def _check(
    node_config: Annotated[
        str,
        typer.Argument(metavar="NODE_CONFIG", help="The node's configuration, as in 'data-path=\"/data\" budget=8.0'."),
    ] = "",
    model: Annotated[str, typer.Option(help="The model of a run, if the data name none.")] = "",
    loss: Annotated[str, typer.Option(help="Loss of that model.")] = "",
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server, to check the way to it.")] = "",
    root_certificates: Annotated[Path | None, typer.Option(help="The certificate authority's certificate.")] = None,
    auth_supernode_private_key: Annotated[Path | None, typer.Option(help="The node's private key.")] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Let a journal that is damaged, or lacks messages, be used again: each missing message is charged to "
            "every client, at the dearest price so far or that the policy accepts.",
        ),
    ] = False,
) -> None:
    """Explain a site's configuration, and check all that a run will need.

    The checks: the data against the manifest, the model, the journal, permissions, and the disk. With
    --superlink also the key, the certificates, the server and the clock. Environment variables (UMBEL_...) count, as
    they do for the node.
    """
    with errors_in_one_line():
        from umbel.client.bundle import Bundle
        from umbel.client.checks import entries_of, own_checks, server_checks
        from umbel.client.node import Node
        from umbel.privacy.site.config import Site
        from umbel.privacy.site.journal import VERSION as LEDGERS
        from umbel.privacy.site.journal import Journal
        from umbel.privacy.site.policy import Policy
        from umbel.protocol.clients import ClientInDataset
        from umbel.protocol.tasks import VERSION as PROTOCOL

        entries = entries_of(node_config)
        site = Site.of(entries)
        # An app that the site installed has its own way to read data.
        run = RunConfig.of(RunConfig(dataset="", model=model, loss=loss).entries())
        # A trial, because clients are numbered for good, and the table may still be wrong.
        node = None if site.policy.app else Node.at(site, run, trial=True)
        if repair and site.ledger_path:
            clients = map(ClientInDataset, [0] if node is None else range(node.dataset.manifest.clients))
            journal = Journal(site.ledger_path, witness=site.witness_folder, opened=False)
            typer.echo(journal.repair(site.policy, clients) or "The journal needs no repair.")
    checks = [
        *own_checks(site),
        *(server_checks(superlink, root_certificates, auth_supernode_private_key) if superlink else ()),
    ]
    faults: dict[str, UmbelError] = {}  # by text: several checks may find the same
    table = Table("", "", title="This site", show_header=False)
    if node is not None:
        data, used = node.dataset, node.model
        table.add_row("data", Text(f"{data.manifest.name}: {data.manifest.clients} clients, {len(data.features)} rows"))
        table.add_row("clients", f"{len(node.training)} train, {len(node.validation)} report")
        table.add_row("model", Text(f"{used.name}, n = {used.num_parameters}, loss {used.loss.name}"))
    for what, check in checks:
        try:
            table.add_row(what, Text(check()))
        except UmbelError as fault:
            faults[str(fault)] = fault
            table.add_row(Text(what, style="bold red"), Text("see below"))
    table.add_row("speaks", f"protocol {PROTOCOL}, and keeps ledgers of version {LEDGERS}")
    table.add_row("runs of", Text(" ".join(site.policy.bundles) or str(Bundle.installed() or "no known umbel")))
    for name, default, _, meaning in Policy.table():
        field = name.replace("-", "_")
        if getattr(site.policy, field) != Policy.model_fields[field].default and name != "data-path":
            said = Text(f"{name} = {getattr(site.policy, field)}", style="bold")
            table.add_row(said, Text(f"{meaning} (by default {default})"))
    console().print(table)
    for text in faults:
        typer.echo(f"Error: {printable(text)}", err=True)
    if faults:
        raise typer.Exit(max(found.exit_code for found in faults.values()))
    console().print("The site can go online. All other entries have the defaults that `umbel config --site` prints.")


check = command_line(_check)
