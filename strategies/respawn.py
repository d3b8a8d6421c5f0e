"""A hypothesis that nobody trains any more is reborn as half of the largest group.

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

from logging import INFO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.flower import log
from strategies.cosines import cosines

_IDLE = "respawn/idle"
_USED = 0.25  # of the releases that each would have if all had as many
_LEAST = 2  # releases of a half
_NOBODY = -1  # hypothesis of a release whose own is reborn
_GAP = 0.7  # found on FEMNIST, where releases of one kind have up to .6 and those of two kinds 1 to 2


def respawned(
    state: dict[str, NDArray[Any]],
    after: int,
    round: int,
    moved: NDArray[np.float64],
    hypotheses: NDArray[np.float64],
    releases: NDArray[np.float64],
    labels: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return the next hypotheses (k, n): those that moved, where no hypothesis has been idle for too long.

    Parameters
    ----------
    state : dict of ndarray
        The strategy's; the rounds that each hypothesis has been idle are kept there.
    after : int
        Rounds in a row with hardly a release after which a hypothesis is reborn.
    round : int
    moved, hypotheses : ndarray, shape (k, n)
        After and before the round.
    releases : ndarray, shape (m, n)
    labels : ndarray of int, shape (m,)
        The hypothesis of each release.
    """
    k, share = len(hypotheses), len(labels) / len(hypotheses)
    used = np.bincount(labels, minlength=k) >= _USED * share
    idle = np.where(used, 0, state.get(_IDLE, np.zeros(k, np.int64)) + 1)
    following, labels = moved.copy(), labels.copy()
    for j in np.flatnonzero(idle >= after).tolist():
        found = _torn(releases, hypotheses, labels, max(2 * _LEAST, share))
        if found is None:
            break
        parent, part = found
        log(INFO, "round %d: hypothesis %d, idle for %d rounds, is reborn from %d of the %d releases of hypothesis %d",
            round, j, idle[j], len(part), (labels == parent).sum(), parent)  # fmt: skip
        labels[labels == j] = _NOBODY
        labels[part], idle[j] = j, 0
        for one in (parent, j):
            following[one] = releases[labels == one].mean(axis=0)
    state[_IDLE] = idle
    return following


def _torn(
    releases: NDArray[np.float64], hypotheses: NDArray[np.float64], labels: NDArray[np.int64], least: float
) -> tuple[int, NDArray[np.int64]] | None:
    """Return the largest group that clearly consists of two, and the releases of one of these; None if there is none.

    Only groups of at least `least` releases count: a few points fall into two by chance.
    """
    sizes = np.bincount(labels[labels != _NOBODY], minlength=len(hypotheses))
    for j in np.argsort(-sizes, kind="stable").tolist():
        if sizes[j] < least:
            break
        mine = np.flatnonzero(labels == j)
        second, gap = halves(releases[mine] - hypotheses[j])
        if gap >= _GAP and _LEAST <= second.sum() <= len(mine) - _LEAST:
            return j, mine[second]
    return None


def halves(updates: NDArray[np.float64]) -> tuple[NDArray[np.bool_], float]:
    """Return the two sides of the mean of updates along their principal axis, and how far the axis stands out.

    Each update counts as long as any other: noise is as long as a multiple of its own update, and would else make the
    longest one a side of its own. In many dimensions noise of different clients is at right angles to all else, so
    that it adds as much to each eigenvalue: it changes neither the axis nor the gap. Lloyd's iterations with two
    means, in which each release is near to the mean that it is part of, would stay wherever they begin.

    Parameters
    ----------
    updates : ndarray, shape (m, n)
        Of at least four clients.

    Returns
    -------
    second : ndarray of bool, shape (m,)
        Who is on the side without the first client.
    gap : float
        From the largest to the second eigenvalue of the centred cosines, as a part of the way from there to the
        smallest one that is not zero by centring.
    """
    alike = cosines(updates)
    centred = alike - alike.mean(axis=0)
    centred -= centred.mean(axis=1, keepdims=True)
    values, axes = np.linalg.eigh(centred)
    side = axes[:, -1] > 0
    bulk = float(values[-2] - values[1])
    return side != side[0], float(values[-1] - values[-2]) / bulk if bulk > 0 else np.inf
