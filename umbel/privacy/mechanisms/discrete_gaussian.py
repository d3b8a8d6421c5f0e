"""The discrete Gaussian mechanism: noise on a grid that is drawn exactly (Canonne, Kamath and Steinke 2020).

An update is clipped and moved to a grid of powers of two (`to_grid`), so that its norm does not exceed the radius.
The noise is an integer number x of steps with a probability proportional to exp(-x^2/(2 s^2)), s being nu radii in
steps. Update and noise add up without rounding. So the guarantee holds for the computed numbers, without assumptions on
floating point: between inputs a distance d apart, in radii, the release is rho-zCDP with rho = (d/nu)^2/2
(Proposition 5 and its sum over components), for any number of components.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from umbel.privacy.mechanisms.base import ByteSource, Loss, Matrix, Mechanism, NoiseSource, clip, each, of_any_sign
from umbel.protocol.errors import Refused
from umbel.protocol.release import DISCRETE_GAUSSIAN

_STEPS = 256  # minimum steps of the grid in a standard deviation
FINE = 2.0  # steps that a number of a clipped update has at least, in the quadratic mean, where a table is large enough
_LEAST = 0.5  # the same, below which numbers of the quadratic mean are rounded to 0
_MOST_STEPS = 1 << 15
_MARGIN = 1.2  # of the square by which an update is too long
_WORD = 64
_BLOCK = 1 << 14  # words that are decided together, which fit a cache
_GUIDE_BITS, _BEGINNINGS = 18, 40
"""Most first bits of a word that a guide looks at, and beginnings for each step of the deviation."""
_GUARD = 160  # extra bits in a table
_LOST = 1 << 80  # a generous bound, in units of these bits, on the error of a sum by rounding and by the table's ends
SHORTER = 1 - 2.0**-20
"""Factor on a radius: more than the rounding of a norm of 2**32 numbers can add."""


@dataclass(frozen=True)
class DiscreteGaussian(Mechanism):
    """Integer steps of a public grid, normal with deviation `noise_multiplier` times the radius; public radii only."""

    name: ClassVar[str] = DISCRETE_GAUSSIAN
    public_only: ClassVar[bool] = True

    def constrain(self, updates: Matrix, radius: float) -> Matrix:
        step, _ = self._grid(radius, updates.shape[1])
        inside: Matrix = to_grid(updates, radius, step) * step
        return inside

    def noise(self, sizes: Sequence[int], radii: Matrix, generators: Iterator[NoiseSource]) -> Matrix:
        noise = np.empty((len(radii), sum(sizes)))
        ends = np.cumsum(sizes)
        for row, own, source in zip(noise, radii, each(generators, len(radii)), strict=True):
            for part, radius in zip(np.split(row, ends[:-1]), own, strict=True):
                step, scale = self._grid(float(radius), len(part))
                part[:] = draw(scale, len(part), source) * step
        return noise

    def _grid(self, radius: float, n: int) -> tuple[float, float]:
        """Return the step at a radius, a power of two no larger than the radius, and nu radii in steps, rounded up.

        An update of n numbers has numbers of radius / sqrt(n). A coarse grid would round all of them to zero.
        """
        deviation = math.nextafter(self.noise_multiplier * radius, math.inf)
        coarsest = min(math.floor(math.log2(deviation / _STEPS)), math.floor(math.log2(radius)))
        finest = math.ceil(math.log2(deviation / _MOST_STEPS))
        if finest > coarsest:
            raise Refused(
                f"mechanism discrete-gaussian draws noise of at most {_MOST_STEPS} clip norms, but noise multiplier "
                f"{self.noise_multiplier:g} needs more; lower it, or use mechanism gaussian",
                code="refused.noise-out-of-range",
            )
        wanted = math.floor(math.log2(radius / (FINE * math.sqrt(n))))
        step = 2.0 ** min(coarsest, max(finest, wanted))
        check_fine(radius / step, n, self.noise_multiplier)
        return step, deviation / step

    def deviation(self, n: int) -> float:
        return self.noise_multiplier

    def longest(self, n: int, rare: float) -> float:
        """Return the bound of a vector of sub-Gaussian components (Hsu, Kakade and Zhang 2012, Theorem 2.1)."""
        return self.noise_multiplier * math.sqrt(n + 2 * math.sqrt(n * rare) + 2 * rare)

    def count_radius(self, choice_epsilon: float) -> float:
        """Return 1, as for `Gaussian`: the squares of all moves sum to at most 4."""
        return 1.0

    def pure(self, n: int, distance: int) -> Fraction | None:
        return None

    def loss(self, n: int, distance: float) -> Loss:
        moved = distance / self.noise_multiplier
        return ConcentratedLoss(moved * moved / 2)  # infinite if the noise is so small that it overflows


def check_fine(weight: float, n: int, noise_multiplier: float) -> None:
    """Raise `Refused` if updates of n numbers, of `weight` steps in a clip norm, would nearly all be rounded to 0."""
    if weight < _LEAST * math.sqrt(n):
        raise Refused(
            f"noise multiplier {noise_multiplier:g} needs a grid that rounds updates of {n:,} numbers to 0; use less "
            "noise, fewer parameters, or mechanism gaussian",
            code="refused.noise-out-of-range",
        )


def to_grid(updates: Matrix, radius: float, step: float) -> Matrix:
    """Return updates (m, n), clipped to a radius, in whole steps; no norm exceeds the radius.

    Each number is rounded to the nearest step. Rounding all towards zero would shorten updates of many small numbers.
    An update that rounding makes too long is made shorter before it, and as a last resort is rounded towards zero.
    """
    longest = radius * SHORTER / step
    inside = clip(updates, radius * SHORTER) / step
    rounded: Matrix = np.rint(inside)
    for last in (False, False, True):
        # Squares of whole numbers, so this comparison is exact.
        squares = np.einsum("ij,ij->i", rounded, rounded)
        long = squares > longest**2
        if not long.any():
            break
        if last:
            rounded[long] = np.trunc(inside[long])
            break
        shares = (squares[long] - longest**2) / np.maximum(squares[long], 1)
        factors = np.sqrt(np.maximum(1 - _MARGIN * shares, 0))[:, None]
        if long.all():  # a large model: in place, since memory takes longer than arithmetic
            np.rint(np.multiply(inside, factors, out=rounded), out=rounded)
        else:
            rounded[long] = np.rint(inside[long] * factors)
    return rounded


def draw(scale: float, count: int, source: ByteSource) -> NDArray[np.int64]:
    """Return independent integers, x with a probability proportional to exp(-x^2/(2 scale^2)), exactly.

    This is the smallest x with U < P(X <= x), U uniform in [0, 1). 64 bits of U nearly always decide; otherwise more
    bits of U are compared with more bits of the probabilities, until they do.
    """
    guide, values, undecided = _guide(scale), np.empty(count, np.int64), dict[int, int]()
    for begin in range(0, count, _BLOCK):
        block = values[begin : begin + _BLOCK]
        words = np.frombuffer(source.bytes(len(block) * _WORD // 8), np.uint64)
        found = guide.places(words)
        np.add(found, guide.first, out=block)
        # A word that equals a limit's first bits may lie on either side of the limit, or beyond an end of the table.
        open_ = (words == guide.limits[found - 1]) | (words == 0) | (found == len(guide.limits) - 1)
        undecided |= {begin + int(index): int(words[index]) for index in np.flatnonzero(open_)}
    for index, word in undecided.items():
        values[index] = _decide(scale, word, source)
    return values


@dataclass(frozen=True)
class _Guide:
    """A table of limits, and where to begin in it for the first bits of a word: a search of it would take longer."""

    first: int  # the number below the first limit
    limits: NDArray[np.uint64]  # ascending; the last is the largest word, which stands for the end
    # For each beginning how many limits are at most the smallest word with it; -1 if more than one limit has it.
    starts: NDArray[np.int32]
    shift: np.uint64  # the bits of a word behind its first ones

    def places(self, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return for each word how many limits it reaches."""
        found = self.starts[(words >> self.shift).astype(np.intp)].astype(np.int64)
        crowded = np.flatnonzero(found < 0)
        found += words >= self.limits[found]
        found[crowded] = self.limits[:-1].searchsorted(words[crowded], side="right")
        return np.minimum(found, len(self.limits) - 1, out=found)


