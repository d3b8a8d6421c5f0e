"""Scores of classes over the rows of all measured clients, each with an interval over clients.

They tell more than the accuracy where one class is rare, because a constant has a high accuracy there. A client may
have no row of a class, so rows are pooled. The interval is that of a jackknife, which leaves out one client at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.client.personal.predictors import Floats

Integers = NDArray[np.int64]

AUC = "AUC"
_ERRORS = 2.0  # standard errors, as of a normal distribution


def jackknifed(values: Floats, labels: Integers, lengths: Integers, probabilities: bool) -> Mapping[str, Floats]:
    """Return each score by name, followed by what each client adds to it, (1 + clients,): NaN if that is not known.

    What clients add varies around the score as independent values would of which it is the mean. There is balanced
    accuracy and the area under the ROC curve for two classes, and macro F1 for more.

    Parameters
    ----------
    values : ndarray, shape (rows, classes)
        The largest of a row is that of the predicted class.
    labels : ndarray of int64, shape (rows,)
        Each row's class. Rows are grouped by client.
    lengths : ndarray of int64, shape (clients,)
    probabilities : bool
        Whether the values are logarithms of probabilities, up to a number for each row: then two classes have a log
        loss.
    """
    clients, classes = len(lengths), values.shape[1]
    owner, predicted = np.repeat(np.arange(clients), lengths), values.argmax(1)

    def counted(which: Integers, weights: NDArray[np.bool_] | None = None) -> Floats:
        counts = np.bincount(owner * classes + which, weights, clients * classes)
        return _without_one(counts.reshape(clients, classes))

    true, guessed, hits = counted(labels), counted(predicted), counted(labels, labels == predicted)
    with np.errstate(divide="ignore", invalid="ignore"):
        if classes > 2:
            score = 2 * hits / (true + guessed)
            scores = {"macro F1": np.nansum(score, 1) / (~np.isnan(score)).sum(1)}  # of the classes that are there
        else:
            scores = {
                "balanced accuracy": (hits / true).mean(1),
                AUC: _wins(values[:, 1] - values[:, 0], labels > 0, owner),
            }
            scores[AUC] /= true.prod(1)
            if probabilities:
                losses = np.logaddexp.reduce(values, 1) - values[np.arange(len(values)), labels]
                scores["log loss"] = _without_one(np.bincount(owner, losses)) / true.sum(1)
        return {
            name: np.concatenate([score[:1], score[0] + (clients - 1) * (score[1:].mean() - score[1:])])
            for name, score in scores.items()
        }


def chance(values: Floats) -> float:
    """Return how far the mean of independent values may be off: twice its standard error, if there are many.

    With few values the factor is larger: Student's t distribution gives it for the same certainty. It is infinite for a
    single value.
    """
    from scipy.special import ndtr, stdtrit  # the import takes a moment

    if len(values) < 2:
        return math.inf
    return float(stdtrit(len(values) - 1, ndtr(_ERRORS)) * values.std(ddof=1) / math.sqrt(len(values)))


def _without_one(of_clients: NDArray[Any]) -> Floats:
    """Return the sum over all clients, and over all but each of them, (1 + clients, ...)."""
    total = of_clients.sum(0)
    return np.concatenate([total[None], total - of_clients]).astype(np.float64)


def _wins(scores: Floats, positive: NDArray[np.bool_], owner: Integers) -> Floats:
    """Return how many pairs of a row of each class are in order, of all clients and without each, (1 + clients,).

    Equal scores count half.
    """
    places, clients, span = np.unique(scores, return_inverse=True)[1], owner[-1] + 1, len(scores)

    def won(order: Integers, mine: NDArray[np.bool_], group: Integers) -> Floats:
        """Return the sum over each client's rows of one class of the other class's rows below, in the same group."""
        keys = group * span + order
        rest = np.sort(keys[~mine])
        below = (np.searchsorted(rest, keys[mine]) + np.searchsorted(rest, keys[mine], "right")) / 2
        return np.bincount(owner[mine], below - np.searchsorted(rest, group[mine] * span), clients).astype(np.float64)

    together = np.zeros_like(owner)
    above, below = won(places, positive, together), won(span - 1 - places, ~positive, together)
    return np.concatenate([[above.sum()], above.sum() - above - below + won(places, positive, owner)])
