"""Runs in simulation: their values, from a file, a name, the user and a wanted guarantee; their checks; their start.

They run in this process.
"""

from __future__ import annotations

import difflib
import os
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from umbel.data import find_dataset, read_manifest
from umbel.data.data import encoded_alike
from umbel.data.files import read_manifest_of_run
from umbel.data.find import datasets_made
from umbel.protocol.errors import ConfigError, DatasetError
from umbel.protocol.home import umbel_home
from umbel.protocol.log import log
from umbel.protocol.plugins import distrust, names_in, remember, trust
from umbel.protocol.project import CONFIGS, PACKAGE
from umbel.protocol.run_config import RunConfig, read_saved
from umbel.server.runs import find_run, run_named
from umbel.simulation.wanted import PlannedRun, Wanted

if TYPE_CHECKING:
    from umbel.server.setup import Setup

_SHIPPED = str(RunConfig.model_fields["dataset"].default)  # the dataset of a run without a configuration
_TABLES = {".csv", ".parquet", ".pq", ".tsv", ".xls", ".xlsx"}


def read_values(source: str | Path = "", given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the values of a configuration, and those given over them, checked one by one.

    The source is a TOML file, the name of one in configs/, or a dataset; empty for the defaults. Raises `ConfigError`
    when it cannot be read, or for the first value that cannot be used.
    """
    trust(*(given or {}).values())
    over = RunConfig.current(given or {})
    values = _named(str(source)) | over
    if (saved := Path(source).expanduser()).name == "config.toml" and "dataset" not in over:
        _check_data(saved.parent, values.get("dataset"))
    if before := RunConfig.parse(values).start_from:
        # Resolved here: the run may execute elsewhere, where "last" could mean another run.
        values["start-from"] = str(run_named("start-from", before))
    return values


def values_of(
    source: str | Path | Mapping[str, Any] = "",
    given: Mapping[str, Any] | None = None,
    wanted: Wanted | None = None,
    sites: int = 1,
    ask: bool = True,
) -> PlannedRun:
    """Return the values of a run, and lines that describe them.

    For a configuration they are its own, overridden by the given ones. For a dataset without a configuration, missing
    values are chosen to suit it. With a wanted guarantee, the noise is chosen too (`umbel.simulation.planner.plan_run`,
    which documents the errors). Where ranges are missing, the clients are asked for them first, unless not to `ask`.
    """
    given = RunConfig.current(_plain(given or {}))
    asked = {**(wanted.settings if wanted else {}), **given}
    if isinstance(source, Mapping):
        values, configured, name = read_values("", {**RunConfig.current(_plain(source)), **asked}), True, ""
    else:
        values, name = read_values(source, asked), str(source)
        dataset = dataset_of(name) if name else given.get("dataset", _SHIPPED)
        configured = dataset is None or (not name and dataset in ("", _SHIPPED))
    from umbel.simulation.planner import plan_run  # it imports PyTorch; a wrong name is reported before

    if not wanted and configured:
        return PlannedRun(values, [])
    if not values.get("dataset", _SHIPPED):
        raise ConfigError('dataset = "" has nothing to plan from; name a dataset', code="config.no-dataset")
    name = name or str(values.get("dataset", ""))
    return plan_run(values, given, configured, wanted, sites, name, ask)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with Python's numbers in place of NumPy's, which a loop over np.arange gives."""
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in values.items()}