@lru_cache(maxsize=8)
def _guide(scale: float) -> _Guide:
    first, table = _table(scale, _WORD)
    limits = np.array([*table, (1 << _WORD) - 1], np.uint64)
    bits = min(_GUIDE_BITS, math.ceil(math.log2(_BEGINNINGS * max(scale, 1.0))))
    shift = np.uint64(_WORD - bits)
    starts = limits[:-1].searchsorted(np.arange(1 << bits, dtype=np.uint64) << shift, side="right")
    starts[np.diff(starts, append=len(table)) > 1] = -1
    return _Guide(first, limits, starts.astype(np.int32), shift)


def _decide(scale: float, word: int, source: ByteSource) -> int:
    """Return the number for an undecided word, drawing as many more words as it takes."""
    bits = _WORD
    while True:
        bits += _WORD
        word = word << _WORD | int.from_bytes(source.bytes(_WORD // 8), "little")
        first, table = _table(scale, bits)
        above = next((place for place, limit in enumerate(table) if limit > word), len(table))
        if word and above < len(table) and (above == 0 or table[above - 1] != word):
            return above + first


@lru_cache(maxsize=64)
def _table(scale: float, bits: int) -> tuple[int, list[int]]:
    """Return the first x of a table, and floor(2^bits P(X <= x)) from x on while it is above 0 and below the maximum.

    It is computed between two bounds in fixed point, with increasing guard bits until both have the same floor.
    """
    guard = _GUARD
    while True:
        one = 1 << (bits + guard)
        # Beyond it lie less than 1 + scale^2 units.
        reach = math.ceil(scale * math.sqrt(2 * math.log(2) * (bits + guard))) + 1
        masses = _masses(scale, reach, bits + guard)
        total = masses[0] + 2 * sum(masses[1:])
        sums = [below * one // total for below in accumulate([*masses[:0:-1], *masses])]
        low, high = ([(below + change) >> guard for below in sums] for change in (-_LOST, _LOST))
        inner = [place for place, limit in enumerate(high) if 0 < limit < (1 << bits) - 1]
        if all(low[place] == high[place] for place in inner):
            return inner[0] - reach, [high[place] for place in inner]
        guard += _GUARD


def _masses(scale: float, reach: int, bits: int) -> list[int]:
    """Return 2^bits exp(-x^2/(2 scale^2)) for x from 0 to `reach`, each short by less than 2^45 if reach < 2^21."""
    with localcontext(prec=math.ceil((bits + 64) * math.log10(2))):
        exponent = -1 / (2 * Decimal(scale) ** 2)
        ratio, square = (int((exponent * times).exp() * (1 << bits)) for times in (1, 2))
    mass, masses = 1 << bits, []
    for _ in range(reach + 1):
        masses.append(mass)
        mass = mass * ratio >> bits
        ratio = ratio * square >> bits
    return masses


@dataclass(frozen=True)
class ConcentratedLoss(Loss):
    """The loss bound from rho-zCDP, by Corollary 13 of Canonne, Kamath and Steinke (2020)."""

    rho: float  # at least 0

    @property
    def mean(self) -> float:
        return self.rho

    @property
    def deviation(self) -> float:
        return math.sqrt(2 * self.rho)

    @property
    def largest(self) -> float:
        return math.inf if self.rho else 0.0

    def delta(self, epsilons: Matrix) -> Matrix:
        """The minimum of exp((a - 1)(a rho - epsilon)) (1 - 1/a)^a / (a - 1) over orders a > 1."""
        epsilons = np.asarray(epsilons, np.float64)
        if not self.rho:
            return np.maximum(-np.expm1(epsilons), 0.0)
        return of_any_sign(epsilons, np.exp(np.minimum(_log_delta(self.rho, np.abs(epsilons)), 0.0)))


def _log_delta(rho: float, epsilons: Matrix) -> Matrix:
    """Return the logarithm of the bound at its best order, which bisection of its derivative finds."""
    low, high = np.full_like(epsilons, 1e-9), np.full_like(epsilons, 1.0) + epsilons / rho + 40 / math.sqrt(rho)
    for _ in range(100):  # brackets a - 1; every value in between gives a valid bound on delta
        middle = np.sqrt(low * high)
        # d/da of (a-1)(a rho - eps) + (a-1) log(a-1) - a log a
        rises = (2 * middle + 1) * rho - epsilons - np.log1p(1 / middle) > 0
        low, high = np.where(rises, low, middle), np.where(rises, middle, high)
    a = 1 + low
    log_delta: Matrix = low * (a * rho - epsilons) + low * np.log(low) - a * np.log(a)
    return log_delta
