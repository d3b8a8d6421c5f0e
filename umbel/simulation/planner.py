"""Plans of whole runs, from a dataset's public facts, and settings for the user's own data in simulation.

With a wanted guarantee no row is read. Without one, a run of the user's own data has no noise, and its steps suit the
rows.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from umbel.protocol.release import Clipping, ReleaseBy
from umbel.protocol.run_config import ClipSchedule
from umbel.server.setup import Setup
from umbel.simulation.client_planner import PRIVACY, PROVISIONAL, with_noise
from umbel.simulation.facts import Draft, filled
from umbel.simulation.local_training import local_training
from umbel.simulation.row_planner import with_row_noise
from umbel.simulation.start import PlannedRun, Wanted

_ROW_ROUNDS = 20
"""Rounds of a run that hides rows and has no configuration."""


def plan_run(
    values: Mapping[str, Any], given: Iterable[str], configured: bool, wanted: Wanted | None, sites: int, name: str
) -> PlannedRun:
    """Return a run config with the missing entries; see `umbel.simulation.start.values_of`.

    The values are those of a configuration, if there is one (`configured`), or only the dataset's name, overridden by
    `Wanted.settings` and by the user's, whose keys are the given ones. Raises `ConfigError` if the run would learn
    nothing with the guarantee, the user's entries break it, or it needs ranges that are not declared.
    """
    kept, by_rows = frozenset(given), wanted is not None and wanted.rows is not None
    planned = dict(values)
    if wanted and not configured:
        planned.setdefault("hypotheses", 1)
    if wanted and not by_rows:
        clipping = ClipSchedule.read(str(planned.get("clipping", Clipping.PUBLIC)), "clipping")
        public = str(replace(clipping, mode=Clipping.PUBLIC))
        planned = filled(planned, {**PROVISIONAL, "clipping": public}, kept)
    setup = Setup.parse(planned)
    dataset = setup.open_dataset()
    assert dataset is not None, "a simulated run names one"
    clients = _usual_clients(dataset.manifest.train)
    if not configured:
        noisy = setup.config.protect.rows or (setup.config.noise_multiplier > 0 and bool(kept & set(PRIVACY)))
        planned = filled(planned, local_training(setup, dataset, exact=not (wanted or noisy)), kept)
        if by_rows:
            planned = filled(planned, {"rounds": _ROW_ROUNDS, "clients-per-round": clients}, kept)
        setup = Setup.parse(planned)
    if wanted:
        draft = Draft(planned, kept, wanted, setup, dataset, sites)
        return PlannedRun(*(with_row_noise if by_rows else with_noise)(draft))
    if configured or kept & set(PRIVACY):
        return PlannedRun(planned, [])
    entries = _without_noise(setup, clients, bool(dataset.manifest.split["validation"]))
    scaled = (
        "; its steps and units were fitted to its rows, which a guarantee does not allow" if setup.model.linear else ""
    )
    command = shlex.join(["umbel", "run", name or str(planned["dataset"]), "--epsilon", "4"])
    line = f"No noise: this run guarantees nothing{scaled}. With a guarantee: {command}"
    return PlannedRun(filled(planned, entries, kept), [line])


def _usual_clients(train: int) -> int:
    """Return how many training clients a round asks."""
    return train if train <= 100 else min(max(100, train // 10), 1000)


def _without_noise(setup: Setup, clients: int, validates: bool) -> dict[str, Any]:
    """Return the entries of a run of the user's own data without noise."""
    entries: dict[str, Any] = {
        "noise-multiplier": 0.0,
        "choice-epsilon": 0.0,
        "clipping": str(Clipping.UPDATE),
        "max-participations": 0,
        "rounds": 50,
        "clients-per-round": clients,
    }
    if setup.strategy.release_by is not ReleaseBy.CLIENT:
        entries["clipping"] = str(ClipSchedule(Clipping.PUBLIC, norm=1e6, decay=1.0))
    return {**entries, "patience": 15} if validates else entries
