"""The Laplace mechanism under Euclidean distance (group privacy paper, Lemma 4.1 and Algorithm 2).

The noise rho in R^n has density proportional to exp(-epsilon |rho|). Its norm is
Gamma(n, 1/epsilon), its direction uniform, its components have variance (n + 1)/epsilon^2
(Lemma 4.3). All arithmetic is in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


class NoiseSource(Protocol):
    """The part of ``numpy.random.Generator`` that the mechanism draws from."""

    def standard_normal(self, size: int, /) -> Matrix:
        """Return independent standard normals."""

    def standard_gamma(self, shape: float, /) -> float:
        """Return a gamma variate of scale 1."""


def sample(n: int, epsilon: float, generator: NoiseSource) -> Matrix:
    """Draw one noise vector.

    Drawn as a scale mixture of Gaussians, ``sqrt(W) g`` with W ~ Gamma((n+1)/2, scale
    2/epsilon^2) and g ~ N(0, I_n): the same law as the paper's norm and direction (Sec. 4.2)
    without a normalisation, so there is no zero norm to divide by.

    Parameters
    ----------
    n : int
        Number of components, at least 1.
    epsilon : float
        Privacy lost per unit of distance, above 0.
    generator : NoiseSource
        Source of the draw.

    Returns
    -------
    ndarray of float64, shape (n,)
    """
    if n < 1 or not 0 < epsilon < np.inf:
        raise ValueError(f"the Laplace mechanism needs n >= 1 and a finite epsilon > 0, got {n} and {epsilon}")
    return _draw([n], [epsilon], generator)


def _draw(sizes: Sequence[int], epsilons: Sequence[float], generator: NoiseSource) -> Matrix:
    """Return independent noise vectors of the given sizes, one after the other."""
    scales = [
        math.sqrt(generator.standard_gamma((size + 1) / 2) * 2.0) / epsilon
        for size, epsilon in zip(sizes, epsilons, strict=True)
    ]
    noise: Matrix = generator.standard_normal(sum(sizes))
    noise *= scales[0] if len(scales) == 1 else np.repeat(scales, sizes)
    return noise


def clip(updates: Matrix, radius: float) -> Matrix:
    """Shorten the rows of `updates` (m, n) that are longer than `radius`."""
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    shrink = np.divide(radius, norms, out=np.ones_like(norms), where=norms > radius)
    clipped: Matrix = updates * shrink
    return clipped


def sanitise(
    updates: Matrix,
    noise_multiplier: float,
    radius: float,
    radius_mode: str,
    generators: Iterable[NoiseSource],
    parts: Sequence[slice] | None = None,
) -> Matrix:
    """Return clients' updates with noise of scale epsilon = n / (nu r) (Algorithm 2).

    Parameters
    ----------
    updates : ndarray, shape (m, n)
        Trained parameters less the chosen hypothesis, a row a client.
    noise_multiplier : float
        nu; 0 adds no noise.
    radius : float
        In mode ``public`` the radius r itself, to which updates are clipped. In mode ``update``
        the least radius: r = max(|update|, radius), since an update of norm 0 would otherwise
        go without noise.
    radius_mode : str
        ``update`` (the paper) or ``public``.
    generators : iterable of NoiseSource, one a client
        Each is used up before the next is asked for.
    parts : sequence of slice, optional
        Columns to be noised by themselves, each within its own radius, as the layers in the
        paper's Sec. 5.3; together all columns, in order. By default the whole vector at once.

    Returns
    -------
    ndarray of float64, shape (m, n)
    """
    if radius_mode not in ("update", "public"):
        raise ValueError(f"unknown radius mode {radius_mode!r}")
    if not (np.isfinite(noise_multiplier) and noise_multiplier >= 0 and np.isfinite(radius) and radius > 0):
        raise ValueError(f"cannot sanitise with noise multiplier {noise_multiplier} and radius {radius}")
    sanitised = np.array(updates, np.float64)
    columns = parts or [slice(0, sanitised.shape[1])]
    radii = np.empty((len(sanitised), len(columns)))
    for i, own in enumerate(columns):
        part = sanitised[:, own]
        if radius_mode == "public":
            part[:] = clip(part, radius)
            radii[:, i] = radius
        else:
            radii[:, i] = np.maximum(np.sqrt(np.einsum("ij,ij->i", part, part)), radius)
    if noise_multiplier > 0:
        sizes = [own.stop - own.start for own in columns]
        for row, radii_of_row, generator in zip(sanitised, radii.tolist(), generators, strict=True):
            epsilons = [size / (noise_multiplier * r) for size, r in zip(sizes, radii_of_row, strict=True)]
            row += _draw(sizes, epsilons, generator)
    return sanitised
