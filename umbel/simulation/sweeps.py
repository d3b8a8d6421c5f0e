"""Many runs from Python: every combination of varied values, on all cores, each saved when it is done."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from umbel.protocol.errors import ConfigError
from umbel.protocol.home import umbel_home
from umbel.protocol.run_config import RunConfig
from umbel.simulation.start import check, read_values
from umbel.simulation.sweep import Spec
from umbel.simulation.sweep import sweep as sweep_all

_LONGEST = 150  # characters of a run's name; file systems take 255 bytes


def sweep(config: str | Path | Mapping[str, Any] = "", *, name: str, **values: Any) -> pd.DataFrame:
    """Do a run for each combination of the values that are lists, and return the measures of each.

    The runs are under ``$UMBEL_HOME/sweeps/NAME``. The same call resumes a stopped sweep. It uses all
    cores.

    Parameters
    ----------
    config : str, Path or mapping
        The common configuration, as for `umbel.run`.
    name : str
        Name of the sweep.
    **values
        Run-config values, with underscores for hyphens; a list, a range or an array is varied.

    Returns
    -------
    DataFrame
        One row for each run: its varied values, then its measures (`umbel.simulation.sweep.finish`), and ``error``,
        which is empty unless the run failed. A measure with the name of a varied setting is called ``measured.NAME``.

    Raises
    ------
    ConfigError
        For the first invalid value, before anything starts.

    Examples
    --------
    >>> import umbel
    >>> found = umbel.sweep(name="steps", step_size=[0.05, 0.1], seed=list(range(5)))  # doctest: +SKIP
    >>> found.groupby("step-size")["best.mean"].mean()  # doctest: +SKIP
    """
    own = {key.replace("_", "-"): _listed(value) for key, value in values.items()}
    if "epsilon" in own:
        text = "a sweep plans nothing, so it takes no epsilon; vary noise_multiplier, or give a planned config"
        raise ConfigError(text, code="config.sweep-epsilon")
    varied = {key: value for key, value in own.items() if isinstance(value, list)}
    if not varied or not all(varied.values()):
        text = "a sweep varies something: give a list of values, as seed=[0, 1, 2]"
        raise ConfigError(text, code="config.nothing-varied")
    fixed = {key: value for key, value in own.items() if key not in varied}
    source, common = (config, {}) if isinstance(config, str | Path) else ("", dict(config))
    specs = []
    for combination in itertools.product(*varied.values()):
        some = dict(zip(varied, combination, strict=True))
        name_of_run = _short("-".join(f"{key}={_plain(value)}" for key, value in some.items()))
        specs.append(Spec(name_of_run, RunConfig().entries() | read_values(source, common | fixed | some)))
    if any(spec.config["resume"] for spec in specs):
        text = "a sweep starts each of its runs, and does not resume others; leave resume out"
        raise ConfigError(text, code="config.sweep-resume")
    for spec in specs:
        check(spec.config)
    results = sweep_all(specs, umbel_home() / "sweeps" / name)
    rows = [{**{key: result.spec.config[key] for key in varied}, "error": result.error} for result in results]
    measures = pd.json_normalize([result.measures for result in results])
    measures = measures.rename(columns={key: f"measured.{key}" for key in varied})
    return pd.concat([pd.DataFrame(rows), measures], axis=1)


def _listed(value: Any) -> Any:
    """Return several values as a list, and NumPy's numbers as Python's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [*map(_listed, value)] if isinstance(value, list | tuple | range) else value


def _plain(value: Any) -> str:
    """Return a value as part of a folder's name."""
    return "".join(one if one.isalnum() or one in "._" else "-" for one in str(value))


def _short(name: str) -> str:
    """Return a name that a file system takes."""
    if len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
