"""The Laplace mechanism under Euclidean distance (group privacy paper, Lemma 4.1 and Algorithm 2).

The noise rho in R^n has density proportional to exp(-epsilon |rho|). Its norm is
Gamma(n, 1/epsilon), its direction uniform, its components have variance (n + 1)/epsilon^2
(Lemma 4.3). All arithmetic is in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.release import RadiusMode

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
    noise: Matrix = _draw([n], np.array([[epsilon]]), iter([generator]))[0]
    return noise


def _draw(sizes: Sequence[int], epsilons: Matrix, generators: Iterator[NoiseSource]) -> Matrix:
    """Return noise (m, n) for epsilons (m, parts): in each row independent vectors of the given sizes."""
    n, shapes = sum(sizes), [(size + 1) / 2 for size in sizes]
    mixing, noise = np.empty(epsilons.shape), np.empty((len(epsilons), n))
    for row in range(len(noise)):
        generator = next(generators, None)
        if generator is None:
            raise ValueError("there are fewer generators than clients")
        for part, shape in enumerate(shapes):
            mixing[row, part] = generator.standard_gamma(shape)
        noise[row] = generator.standard_normal(n)
    scales = np.sqrt(mixing * 2.0) / epsilons
    noise *= scales if len(sizes) == 1 else np.repeat(scales, sizes, axis=1)
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
    radius_mode: RadiusMode,
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
    radius_mode : RadiusMode
    generators : iterable of NoiseSource, one a client
        Each is used up before the next is asked for.
    parts : sequence of slice, optional
        Columns to be noised by themselves, each within its own radius, as the layers in the
        paper's Sec. 5.3; together all columns, in order. By default the whole vector at once.

    Returns
    -------
    ndarray of float64, shape (m, n)
    """
    public = RadiusMode(radius_mode) is RadiusMode.PUBLIC
    if not (np.isfinite(noise_multiplier) and noise_multiplier >= 0 and np.isfinite(radius) and radius > 0):
        raise ValueError(f"cannot sanitise with noise multiplier {noise_multiplier} and radius {radius}")
    sanitised = np.array(updates, np.float64)
    columns = parts or [slice(0, sanitised.shape[1])]
    radii = np.empty((len(sanitised), len(columns)))
    for i, own in enumerate(columns):
        part = sanitised[:, own]
        if public:
            part[:] = clip(part, radius)
            radii[:, i] = radius
        else:
            radii[:, i] = np.maximum(np.sqrt(np.einsum("ij,ij->i", part, part)), radius)
    if noise_multiplier > 0:
        sizes = [own.stop - own.start for own in columns]
        epsilons = sizes / (noise_multiplier * radii)
        sources = iter(generators)
        sanitised += _draw(sizes, epsilons, sources)
        if next(sources, None) is not None:
            raise ValueError("there are more generators than clients")
    return sanitised
