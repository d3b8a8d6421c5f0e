"""What 32-bit numbers can carry: the public grid on which releases are rounded."""

from __future__ import annotations

import math
import sys

import numpy as np
from numpy.typing import NDArray

from umbel.privacy.mechanisms.base import Mechanism
from umbel.protocol.errors import Refused
from umbel.protocol.release import NOISE_STEPS


def resolution(hypotheses: NDArray[np.float64]) -> float:
    """Return the spacing of 32-bit numbers at the largest magnitude among the hypotheses (k, n)."""
    # Beyond 3e38 it is the same up to the largest number, which has no next one to be apart from.
    return float(np.spacing(np.float32(min(np.abs(hypotheses).max(), 3e38))))


def min_radius(deviation: float, resolution: float) -> float:
    """Return the radius from which on the noise spans `NOISE_STEPS` steps of 32-bit numbers.

    Below it a coordinate may come out as if no noise had been added.

    Parameters
    ----------
    deviation : float
        Standard deviation of a component of the noise at radius 1.
    resolution : float
        See `resolution`.
    """
    return NOISE_STEPS * resolution / deviation


def check_noise(mechanism: Mechanism, n: int, radius: float) -> None:
    """Raise `Refused` where a mechanism's noise, or what `round_to_grid` makes of it, is beyond 64-bit numbers."""
    noise = mechanism.deviation(n) * radius
    # Far enough from the ends that no draw, its square and sums of n of them leave them either.
    if not (sys.float_info.min * n <= noise <= math.sqrt(sys.float_info.max) / (n + 1)):
        nu = mechanism.noise_multiplier
        raise Refused(
            f"noise multiplier {nu:g} at radius {radius:g} is no noise that can be computed",
            code="refused.noise-out-of-range",
        )


def grid_step(noise: float, resolution: float) -> float:
    """Return the step of a grid that everybody can compute.

    It is a power of two, at most 1/`NOISE_STEPS` of the noise at the least radius, but not below the resolution.

    Parameters
    ----------
    noise : float
        Standard deviation of a component of the noise that the least radius gives, which is public;
        never that of the norm of an update.
    resolution : float
        See `resolution`.
    """
    return max(2.0 ** math.floor(math.log2(noise / NOISE_STEPS)), resolution)


def round_to_grid(values: NDArray[np.float64], noise: float, resolution: float) -> NDArray[np.float64]:
    """Round noisy values to the public grid; arguments as of `grid_step`.

    The low bits of a sum of 64-bit numbers tell what was added to what; they must not leave.
    """
    step = grid_step(noise, resolution)
    rounded: NDArray[np.float64] = values / step
    np.rint(rounded, out=rounded)
    rounded *= step
    return rounded
