"""Prices of releases as exact fractions, so that sums of them are exact as well."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

MAX_CHOICE_EPSILON = 30.0
"""Largest epsilon of a choice. Above it a choice is practically open, and its probabilities are finer than random
numbers."""

_LONGEST, _GRAIN = 1000, 2**32  # denominators


def exact(value: float) -> Fraction:
    """Return the decimal number that people wrote: .3 is 3/10, and not the nearest binary number."""
    return Fraction(repr(float(value)))


@lru_cache(maxsize=64)
def quotient(above: int, below: float) -> Fraction:
    """Return above / below: exact where the fraction is short, otherwise rounded up to a multiple of 2**-32.

    So sums of many prices stay cheap to compute and are never too small.
    """
    price = Fraction(above) / exact(below)
    if price.denominator <= _LONGEST:
        return price
    return Fraction(math.ceil(price * _GRAIN), _GRAIN)
