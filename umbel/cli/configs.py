"""What a run is asked to do, from a file, a name and values of one's own, checked before anything starts."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbel.data import find_dataset
from umbel.protocol.errors import ConfigError, DatasetError
from umbel.protocol.project import CONFIGS
from umbel.protocol.run_config import RunConfig
from umbel.server.runs import find_run, run_named

if TYPE_CHECKING:
    from umbel.server.setup import Setup


def read_values(source: str | Path = "", given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the values of a configuration, and those given over them, checked one by one.

    Parameters
    ----------
    source : str or Path
        A TOML file, or the name of one in configs/; empty for the defaults.
    given : mapping, optional

    Raises
    ------
    ConfigError
        For what cannot be read, or the first value that cannot be used.
    """
    values = (_read(_file(str(source))) if str(source) else {}) | RunConfig.current(given or {})
    if before := RunConfig.parse(values).start_from:
        # As it is called from here: the run may be done elsewhere, and "last" mean another one.
        values["start-from"] = str(run_named("start-from", before))
    return values


def resumed(run: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run that shall go on, and those given over them; errors as `read_values`."""
    folder = find_run(run)
    values = _read(folder / "config.toml") | RunConfig.current(given) | {"resume": str(folder)}
    RunConfig.parse(values)
    return values


def check(values: Mapping[str, Any], part: bool = False) -> Setup:
    """Return what a run config names, if dataset, model and strategy fit together.

    Parameters
    ----------
    values : mapping
    part : bool
        Whether a part of the dataset will do here (see `umbel.data.shard`).

    Raises
    ------
    ConfigError, DatasetError, ModelError
        For the first that does not fit.
    """
    run = RunConfig.parse(values)
    if not run.dataset:
        raise ConfigError(
            'dataset = "" is for sites with data of their own; name a dataset to simulate', code="config.no-dataset"
        )
    find_dataset(run.dataset)
    # They import PyTorch, and a wrong name need not wait for that.
    from umbel.client.trial import try_out
    from umbel.server.observers import named
    from umbel.server.saved import Saved
    from umbel.server.setup import Setup

    setup = Setup.parse(values)
    named(setup)
    _ = setup.first
    if run.resume:
        Saved.of(setup)
    dataset = setup.open_dataset(part)
    assert dataset is not None, "the run config names it"
    for key, asked, kind in (
        ("clients-per-round", run.clients_per_round, "train"),
        ("validation-clients-per-round", run.validation_clients_per_round, "validation"),
    ):
        if asked > (there := dataset.manifest.split[kind]):
            raise ConfigError(
                f"{key} = {asked}, but dataset {run.dataset!r} has only {there}; set {key}={there}",
                code="config.too-few-clients",
            )
    try_out(setup.model, dataset, run.device, run.engine, setup.strategy.hypotheses)
    return setup


def _file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    known = {one.stem: one for one in CONFIGS.glob("*.toml")}
    if name in known:
        return known[name]
    try:
        found = find_run(name)
    except ConfigError:
        if _is_dataset(name):
            raise ConfigError(
                f"{name!r} is a dataset; run it as: umbel run dataset={name}", code="config.is-a-dataset"
            ) from None
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"configs/ has {', '.join(sorted(known))}"
        raise ConfigError(
            f"there is no configuration {name!r}: neither a file nor a name in configs/; {hint}",
            code="config.unknown-configuration",
        ) from None
    raise ConfigError(f"{found.name} is a run; to go on with it add --resume", code="config.is-a-run")


def _is_dataset(name: str) -> bool:
    try:
        return bool(find_dataset(name))
    except DatasetError:
        return False


def _read(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", code="config.unreadable") from None
    # A run's own config.toml does as well: what it ran with is in a table of its own there.
    return RunConfig.current(own if isinstance(own := values.get("config"), dict) else values)
