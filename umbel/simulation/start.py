"""Runs in simulation: their values, from a file, a name and the user; their checks; and their start.

They run in Flower's own simulation, on a Ray cluster, or in this process.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbel.data import find_dataset
from umbel.protocol.errors import ConfigError, DatasetError
from umbel.protocol.plugins import names_in, own_path, trust, trust_elsewhere
from umbel.protocol.project import CONFIGS, OWN_PATH
from umbel.protocol.run_config import RunConfig, read_saved
from umbel.server.runs import find_run, home_of_runs, run_named
from umbel.simulation import launch
from umbel.simulation.relay import Relay

if TYPE_CHECKING:
    from umbel.server.setup import Setup


def read_values(source: str | Path = "", given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the values of a configuration, and those given over them, checked one by one.

    The source is a TOML file, or the name of one in configs/; empty for the defaults. Raises `ConfigError` when it
    cannot be read, or for the first value that cannot be used.
    """
    trust(*(given or {}).values())
    values = (_read(_file(str(source))) if str(source) else {}) | RunConfig.current(given or {})
    if before := RunConfig.parse(values).start_from:
        # As it is called from here: the run may be done elsewhere, and "last" mean another one.
        values["start-from"] = str(run_named("start-from", before))
    return values


def resumed(run: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run that shall go on, and those given over them; errors as `read_values`."""
    folder = find_run(run)
    trust(*given.values())
    values = _read(folder / "config.toml", sent=True) | RunConfig.current(given) | {"resume": str(folder)}
    RunConfig.parse(values)
    return values


def check(values: Mapping[str, Any], part: bool = False) -> Setup:
    """Return what a run config names; raise for the first of dataset, model and strategy that does not fit the others.

    With `part`, a part of the dataset will do here (see `umbel.data.shard`).
    """
    run = RunConfig.parse(values)
    if not run.dataset:
        text = 'dataset = "" is for sites with data of their own; name a dataset to simulate'
        raise ConfigError(text, code="config.no-dataset")
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
    for key, kind in ("clients-per-round", "train"), ("validation-clients-per-round", "validation"):
        if (asked := run.entries()[key]) > (there := dataset.manifest.split[kind]):
            text = f"{key} = {asked}, but dataset {run.dataset!r} has only {there}; set {key}={there}"
            raise ConfigError(text, code="config.too-few-clients")
    try_out(setup.model, dataset, run.device, run.engine, setup.strategy.hypotheses)
    return setup


def launched(values: Mapping[str, Any], nodes: int, relay: Relay) -> Path:
    """Do a run in processes of its own, and return its folder.

    They are those of Flower's own simulation, or, where ``RAY_ADDRESS`` names a Ray cluster, hosts on its machines.
    Errors are those of `umbel.simulation.launch.run`, or `umbel.simulation.ray_grid.run`.
    """
    if on_cluster():
        from umbel.simulation import cluster  # to import Ray takes a second

        with relay.in_this_process():
            cluster.probe()
            check(values, part=True)
            _make_home()
            # What is wrong need not wait for its imports.
            from umbel.simulation import ray_grid

            return ray_grid.run(values, nodes, own_modules(Path.cwd(), values))
    _make_home()
    environment = {OWN_PATH: own_path()} | trust_elsewhere()
    launch.run(launch.APP, values, nodes, relay=relay, check=lambda: check(values), environment=environment)
    return Path(relay.folder)


def on_cluster() -> bool:
    """Return whether ``RAY_ADDRESS`` names a Ray cluster."""
    return os.environ.get("RAY_ADDRESS", "") not in ("", "local")


def own_modules(folder: Path, values: Mapping[str, Any]) -> list[Path]:
    """Return the modules and packages in a folder if the run config names one, as ``module:attribute``."""
    own = {path.stem: path for path in folder.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    named = {name.partition(":")[0].partition(".")[0] for name in names_in(values.values())}
    return [path for name, path in own.items() if name.isidentifier() and name != "umbel"] if named & own.keys() else []


def in_this_process(values: Mapping[str, Any], nodes: int) -> Path:
    """Do a run in this process, and return its folder; errors as `umbel.simulation.in_process.run`."""
    check(values)
    _make_home()
    # What is wrong need not wait for its imports.
    from umbel.simulation import in_process

    return in_process.run(values, nodes or 1)


def _make_home() -> None:
    home = home_of_runs()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{home} cannot be made: {error.strerror}; set UMBEL_HOME to a folder of yours"
        raise ConfigError(text, code="config.home") from None
    if not os.access(home, os.W_OK):
        raise ConfigError(f"{home} cannot be written to; set UMBEL_HOME to a folder of yours", code="config.home")


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
        with suppress(DatasetError):
            find_dataset(name)
            text = f"{name!r} is a dataset; run it as: umbel run dataset={name}"
            raise ConfigError(text, code="config.is-a-dataset") from None
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"configs/ has {', '.join(sorted(known))}"
        text = f"there is no configuration {name!r}: neither a file nor a name in configs/; {hint}"
        raise ConfigError(text, code="config.unknown-configuration") from None
    raise ConfigError(f"{found.name} is a run; to go on with it add --resume", code="config.is-a-run")


def _read(file: Path, sent: bool = False) -> dict[str, Any]:
    """Return the values in a file; one that is `sent`, in a run's folder, has the table of a run's own."""
    try:
        values = read_saved(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", code="config.unreadable") from None
    # A run's own config.toml does as well: what it ran with is in a table of its own there.
    if isinstance(own := values.get("config"), dict):
        return RunConfig.current(own)
    if sent:
        raise ConfigError(f"{file} has no table config; give the folder of a run", code="config.no-run")
    trust(*values.values())
    return RunConfig.current(values)
