"""The privacy blanket of a client's release: the part of its distribution that no data set of the client can change.

A release has two parts: the hypothesis that the client trained, one of k, and the vector y, its noisy update in units
of the clip norm. For any data set, randomised response has probabilities of at least q = 1/(e^c + k - 1), where c is
choice-epsilon, and the centre of the noise lies in the unit ball. Let f be the density of the noise, which falls with
the length of y. Then the density of the release is at least the blanket

    omega(j, y) = q g(y),    g(y) = f(|y| + 1).

The two extreme data sets prefer different hypotheses. Their updates are e and -e for a unit vector e and any
hypothesis (docs/how/secure-and-anonymous.md has the proof). Their densities are p = A omega and p' = B omega
with

    A = alpha f(|y - e|)/f(|y| + 1),    B = beta f(|y + e|)/f(|y| + 1),

and (alpha, beta) = (e^c, 1) for one hypothesis, (1, e^c) for another, (1, 1) for the k - 2 others. Let r be the length
of y, and theta its angle with e. A grows with r and falls with theta, and B grows with both. So corners of a cell give
the ranges of A and B in it. The cell's mass and the means of A and B are integrals of smooth functions.

For two data sets whose updates lie only a distance d < 2 apart, and that prefer the same hypothesis, let their middle c
be the origin. The updates are h e and -h e with h = d/2. Both lie in the unit ball, so c is no longer than the root of
1 - h^2, and |y| + 1 <= |y - c| + R with R = 1 + sqrt(1 - h^2). So f(|y - c| + R) q is a blanket as well, and all of the
above holds with h e in place of e, R in place of 1, and alpha = beta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

from umbel.privacy.mechanisms.base import Matrix, Mechanism
from umbel.privacy.mechanisms.gaussian import Gaussian
from umbel.privacy.mechanisms.laplace import Laplace

OUTSIDE = 1e-16
"""Bound on the probability that a release lies outside all cells. It is added to delta."""

FURTHEST = 2.0
"""The largest distance of two updates, in clip norms."""

# Probability of each tail that no cell covers, and of all cells that are left out because they are rarer.
_TAIL, _RARE = 1e-17, 5e-17
# Cells by length and by angle, and nodes of the quadrature on each side of a cell.
_LENGTHS, _ANGLES, _NODES = 96, 160, 4
# The share by which the mass of a blanket is lowered, for rounding errors; a smaller blanket is a blanket.
_SHARE = 1e-8
# The largest logarithm of a ratio, for noise and for the choice. Beyond it a batch hides nothing, and squares of
# ratios may overflow.
_LARGEST = 70.0


@dataclass(frozen=True)
class Cells:
    """A release split into cells: ratios of the extreme densities to the blanket.

    Attributes
    ----------
    mass : ndarray, shape (m,)
        The blanket's mass of each cell; the sum is at most 1.
    first, second : ndarray, shape (3, m)
        Least, mean and largest value of A, and of B, where the mean is weighted by the blanket. For a fixed length,
        A falls and B grows with the angle. So both are at their least and largest values in opposite corners.
    """

    mass: Matrix
    first: Matrix
    second: Matrix


@lru_cache(maxsize=16)
def blanket(
    mechanism: Mechanism | None, n: int, hypotheses: int, choice_epsilon: float, distance: float = FURTHEST
) -> Cells | None:
    """Return the blanket of a release: of noise on n numbers, and of the choice.

    Parameters
    ----------
    mechanism : Mechanism or None
        None for a choice without a vector.
    n : int
    hypotheses : int
        k.
    choice_epsilon : float
        Of randomised response; ignored for one hypothesis.
    distance : float
        Of the updates of the two data sets, in clip norms. Below `FURTHEST` both prefer the same hypothesis.

    Returns
    -------
    Cells or None
        None if ratios exceed what floats hold.
    """
    noise = Cells(np.ones(1), np.ones((3, 1)), np.ones((3, 1))) if mechanism is None else _noise(mechanism, n, distance)
    if noise is None or hypotheses == 1:
        return noise
    if choice_epsilon > _LARGEST:
        return None
    more = math.exp(choice_epsilon)
    rare = 1 / (more + hypotheses - 1)
    kinds = [(more, 1.0, rare), (1.0, more, rare), (1.0, 1.0, rare * (hypotheses - 2))]
    if distance < FURTHEST:
        kinds = [(more, more, rare), (1.0, 1.0, rare * (hypotheses - 1))]
    kinds = [kind for kind in kinds if kind[2]]
    return Cells(
        np.concatenate([share * noise.mass for _, _, share in kinds]),
        np.hstack([alpha * noise.first for alpha, _, _ in kinds]),
        np.hstack([beta * noise.second for _, beta, _ in kinds]),
    )


def covered(mechanism: Mechanism) -> bool:
    """Return whether the blanket of a mechanism is known."""
    return type(mechanism) in (Laplace, Gaussian)


@dataclass(frozen=True)
class _Pair:
    """h, the distance of both updates from their middle, and R, by which the blanket's noise is longer."""

    half: float
    reach: float

    @classmethod
    def at(cls, distance: float) -> _Pair:
        half = distance / 2
        return cls(half, 1 + math.sqrt(1 - half * half))


