"""``umbel server``: start the server, and sign in to one that is guarded."""

from __future__ import annotations

import typer

from umbel.deploy import login, superlink
from umbel.protocol.cli import PASSES_ON

app = typer.Typer(
    add_completion=False,
    suggest_commands=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Start the server, and sign in to it.",
)
app.command("start", context_settings=PASSES_ON)(superlink.main)
app.command("login")(login.main)
