"""The mechanism applied to models: from clients' training results to releases.

`sanitise_in_place` adds the noise, which `umbel.privacy.mechanisms` draws. There a clip norm is called a radius, as in
the paper: a public one in mode ``public``; in mode ``update`` the norm of the update itself, at least a floor. Releases
lie on a public grid (`round_to_grid`), which 32-bit numbers can carry.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from umbel.privacy import mechanisms
from umbel.privacy.gate.site import Site
from umbel.privacy.mechanisms.base import Matrix, Mechanism, NoiseSource, clip
from umbel.protocol.arrays import Arrays, Packed, all_finite, flatten
from umbel.protocol.errors import Refused
from umbel.protocol.records import MOST_STEPS
from umbel.protocol.release import NOISE_STEPS, Clipping, NoisePer, Release, ReleaseBy
from umbel.protocol.tasks import TrainingSpec

LARGEST = float(np.finfo(np.float32).max)
"""The largest number that travels."""
_BLOCK = 1 << 17  # numbers that are sanitised together
_AT_ONCE = 1 << 24  # numbers that threads sanitise at the same time, which bounds the memory
_FAR = 40.0  # in standard deviations; a number is farther away with a probability below 10^-20


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


def round_to_grid(values: Matrix, noise: float, resolution: float) -> Matrix:
    """Round noisy values to the public grid; for the arguments see `grid_step`.

    The low bits of a sum of 64-bit numbers reveal its summands; they must not leave.
    """
    rounded = np.array(values)
    round_in_place(rounded, noise, resolution)
    return rounded


def round_in_place(values: Matrix, noise: float, resolution: float) -> None:
    """Round noisy values to the public grid in place."""
    step = grid_step(noise, resolution)
    values /= step
    np.rint(values, out=values)
    values *= step


# --- the noise


def sanitise(
    mechanism: Mechanism | None,
    updates: Matrix,
    radius: float,
    clipping: Clipping,
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
    clipping : Clipping
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
    clipping: Clipping,
    sources: Iterable[NoiseSource],
    parts: Sequence[slice] | None = None,
) -> None:
    """Sanitise the updates in place: copying large models takes a while."""
    if not 0 < radius < np.inf:
        raise ValueError(f"cannot sanitise within radius {radius}")
    public = Clipping(clipping) is Clipping.PUBLIC
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
        sanitised += noise_of(mechanism, [own.stop - own.start for own in columns], radii, generators)
        if next(generators, None) is not None:
            raise ValueError("there are more generators than clients")


def within(mechanism: Mechanism | None, updates: Matrix, radius: float) -> Matrix:
    """Return updates (m, n) moved to within a public radius, by the mechanism's rule."""
    if mechanism is None:
        return clip(updates, radius)
    return _of_shape(updates.shape, mechanism.constrain(updates, radius), mechanism, "constrain")


def noise_of(mechanism: Mechanism, sizes: Sequence[int], radii: Matrix, sources: Iterator[NoiseSource]) -> Matrix:
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


# --- a task's releases


