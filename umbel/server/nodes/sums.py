"""What sites released of their clients together, checked: whatever one of them sends, the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import WARNING

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ProtocolError
from umbel.protocol.flower import log
from umbel.protocol.messages import site_sums_in
from umbel.server.nodes.replies import Asked, checked_rows
from umbel.server.nodes.words import told


@dataclass(frozen=True)
class Sums:
    """The sums of a round, in the order of the sites' first clients.

    Attributes
    ----------
    sums : ndarray, shape (s, k, n)
        Of the updates of each site's clients by hypothesis, with noise.
    counts : ndarray, shape (s, k)
        How many of its clients trained each, as it says: with noise, and between 0 and all of them.
    clients : ndarray of int, shape (m,)
        Who took part at all sites, counted over the dataset.
    asked : int
        How many clients were.
    lost_nodes : int
        Nodes that did not answer, or not as they should.
    outside : ndarray of int
        Clients of sites that were left out because a sum is longer than theirs can be; they have paid as well.
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.float64]
    clients: NDArray[np.int64]
    asked: int
    lost_nodes: int
    outside: NDArray[np.int64]


def read_sums(
    answers: Mapping[int, Message], asked: Asked, hypotheses: Arrays, furthest: Callable[[int], float]
) -> Sums:
    """Return the sums in nodes' replies.

    Parameters
    ----------
    answers : mapping from node id to Message
    asked : Asked
    hypotheses : dict of ndarray, each (k, \\*shape)
        What was sent.
    furthest : callable
        How long a sum over so many clients may be (`umbel.server.nodes.bounds.furthest_sum`).
    """
    k, n = len(next(iter(hypotheses.values()))), sum(value[0].size for value in hypotheses.values())
    sums, counts = [], []
    inside, outside = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    lost = len(asked.positions) - len(answers)
    for node in sorted(answers, key=lambda node: int(asked.positions[node][0])):
        try:
            matrix, count, part = _read(answers[node], len(asked.positions[node]), hypotheses)
        except Exception as error:  # whatever one node sends, the run goes on
            log(WARNING, "dropped the reply of node %s: %s", node, told(error))
            lost += 1
            continue
        mine = asked.positions[node][part]
        longest, most = float(np.linalg.norm(matrix, axis=1).max()), furthest(len(mine))
        if not longest <= most:
            log(
                WARNING,
                "left out the sums of node %s: one is %.3g long, those of %d clients %.3g at most; if its own "
                "clip-norm-floor makes them that long, raise max-update-norm",
                node,
                longest,
                len(mine),
                most,
            )
            outside.append(mine)
            continue
        sums.append(matrix)
        counts.append(np.clip(count, 0, len(mine)))
        inside.append(mine)
    return Sums(
        np.stack(sums) if sums else np.zeros((0, k, n)),
        np.stack(counts) if counts else np.zeros((0, k)),
        asked.clients[np.sort(np.concatenate(inside))],
        len(asked.clients),
        lost,
        asked.clients[np.concatenate(outside)],
    )


def _read(
    reply: Message, asked: int, hypotheses: Arrays
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Check a reply; return its sums (k, n), its counts (k,), and who took part."""
    arrays, counts, part = site_sums_in(reply.content, asked)
    matrix = checked_rows(arrays, len(next(iter(hypotheses.values()))), hypotheses)
    if not part.any():
        raise ProtocolError("it says that nobody took part")
    return matrix.astype(np.float64), counts, part
