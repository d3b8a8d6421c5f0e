"""``umbel run``: a simulation on this machine, from its checks to its results."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from protocol.cli import errors_in_one_line
from protocol.errors import ConfigError
from protocol.run_config import RunConfig
from server.runs import find_run
from simulation.launch import APP, run
from simulation.relay import Relay
from umbel.own_code import own_code

app = typer.Typer()

CONFIGS = APP / "configs"


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
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print what Flower and Ray say as well.")] = False,
) -> None:
    """Run an experiment in simulation on this machine."""
    with errors_in_one_line():
        values = read_values(what or [], config, resume)
        relay = Relay(typer.echo, verbose)
        with own_code(Path.cwd(), values) as environment:
            try:
                run(APP, values, nodes, relay=relay, check=lambda: check(values), environment=environment)
            except KeyboardInterrupt:
                raise typer.Exit(130) from None


def read_values(what: list[str], config: Path | None = None, resume: bool = False) -> dict[str, Any]:
    """Return the run-config values that the words of the command line stand for, checked one by one.

    Raises
    ------
    ConfigError
        For what cannot be read, or the first value that cannot be used.
    """
    named = [word for word in what if "=" not in word]
    if len(named) + (config is not None) > 1:
        raise ConfigError(f"{named[-1]!r} is not KEY=VALUE, and one configuration is given already")
    given = pairs([word for word in what if "=" in word])
    source = str(config) if config is not None else named[0] if named else ""
    if resume:
        if not source:
            raise ConfigError("name the run to go on with: umbel run RUN --resume; umbel runs list shows them")
        values = _resumed(find_run(source), given)
    else:
        values = (_read(_config_file(source)) if source else {}) | given
    RunConfig.parse(values)
    return values


def pairs(words: list[str]) -> dict[str, Any]:
    """Return the values in ``key=value`` words, each as TOML or, as a shell hands it over, plain text."""
    values: dict[str, Any] = {}
    for word in words:
        try:
            values |= tomllib.loads(word)
        except tomllib.TOMLDecodeError:
            key, _, text = word.partition("=")
            values[key.strip()] = text.strip()
    return values


def check(values: Mapping[str, Any]) -> None:
    """Raise unless the run config, the federation, the model and the strategy fit together."""
    # It imports PyTorch, and a key's wrong name need not wait for that.
    from server.setup import Setup

    if not RunConfig.parse(values).federation:
        raise ConfigError('federation = "" is for sites with data of their own; name a federation to simulate')
    Setup.parse(values)


def _config_file(name: str) -> Path:
    """Return the file of a configuration, by its path or by its name in configs/."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    known = {one.stem: one for one in CONFIGS.glob("*.toml")}
    if name in known:
        return known[name]
    try:
        found = find_run(name)
    except ConfigError:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"configs/ has {', '.join(sorted(known))}"
        raise ConfigError(
            f"there is no configuration {name!r}: neither a file nor a name in configs/; {hint}"
        ) from None
    raise ConfigError(f"{found.name} is a run; to go on with it add --resume")


def _read(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    # A run's own config.toml does as well: what it ran with is in a table of its own there.
    if isinstance(own := values.get("config"), dict):
        return own
    return values


def _resumed(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run config of a run that shall go on, with what is to be another way."""
    was = _read(folder / "config.toml")
    return was | dict(given) | {"resume": str(folder)}
