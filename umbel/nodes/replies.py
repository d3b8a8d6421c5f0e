"""Replies of umbel's nodes, checked: releases, sites' sums, and the scores of validation clients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from logging import WARNING

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from umbel.nodes.bounds import furthest, furthest_sum, near, pulled_in
from umbel.nodes.reading import Asked, read
from umbel.privacy.accounting.guarantee import report_deviation
from umbel.protocol.arrays import Arrays, Vectors, all_finite, as_matrix, distances, flatten
from umbel.protocol.errors import ProtocolError
from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.log import log
from umbel.protocol.messages import (
    answers_training,
    let_go,
    noise_of_reports,
    released_in,
    reports_exactly,
    scores_in,
    site_sums_in,
)
from umbel.protocol.releases import SPREAD, Releases, Scores, Sums

_LARGEST = float(np.finfo(np.float32).max)


@dataclass
class _Releases:
    """One reply's releases (m, n), the positions of their clients in the sample, and the clients' choices."""

    reply: Message
    matrix: Vectors
    positions: NDArray[np.int64]
    choices: NDArray[np.int64]


def read_releases(asked: Asked, replies: Iterable[Message], update_norm: float = 0.0) -> Releases:
    """Return the releases in nodes' replies, except those too far from the hypotheses.

    With several replies, each drops its arrays once they are copied.

    Parameters
    ----------
    update_norm : float
        Maximum norm of an update, as for `umbel.nodes.bounds.furthest`.
    """
    taken = list(read(asked, replies, partial(_releases_in, asked)).values())
    sent, reach, outside = flatten(asked.hypotheses), furthest(asked.task, asked.hypotheses.matrix, update_norm), []
    for one in taken:
        inside = near(one.matrix, sent, reach)
        if not inside.all():
            text = (
                "left out %d of %d releases of %s, further than %.3g from the hypotheses; if its floor of clipping "
                "or its data explain such long updates, raise the update-norm of per-node"
            )
            name = asked.names[one.reply.metadata.src_node_id]
            log(WARNING, text, (~inside).sum(), len(inside), name, reach)
            outside.append(one.positions[~inside])
            one.matrix, one.positions = one.matrix[inside], one.positions[inside]
            one.choices = one.choices[inside[: len(one.choices)]]
    joined = _joined(one.positions for one in taken)
    order = np.argsort(joined)
    choices = _joined(one.choices for one in taken)[order] if asked.task.disclose_choice else None
    lost = len(asked.positions) - len(taken)
    vectors = _in_order(taken, order, sent.shape[1])
    vectors.flags.writeable = False  # for one reply as for several
    clients = asked.clients[joined[order]]
    return Releases(vectors, clients, choices, len(asked.clients), lost, asked.clients[_joined(outside)])


def _joined(parts: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _releases_in(asked: Asked, node: int, reply: Message) -> _Releases | None:
    """Check a reply, and return its releases; None if it has no part about training clients."""
    if not answers_training(reply.content):
        return None
    arrays, released, choices = released_in(reply.content, len(asked.positions[node]))
    m, chosen = int(released.sum()), np.zeros(0, np.int64)
    matrix = checked_rows(arrays, m, asked.hypotheses)
    if asked.task.disclose_choice:
        if choices is None or choices.shape != (m,) or not np.isin(choices, range(asked.hypotheses.k)).all():
            raise ProtocolError("it does not say what its clients chose", code="protocol.choices")
        chosen = choices
    return _Releases(reply, matrix, asked.positions[node][released], chosen)


def _in_order(taken: list[_Releases], order: NDArray[np.int64], n: int) -> Vectors:
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


def checked_rows(arrays: Arrays, rows: int, hypotheses: Hypotheses) -> Vectors:
    """Return arrays from a node as a matrix (rows, n) if they have that many rows and the hypotheses' shapes."""
    expected = {name: ((rows, *value.shape[1:]), value.dtype) for name, value in hypotheses.items()}
    if {name: (value.shape, value.dtype) for name, value in arrays.items()} != expected:
        raise ProtocolError("its arrays do not fit the hypotheses", code="protocol.arrays")
    matrix = as_matrix(arrays if list(arrays) == list(hypotheses) else {name: arrays[name] for name in hypotheses})
    if not all_finite(matrix):
        raise ProtocolError("its arrays are not finite", code="protocol.not-finite")
    return matrix


# --- scores of validation clients


def read_scores(asked: Asked, replies: Iterable[Message], by: str = "mean", share: bool = False) -> Scores | None:
    """Return the mean, or the median, of loss and metric in nodes' replies; None without valid replies.

    A metric that is a share, such as an accuracy, is clipped to 0 to 1.
    """
    scores, exact = np.full((2, len(asked.clients)), np.nan), np.zeros(len(asked.clients), bool)
    variance, bounds = 0.0, [0.0]
    found = read(asked, replies, partial(_scores_in, asked))
    for node, (values, exactly, nu, bound) in found.items():
        positions = asked.positions[node]
        scores[:, positions], exact[positions] = values, exactly
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


def _scores_in(asked: Asked, node: int, reply: Message) -> tuple[NDArray[np.float64], bool, float, float] | None:
    """Return loss and metric (2, clients) in a reply, whether they came without noise, and its nu and bound."""
    values = scores_in(reply.content, len(asked.positions[node]))
    return None if values is None else (values, reports_exactly(reply.content), *noise_of_reports(reply.content))


# --- sums of sites


def read_sums(asked: Asked, replies: Iterable[Message], update_norm: float = 0.0) -> Sums:
    """Return the sums in nodes' replies, in the order of the sites' first clients, except those that are too long.

    Parameters
    ----------
    update_norm : float
        Maximum norm of an update, as for `umbel.nodes.bounds.furthest_sum`.
    """
    found = read(asked, replies, partial(_sums_in, asked))
    k, n = asked.hypotheses.matrix.shape
    sums, counts, inside, outside = [], [], [], []
    for node in sorted(found, key=lambda node: int(asked.positions[node][0])):
        matrix, count, mine = found[node]
        longest = float(distances(matrix, np.zeros(n)).max())
        most = furthest_sum(asked.task, k, n, len(mine), update_norm)
        if not longest <= most:
            text = (
                "left out the sums of %s: one has norm %.3g, above the %.3g that %d clients can have; if its "
                "floor of clipping explains such long sums, raise the update-norm of per-node"
            )
            log(WARNING, text, asked.names[node], longest, most, len(mine))
            outside.append(mine)
            continue
        sums.append(matrix)
        counts.append(np.clip(count, 0, len(mine)))
        inside.append(mine)
    taken, left = asked.clients[np.sort(_joined(inside))], asked.clients[_joined(outside)]
    matrices, numbers = np.reshape(sums, (len(sums), k, n)), np.reshape(counts, (len(counts), k))
    return Sums(matrices, numbers, taken, len(asked.clients), len(asked.positions) - len(found), left)


def _sums_in(asked: Asked, node: int, reply: Message) -> tuple[Vectors, NDArray[np.float64], NDArray[np.int64]] | None:
    """Check a reply, and return a site's sums (k, n), its counts, and its clients' positions in the sample."""
    if not answers_training(reply.content):
        return None
    arrays, count, part = site_sums_in(reply.content, len(asked.positions[node]))
    matrix = checked_rows(arrays, asked.hypotheses.k, asked.hypotheses)
    if not part.any():
        raise ProtocolError("it says that no client took part", code="protocol.no-releases")
    return matrix, count, asked.positions[node][part]
