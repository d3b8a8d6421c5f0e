"""What 32-bit numbers can carry: the public grid on which releases are rounded."""

from __future__ import annotations

import math
import sys

import numpy as np
from numpy.typing import NDArray

from protocol.errors import Refused

# Steps of the grid that the standard deviation of a coordinate's noise spans at least.
STEPS = 16


def resolution(hypotheses: NDArray[np.float64]) -> float:
    """Return the spacing of 32-bit numbers at the largest magnitude among the hypotheses (k, n)."""
    # Beyond 3e38 it is the same up to the largest number, which has no next one to be apart from.
    return float(np.spacing(np.float32(min(np.abs(hypotheses).max(), 3e38))))


def min_radius(n: int, noise_multiplier: float, resolution: float) -> float:
    """Return the radius from which on the noise spans `STEPS` steps of 32-bit numbers.

    Below it a coordinate may come out as if no noise had been added. The standard deviation of a
    component is nu r sqrt(n + 1) / n (Lemma 4.3).
    """
    return STEPS * resolution * n / (noise_multiplier * math.sqrt(n + 1))


def check_noise(n: int, noise_multiplier: float, radius: float) -> None:
    """Raise `Refused` where nu and radius, or what `round_to_grid` makes of them, are beyond 64-bit numbers."""
    product = noise_multiplier * radius
    if noise_multiplier > 0 and not (sys.float_info.min * n <= product <= sys.float_info.max / (n + 1)):
        raise Refused(f"noise multiplier {noise_multiplier:g} at radius {radius:g} is no noise that can be computed")


def round_to_grid(
    values: NDArray[np.float64], n: int, noise_multiplier: float, radius: float, resolution: float
) -> NDArray[np.float64]:
    """Round noisy values to a grid that everybody can compute.

    The low bits of a sum of 64-bit numbers tell what was added to what; they must not leave. The
    step is a power of two, at most 1/`STEPS` of the noise that the least radius gives, but not
    below the resolution.

    Parameters
    ----------
    values : ndarray
    n : int
        Number of parameters.
    noise_multiplier : float
        nu, above 0.
    radius : float
        The least radius, which is public; never the norm of an update.
    resolution : float
        See `resolution`.
    """
    noise = noise_multiplier * radius * math.sqrt(n + 1) / n
    step = max(2.0 ** math.floor(math.log2(noise / STEPS)), resolution)
    rounded: NDArray[np.float64] = values / step
    np.rint(rounded, out=rounded)
    rounded *= step
    return rounded
