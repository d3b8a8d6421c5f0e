"""The replies of a round, checked. Invalid replies are dropped; the round continues."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Literal

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from umbel.nodes.bounds import near, pulled_in
from umbel.nodes.words import Names, told
from umbel.privacy.accounting.guarantee import report_deviation
from umbel.protocol.arrays import Arrays, Matrix, Vectors, all_finite, as_matrix, distances, flatten
from umbel.protocol.errors import ProtocolError
from umbel.protocol.flower import log
from umbel.protocol.messages import let_go, noise_of_reports, released_in, reports_exactly, scores_in, site_sums_in
from umbel.protocol.releases import SPREAD, Releases, Scores, Sums

Average = Literal["mean", "median"]
"""Aggregates of many clients' losses."""

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Asked:
    """The clients that a message asked: for each node, their positions in the sample.

    Attributes
    ----------
    clients : ndarray of int
        Their numbers in the run (`umbel.protocol.clients.ClientInRun`), in increasing order.
    positions : dict from node id to ndarray of int
    disclose : bool
        Whether they were asked for their choices.
    rows : int, optional
        k, if sites were asked for sums; by default a reply has one row for each client that released.
    names : Names
        The names of the nodes in the log.
    """

    clients: NDArray[np.int64]
    positions: dict[int, NDArray[np.int64]]
    disclose: bool = False
    rows: int | None = None
    names: Names = field(default_factory=Names)


def read_releases(
    answers: Mapping[int, Message], asked: Asked, hypotheses: Arrays, furthest: float = math.inf
) -> Releases:
    """Return the releases in nodes' replies. With several replies, each drops its arrays once they are copied.

    Parameters
    ----------
    hypotheses : dict of ndarray, each (k, \\*shape)
        The hypotheses that were sent.
    furthest : float
        Maximum distance of a release from the nearest of them (`umbel.nodes.bounds.furthest`).
    """
    sent = flatten(hypotheses)
    taken = [one for node, reply in answers.items() if (one := _take(node, reply, asked, hypotheses, sent, furthest))]
    joined = _joined(one.positions for one in taken)
    order = np.argsort(joined)
    outside = asked.clients[_joined(one.outside for one in taken)]
    choices = _joined(one.choices for one in taken)[order] if asked.disclose else None
    lost = len(asked.positions) - len(taken)
    vectors = _in_order(taken, order, sent.shape[1])
    vectors.flags.writeable = False  # for one reply as for several
    return Releases(vectors, asked.clients[joined[order]], choices, len(asked.clients), lost, outside)


def _joined(parts: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *parts])


@dataclass
class _Taken:
    """One reply's releases (m, n), the positions of their clients in the sample, and the clients' choices."""

    reply: Message
    matrix: Vectors
    positions: NDArray[np.int64]
    choices: NDArray[np.int64]
    outside: NDArray[np.int64]


def _take(node: int, reply: Message, asked: Asked, hypotheses: Arrays, sent: Matrix, furthest: float) -> _Taken | None:
    """Return the releases in a node's reply, except those too far from the hypotheses; None for a useless reply.

    `sent` are the hypotheses as a matrix (k, n).
    """
    try:
        matrix, released, chosen = _read(reply, len(asked.positions[node]), asked.disclose, hypotheses)
    except Exception as error:  # keep running: one bad node must not stop the round
        log(WARNING, "dropped the reply of %s: %s", asked.names[node], told(error))
        return None
    inside, mine = near(matrix, sent, furthest), asked.positions[node][released]
    if inside.all():
        return _Taken(reply, matrix, mine, chosen, mine[:0])
    text = (
        "left out %d of %d releases of %s, further than %.3g from the hypotheses; if its clip-norm-floor or its "
        "data explain such long updates, raise the update-norm of per-node"
    )
    log(WARNING, text, (~inside).sum(), len(inside), asked.names[node], furthest)
    return _Taken(reply, matrix[inside], mine[inside], chosen[inside] if asked.disclose else chosen, mine[~inside])


def read_scores(
    answers: Mapping[int, Message], asked: Asked, by: Average = "mean", share: bool = False
) -> Scores | None:
    """Return the mean, or the median, of loss and metric in nodes' replies; None without valid replies.

    A metric that is a share, such as an accuracy, is clipped to 0 to 1.
    """
    scores, exact = np.full((2, len(asked.clients)), np.nan), np.zeros(len(asked.clients), bool)
    variance, bounds = 0.0, [0.0]
    for node, reply in answers.items():
        positions = asked.positions[node]
        try:
            values = scores_in(reply.content, len(positions))
        except Exception as error:  # keep running: one bad node must not stop the round
            log(WARNING, "dropped the report of %s: %s", asked.names[node], told(error))
            continue
        if values is not None:
            scores[:, positions], exact[positions] = values, reports_exactly(reply.content)
            nu, bound = noise_of_reports(reply.content)
            there = values[:, ~np.isnan(values).any(axis=0)]
            # A site's mean has noise once, and stands for each of its clients.
            separate = 1 if (there == there[:, :1]).all() else there.shape[1]
            if nu and there.size:
                variance += separate * (report_deviation(nu, bound) ** 2)
                bounds.append(bound)
    answered = ~np.isnan(scores).any(axis=0)
    # An infinite loss counts as the largest finite one: if it were left out, a model that diverged for most clients
    # would be the best for the rest. A loss that no model has would make the mean infinite.
    scores = np.clip(scores, -_LARGEST, _LARGEST)
    if share:
        scores[1] = np.clip(scores[1], 0, 1)
    if not answered.any():
        return None
    # In client order, so that rounding does not depend on the nodes.
    there, told_exactly = scores[:, answered], exact[answered]
    ordered = np.sort(there)
    if by == "median":
        loss, metric = np.median(there, axis=1)
    else:
        loss, metric = (pulled_in(*values).mean() for values in zip(there, ordered, strict=True))
    m, most = there.shape[1], int(told_exactly.sum())
    # Noise, or a mean over many clients, shows nothing about their differences.
    alone = np.sort(there[:, told_exactly])
    spread = [alone[i, [round(q * (most - 1)) for q in SPREAD]].tolist() if most else [] for i in range(2)]
    clipped = min(filter(None, bounds), default=0.0)
    return Scores(float(loss), float(metric), m, spread[0], spread[1], most, math.sqrt(variance) / m, clipped)


