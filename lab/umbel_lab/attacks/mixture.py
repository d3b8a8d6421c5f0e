"""Taking a sum of several clients' updates apart: by the items that only one of them moved, or by sums of others.

A client moves the items that it labelled along its own vector (*PAC identifiability in federated personalization*, Eq.
1), and no others. So a row of a sum, an item, that only one client moved points along that client's vector. Such rows
lie on few lines through 0, one for each client; rows that several clients moved do not. `lines` finds the lines on
which most rows lie, by iteratively reweighted least squares, as `umbel_lab.attacks.small_batch` finds sparse
directions.

A server that chooses the members of its sums needs no such structure. The difference of two sums is the update of the
client that is in only one of them, and many sums are a system of linear equations (`parts`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

_ROWS = 4096  # which the search looks at
_STARTS = 600  # rows from which it starts, beside the d main directions
_STEPS = 10
_EXACT = 1e-3  # distance from a line, relative to the longest row, within which a row lies on it if there is no noise
_SAME = 0.98  # cosine from which two lines are one


def lines(rows: Matrix, count: int, noise: float, generator: np.random.Generator) -> Matrix:
    """Return the directions of the lines through 0 on which most rows lie.

    Parameters
    ----------
    rows : ndarray, shape (R, d)
    count : int
        Maximum number of lines, at least 1.
    noise : float
        Standard deviation of the noise in each number.
    generator : Generator
        Draws the rows that the search looks at, and starts from.

    Returns
    -------
    ndarray, shape (at most count, d)
        Each of length 1, the best first. Signs mean nothing. Empty if all rows are 0.
    """
    rows = rows[rows.any(axis=1)]
    rows = generator.permutation(rows)[:_ROWS]
    if not len(rows):
        return rows
    lengths = np.linalg.norm(rows, axis=1)
    near = max(_EXACT * lengths.max(), noise * np.sqrt(rows.shape[1] - 1)) ** 2
    ways = np.concatenate([np.linalg.svd(rows, full_matrices=False)[2], rows[:_STARTS] / lengths[:_STARTS, None]])
    products = rows[:, :, None] * rows[:, None, :]
    for _ in range(_STEPS):
        moments = np.tensordot(1 / (_distances(rows, ways) + near), products, axes=1)
        ways = np.linalg.eigh(moments)[1][:, :, -1]
    costs = np.log(_distances(rows, ways) + near).sum(axis=1)
    found: list[Matrix] = []
    for way in ways[costs.argsort(kind="stable")]:
        if len(found) < count and all(abs(float(way @ other)) < _SAME for other in found):
            found.append(way)
    return np.stack(found)


def _distances(rows: Matrix, ways: Matrix) -> Matrix:
    """Return the squared distance of each row (R, d) from the line along each way (s, d), as (s, R)."""
    apart: Matrix = np.maximum(np.square(rows).sum(axis=1) - np.square(ways @ rows.T), 0)
    return apart


def parts(members: NDArray[np.bool_], sums: Matrix) -> Matrix:
    """Return each client's part of some sums by least squares; the shortest one if the sums leave it open.

    Parameters
    ----------
    members : ndarray of bool, shape (T, N)
        Whether a client is in a sum.
    sums : ndarray, shape (T, n)

    Returns
    -------
    ndarray, shape (N, n)
    """
    found: Matrix = np.linalg.pinv(members.astype(np.float64)) @ sums
    return found
