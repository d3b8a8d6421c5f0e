"""An update made safe to release: clipped, with a mechanism's noise, on a public grid.

`release_in_place` does all of that; `sanitise_in_place` adds the noise, which a mechanism draws. A clip norm is called
a radius here, as in the paper: a public one in mode ``public``; in mode ``update`` the norm of the update itself, at
least a floor. Releases lie on a public grid (`round_to_grid`), which 32-bit numbers can carry.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from umbel.privacy.mechanisms.base import Matrix, Mechanism, NoiseSource, clip
from umbel.protocol.errors import Refused

LARGEST = float(np.finfo(np.float32).max)
"""The largest number that travels."""

NOISE_STEPS = 16
"""The standard deviation of a component's noise is at least this many steps of the grid on which a release is rounded,
and at least this many steps of 32-bit numbers."""

_PUBLIC = {"public": True, "update": False}

# --- the grid


def resolution(hypotheses: Matrix) -> float:
    """Return the spacing of 32-bit numbers at the largest magnitude among the hypotheses (k, n)."""
    # Above 3e38 the spacing stays the same up to the largest number, which has no next one.
    return float(np.spacing(np.float32(min(np.abs(hypotheses).max(), 3e38))))


def min_radius(deviation: float, resolution: float) -> float:
    """Return the smallest radius at which the noise, of `deviation` at radius 1, spans `NOISE_STEPS` steps of the
    resolution.

    Below it, a coordinate could look as if no noise had been added.
    """
    return NOISE_STEPS * resolution / deviation


def check_noise(mechanism: Mechanism, n: int, radius: float) -> None:
    """Raise `Refused` if a mechanism's noise, or its rounding by `round_to_grid`, exceeds 64-bit numbers."""
    noise = mechanism.deviation(n) * radius
    # Far enough from the limits for any draw, its square, and sums of n of them.
    if not (sys.float_info.min * n <= noise <= math.sqrt(sys.float_info.max) / (n + 1)):
        text = (
            f"noise multiplier {mechanism.noise_multiplier:g} at clip norm {radius:g} gives noise that no 64-bit number"
        )
        raise Refused(f"{text} holds; bring clip norm and noise nearer to 1", code="refused.noise-out-of-range")


def grid_step(noise: float, resolution: float) -> float:
    """Return the step of a public grid.

    It is a power of two, at most 1/`NOISE_STEPS` of the noise, but not below the resolution. The noise is the standard
    deviation of a component at the smallest radius, which is public; never that of the norm of an update.
    """
    return max(2.0 ** math.floor(math.log2(noise / NOISE_STEPS)), resolution)


def round_to_grid(values: Matrix, noise: float, resolution: float, out: Matrix | None = None) -> Matrix:
    """Round noisy values to the public grid, in `out` if given; for the other arguments see `grid_step`.

    The low bits of a sum of 64-bit numbers reveal its summands; they must not leave.
    """
    step = grid_step(noise, resolution)
    rounded: Matrix = np.divide(values, step, out=out)
    np.rint(rounded, out=rounded)
    rounded *= step
    return rounded


# --- the noise


def sanitise(
    mechanism: Mechanism | None,
    updates: Matrix,
    radius: float,
    clipping: str,
    sources: Iterable[NoiseSource],
    parts: Sequence[slice] | None = None,
) -> Matrix:
    """Return clients' updates with a mechanism's noise (group privacy paper, Algorithm 2).

    Parameters
    ----------
    mechanism : Mechanism or None
        None adds no noise.
    updates : ndarray, shape (m, n)
        Trained parameters minus the chosen hypothesis, a row for each client.
    radius : float
        In mode ``public`` the radius r, to which updates are clipped. In mode ``update`` the smallest radius:
        r = max(|update|, radius), since an update of norm 0 would otherwise get no noise.
    clipping : {"public", "update"}
    sources : iterable of NoiseSource, one a client
        Each is used up before the next is taken.
    parts : sequence of slice, optional
        Columns that get separate noise, each within a separate radius, such as the layers in the
        paper's Sec. 5.3; together all columns, in order. By default the whole vector at once.

    Returns
    -------
    ndarray of float64, shape (m, n)
    """
    sanitised = np.array(updates, np.float64)
    sanitise_in_place(mechanism, sanitised, radius, clipping, sources, parts)
    return sanitised


