"""``umbel run``: a simulation on this machine or a Ray cluster, from its checks to its results."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from umbel.protocol.cli import errors_in_one_line
from umbel.protocol.errors import ConfigError
from umbel.simulation.relay import Relay
from umbel.simulation.start import in_this_process, launched, read_values, resumed

app = typer.Typer(add_completion=False)


@app.command()
def command(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG|RUN] [KEY=VALUE...]",
            help="A TOML file of run-config values or the name of one in configs/ (with --resume: a run), and values "
            "that win over it. `umbel keys` lists the keys.",
            show_default="the demo",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="The same as CONFIG.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with RUN after its last finished round.")] = False,
    nodes: Annotated[
        int, typer.Option(min=0, help="Simulated nodes, among which clients are dealt out.", show_default="as fit")
    ] = 0,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="In this process alone, without Flower's simulation; with as many nodes, to the same bit.",
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print what Flower and Ray say as well.")] = False,
) -> None:
    """Run an experiment in simulation: on this machine, or on the Ray cluster that RAY_ADDRESS names."""
    with errors_in_one_line():
        values = asked(what or [], config, resume)
        relay = Relay(typer.echo, verbose)
        try:
            if in_process:
                with relay.in_this_process():
                    in_this_process(values, nodes)
            else:
                launched(values, nodes, relay)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


_SHORT = re.compile(r"[+-]?(\.\d+|\d+\.)(e[+-]?\d+)?", re.IGNORECASE)  # .5 and 5. are numbers to all but TOML


def asked(words: list[str], config: Path | None = None, resume: bool = False) -> dict[str, Any]:
    """Return the run-config values that a command line stands for; errors as `umbel.configs.read_values`."""
    named = [word for word in words if "=" not in word]
    if len(named) + (config is not None) > 1:
        raise ConfigError(
            f"{named[-1]!r} is not KEY=VALUE, and one configuration is given already", code="config.two-configurations"
        )
    given = pairs([word for word in words if "=" in word])
    source = str(config) if config is not None else named[0] if named else ""
    if not resume:
        return read_values(source, given)
    if not source:
        raise ConfigError(
            "name the run to go on with: umbel run RUN --resume; umbel runs list shows them", code="config.no-run"
        )
    return resumed(source, given)


def pairs(words: list[str]) -> dict[str, Any]:
    """Return the values in ``key=value`` words, each as TOML or, as a shell hands it over, plain text."""
    values: dict[str, Any] = {}
    for word in words:
        try:
            values |= tomllib.loads(word)
        except tomllib.TOMLDecodeError:
            key, _, text = word.partition("=")
            values[key.strip()] = float(text) if _SHORT.fullmatch(text.strip()) else text.strip()
    return values
