"""``umbel config`` explains every setting, and ``umbel sign`` signs a run's."""

from __future__ import annotations

import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import tomli_w
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from umbel.protocol.cli import command_line
from umbel.protocol.errors import ConfigError
from umbel.protocol.home import write_atomically
from umbel.protocol.rules import Settings
from umbel.protocol.run_config import RunConfig
from umbel.protocol.signatures import SIGNATURE, server_of, sign
from umbel.protocol.words import did_you_mean


@command_line
def explain(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD...]", help="Only keys with one of these words in name or text.")
    ] = None,
    site: Annotated[bool, typer.Option("--site", help="Print the entries of a site's policy instead.")] = False,
) -> None:
    """Print every key of the run config, with its default and its meaning."""
    kind: type[Settings] = RunConfig
    if site:
        from umbel.privacy.site.policy import Policy

        kind = Policy
    rows = kind.table()
    found = [
        (name, default, rule, meaning)
        for name, default, rule, meaning in rows
        if not words or any(word.lower().replace("_", "-") in f"{name} {meaning}".lower() for word in words)
    ]
    if not found:
        hint = did_you_mean((words or [""])[0], kind.names())
        asked = " or ".join(map(repr, words or []))
        raise ConfigError(f"no key or meaning contains {asked}{hint}", code="config.unknown-key")
    table = Table("key", "default", "meaning", show_lines=len(found) < len(rows))
    for name, default, rule, meaning in found:
        text = Text(meaning)
        if len(found) < len(rows):
            text.append(f"\n{rule}", style="dim")
        table.add_row(Text(name, style="bold"), Text(default), text)
    Console().print(table)


def _sign(
    config: Annotated[Path, typer.Argument(help="TOML file with the run's settings.", exists=True, dir_okay=False)],
    key: Annotated[Path, typer.Option(help="Your private SSH key.")],
    root_certificates: Annotated[
        Path, typer.Option(help="The certificate authority's certificate of the server that will run it, ca.crt.")
    ],
    days: Annotated[int, typer.Option(min=1, max=366, help="Days for which the signature is valid.")] = 30,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="CONFIG, signed.toml")] = None,
) -> None:
    """Sign a run's settings, and write all of them with the signature into a new file, for flwr run.

    The signature covers every setting, those with default values too, and is for one run at one server. A site that
    lists your public key answers that run. Change no setting afterwards.
    """
    try:
        given = tomllib.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{config} is no TOML file: {error}", code="config.unreadable") from None
    whole = RunConfig.parse(given, str(config))
    signature = sign(whole.unsigned(), key, datetime.now(UTC) + timedelta(days=days), server_of(root_certificates))
    path = out or config.with_suffix(".signed.toml")
    write_atomically(path, tomli_w.dumps(whole.entries() | {SIGNATURE: signature}).encode())
    typer.echo(path)


sign_config = command_line(_sign)
