"""Respawning: a hypothesis that clients no longer train becomes half of the largest group.

If one hypothesis fits every client best at the start, all clients train it. The others are not trained, so it stays the
best, and the run has collapsed into one model. Random networks differ in ways that suit all clients alike rather than
in the differences between groups of clients, so this is common for large models. Two hypotheses from the two halves of
one group's releases are equally well trained, and differ as the clients of the halves differ. From there, the clients'
own choices separate the groups.

All of it is computed from sanitised releases, so it costs no privacy.

It trusts the clients. Two hostile clients of twenty can hide two kinds from it, or split clients that are all alike, by
releases that lie on one line. An axis of only a few releases cannot simply be ignored: a small group has such an axis,
and respawning is for small groups; in small rounds, noise sometimes has one too.
"""

from __future__ import annotations

from functools import lru_cache
from logging import INFO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.arrays import Labels, Matrix, Vectors, distances, in_blocks, mean_of
from umbel.protocol.log import log

_IDLE, _TOLD = "respawn/idle", "respawn/told"
_USED = 0.25  # share of the average number of releases
_LEAST = 2  # minimum releases of a half
_NONE = -1  # label of a release whose hypothesis is respawned
_GAP = 0.7  # from FEMNIST, where releases of one kind have gaps up to .6 and those of two kinds 1 to 2
_FALSE = 0.001  # probability that releases of one kind are taken for two
_DRAWS = 999  # draws of one kind, to estimate the probability of a gap by chance
_COUNTS = (*range(2, 13), 16, 24, 32, 48, 64)  # numbers of releases with an estimate: for fewer, gaps are larger
_WIDE = 32  # dimensions for each release above which more make no difference
_ROUNDING = 1e-9


def respawned(
    state: dict[str, NDArray[Any]],
    after: int,
    round: int,
    moved: Matrix,
    hypotheses: Matrix,
    releases: Vectors,
    labels: Labels,
) -> Matrix:
    """Return the next hypotheses (k, n): `moved`, except for hypotheses that have been idle for `after` rounds.

    A hypothesis is idle if it has less than a quarter of its share of the releases, and none of them is near it. A few
    stray releases from afar do not count as use, but a small group of clients does. The strategy's `state` keeps how
    long each has been idle, and the evidence of the last rounds on whether its releases are of two kinds. The rest is
    as for `umbel.strategies.base.HypothesisStrategy.reshape`.
    """
    from scipy import special  # the import takes a moment

    k, share = len(hypotheses), len(labels) / len(hypotheses)
    counts = np.bincount(labels, minlength=k)
    used = [counts[j] >= _USED * share or _visited(j, hypotheses, releases, labels) for j in range(k)]
    idle = np.where(used, 0, state.get(_IDLE, np.zeros(k, np.int64)) + 1)
    evidence = state.get(_TOLD, np.zeros((after, k)))
    sides = _sides(releases, hypotheses, labels, max(2 * _LEAST, share)) if idle.any() else {}
    now = [-np.log(sides[j].chance) if j in sides else 0.0 for j in range(k)]
    evidence = np.concatenate([evidence[1:], [now]])
    # Fisher's test: for releases of one kind, twice the sum has a chi-squared distribution.
    clear = evidence.sum(axis=0) >= special.chdtri(2 * after, _FALSE) / 2
    torn = [j for j in sides if clear[j] and sides[j].gap >= _GAP and len(sides[j].second) >= _LEAST]
    following, labels = moved.copy(), labels.copy()
    for j, parent in zip(np.flatnonzero(idle >= after).tolist(), torn, strict=False):
        part = sides[parent].second
        log(INFO, "round %d: hypothesis %d, idle for %d rounds, respawned from %d of the %d releases of hypothesis %d",
            round, j, idle[j], len(part), counts[parent], parent)  # fmt: skip
        labels[labels == j] = _NONE
        labels[part], idle[j] = j, 0
        evidence[:, [j, parent]] = 0
        for hypothesis in (parent, j):
            following[hypothesis] = mean_of(releases, np.flatnonzero(labels == hypothesis))
    state[_IDLE], state[_TOLD] = idle, evidence
    return following


def _visited(j: int, hypotheses: Matrix, releases: Vectors, labels: Labels) -> bool:
    """Return whether one of a hypothesis's releases is nearer to it than half of the way to any other hypothesis.

    From another hypothesis such a release would have come more than half of the way, straight towards this one. In many
    dimensions, noise hardly ever does that.
    """
    others = np.linalg.norm(np.delete(hypotheses, j, axis=0) - hypotheses[j], axis=1)
    nearest = distances(releases, hypotheses[j], np.flatnonzero(labels == j)).min(initial=np.inf)
    return bool(nearest < others.min(initial=np.inf) / 2)


class _Side(NamedTuple):
    """One side of a group's axis, the gap by which it stands out, and the probability of such a gap by chance.

    The side is the one without the group's first release; it is empty if the other has too few.
    """

    second: Labels
    gap: float
    chance: float