@lru_cache(maxsize=4)
def _noise(mechanism: Mechanism, n: int, distance: float) -> Cells | None:
    """Return the cells of one hypothesis; None if ratios are too large."""
    pair = _Pair.at(distance)
    lengths, angles = _edges(mechanism, n, pair.half)
    if float(_log_ratio(mechanism, n, lengths[-1], 1.0, pair)) > _LARGEST:
        return None
    mass, *means = _integrals(mechanism, n, lengths, angles, _NODES, pair)
    # Where a density has a kink, the quadrature is less exact. Its error is far below the change from fewer nodes.
    errors = [
        np.abs(mean - less)
        for mean, less in zip(means, _integrals(mechanism, n, lengths, angles, _NODES - 1, pair)[1:], strict=True)
    ]
    starts, ends = (np.array([1.0, -1.0]),) * 2 if n == 1 else (np.cos(angles[:-1]), np.cos(angles[1:]))
    low, high = lengths[:-1, None], lengths[1:, None]
    first = [np.exp(_log_ratio(mechanism, n, r, cosine, pair)) for r, cosine in ((low, ends), (high, starts))]
    second = [np.exp(_log_ratio(mechanism, n, r, -cosine, pair)) for r, cosine in ((low, starts), (high, ends))]
    first.insert(1, np.minimum(means[0] + errors[0], first[1]))
    second.insert(1, np.maximum(means[1] - errors[1], second[0]))
    # The probability of a cell under the first data set, mass times mean, is what leaving it out costs.
    chance = (mass * means[0]).ravel()
    order = np.argsort(chance)
    keep = order[np.cumsum(chance[order]) > _RARE]
    ratios = (np.stack([one.ravel()[keep] for one in side]) / (1 - _SHARE) for side in (first, second))
    return Cells(mass.ravel()[keep] * (1 - _SHARE), *ratios)


def _integrals(mechanism: Mechanism, n: int, lengths: Matrix, angles: Matrix, nodes: int, pair: _Pair) -> list[Matrix]:
    """Return the mass of each cell and the means of A and B in it, shape (lengths, angles); (lengths, 2) if n = 1."""
    r, weights = _nodes(lengths, nodes)
    # The length of noise has a density proportional to r^(n-1) f(r). The blanket has f(r + R) in place of f(r).
    radial = (
        np.exp((n - 1) * np.log(r) + _log_density(mechanism, n, r + pair.reach) - _log_total(mechanism, n)) * weights
    )
    if n == 1:
        cosines, directions = np.array([[1.0], [-1.0]]), np.full((2, 1), 0.5)
    else:
        theta, weights = _nodes(angles, nodes)
        directions = np.exp((n - 2) * np.log(np.sin(theta)) - special.betaln((n - 1) / 2, 0.5)) * weights
        cosines = np.cos(theta)
    mass = np.outer(radial.sum(1), directions.sum(1))
    found = [mass]
    for sign in (1, -1):
        ratio = np.exp(_log_ratio(mechanism, n, r[:, :, None, None], sign * cosines, pair))
        found.append(np.einsum("ia,jb,iajb->ij", radial, directions, ratio) / np.maximum(mass, 1e-300))
    return found


