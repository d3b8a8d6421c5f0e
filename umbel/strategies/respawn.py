"""A hypothesis that no client trains any more is reborn as half of the largest group.

One hypothesis that fits every client best at the start wins them all; it alone is trained then, so it keeps
them, and the run has collapsed into one model. Random networks differ in ways that suit all clients alike,
and not in what tells groups of clients apart, so that this is common where models are large. Two hypotheses
that are two halves of one group's releases are equally well trained, and differ in what the clients of the
halves do differently: from there, the clients' own choices tell the groups apart.

All of it is computed from sanitised releases, so it costs no privacy.

It trusts the clients. Two hostile ones of twenty can hide two kinds from it, or have clients that are all alike split,
by releases that lie on one line. That axis cannot be set aside as one of only a few releases: so is that of a small
group, which is what a hypothesis is reborn for, and in small rounds so is now and then that of noise.
"""

from __future__ import annotations

from functools import lru_cache
from logging import INFO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from umbel.protocol.arrays import Labels, Matrix, Vectors, distances, mean_of
from umbel.protocol.flower import log

_IDLE, _TOLD = "respawn/idle", "respawn/told"
_USED = 0.25  # of the releases that each would have if all had as many
_LEAST = 2  # releases of a half
_NONE = -1  # hypothesis of a release whose own is reborn
_GAP = 0.7  # found on FEMNIST, where releases of one kind have up to .6 and those of two kinds 1 to 2
_FALSE = 0.001  # how often releases of one kind may be taken for two
_DRAWS = 999  # of releases of one kind, to see how often a gap is chance
_COUNTS = (*range(2, 13), 16, 24, 32, 48, 64)  # of releases, for which that is worked out: of fewer, gaps are larger
_WIDE = 32  # dimensions for each release from which on more make no difference
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
    """Return the next hypotheses (k, n): those that moved, where no hypothesis has been idle for `after` rounds.

    Idle is one with less than a quarter of its share of the releases, and none of them near it. A few that stray to it
    from afar are no use of it, and a small group of clients is. The strategy's `state` keeps for how long each has been
    idle, and what the last rounds have told of whether its releases are of two kinds. The rest is as for
    `umbel.strategies.base.HypothesisStrategy.reshape`.
    """
    k, share = len(hypotheses), len(labels) / len(hypotheses)
    counts = np.bincount(labels, minlength=k)
    used = [counts[j] >= _USED * share or _visited(j, hypotheses, releases, labels) for j in range(k)]
    idle = np.where(used, 0, state.get(_IDLE, np.zeros(k, np.int64)) + 1)
    told = state.get(_TOLD, np.zeros((after, k)))
    found = _sides(releases, hypotheses, labels, max(2 * _LEAST, share)) if idle.any() else {}
    now = [-np.log(found[j].chance) if j in found else 0.0 for j in range(k)]
    told = np.concatenate([told[1:], [now]])
    # Fisher's test: of one kind, twice the sum has a chi-squared distribution.
    clear = told.sum(axis=0) >= special.chdtri(2 * after, _FALSE) / 2
    torn = [j for j in found if clear[j] and found[j].gap >= _GAP and len(found[j].second) >= _LEAST]
    following, labels = moved.copy(), labels.copy()
    for j, parent in zip(np.flatnonzero(idle >= after).tolist(), torn, strict=False):
        part = found[parent].second
        log(INFO, "round %d: hypothesis %d, idle for %d rounds, is reborn from %d of the %d releases of hypothesis %d",
            round, j, idle[j], len(part), counts[parent], parent)  # fmt: skip
        labels[labels == j] = _NONE
        labels[part], idle[j] = j, 0
        told[:, [j, parent]] = 0
        for one in (parent, j):
            following[one] = mean_of(releases, np.flatnonzero(labels == one))
    state[_IDLE], state[_TOLD] = idle, told
    return following


def _visited(j: int, hypotheses: Matrix, releases: Vectors, labels: Labels) -> bool:
    """Return whether one of a hypothesis's releases is nearer to it than half of the way to any other.

    From another hypothesis such a release would have come more than half of the way, and right towards this one, as
    noise in many dimensions hardly does.
    """
    others = np.linalg.norm(np.delete(hypotheses, j, axis=0) - hypotheses[j], axis=1)
    nearest = distances(releases, hypotheses[j], np.flatnonzero(labels == j)).min(initial=np.inf)
    return bool(nearest < others.min(initial=np.inf) / 2)