def _in_order(taken: list[_Taken], order: NDArray[np.int64], n: int) -> Vectors:
    """Return the rows (m, n) of all replies in order; the rows of a single reply, already in order, are not copied.

    Models may be large, so there is only one copy: a reply drops its arrays once they are copied.
    """
    if len(taken) == 1:
        return taken[0].matrix
    rows, start = np.argsort(order), 0
    vectors = np.empty((len(order), n), np.float32)
    for one in taken:
        stop = start + len(one.positions)
        vectors[rows[start:stop]] = one.matrix
        start, one.matrix = stop, vectors[:0]
        let_go(one.reply.content)
    return vectors


def _read(
    reply: Message, asked: int, disclose: bool, hypotheses: Arrays
) -> tuple[Vectors, NDArray[np.bool_], NDArray[np.int64]]:
    """Check a reply; return its releases (m, n), who released, and their choices."""
    arrays, released, choices = released_in(reply.content, asked)
    m = int(released.sum())
    matrix = checked_rows(arrays, m, hypotheses)
    if not disclose:
        return matrix, released, np.zeros(0, np.int64)
    k = len(next(iter(hypotheses.values())))
    if choices is None or choices.shape != (m,) or not np.isin(choices, range(k)).all():
        raise ProtocolError("it does not say what its clients chose", code="protocol.choices")
    return matrix, released, choices


def checked_rows(arrays: Arrays, rows: int, hypotheses: Arrays) -> Vectors:
    """Return arrays from a node as a matrix (rows, n) if they have that many rows and the hypotheses' shapes."""
    expected = {name: ((rows, *value.shape[1:]), value.dtype) for name, value in hypotheses.items()}
    if {name: (value.shape, value.dtype) for name, value in arrays.items()} != expected:
        raise ProtocolError("its arrays do not fit the hypotheses", code="protocol.arrays")
    matrix = as_matrix(arrays if list(arrays) == list(hypotheses) else {name: arrays[name] for name in hypotheses})
    if not all_finite(matrix):
        raise ProtocolError("its arrays are not finite", code="protocol.not-finite")
    return matrix


# --- sums of sites


def read_sums(
    answers: Mapping[int, Message], asked: Asked, hypotheses: Arrays, furthest: Callable[[int], float]
) -> Sums:
    """Return the sums in nodes' replies.

    Parameters
    ----------
    hypotheses : dict of ndarray, each (k, \\*shape)
        The hypotheses that were sent.
    furthest : callable
        Maximum norm of a sum over so many clients (`umbel.nodes.bounds.furthest_sum`).
    """
    sums, counts, inside, outside = [], [], [], []
    lost = len(asked.positions) - len(answers)
    for node in sorted(answers, key=lambda node: int(asked.positions[node][0])):
        try:
            arrays, count, part = site_sums_in(answers[node].content, len(asked.positions[node]))
            matrix = checked_rows(arrays, len(next(iter(hypotheses.values()))), hypotheses)
            if not part.any():
                raise ProtocolError("it says that no client took part", code="protocol.no-releases")
        except Exception as error:  # keep running: one bad node must not stop the round
            log(WARNING, "dropped the reply of %s: %s", asked.names[node], told(error))
            lost += 1
            continue
        mine = asked.positions[node][part]
        longest, most = float(distances(matrix, np.zeros(matrix.shape[1])).max()), furthest(len(mine))
        if not longest <= most:
            text = (
                "left out the sums of %s: one has norm %.3g, above the %.3g that %d clients can have; if its "
                "clip-norm-floor explains such long sums, raise the update-norm of per-node"
            )
            log(WARNING, text, asked.names[node], longest, most, len(mine))
            outside.append(mine)
            continue
        sums.append(matrix)
        counts.append(np.clip(count, 0, len(mine)))
        inside.append(mine)
    k, n = as_matrix(hypotheses).shape
    taken, left = asked.clients[np.sort(_joined(inside))], asked.clients[_joined(outside)]
    matrices, numbers = np.reshape(sums, (len(sums), k, n)), np.reshape(counts, (len(counts), k))
    return Sums(matrices, numbers, taken, len(asked.clients), lost, left)
