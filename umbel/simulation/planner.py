"""Plans of whole runs, from a dataset's public facts, and settings for the user's own data in simulation.

With a wanted guarantee no row is read. Without one, a run of the user's own data has no noise, and its steps suit the
rows.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from umbel.data import Dataset
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Clipping, ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.server.setup import Setup
from umbel.simulation import client_planner, row_planner
from umbel.simulation.client_planner import PRIVACY, PROVISIONAL
from umbel.simulation.facts import check_declared, estimated_scales
from umbel.simulation.local_training import local_training
from umbel.simulation.wanted import Wanted


@dataclass(frozen=True)
class PlannedRun:
    """A run config, with lines that describe it.

    Attributes
    ----------
    values : dict
        The run config's entries; others have their defaults.
    words : list of str
        Lines.
    """

    values: dict[str, Any]
    words: list[str]


def plan_run(
    values: Mapping[str, Any],
    given: Iterable[str],
    own: bool,
    wanted: Wanted,
    sites: int = 1,
    name: str = "",
) -> PlannedRun:
    """Return a run config with the missing entries.

    Parameters
    ----------
    values : mapping
        The entries of a configuration, or only the dataset's name, overridden by `Wanted.settings` and the user's.
    given : iterable of str
        The keys that the user gave. They are not changed.
    own : bool
        Whether there is no configuration. Its entries for training are then chosen too.
    wanted : Wanted
        Without a guarantee, a run of the user's own data has no noise.
    sites : int
        Number of nodes that release sums of their clients' updates, if the strategy has sites release.
    name : str
        The user's name for it, for the hint.

    Raises
    ------
    ConfigError
        If the run would learn nothing with the guarantee, the user's entries break it, or it needs ranges that are
        not declared.
    """
    kept, found = frozenset(given), dict(values)
    if own and wanted.any:
        found.setdefault("hypotheses", 1)
    if wanted.epsilon is not None:
        found |= {key: value for key, value in PROVISIONAL.items() if key not in kept}
    setup = Setup.parse(found)
    dataset = setup.open_dataset()
    if dataset is None:
        raise ConfigError('dataset = "" has nothing to plan from; name a dataset', code="config.no-dataset")
    if own:
        exact = not wanted.any and not _wants_privacy(setup.config, kept)
        entries = local_training(setup, dataset, exact)
        if wanted.row_epsilon is not None:
            entries |= {"rounds": row_planner.ROUNDS, "clients-per-round": _usual_clients(dataset.manifest.train)}
        found |= {key: value for key, value in entries.items() if key not in kept}
        setup = Setup.parse(found)
    if wanted.row_epsilon is not None:
        check_declared(setup.model, dataset)
        planned, words = row_planner.with_noise(found, kept, setup, wanted, dataset.manifest.train)
        return PlannedRun(planned, [*words, *estimated_scales(dataset.manifest)])
    if wanted.epsilon is not None:
        return PlannedRun(*client_planner.with_noise(found, kept, setup, wanted, dataset, sites))
    return _without_noise(found, kept, own, setup, dataset, name)


def _wants_privacy(run: RunConfig, kept: frozenset[str]) -> bool:
    """Return whether the user's own entries ask for noise, so that nothing may be fitted to rows."""
    return run.protect.rows or (run.noise_multiplier > 0 and bool(kept & set(PRIVACY)))


def _usual_clients(train: int) -> int:
    """Return how many training clients a round asks."""
    return train if train <= 100 else min(max(100, train // 10), 1000)


def _without_noise(
    found: dict[str, Any], kept: frozenset[str], own: bool, setup: Setup, dataset: Dataset, name: str
) -> PlannedRun:
    """Return a run config of the user's own data without noise, and the line that says so."""
    if not own or kept & set(PRIVACY):
        return PlannedRun(found, [])
    entries: dict[str, Any] = {
        "noise-multiplier": 0.0,
        "choice-epsilon": 0.0,
        "clipping": str(Clipping.UPDATE),
        "max-participations": 0,
        "rounds": 50,
        "clients-per-round": _usual_clients(dataset.manifest.train),
    }
    if setup.strategy.release_by is not ReleaseBy.CLIENT:
        entries |= {"clipping": str(Clipping.PUBLIC), "clip-norm": 1e6, "clip-norm-decay": 1.0}
    if dataset.manifest.split["validation"]:
        entries["patience"] = 15
    found |= {key: value for key, value in entries.items() if key not in kept}
    scaled = (
        "; its steps and units were fitted to its rows, which a guarantee does not allow" if setup.model.linear else ""
    )
    command = shlex.join(["umbel", "run", name or str(found["dataset"]), "--epsilon", "4"])
    return PlannedRun(found, [f"No noise: this run guarantees nothing{scaled}. With a guarantee: {command}"])