class _Side(NamedTuple):
    """Of a group of releases: one side of its axis, how far that stands out, and how often by chance.

    The side is the one without the group's first release, and empty where the other has too few.
    """

    second: Labels
    gap: float
    chance: float


def _sides(releases: Vectors, hypotheses: Matrix, labels: Labels, least: float) -> dict[int, _Side]:
    """Return the sides of each group of at least `least` releases, the largest group first."""
    sizes = np.bincount(labels, minlength=len(hypotheses))
    found = {}
    for j in np.argsort(-sizes, kind="stable").tolist():
        if sizes[j] < least:
            break
        mine = np.flatnonzero(labels == j)
        sides = halves(releases[mine] - hypotheses[j])
        second = mine[sides.second] if len(mine) - sides.second.sum() >= _LEAST else mine[:0]
        found[j] = _Side(second, sides.gap, by_chance(sides.gap, len(mine), sides.dimensions))
    return found


class Halves(NamedTuple):
    """The two sides of m updates along their principal axis: who (m,) is on that without the first client.

    The gap is from the largest to the second eigenvalue of the centred cosines, as a part of the way from there to the
    smallest one that is not zero by centring. The dimensions are the directions at right angles in which the updates
    differ apart from that axis, all of them counting alike.
    """

    second: NDArray[np.bool_]
    gap: float
    dimensions: float


def halves(updates: Matrix) -> Halves:
    """Return the two sides of updates (m, n), for m of at least 4, along their principal axis.

    Each update counts as long as any other: noise is as long as a multiple of its own update, and would else make a
    side of the longest one. In many dimensions noise of different clients is at right angles to all else, so that it
    adds as much to each eigenvalue: it changes neither the axis nor the gap. Lloyd's iterations with two means, in
    which each release is near to the mean that it is part of, would stay wherever they begin.
    """
    values, axes = np.linalg.eigh(_centred(cosines(updates)))
    values = values.clip(min=0)
    side = axes[:, -1] > 0
    return Halves(side != side[0], _gap(values), _dimensions(values))


def by_chance(gap: float, count: int, dimensions: float) -> float:
    """Return how often so many updates of one kind, in so many dimensions, have so large a gap.

    Counted in sets of directions drawn at random. In one dimension, or with a few updates, any gap can be chance.
    """
    m = max(possible for possible in _COUNTS if possible <= count)
    # By powers of two, from below: in fewer dimensions gaps are larger.
    gaps = _gaps_of_one_kind(m, int(2 ** np.floor(np.log2(np.clip(dimensions, 1, _WIDE * m)))))
    return float(1 + np.count_nonzero(gaps >= gap)) / (1 + _DRAWS)


@lru_cache
def _gaps_of_one_kind(m: int, d: int) -> Matrix:
    generator = np.random.default_rng([m, d])
    ways = (generator.standard_normal((m, d)) for _ in range(_DRAWS))
    return np.array([_gap(np.linalg.eigvalsh(_centred(cosines(one))).clip(min=0)) for one in ways])


def cosines(updates: Matrix) -> Matrix:
    """Return the cosine (m, m) of each two of updates (m, n), 0 with one of length 0."""
    lengths = np.linalg.norm(updates, axis=1, keepdims=True)
    unit = updates / np.where(lengths > 0, lengths, 1)
    found: Matrix = np.clip(unit @ unit.T, -1, 1)
    return found


def _centred(alike: Matrix) -> Matrix:
    """Return cosines (m, m) of updates, less what all updates have in common."""
    centred: Matrix = alike - alike.mean(axis=0)
    centred -= centred.mean(axis=1, keepdims=True)
    return centred


def _gap(values: Matrix) -> float:
    """Return the gap of eigenvalues in ascending order, the first of which is 0 by centring."""
    above, bulk = float(values[-1] - values[-2]), float(values[-2] - values[1])
    if above <= _ROUNDING * values[-1]:
        return 0.0
    return above / bulk if bulk > _ROUNDING * values[-1] else np.inf


def _dimensions(values: Matrix) -> float:
    """Return the dimensions of which random directions have so uneven a spectrum, its largest value left out.

    Of m in d dimensions, (sum of eigenvalues)^2 / (sum of their squares) is about 1 / (1 / m + 1 / d).
    """
    rest = values[1:-1]
    total, squares = float(rest.sum()), float(np.square(rest).sum())
    if total <= _ROUNDING * values[-1]:
        return 1.0
    left = squares / total**2 - 1 / len(rest)
    return 1 / left if left > _ROUNDING else np.inf
