"""Give the ``flwr`` command the operator's secret, so that a guarded server lets it in.

    umbel server login umbel certs/control.secret

From then on, `flwr` sends the secret to the address of this connection, and to no other. It is kept where Flower keeps
sign-ins, ``credentials.yaml`` beside ``config.toml``, which no other user can read.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from umbel.deploy.guard import read_secret
from umbel.protocol.cli import command_line, errors_in_one_line
from umbel.protocol.errors import GuardError
from umbel.protocol.flower import keep_secret


def main(
    connection: Annotated[str, typer.Argument(help="A connection in Flower's config.toml.")],
    secret: Annotated[Path, typer.Argument(help="The file that holds the operator's secret.")],
) -> None:
    """Keep the operator's secret for a connection."""
    with errors_in_one_line():
        home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
        address = _address(home / "config.toml", connection)
        keep_secret(home, address, read_secret(secret).decode())
    typer.echo(f"flwr sends the operator's secret to {address}")


def _address(config: Path, connection: str) -> str:
    try:
        return str(tomllib.loads(config.read_text(encoding="utf-8"))["superlink"][connection]["address"])
    except (KeyError, TypeError, ValueError):
        text = f"{config} has no connection {connection!r} with an address; write it first"
        raise GuardError(text, code="guard.no-connection") from None


app = command_line(main)
