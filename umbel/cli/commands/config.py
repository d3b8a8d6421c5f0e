"""``umbel config``: every setting, with its default, its range and its meaning."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from umbel.protocol.cli import errors_in_one_line
from umbel.protocol.errors import ConfigError
from umbel.protocol.rules import Settings
from umbel.protocol.run_config import RunConfig

app = typer.Typer(add_completion=False)


@app.command()
def command(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD...]", help="Only keys with one of these words in name or text.")
    ] = None,
    site: Annotated[bool, typer.Option("--site", help="Print the entries of a site's policy instead.")] = False,
) -> None:
    """Print every key of the run config, with its default and its meaning."""
    kind: type[Settings] = RunConfig
    if site:
        from umbel.privacy.gate.policy import Policy

        kind = Policy
    rows = kind.table()
    found = [
        (name, default, rule, meaning)
        for name, default, rule, meaning in rows
        if not words or any(word.lower().replace("_", "-") in f"{name} {meaning}".lower() for word in words)
    ]
    if not found:
        near = difflib.get_close_matches((words or [""])[0], kind.names(), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        with errors_in_one_line():
            raise ConfigError(
                f"no key or meaning contains {' or '.join(map(repr, words or []))}{hint}", code="config.unknown-key"
            )
    table = Table("key", "default", "meaning", show_lines=len(found) < len(rows))
    for name, default, rule, meaning in found:
        text = Text(meaning)
        if len(found) < len(rows):
            text.append(f"\n{rule}", style="dim")
        table.add_row(Text(name, style="bold"), Text(default), text)
    Console().print(table)
