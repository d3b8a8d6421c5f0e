"""``umbel sign``: sign a run config with a researcher's key, for sites that list researchers."""

from __future__ import annotations

import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import tomli_w
import typer

from umbel.protocol.cli import command_line, errors_in_one_line
from umbel.protocol.errors import ConfigError
from umbel.protocol.home import write_atomically
from umbel.protocol.run_config import RunConfig
from umbel.protocol.signatures import SIGNATURE, server_of, sign


def main(
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
    with errors_in_one_line():
        try:
            given = tomllib.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{config} is no TOML file: {error}", code="config.unreadable") from None
        whole = RunConfig.parse(given, str(config))
        signature = sign(whole.unsigned(), key, datetime.now(UTC) + timedelta(days=days), server_of(root_certificates))
        path = out or config.with_suffix(".signed.toml")
        write_atomically(path, tomli_w.dumps(whole.entries() | {SIGNATURE: signature}).encode())
    typer.echo(path)


app = command_line(main)
