"""Choose the method that best predicts a client's rows, each fitted to the other rows.

A client's rows are cut into five folds: the first, sixth, ... and so on. If a client has up to five rows, each is left
out once. A method's fit counts as a likelihood with the variance of the noise integrated out, and `PREFERENCES` as a
prior: a client with a single row, whose fits are all equal, takes the preferred method.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from umbel.client.cohort import Cohort
from umbel.client.personal.bayes import bayes, closed_form
from umbel.client.personal.calibrate import calibrate, log_likelihood, mixture
from umbel.client.personal.predictors import Floats, Predictors, Task, row_scores, sums
from umbel.client.personal.tune import as_it_is, between, tuned
from umbel.models.losses import squared_error

FOLDS = 5
_AT_ONCE = 1 << 25  # clients' parameters computed together; there are a dozen copies of them
SHARES = 0.25, 0.5, 0.75, 1.0
"""Shares of a client's training in its candidate models; the last is fine-tuning."""

PREFERENCES = {"mixture": 0.0, "bayes": 0.0, "calibrate": 0.3, "no": 2.0, "tuned": 3.0}
"""How much more likely, as logarithms, a method must make the rows to win over a preferred one."""
CLASS_PREFERENCES = {"no": 0.0, "calibrate": 3.0, "bayes": 3.0, "mixture": 3.0, "tuned": 5.0}
"""The same for losses other than squares: there the unchanged hypothesis is the default."""


def auto(task: Task) -> Predictors:
    """Return for each client the predictor of the method that suits its rows best.

    Clients are computed in parts: the results of all methods for a large model take much memory.
    """
    size = max(1, _AT_ONCE // task.learner.model.num_parameters)
    parts = [slice(first, first + size) for first in range(0, len(task.cohort), size)]
    return Predictors.joined([_auto(_part(task, some)) for some in parts])


def _part(task: Task, some: slice) -> Task:
    return replace(task, cohort=task.cohort.part(some), generators=lambda: task.generators()[some])


def _auto(task: Task) -> Predictors:
    losses: dict[str, Floats] = {}
    for fold in range(FOLDS):
        seen, left_out = folded(task.cohort, fold)
        if not len(left_out.features):
            break
        for name, own in _candidates(replace(task, cohort=seen)).items():
            found = row_scores(task.learner.model.loss, own.outputs(task.learner, left_out)[None], left_out)
            found = np.where(np.isnan(found), np.inf, found)
            losses[name] = losses.get(name, 0.0) + sums(found, left_out.lengths)[0]
    made = _candidates(task)
    preferences = PREFERENCES if task.learner.model.loss.per_sample is squared_error else CLASS_PREFERENCES
    penalties = np.array([preferences[name.split()[0]] for name in made])
    fits = np.stack([losses.get(name, np.zeros(len(task.cohort))) for name in made])
    fits[:, task.cohort.lengths < 2] = 0  # the only row would be predicted from no rows
    best = (log_likelihood(task, fits) - penalties[:, None]).argmax(0)
    return Predictors.chosen(list(made.values()), best)


def folded(cohort: Cohort, fold: int) -> tuple[Cohort, Cohort]:
    """Return each client's rows without every fifth, counted from the `fold`-th, and those left out."""
    position = np.arange(int(cohort.lengths.sum())) - np.repeat(cohort.starts, cohort.lengths)
    return cohort.rows(position % FOLDS != fold), cohort.rows(position % FOLDS == fold)


def _candidates(task: Task) -> dict[str, Predictors]:
    start = task.start
    trained = tuned(task, start)
    made = {"no": as_it_is(task), "calibrate": calibrate(task)}
    if len(task.outputs) > 1:
        made["mixture"] = mixture(task)
    if closed_form(task.learner.model):  # else proximal steps, which serve clients of few rows badly
        made["bayes"] = bayes(task)
    for share in SHARES:
        shares = np.full(len(task.cohort), share)
        made[f"tuned {share:g}"] = task.networks(between(start, trained, shares))
    return made