def _edges(mechanism: Mechanism, n: int, half: float) -> tuple[Matrix, Matrix]:
    """Return the edges of the cells by length and by angle, which hold nearly all noise around either centre."""
    if isinstance(mechanism, Gaussian):
        short, long = np.sqrt(2 * np.array([special.gammaincinv(n / 2, _TAIL), special.gammainccinv(n / 2, _TAIL)]))
        short, long = short * mechanism.noise_multiplier, long * mechanism.noise_multiplier
    else:
        short, long = special.gammaincinv(n, _TAIL), special.gammainccinv(n, _TAIL)
        short, long = (length * mechanism.noise_multiplier / n for length in (short, long))
    # A centre moves a length by at most h.
    low, high = max(short - half, 0.0), long + half
    if low < half:
        # Densities have a kink at the length h, and ratios change over lengths as they are below it, and over their
        # logarithm above.
        near = max(1, round(_LENGTHS * (1 - low / half) / (1 - low / half + math.log(high / half))))
        lengths = np.concatenate(
            [np.linspace(low, half, near, endpoint=False), np.geomspace(half, high, _LENGTHS - near + 1)]
        )
    else:
        lengths = np.geomspace(low, high, _LENGTHS + 1)
    # A cosine exceeds this with probability _TAIL, and moving the centre moves it by at most 2 h / length.
    most = 1.0 if n == 1 else math.sqrt(1 - special.betaincinv((n - 1) / 2, 0.5, 2 * _TAIL)) + 2 * half / short
    widest = math.pi / 2 if most >= 1 else math.asin(most)
    return lengths, np.linspace(math.pi / 2 - widest, math.pi / 2 + widest, _ANGLES + 1)


def _nodes(edges: Matrix, nodes: int) -> tuple[Matrix, Matrix]:
    """Return the nodes and weights of Gauss and Legendre's quadrature between edges, shape (cells, nodes)."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    half = np.diff(edges)[:, None] / 2
    return edges[:-1, None] + half * (1 + points), half * weights


def _log_density(mechanism: Mechanism, n: int, length: Matrix) -> Matrix:
    """Return log f up to a constant."""
    nu = mechanism.noise_multiplier
    return -np.square(length / nu) / 2 if isinstance(mechanism, Gaussian) else -length * (n / nu)


def _log_total(mechanism: Mechanism, n: int) -> float:
    """Return the logarithm of the integral of r^(n-1) f(r) over all lengths r."""
    nu = mechanism.noise_multiplier
    if isinstance(mechanism, Gaussian):
        return float(n * math.log(nu) + (n / 2 - 1) * math.log(2) + special.gammaln(n / 2))
    return float(special.gammaln(n) + n * math.log(nu / n))


def _log_ratio(mechanism: Mechanism, n: int, r: Matrix, cosine: Matrix | float, pair: _Pair) -> Matrix:
    """Return log f(|y - h e|) - log f(|y| + R) at the length r of y and the cosine between y and e."""
    nu, h, reach = mechanism.noise_multiplier, pair.half, pair.reach
    # The difference of the squares of r + R and of the distance.
    squares = 2 * r * (reach + h * cosine) + reach**2 - h**2
    if isinstance(mechanism, Gaussian):
        return squares / (2 * nu**2)
    # The difference itself, as the quotient of that of the squares by the sum.
    return squares / (r + reach + np.sqrt(np.square(r - h) + 2 * r * h * (1 - cosine))) * (n / nu)
