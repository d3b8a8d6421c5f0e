"""Measures the worth of a finished run, if the rows of all clients are here (`umbel.server.worth`).

`plan` decides how much work to do, so that the same run has the same table on any machine. `ways` does it, and
`verdict` describes the result.
"""

from __future__ import annotations

from logging import INFO, WARNING

import numpy as np
from numpy.typing import NDArray

from umbel.client.cohort import Cohort
from umbel.client.trial import try_out
from umbel.data import Dataset
from umbel.privacy.gate.randomness import streams
from umbel.protocol.arrays import Arrays
from umbel.protocol.flower import log
from umbel.server.history import State
from umbel.server.observer import Observer, Run
from umbel.server.setup import Setup
from umbel.server.worth import Worth
from umbel.simulation.baselines import halves
from umbel.simulation.worth.plan import Plan
from umbel.simulation.worth.verdict import not_measured, table
from umbel.simulation.worth.ways import Ways
from umbel.strategies.differences import prior_of


class Appraisal(Observer):
    """Measures the worth of a finished run, and logs it."""

    def at_end(self, run: Run) -> None:
        """Measure it, if the whole dataset is here."""
        manifest = run.setup.manifest
        if run.folder is None or manifest is None or manifest.part:
            return
        if not run.setup.has_rows_of(run.folder.read_config()):
            log(WARNING, "The dataset has changed since the run began, so the run's worth is not measured.")
            return
        worth = appraise(run.setup, run.state, run.fleet.participations, run.strategy.state)
        run.folder.write_worth(worth)
        for line in worth.lines():
            log(INFO, "%s", line)


def appraise(setup: Setup, state: State, participations: NDArray[np.int64], kept: Arrays) -> Worth:
    """Return the worth of a run for clients that it did not train on.

    Parameters
    ----------
    setup : Setup
        Its dataset must be here as a whole; otherwise `DatasetError`.
    state : State
        The final state of the run.
    participations : ndarray of int, shape (training clients,)
        Number of releases of each.
    kept : dict of ndarray
        State that the strategy keeps from round to round, such as the differences between clients.
    """
    dataset = setup.open_dataset()
    assert dataset is not None, "a simulated run names one"
    seed = setup.config.seed
    measured, whose = _measured(dataset, participations, seed, bool(setup.config.start_from))
    if not len(measured):
        return not_measured(setup, state)
    learner = try_out(setup.model, dataset, setup.config.device)
    training = np.setdiff1d(np.arange(dataset.manifest.train), measured)
    plan = Plan.of(setup, learner, dataset, state, training, measured)
    clients = np.sort(measured[: plan.clients]).tolist()
    support, query = halves(Cohort.gather(dataset, clients, learner.device), seed)
    if plan.clients < (there := dataset.manifest.clients - dataset.manifest.train) and "validation" in whose:
        whose = f"of {there:,} {whose}"
    prior = prior_of(kept, len(next(iter(state.hypotheses.values()))))
    ways = Ways(setup, learner, dataset, state, training, support, query, prior)
    found = ways.measure(plan)
    return table(setup, state, found, plan, ways.remarks, {**plan.left_out, **ways.left_out}, whose)


def _measured(
    dataset: Dataset, participations: NDArray[np.int64], seed: int, starts_from: bool = False
) -> tuple[NDArray[np.int64], str]:
    """Return clients with two rows or more that the run did not train on, in a random order, and their description.

    A run that it `starts_from` may have trained on any training client.
    """
    draw = streams(seed, "worth", 0, [0])[0]
    manifest = dataset.manifest
    several = np.flatnonzero(np.diff(dataset.offsets) > 1)
    validating = several[several >= manifest.train]
    if len(validating):
        return draw.permutation(validating), "validation clients"
    spent = np.pad(participations, (0, max(0, manifest.train - len(participations))))
    never = several[(spent[several] == 0) & (not starts_from)]
    return draw.permutation(never), "training clients that never took part"
