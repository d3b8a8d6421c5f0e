"""Pilots: a finished run again with another setting, to learn whether the setting would have served clients better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from logging import CRITICAL
from typing import Any

from umbel.data import Dataset
from umbel.protocol.errors import UmbelError
from umbel.protocol.logs import quiet
from umbel.protocol.release import ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.server.run import Run
from umbel.server.setup import Setup
from umbel.server.summary import Summary
from umbel.simulation.in_process import play

MOST, STEP = 2**34, 2**16
"""The most that a pilot may take, in numbers that its network holds or computes, and what a client's step takes at
least."""
_TIMES = 3.0  # by which a step size is too small or too large


def changes_for(run: RunConfig, rounds: int, k: int, differ: bool, improves: bool) -> list[dict[str, Any]]:
    """Return the changes that the result of a run of so many rounds suggests, two or three.

    Its `k` hypotheses may be too few if clients `differ`, and its rounds if it still `improves`.
    """
    noisy, changes = run.noise_multiplier or run.protect.rows, list[dict[str, Any]]()
    changes += [{"hypotheses": 2}] * (k == 1 and differ) + [{"rounds": 2 * rounds}] * (improves and not noisy)
    changes += [{"step-size": float(f"{run.step_size * factor:.3g}")} for factor in (_TIMES, 1 / _TIMES)]
    return changes[: 3 if k == 1 else 2]  # with several, one model alone is the third


def pilot(setup: Setup, dataset: Dataset, rounds: int, numbers: int, changes: Mapping[str, Any]) -> Run | str:
    """Return so many rounds of a run with changed settings, and the same clients and seed; or why there is none.

    A network holds or computes so many `numbers` for a row. The pilot costs clients no more epsilon than the run does.
    """
    run = setup.config
    if run.start_from:
        return "since the run starts from another's hypotheses"
    if setup.strategy.release_by is not ReleaseBy.CLIENT:
        return "since sites release sums"
    values = {**run.entries(), "rounds": rounds, "patience": 0, "observers": "", "resume": "", **changes}
    # Validation clients pick the first hypotheses as in the run.
    values["validation"] = str(replace(run.validation, every=values["rounds"] + 1))
    if _work(run, dataset, numbers) * values["rounds"] > MOST:
        return "since it takes as long as the run, which is large"
    try:
        changed = Setup.parse(values)
        if _costs_more(setup, changed):
            return "since it would cost more epsilon"
        with quiet(CRITICAL):  # its log would look like the run's
            return play(values)
    except UmbelError as error:
        return f"since it is refused: {error.text}"


def _work(run: RunConfig, dataset: Dataset, numbers: int) -> float:
    """Return what a round takes, in numbers."""
    rows = float(dataset.lengths[: dataset.manifest.train].mean())
    batch = run.batch_size or rows
    steps = run.local_steps or run.local_epochs * max(1.0, rows / batch)
    return run.clients_per_round * max(steps * min(batch, rows) * numbers, steps * STEP)


def _costs_more(one: Setup, other: Setup) -> bool:
    """Return whether the other run lacks or weakens a guarantee of the first, to a client or to a row."""
    (first, times), (second, often) = ((Summary.of(each), each.config.most_participations) for each in (one, other))
    pairs = (first.of_client(times), second.of_client(often)), (first.of_row(times), second.of_row(often))
    return any(had and (not has or has.epsilon > had.epsilon * (1 + 1e-9)) for had, has in pairs)