def resumed(run: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run to resume, overridden by the given ones; errors as for `read_values`."""
    folder = find_run(run)
    trust(*given.values())
    values = _read(folder / "config.toml", sent=True) | RunConfig.current(given) | {"resume": str(folder)}
    RunConfig.parse(values)
    return values


def check(values: Mapping[str, Any]) -> Setup:
    """Return the parts of a run config; raise for the first of dataset, model and strategy that does not fit the
    others."""
    run = RunConfig.parse(values)
    if not run.dataset:
        text = 'dataset = "" is for sites with their own data; name a dataset to simulate'
        raise ConfigError(text, code="config.no-dataset")
    find_dataset(run.dataset)
    # They import PyTorch; a wrong name is reported before.
    from umbel.client.trial import try_out
    from umbel.server.callbacks import named
    from umbel.server.setup import Saved, Setup

    setup = Setup.parse(values)
    named(setup)
    _ = setup.first
    if run.resume:
        Saved.of(setup)
    dataset = setup.open_dataset()
    assert dataset is not None, "the run config names it"
    for key, asked, kind, at_most in (
        ("clients-per-round", run.clients_per_round, "train", "clients-per-round={}"),
        ("validation: clients", run.validation.clients, "validation", 'validation="clients={}"'),
    ):
        if asked > (there := dataset.manifest.split[kind]):
            text = f"{key} = {asked}, but dataset {run.dataset!r} has only {there}; set {at_most.format(there)}"
            raise ConfigError(text, code="config.too-few-clients")
    try_out(setup.model, dataset, run.device, hypotheses=setup.strategy.hypotheses, precision=run.precision)
    return setup


def in_this_process(values: Mapping[str, Any], nodes: int = 1, baselines: bool = True) -> Path:
    """Run in this process, and return the run's folder; errors as for `umbel.simulation.in_process.run`.

    With `baselines`, its worth is measured at its end (`umbel.simulation.worth`).
    """
    if os.environ.get("RAY_ADDRESS"):
        log(WARNING, "umbel run works in this process and ignores RAY_ADDRESS; flwr run uses the Ray cluster")
    if nodes < 1:
        raise ConfigError(f"a simulation has at least 1 node, not {nodes}", code="config.nodes")
    setup = check(values)
    # Errors are reported before these imports.
    from umbel.simulation import in_process
    from umbel.simulation.worth import Appraisal

    return in_process.run(setup, nodes, [Appraisal()] if baselines else [])


def dataset_of(name: str) -> str | None:
    """Return the dataset for a name or a path, unless it means a configuration or a run."""
    path = Path(name).expanduser()
    if (path / "manifest.json").is_file() or (path.suffix == ".json" and path.is_file()):
        return str(path.absolute())
    if path.is_file() or (CONFIGS / f"{name}.toml").is_file():
        return None
    with suppress(ConfigError):
        run = find_run(name)
        # A dataset's name, such as 2026, may be the beginning of a run's.
        if run.name == name or not run.name.startswith(name):
            return None
    with suppress(DatasetError):
        find_dataset(name)
        return name
    return None


def _check_data(folder: Path, dataset: str | None) -> None:
    """Raise `ConfigError` if a folder is a run's, and its dataset has got other columns or scales since then."""
    with suppress(DatasetError):  # which whoever opens the dataset is told
        was = read_manifest_of_run(folder) if dataset else None
        if was and not encoded_alike(was, read_manifest(find_dataset(str(dataset)))):
            text = f"dataset {dataset} has got other columns or scales since that run, whose settings do not fit them"
            raise ConfigError(f"{text}; begin anew: umbel run {shlex.quote(str(dataset))}", code="config.other-data")


# In a folder with one of these, "." is a dataset or a run, whose names are not trusted, and no Flower app.
_SENT = ("manifest.json", "config.toml")


def _named(name: str) -> dict[str, Any]:
    """Return the values of a configuration, or the dataset for a name or a path."""
    if not name:
        return {}
    if name == "." and Path("pyproject.toml").is_file() and not any(map(os.path.exists, _SENT)):
        return _read(Path("pyproject.toml"))
    if (dataset := dataset_of(name)) is not None:
        return {"dataset": dataset}
    path = Path(name).expanduser()
    if path.is_file():
        _refuse_table(path)
        return _read(path)
    known = {one.stem: one for one in CONFIGS.glob("*.toml")}
    if name in known:
        return _read(known[name])
    try:
        found = find_run(name)
    except ConfigError:

        def listed(names: Iterable[str]) -> str:
            return ", ".join(sorted(names, key=lambda one: (-difflib.SequenceMatcher(None, name, one).ratio(), one)))

        datasets = listed(path.name for path in datasets_made()) or "none yet"
        hint = f"your datasets: {datasets}; shipped configurations: {listed(known)}"
        text = f"there is no configuration or dataset {name!r}: neither a file nor a known name; {hint}"
        raise ConfigError(text, code="config.unknown-configuration") from None
    raise ConfigError(f"{found.name} is a run; to resume it add --resume", code="config.is-a-run")


def _refuse_table(file: Path) -> None:
    if not _TABLES & {suffix.lower() for suffix in file.suffixes}:
        return
    name = file.name.split(".")[0]  # the one that the import takes by default
    command = f"umbel data import {shlex.quote(str(file))} --client COLUMN --target COLUMN"
    fix = f"import it, and run the dataset: {command}"
    if (umbel_home() / "data" / name).exists():
        fix = f"run the dataset {name!r} that is there, or import the table in its place: {command} --replace"
    raise ConfigError(f"{file} is a table, not a dataset; {fix}", code="config.is-a-table")


def _read(file: Path, sent: bool = False) -> dict[str, Any]:
    """Return the values in a file; a `sent` one, in a run's folder, has the table of a run's own config."""
    try:
        values = read_saved(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", code="config.unreadable") from None
    # A Flower app's pyproject.toml has its run config in a table.
    if isinstance(tool := values.get("tool"), dict):
        app = tool.get("flwr", {}).get("app", {})
        others = [name for name in app.get("components", {}).values() if not str(name).startswith("umbel.")]
        if others:
            text = f"{file} is of a Flower app with its own {others[0]}, and umbel run runs umbel's app alone"
            raise ConfigError(f"{text}; run this one with flwr run", code="config.other-app")
        values = app.get("config", {})
    # A run's own config.toml has its run config in a separate table.
    if isinstance(own := values.get("config"), dict):
        return RunConfig.current(own)
    if sent:
        raise ConfigError(f"{file} has no table config; give the folder of a run", code="config.no-run")
    # A file is sent around like a folder. Modules in the person's working folder are the person's own.
    here = {path.stem for path in Path.cwd().iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    named = {name: name.partition(":")[0].partition(".")[0] for name in names_in(values.values())}
    remember(name for name, package in named.items() if package in here - {PACKAGE.name})
    distrust(*values.values())
    return RunConfig.current(values)
