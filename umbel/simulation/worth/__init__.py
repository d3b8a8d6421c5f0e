"""Measures the worth of a finished run, if the rows of all clients are here (`umbel.server.worth`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from logging import INFO, WARNING

import numpy as np
from numpy.typing import NDArray

from umbel.client.cohort import Cohort
from umbel.client.trial import try_out
from umbel.data import Dataset
from umbel.nodes.differences import prior_of
from umbel.privacy.gate.randomness import streams
from umbel.protocol.arrays import Arrays
from umbel.protocol.log import log
from umbel.protocol.words import count_of
from umbel.server.history import State, diverged
from umbel.server.observer import Observer, Run
from umbel.server.setup import Setup
from umbel.server.summary import Summary, why_stuck
from umbel.server.worth import Arm, LeftOut, Level, Way, Worth
from umbel.simulation.baselines import halves, worst_decile
from umbel.simulation.worth.ways import MOST_ALONE, Row, Ways, numbers_of_a_row

MOST_CLIENTS, LEAST_CLIENTS = 1000, 10
"""Maximum number of measured clients, and the least for which a network is not too large to train by each."""
CLOSE = 0.1
"""Share of the gain of pooled rows over a constant that a close run may lack."""
_ERRORS = 2.0  # standard errors, as of a normal distribution


class Appraisal(Observer):
    """Measures the worth of a finished run, and logs it."""

    def at_end(self, run: Run) -> None:
        """Measure it, if the run has a dataset here."""
        manifest = run.setup.manifest
        if run.folder is None or manifest is None:
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
    clients = _measured(dataset, seed, MOST_ALONE // numbers_of_a_row(model, dataset))
    found, level = list[Row | LeftOut](), Level.NOT_MEASURED
    verdict = "Not known: no validation client has two rows, one to choose a hypothesis and one to measure it."
    if clients:
        learner = try_out(model, dataset, setup.config.device)
        support, query = halves(Cohort.gather(dataset, clients, learner.device), seed)
        prior = prior_of(kept, len(next(iter(state.hypotheses.values()))))
        found = Ways(setup, learner, dataset, state, support, query, prior).compare()
    rows = [one for one in found if isinstance(one, Row)]
    if rows:
        gains = {row.way: row.metrics if metric.higher_is_better else -row.metrics for row in rows}
        level, verdict = judge(gains, diverged(state.history), why_stuck(state.history))
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
        level=level,
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


def judge(gains: Mapping[Way, NDArray[np.float64]], has_diverged: bool, stuck: str = "") -> tuple[Level, str]:
    """Return the level of a run's worth, and a sentence that says it.

    This judges the predictors that clients would use: the personalised hypotheses, or the plain ones if those were not
    measured. A way is better than another if the mean difference over clients is more than twice its standard error.
    With few clients the factor is larger: Student's t distribution gives it for the same certainty.

    Parameters
    ----------
    gains : mapping from Way to ndarray, shape (clients,)
        The metric of each client, negated if lower is better.
    has_diverged : bool
        Whether the run's rounds moved away from its best hypotheses.
    stuck : str
        Why they changed nothing; empty if they did. Predictors that clients make of such hypotheses are not the run's
        merit.
    """
    run = gains[judged(gains)]
    if stuck:
        return Level.DIVERGED, f"No: {stuck.partition('.')[0]}."
    if has_diverged or not np.isfinite(gains[Way.LAST]).all():
        return Level.DIVERGED, "No: it diverged, as the last loss is several times the lowest, or not finite."
    for way, level, what in (
        (Way.CONSTANT, Level.NOT_BETTER_THAN_CONSTANT, "a constant"),
        (Way.ALONE, Level.NOT_BETTER_THAN_ALONE, "each client alone"),
    ):
        if way in gains and not _ahead(run, gains[way]):
            if _ahead(gains[way], run):
                return level, f"No: it is worse than {what}."
            few = f", though {count_of(len(run), 'client')} may be too few" if run.mean() > gains[way].mean() else ""
            return level, f"Not shown: it is not clearly better than {what}{few}."
    if Way.ALONE not in gains:
        return Level.BETTER_THAN_CONSTANT, "It is better than a constant; clients alone were not measured."
    better = "Yes: it is better than each client alone"
    if Way.POOLED not in gains or not _ahead(gains[Way.POOLED], gains[Way.CONSTANT]):
        return Level.BETTER_THAN_ALONE, f"{better}."
    behind, gain = (float((gains[Way.POOLED] - other).mean()) for other in (run, gains[Way.CONSTANT]))
    if behind <= CLOSE * gain:
        how = "better than" if _ahead(run, gains[Way.POOLED]) else "close to"
        return Level.CLOSE_TO_POOLED, f"{better}, and {how} all rows pooled."
    return Level.BETTER_THAN_ALONE, f"{better}, but behind all rows pooled."


def judged(ways: Collection[Way]) -> Way:
    """Return the way by which a run is judged."""
    return Way.OWN if Way.OWN in ways else Way.LAST


def _ahead(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    """Return whether one way gains more than another, by twice the standard error over many clients.

    A single client shows nothing.
    """
    from scipy.special import ndtr, stdtrit  # the import takes a moment

    difference = one - other
    if len(difference) < 2:
        return False
    error = difference.std(ddof=1) / math.sqrt(len(difference))
    return bool(difference.mean() > stdtrit(len(difference) - 1, ndtr(_ERRORS)) * error)


def _rounded(value: float) -> float | None:
    """Return six digits: the others depend on the number of nodes."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