@dataclass(frozen=True)
class Sanitiser:
    """A site's sanitisation of the updates for one task.

    Attributes
    ----------
    task : TrainingSpec
    hypotheses : ndarray, shape (k, n)
    mechanism : Mechanism or None
        None if the task asks for no noise.
    radius : float
        The task's clip norm, raised to the site's floor and, outside simulation, to the minimum for 32-bit numbers.
    finest : float
        See `resolution`.
    parts : sequence of slice, optional
        The columns that get separate noise; None for the whole vector.
    by_rows : bool
        Whether the noise of training is all that hides what leaves.
    """

    task: TrainingSpec
    hypotheses: Matrix
    mechanism: Mechanism | None
    radius: float
    finest: float
    parts: Sequence[slice] | None
    by_rows: bool

    @classmethod
    def of(cls, site: Site, hypotheses: Arrays, task: TrainingSpec) -> Sanitiser:
        """Return a site's sanitiser for a task; raise `Refused` if the task permits no release."""
        check_hidden(site, task)
        everything = flatten(hypotheses)
        finest, n = resolution(everything), everything.shape[1]
        parts = None if task.noise_per is NoisePer.VECTOR else _PARTS[task.noise_per](hypotheses)
        radius, mechanism = max(task.clip_norm, site.policy.clip_norm_floor), None
        if task.noise_multiplier > 0:
            mechanism = mechanisms.load(task.mechanism)(task.noise_multiplier)
            if not site.simulated:
                radius = max(radius, min_radius(mechanism.deviation(n), finest))
            check_noise(mechanism, n, radius)
            if mechanism.public_only and task.clipping is not Clipping.PUBLIC:
                raise Refused(
                    f"mechanism {mechanism.name!r} works only with clipping = 'public'", code="refused.private-radius"
                )
        by_rows = mechanism is None and not site.simulated
        return cls(task, everything, mechanism, radius, finest, parts, by_rows)

    @property
    def step(self) -> float:
        """The step of the public grid if a release's numbers, in steps, fit 16 bits; 0 if they may not.

        Only public values decide this, so that the length of a message reveals nothing about the data.
        """
        if self.mechanism is None or self.task.clipping is not Clipping.PUBLIC:
            return 0.0
        noise = self.mechanism.deviation(self.hypotheses.shape[1]) * self.radius
        step = grid_step(noise, self.finest)
        largest = float(np.abs(self.hypotheses).max()) + self.radius + _FAR * noise
        return step if largest <= min(MOST_STEPS * step, LARGEST) else 0.0

    @property
    def release(self) -> Release:
        """The release with which clients are charged."""
        k, n = self.hypotheses.shape
        return self.task.release(n, k, self.radius)

    def sanitised(
        self, trained: Arrays, chosen: NDArray[np.int64], sources: Iterator[NoiseSource], threads: int = 1
    ) -> Packed:
        r"""Return the releases of charged clients, from what each trained, (clients, \*shape), and chose.

        `sources` has one for each client. With several threads, each must stay valid when the next is taken.
        """
        if self.by_rows and not all(map(all_finite, trained.values())):
            # It would leave as the bare hypothesis.
            raise Refused("what was trained to hide rows is not finite, so it has no noise", code="refused.result")
        n = self.hypotheses.shape[1]
        shapes = {name: value.shape[1:] for name, value in trained.items()}
        releases = Packed(np.empty((len(chosen), n), np.float32), shapes)

        def fill(block: slice, own: Iterator[NoiseSource]) -> None:
            releases.matrix[block] = self._noisy(trained, block, chosen[block], own)

        parts, most = list(blocks(len(chosen), n)), _AT_ONCE // n
        own = (islice(sources, len(chosen[block])) for block in parts)
        if min(threads, len(parts), most) <= 1 or self.task.mechanism not in mechanisms.MECHANISMS:
            for block, some in zip(parts, own, strict=True):
                fill(block, some)
            return releases
        with ThreadPoolExecutor(min(threads, most)) as pool:
            # An iterator of sources may be advanced by one thread only.
            list(pool.map(fill, parts, [iter(list(some)) for some in own]))
        return releases

    def _noisy(
        self, trained: Arrays, block: slice, chosen: NDArray[np.int64], sources: Iterator[NoiseSource]
    ) -> Matrix:
        """Return the releases (m, n) of a block of clients."""
        # For large models a block is one client, and its hypothesis need not be copied.
        start = self.hypotheses[chosen[0] : chosen[0] + 1] if len(chosen) == 1 else self.hypotheses[chosen]
        noisy = updates_in(trained, block, start)
        sanitise_in_place(self.mechanism, noisy, self.radius, self.task.clipping, sources, self.parts)
        noisy += start
        if self.mechanism is not None:
            deviation = self.mechanism.deviation(self.hypotheses.shape[1])
            round_in_place(noisy, deviation * self.radius, self.finest)
        return np.clip(noisy, -LARGEST, LARGEST, out=noisy)


def check_hidden(site: Site, task: TrainingSpec) -> None:
    """Raise `Refused` if a task's releases would leave a site with noise neither of the release nor of training."""
    hidden = task.noise_multiplier > 0 or (task.row_privacy is not None and task.release_by is ReleaseBy.CLIENT)
    if not (hidden or site.simulated):
        raise Refused("nothing leaves without noise", code="refused.unsanitised")


def updates_in(trained: Arrays, block: slice, start: Matrix) -> Matrix:
    r"""Return the updates (m, n) of a block of the clients that trained `trained`, each (clients, \*shape).

    They began at `start` (m, n).

    Diverged training counts as no update. Whether training diverges depends on the data and on the server's task, so a
    missing release would reveal something about the data.
    """
    updates = flatten({name: value[block] for name, value in trained.items()})
    updates -= start
    updates[~all_finite(updates, axis=1)] = 0.0
    return updates


def blocks(clients: int, n: int) -> Iterator[slice]:
    """Yield blocks of clients: as many large models as fit into a cache, but at least one."""
    size = max(1, _BLOCK // n)
    for begin in range(0, clients, size):
        yield slice(begin, begin + size)


def _rows(hypotheses: Arrays) -> Sequence[slice]:
    """Return the columns of each row of each array; an array of one axis is a single row."""
    rows: list[slice] = []
    start = 0
    for value in hypotheses.values():
        shape = value.shape[1:]
        size = math.prod(shape[1:] if len(shape) > 1 else shape)
        stop = start + math.prod(shape)
        rows += [slice(begin, begin + size) for begin in range(start, stop, size)]
        start = stop
    return rows


def _layers(hypotheses: Arrays) -> Sequence[slice]:
    """Return the columns of each layer: parameters with the same prefix, such as weight and bias."""
    layers: dict[str, slice] = {}
    start = 0
    for name, value in hypotheses.items():
        stop = start + math.prod(value.shape[1:])
        layer = name.rpartition(".")[0]
        if layer in layers and layers[layer].stop != start:
            raise Refused(f"the parameters of layer {layer!r} are not next to each other", code="refused.layers")
        layers[layer] = slice(layers[layer].start if layer in layers else start, stop)
        start = stop
    return list(layers.values())


_PARTS = {NoisePer.LAYER: _layers, NoisePer.ROW: _rows}
"""Functions that return the columns of each unit with separate noise."""
