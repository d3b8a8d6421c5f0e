"""What nodes answered in a round, checked: whatever one of them sends, the run goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Literal

import numpy as np
from flwr.app import Message, MetricRecord
from numpy.typing import NDArray

from umbel.protocol.arrays import Arrays, Vectors, all_finite, as_matrix, flatten
from umbel.protocol.errors import ProtocolError
from umbel.protocol.flower import log
from umbel.protocol.messages import let_go, released_in, scores_in
from umbel.server.nodes.bounds import near, pulled_in
from umbel.server.nodes.words import told

Average = Literal["mean", "median"]
"""What the losses of many clients become."""

SPREAD = (0.1, 0.25, 0.5, 0.75, 0.9)
"""What is told of how clients differ: these quantiles, each a value that a client reported."""

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Asked:
    """The clients that were asked for something: for each node, their positions in the sample.

    Attributes
    ----------
    clients : ndarray of int
        Counted over the dataset, in increasing order.
    positions : dict from node id to ndarray of int
    disclose : bool
        Whether they were asked for the hypothesis that they chose.
    rows : int, optional
        k, where sites were asked for sums; by default a node answers with a row a client that released.
    """

    clients: NDArray[np.int64]
    positions: dict[int, NDArray[np.int64]]
    disclose: bool = False
    rows: int | None = None


@dataclass(frozen=True)
class Releases:
    """The releases of a round, in client order.

    Attributes
    ----------
    vectors : ndarray of float32, shape (m, n)
        Sanitised parameter vectors, as they travelled, which cannot be written to. A sum over clients wants 64 bits
        (`umbel.protocol.arrays.mean_of`).
    clients : ndarray of int, shape (m,)
        Who released, counted over the dataset.
    choices : ndarray of int, shape (m,), or None
        What they chose, if they were asked.
    asked : int
        How many clients were.
    lost_nodes : int
        Nodes that did not answer, or not as they should.
    outside : ndarray of int
        Clients whose releases were left out because they lie too far from what was sent; they have paid as well.
    """

    vectors: Vectors
    clients: NDArray[np.int64]
    choices: NDArray[np.int64] | None
    asked: int
    lost_nodes: int
    outside: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True)
class Scores:
    """Loss and metric, averaged over the validation clients that answered, each counting once.

    Values far from all others are pulled in (`umbel.server.nodes.bounds.pulled_in`).

    Attributes
    ----------
    loss, metric : float
    clients : int
    loss_spread, metric_spread : list of float
        The quantiles `SPREAD` over these clients, as they reported; empty where a strategy of one's own tells none.
    """

    loss: float
    metric: float
    clients: int
    loss_spread: list[float] = field(default_factory=list, compare=False)
    metric_spread: list[float] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, record: MetricRecord | None) -> Scores | None:
        """Return what a strategy's ``aggregate_evaluate`` gives Flower."""
        if record is None:
            return None
        loss, metric, clients = (record.get(name, 0.0) for name in ("loss", "metric", "clients"))
        if isinstance(loss, list) or isinstance(metric, list) or isinstance(clients, list):
            raise ProtocolError("aggregate_evaluate must return loss, metric and clients, a number each")
        spreads = (record.get(name, []) for name in ("loss_spread", "metric_spread"))
        return cls(float(loss), float(metric), int(clients), *(list(map(float, np.ravel(one))) for one in spreads))


def read_releases(
    answers: Mapping[int, Message], asked: Asked, hypotheses: Arrays, furthest: float = math.inf
) -> Releases:
    """Return the releases in nodes' replies; where there are several, they let go of them.

    Parameters
    ----------
    answers : mapping from node id to Message
    asked : Asked
    hypotheses : dict of ndarray, each (k, \\*shape)
        What was sent.
    furthest : float
        How far a release may lie from the nearest of them (`umbel.server.nodes.bounds.furthest`).
    """
    n = sum(value[0].size for value in hypotheses.values())
    nobody = np.zeros(0, np.int64)
    taken = [one for node, reply in answers.items() if (one := _take(node, reply, asked, hypotheses, furthest))]
    joined = np.concatenate([nobody, *(one.positions for one in taken)])
    order = np.argsort(joined)
    outside = asked.clients[np.concatenate([nobody, *(one.outside for one in taken)])]
    choices = np.concatenate([nobody, *(one.choices for one in taken)])[order] if asked.disclose else None
    lost = len(asked.positions) - len(taken)
    vectors = _in_order(taken, order, n)
    vectors.flags.writeable = False  # whether one reply holds them all or several do
    return Releases(vectors, asked.clients[joined[order]], choices, len(asked.clients), lost, outside)