def sanitise_in_place(
    mechanism: Mechanism | None,
    sanitised: Matrix,
    radius: float,
    clipping: str,
    sources: Iterable[NoiseSource],
    parts: Sequence[slice] | None = None,
) -> None:
    """Sanitise the updates in place: copying large models takes a while."""
    if not 0 < radius < np.inf:
        raise ValueError(f"cannot sanitise within radius {radius}")
    public = _PUBLIC[clipping]
    columns = parts or [slice(0, sanitised.shape[1])]
    radii = np.full((len(sanitised), len(columns)), radius)
    for i, own in enumerate(columns):
        part = sanitised[:, own]
        if public:
            part[:] = within(mechanism, part, radius)
        else:
            radii[:, i] = np.maximum(np.sqrt(np.einsum("ij,ij->i", part, part)), radius)
    if mechanism is not None:
        generators = iter(sources)
        sanitised += draw_noise(mechanism, [own.stop - own.start for own in columns], radii, generators)
        if next(generators, None) is not None:
            raise ValueError("there are more generators than clients")


def release_in_place(
    mechanism: Mechanism | None,
    updates: Matrix,
    start: Matrix,
    radius: float,
    clipping: str,
    sources: Iterable[NoiseSource],
    parts: Sequence[slice] | None,
    finest: float,
) -> None:
    """Turn updates (m, n) from `start` into releases, in place: sanitised, and rounded to the public grid.

    For `finest` see `resolution`, for the others `sanitise`.
    """
    sanitise_in_place(mechanism, updates, radius, clipping, sources, parts)
    updates += start
    if mechanism is not None:
        round_to_grid(updates, mechanism.deviation(updates.shape[1]) * radius, finest, updates)
    np.clip(updates, -LARGEST, LARGEST, out=updates)


def within(mechanism: Mechanism | None, updates: Matrix, radius: float) -> Matrix:
    """Return updates (m, n) moved to within a public radius, by the mechanism's rule."""
    if mechanism is None:
        return clip(updates, radius)
    return _of_shape(updates.shape, mechanism.constrain(updates, radius), mechanism, "constrain")


def draw_noise(mechanism: Mechanism, sizes: Sequence[int], radii: Matrix, sources: Iterator[NoiseSource]) -> Matrix:
    """Return a mechanism's noise, (m, sum(sizes)); for the arguments see `Mechanism.noise`."""
    return _of_shape((len(radii), sum(sizes)), mechanism.noise(sizes, radii, sources), mechanism, "noise")


def _of_shape(wanted: tuple[int, ...], found: Matrix, mechanism: Mechanism, method: str) -> Matrix:
    """Return an array of a mechanism; `Refused` for another shape.

    NumPy would repeat a single row or column: clients would share noise, or one would release the update of another.
    """
    if np.shape(found) != wanted:
        text = f"{type(mechanism).__name__}.{method} must return an array of shape {wanted}, not {np.shape(found)}"
        raise Refused(f"{text}; let it return a row for each client", code="refused.mechanism-shape")
    return found


# --- units with separate noise


def columns_of(per: str, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[slice] | None:
    """Return the columns of each unit that gets separate noise: a layer or a row; None for the whole vector."""
    match per:
        case "vector":
            return None
        case "layer":
            return _layers(shapes)
        case "row":
            return _rows(shapes)
    raise ValueError(f"noise per {per!r}")


def _rows(shapes: Mapping[str, tuple[int, ...]]) -> Sequence[slice]:
    """Return the columns of each row of each array; an array of one axis is a single row."""
    rows: list[slice] = []
    start = 0
    for shape in shapes.values():
        size = math.prod(shape[1:] if len(shape) > 1 else shape)
        stop = start + math.prod(shape)
        rows += [slice(begin, begin + size) for begin in range(start, stop, max(size, 1))]
        start = stop
    return rows


def _layers(shapes: Mapping[str, tuple[int, ...]]) -> Sequence[slice]:
    """Return the columns of each layer: parameters with the same prefix, such as weight and bias."""
    layers: dict[str, slice] = {}
    start = 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        layer = name.rpartition(".")[0]
        if layer in layers and layers[layer].stop != start:
            raise Refused(f"the parameters of layer {layer!r} are not next to each other", code="refused.layers")
        layers[layer] = slice(layers[layer].start if layer in layers else start, stop)
        start = stop
    return list(layers.values())
