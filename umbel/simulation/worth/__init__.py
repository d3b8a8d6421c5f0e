"""Measures the worth of a finished run, if the rows of all clients are here (`umbel.server.worth`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from logging import INFO, WARNING

import numpy as np
from numpy.typing import NDArray

from umbel.client.cohort import Cohort
from umbel.client.trial import try_out
from umbel.data import Dataset
from umbel.nodes.differences import prior_of
from umbel.privacy.mechanisms.randomness import streams
from umbel.protocol.arrays import Arrays
from umbel.protocol.log import log
from umbel.server.history import State, diverged
from umbel.server.report.alarms import why_stuck
from umbel.server.rounds import Run
from umbel.server.setup import Setup
from umbel.server.summary import Summary
from umbel.server.worth import Arm, LeftOut, Way, Worth
from umbel.simulation.baselines import halves, worst_decile
from umbel.simulation.worth.ways import MOST_ALONE, Row, Ways, numbers_of_a_row
from umbel.strategies import Callback

MOST_CLIENTS, LEAST_CLIENTS = 1000, 10
"""Maximum number of measured clients, and the least for which a network is not too large to train by each."""
_ERRORS = 2.0  # standard errors, as of a normal distribution
_BETTER, _ALIKE, _WORSE = "better than", "about as good as", "worse than"
_OTHERS = {Way.CONSTANT: "a constant", Way.ALONE: "each client alone", Way.POOLED: "all rows pooled"}


class Appraisal(Callback):
    """Measures the worth of a finished run, and logs it."""

    run: Run

    def at_end(self) -> None:
        """Measure it, if the run has a dataset here."""
        run = self.run
        if run.folder is None or run.setup.manifest is None:
            return
        if not run.setup.has_rows_of(run.folder.read_config()):
            log(WARNING, "The dataset has changed since the run began, so the run's worth is not measured.")
            return
        worth = appraise(run.setup, run.state, run.strategy.state)
        run.folder.write_worth(worth)
        for line in worth.lines():
            log(INFO, "%s", line)


def appraise(setup: Setup, state: State, kept: Arrays) -> Worth:
    """Return the worth of a run for validation clients, each measured on half of its rows.

    Parameters
    ----------
    setup : Setup
        Its dataset must be here.
    state : State
        The final state of the run.
    kept : dict of ndarray
        State that the strategy keeps from round to round, such as the differences between clients.
    """
    dataset, model, seed, summary = setup.open_dataset(), setup.model, setup.config.seed, Summary.of(setup)
    assert dataset is not None, "a simulated run names one"
    metric, factor, unit = model.metric, abs(summary.metric_factor), summary.scale[1]
    clients, found = _measured(dataset, seed, MOST_ALONE // numbers_of_a_row(model, dataset)), list[Row | LeftOut]()
    worth_it, verdict = False, "Not known: no validation client has two rows, one to choose and one to measure."
    if clients:
        learner = try_out(model, dataset, setup.config.device)
        support, query = halves(Cohort.gather(dataset, clients, learner.device), seed)
        prior = prior_of(kept, len(next(iter(state.hypotheses.values()))))
        found = Ways(setup, learner, dataset, state, support, query, prior).compare()
    rows = [one for one in found if isinstance(one, Row)]
    if rows:
        gains = {row.way: row.metrics if metric.higher_is_better else -row.metrics for row in rows}
        fault = why_stuck(state.history).partition(".")[0]
        if diverged(state.history) or not np.isfinite(gains[Way.LAST]).all():
            fault = fault or "it diverged, as the last loss is several times the lowest, or not finite"
        worth_it, verdict = (False, f"No: {fault}.") if fault else judge(gains)
    return Worth(
        metric="RMSE" if metric.name == "rmse" else metric.name,
        unit=unit,
        higher_is_better=metric.higher_is_better,
        clients=len(clients),
        arms=[
            Arm(row.way, row.label, _rounded(row.metrics.mean() * factor),
                _rounded(worst_decile(row.metrics, metric.higher_is_better) * factor), row.remark)
            for row in rows
        ],
        left_out=[one for one in found if isinstance(one, LeftOut)],
        worth_it=worth_it,
        verdict=verdict,
        rounds=len(state.history),
    )  # fmt: skip


def _measured(dataset: Dataset, seed: int, rows: int) -> list[int]:
    """Return validation clients that have two rows or more, drawn at random: as many as train on so many rows.

    If these would be too few, clients will not be measured alone, so that all may be drawn.
    """
    several = np.flatnonzero(dataset.lengths > 1)
    drawn = streams(seed, "worth", 0, [0])[0].permutation(several[several >= dataset.manifest.train])
    fitting = int((np.cumsum(-(-dataset.lengths[drawn] // 2)) <= rows).sum())
    most = fitting if fitting >= LEAST_CLIENTS else len(drawn)
    return sorted(drawn[: min(most, MOST_CLIENTS)].tolist())


def judge(gains: Mapping[Way, NDArray[np.float64]]) -> tuple[bool, str]:
    """Return whether a run is better than a constant and than each client alone, and a sentence that compares it.

    This judges the predictors that clients would use: the personalised hypotheses, or the plain ones if those were not
    measured.

    Parameters
    ----------
    gains : mapping from Way to ndarray, shape (clients,)
        The metric of each client, negated if lower is better.
    """
    run = gains[Way.OWN if Way.OWN in gains else Way.LAST]
    beside = {way: _compared(run, gains[way]) for way in _OTHERS if way in gains}
    needed = {relation for way, relation in beside.items() if way is not Way.POOLED}
    answer = "Yes" if needed == {_BETTER} else "No" if _WORSE in needed else "Not shown"
    *first, last = (f"{relation} {_OTHERS[way]}" for way, relation in beside.items())
    return answer == "Yes", f"{answer}: it is {', '.join(first)}{' and ' if first else ''}{last}."


def _compared(one: NDArray[np.float64], other: NDArray[np.float64]) -> str:
    """Return whether one way gains more or less than another, by twice the standard error over many clients.

    With few clients the factor is larger: Student's t distribution gives it for the same certainty. A single client
    shows nothing.
    """
    from scipy.special import ndtr, stdtrit  # the import takes a moment

    difference = one - other
    if len(difference) < 2:
        return _ALIKE
    chance = stdtrit(len(difference) - 1, ndtr(_ERRORS)) * difference.std(ddof=1) / math.sqrt(len(difference))
    return _BETTER if difference.mean() > chance else _WORSE if difference.mean() < -chance else _ALIKE


def _rounded(value: float) -> float | None:
    """Return six digits: the others depend on the number of nodes."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