def _sides(releases: Vectors, hypotheses: Matrix, labels: Labels, least: float) -> dict[int, _Side]:
    """Return the sides of each group of at least `least` releases, the largest group first."""
    sizes = np.bincount(labels, minlength=len(hypotheses))
    sides = dict[int, _Side]()
    for j in np.argsort(-sizes, kind="stable").tolist():
        if sizes[j] < least:
            break
        rows = np.flatnonzero(labels == j)
        both = halves(releases, hypotheses[j], rows)
        second = rows[both.second] if len(rows) - both.second.sum() >= _LEAST else rows[:0]
        sides[j] = _Side(second, both.gap, by_chance(both.gap, len(rows), both.dimensions))
    return sides


class Halves(NamedTuple):
    """The two sides of m updates along their principal axis: a mask (m,) of the side without the first client.

    The gap is the distance from the largest to the second eigenvalue of the centred cosines, relative to the distance
    from there to the smallest one that centring leaves positive. The dimensions are the orthogonal directions in which
    the updates differ apart from that axis, all with equal weight.
    """

    second: NDArray[np.bool_]
    gap: float
    dimensions: float


def halves(vectors: Vectors, centre: Matrix | None = None, rows: Labels | None = None) -> Halves:
    """Return the two sides of updates, those of at least 4 vectors as in `cosines`, along their principal axis.

    Each update is scaled to equal length: noise is as long as a multiple of its update, and otherwise the longest
    update would be a side. In many dimensions the noise of different clients is orthogonal to everything else, so it
    adds the same to each eigenvalue: it changes neither the axis nor the gap. Lloyd's iterations with two means, where
    each release is near the mean that it is part of, would stay wherever they begin.
    """
    values, axes = np.linalg.eigh(_centred(cosines(vectors, centre, rows)))
    values = values.clip(min=0)
    side = axes[:, -1] > 0
    return Halves(side != side[0], _gap(values), _dimensions(values))


def by_chance(gap: float, count: int, dimensions: float) -> float:
    """Return the probability of so large a gap for so many updates of one kind in so many dimensions.

    It is estimated from random sets of directions. In one dimension, or with a few updates, any gap can be chance.
    """
    m = max(possible for possible in _COUNTS if possible <= count)
    # By powers of two, rounded down: in fewer dimensions gaps are larger.
    gaps = _gaps_of_one_kind(m, int(2 ** np.floor(np.log2(np.clip(dimensions, 1, _WIDE * m)))))
    return float(1 + np.count_nonzero(gaps >= gap)) / (1 + _DRAWS)


@lru_cache
def _gaps_of_one_kind(m: int, d: int) -> Matrix:
    generator = np.random.default_rng([m, d])
    ways = (generator.standard_normal((m, d)) for _ in range(_DRAWS))
    return np.array([_gap(np.linalg.eigvalsh(_centred(cosines(drawn))).clip(min=0)) for drawn in ways])


def cosines(vectors: Vectors, centre: Matrix | None = None, rows: Labels | None = None) -> Matrix:
    """Return the cosines (m, m) of pairs of updates, 0 for one of length 0.

    An update is one of vectors (m, n), or of some rows, measured from a centre (n,), by default 0.
    """
    m = len(vectors if rows is None else rows)
    products = np.zeros((m, m))
    for columns, block in in_blocks(vectors, rows):
        updates = block if centre is None else block - centre[columns]
        products += updates @ updates.T
    lengths = np.sqrt(products.diagonal())
    lengths = np.where(lengths > 0, lengths, 1)
    clipped: Matrix = np.clip(products / lengths[:, None] / lengths, -1, 1)
    return clipped


def _centred(alike: Matrix) -> Matrix:
    """Return cosines (m, m) of updates minus their common part."""
    centred: Matrix = alike - alike.mean(axis=0)
    centred -= centred.mean(axis=1, keepdims=True)
    return centred


def _gap(values: Matrix) -> float:
    """Return the gap of eigenvalues in ascending order; centring makes the first 0."""
    above, bulk = float(values[-1] - values[-2]), float(values[-2] - values[1])
    if above <= _ROUNDING * values[-1]:
        return 0.0
    return above / bulk if bulk > _ROUNDING * values[-1] else np.inf


def _dimensions(values: Matrix) -> float:
    """Return in how many dimensions random directions have so uneven a spectrum, without its largest value.

    For m directions in d dimensions, (sum of eigenvalues)^2 / (sum of their squares) is about 1 / (1 / m + 1 / d).
    """
    rest = values[1:-1]
    total, squares = float(rest.sum()), float(np.square(rest).sum())
    if total <= _ROUNDING * values[-1]:
        return 1.0
    left = squares / total**2 - 1 / len(rest)
    return 1 / left if left > _ROUNDING else np.inf