@dataclass
class _Taken:
    """What one reply holds: releases (m, n), whose they are, as positions in the sample, and what they chose."""

    reply: Message
    matrix: Vectors
    positions: NDArray[np.int64]
    choices: NDArray[np.int64]
    outside: NDArray[np.int64]


def _take(node: int, reply: Message, asked: Asked, hypotheses: Arrays, furthest: float) -> _Taken | None:
    """Return the releases in a node's reply, but for those too far from what was sent; None for a reply of no use."""
    try:
        matrix, released, chosen = _read(reply, len(asked.positions[node]), asked.disclose, hypotheses)
    except Exception as error:  # whatever one node sends, the run goes on
        log(WARNING, "dropped the reply of node %s: %s", node, told(error))
        return None
    inside, mine = near(matrix, flatten(hypotheses), furthest), asked.positions[node][released]
    if inside.all():
        return _Taken(reply, matrix, mine, chosen, mine[:0])
    log(
        WARNING,
        "left out %d of %d releases of node %s, further than %.3g from what was sent; if its own clip-norm-floor "
        "or its data make its updates that long, raise max-update-norm",
        (~inside).sum(),
        len(inside),
        node,
        furthest,
    )
    chosen = chosen[inside] if asked.disclose else chosen
    return _Taken(reply, matrix[inside], mine[inside], chosen, mine[~inside])


def read_scores(
    answers: Mapping[int, Message], asked: Asked, by: Average = "mean", share: bool = False
) -> Scores | None:
    """Return the mean, or the median, of loss and metric in nodes' replies; None when nobody answered.

    Where the metric is a share, as an accuracy is, it counts as one from 0 to 1 whatever a node says.
    """
    scores = np.full((2, len(asked.clients)), np.nan)
    for node, reply in answers.items():
        positions = asked.positions[node]
        try:
            values = scores_in(reply.content, len(positions))
        except Exception as error:  # whatever one node sends, the run goes on
            log(WARNING, "dropped the report of node %s: %s", node, told(error))
            continue
        if values is not None:
            scores[:, positions] = values
    answered = ~np.isnan(scores).any(axis=0)
    # A loss that overflows counts as the largest that there is: where it was left out, a model that blew up for most
    # would be the best for those that are left. One that no model has would carry the mean of all to infinity.
    scores = np.clip(scores, -_LARGEST, _LARGEST)
    if share:
        scores[1] = np.clip(scores[1], 0, 1)
    if not answered.any():
        return None
    # In client order, so that rounding does not depend on the nodes.
    there = scores[:, answered]
    if by == "median":
        loss, metric = np.median(there, axis=1)
    else:
        loss, metric = np.stack([pulled_in(values) for values in there]).mean(axis=1)
    m = there.shape[1]
    spread = np.sort(there)[:, [round(q * (m - 1)) for q in SPREAD]]
    return Scores(float(loss), float(metric), m, *spread.tolist())


def _in_order(taken: list[_Taken], order: NDArray[np.int64], n: int) -> Vectors:
    """Return the rows (m, n) of all replies in order; those of one reply, which has its clients in order, as they are.

    Models may be large, and there shall be one copy of all: a reply that is copied lets go of its arrays.
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
        raise ProtocolError("it does not say what its clients chose")
    return matrix, released, choices


def checked_rows(arrays: Arrays, rows: int, hypotheses: Arrays) -> Vectors:
    """Return arrays from a node as a matrix (rows, n) if they have so many and are shaped as the hypotheses."""
    expected = {name: ((rows, *value.shape[1:]), value.dtype) for name, value in hypotheses.items()}
    if {name: (value.shape, value.dtype) for name, value in arrays.items()} != expected:
        raise ProtocolError("its arrays do not fit the hypotheses")
    matrix = as_matrix(arrays if list(arrays) == list(hypotheses) else {name: arrays[name] for name in hypotheses})
    if not all_finite(matrix):
        raise ProtocolError("its arrays are not finite")
    return matrix
