"""The interface of a mechanism: noise on a client's update, its cost, and its privacy loss.

A mechanism adds noise to vectors of n numbers, in units of the radius that they lie within. Its price has two forms:
pure epsilon, which adds up, and the privacy loss of one release, from which `umbel.privacy.accounting.accountant`
computes epsilon at a delta.

`umbel.privacy.mechanisms.sanitise` calls `constrain` and `noise` for each update. The radius there is the clip norm.

To write your own, subclass `Mechanism` or a built-in mechanism, and name it in the run config:
``mechanism = "package.module:Class"``. A site must allow that name in its own ``mechanisms``. docs/guides/extend.md has
a whole example.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.errors import Refused

Matrix = NDArray[np.float64]


class ByteSource(Protocol):
    """A source of random bytes."""

    def bytes(self, length: int, /) -> bytes:
        """Return random bytes."""


class NoiseSource(ByteSource, Protocol):
    """The part of ``numpy.random.Generator`` that mechanisms draw from."""

    def standard_normal(self, size: int, /) -> Matrix:
        """Return independent standard normals."""

    def standard_gamma(self, shape: float, /) -> float:
        """Return a gamma variate of scale 1."""

    def random(self, size: int, /) -> Matrix:
        """Return independent numbers, uniform in [0, 1)."""


@dataclass(frozen=True)
class Mechanism(ABC):
    """Additive noise on vectors of n numbers, in units of the radius.

    Attributes
    ----------
    noise_multiplier : float
        nu, finite and above 0; its meaning depends on the mechanism.
    """

    noise_multiplier: float

    name: ClassVar[str]
    public_only: ClassVar[bool] = False
    """Whether it needs a public radius; it then does not accept the norm of an update."""

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise ValueError(f"the noise multiplier must be finite and above 0, got {self.noise_multiplier}")

    def constrain(self, updates: Matrix, radius: float) -> Matrix:
        """Return `updates` (m, n) with each row moved to within `radius`: here by projection on the Euclidean ball."""
        return clip(updates, radius)

    @abstractmethod
    def noise(self, sizes: Sequence[int], radii: Matrix, generators: Iterator[NoiseSource]) -> Matrix:
        """Draw noise: in each row independent vectors of the given sizes, side by side.

        Parameters
        ----------
        sizes : sequence of int
            Number of components in each part of a row.
        radii : ndarray, shape (m, parts)
            Part p of row i is scaled to ``radii[i, p]``.
        generators : iterator of NoiseSource, one a row
            Each is used up before the next is taken.

        Returns
        -------
        ndarray of float64, shape (m, sum(sizes))

        Raises
        ------
        ValueError
            If there are fewer generators than rows.
        """

    @abstractmethod
    def deviation(self, n: int) -> float:
        """Return the standard deviation of one of n components at radius 1."""

    def longest(self, n: int, rare: float) -> float:
        """Return a norm that noise of n components at radius 1 exceeds with probability below exp(-rare), or
        infinity."""
        return math.inf

    def count_radius(self, choice_epsilon: float) -> float:
        """Return the radius of each count in a site's release, which says how many clients chose each hypothesis.

        Sums of updates have the clients' radius, and counts this one. A change of any one client, its choice included,
        must then cost at most ``pure(n, 2)`` plus `choice_epsilon`, or ``loss(n, 2)`` if there is no pure bound. The
        client may move one sum by 2 radii, or two sums by 1 each and two counts by 1 each. At delta the account takes
        the worse of ``loss(n, 2)`` and of twice ``loss(n, 1)`` with twice ``loss(1, 1 / count_radius)``.

        Raises
        ------
        Refused
            If no such radius exists, also for mechanisms that do not define this method.
        """
        raise Refused(
            f"mechanism {type(self).__name__!r} does not say how a site's release hides which hypothesis each client "
            "chose; ask for 1 hypothesis, or give it a method count_radius",
            code="refused.open-choice",
        )

    @abstractmethod
    def pure(self, n: int, distance: int) -> Fraction | None:
        """Return epsilon at delta = 0 between two inputs `distance` radii apart; None if it is infinite.

        Exact except for the rounding up in `umbel.protocol.release.quotient`.
        """

    @abstractmethod
    def loss(self, n: int, distance: float) -> Loss | None:
        """Return a loss that bounds the privacy loss between any two inputs at most `distance` radii apart.

        None if no bound is known: then there is no guarantee, and sites with a budget refuse the mechanism.
        """


def clip(updates: Matrix, radius: float) -> Matrix:
    """Scale the rows of `updates` (m, n) that are longer than `radius` down to it; without any, return `updates`."""
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    if not (norms > radius).any():
        return updates
    shrink = np.divide(radius, norms, out=np.ones_like(norms), where=norms > radius)
    clipped: Matrix = updates * shrink
    return clipped


def each(generators: Iterator[NoiseSource], rows: int) -> Iterator[NoiseSource]:
    """Yield one generator a row, each only when it is needed; `ValueError` if there are fewer."""
    return islice(chain(generators, _missing()), rows)


def _missing() -> Iterator[NoiseSource]:
    raise ValueError("there are fewer generators than clients")
    yield


def stacked(rows: Sequence[Matrix], n: int) -> Matrix:
    """Return rows (n,), made only for this, as a matrix (m, n); a single row, which may be long, is not copied."""
    return rows[0][None] if len(rows) == 1 else np.array(rows).reshape(len(rows), n)


class Loss(ABC):
    """The privacy loss of one release between two inputs; the same for adding and removing.

    With P and Q the distributions of the release for one input and the other, L = log(dP/dQ) under P. It is symmetric:
    log(dQ/dP) under Q has the distribution of L. Subclasses are frozen dataclasses, so that equal losses are
    counted and cached as one.
    """

    @property
    @abstractmethod
    def mean(self) -> float:
        """E[L]. Like `deviation` it only serves to choose a grid, so it may be approximate."""

    @property
    @abstractmethod
    def deviation(self) -> float:
        """Standard deviation of L."""

    @property
    @abstractmethod
    def largest(self) -> float:
        """The largest loss possible: epsilon at delta = 0; infinite for the Gaussian mechanism."""

    @abstractmethod
    def delta(self, epsilons: Matrix) -> Matrix:
        """Return the hockey-stick divergence delta(epsilon) = E[(1 - exp(epsilon - L))+].

        Accurate to 1e-12, and at epsilon >= 0 also to about nine digits: the accountant multiplies small values by the
        number of participations.

        Parameters
        ----------
        epsilons : ndarray, shape (m,)
            Any real numbers, in any order.

        Returns
        -------
        ndarray, shape (m,)
        """


def of_any_sign(epsilons: Matrix, positive: Matrix) -> Matrix:
    """Return delta at `epsilons` from `positive`, its values at their sizes: delta(-e) = 1 - exp(-e) + exp(-e)
    delta(e)."""
    size = np.abs(epsilons)
    delta: Matrix = np.where(epsilons >= 0, positive, np.exp(-size) * positive - np.expm1(-size))
    return delta
