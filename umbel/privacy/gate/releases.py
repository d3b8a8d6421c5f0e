"""The mechanism applied to models: from what clients have trained to what may leave.

`sanitise_in_place` adds the noise, which `umbel.privacy.mechanisms` draws. There a clip norm is called a radius, as in
the paper: a public one in mode ``public``; in mode ``update`` the norm of the update itself, at least a floor. What
leaves lies on a public grid (`round_to_grid`), which 32-bit numbers can carry.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
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
from umbel.protocol.release import NOISE_STEPS, Clipping, Kind, NoisePer, Release
from umbel.protocol.tasks import TrainingSpec

LARGEST = float(np.finfo(np.float32).max)
"""The largest number that travels."""
_BLOCK = 1 << 17  # numbers that are sanitised together
_FAR = 40.0  # standard deviations, beyond which less than one number in 10^20 comes


# --- the grid


def resolution(hypotheses: Matrix) -> float:
    """Return the spacing of 32-bit numbers at the largest magnitude among the hypotheses (k, n)."""
    # Beyond 3e38 it is the same up to the largest number, which has no next one to be apart from.
    return float(np.spacing(np.float32(min(np.abs(hypotheses).max(), 3e38))))


def min_radius(deviation: float, resolution: float) -> float:
    """Return the radius from which on noise of that deviation at radius 1 spans `NOISE_STEPS` steps of the resolution.

    Below it a coordinate may come out as if no noise had been added.
    """
    return NOISE_STEPS * resolution / deviation


def check_noise(mechanism: Mechanism, n: int, radius: float) -> None:
    """Raise `Refused` where a mechanism's noise, or what `round_to_grid` makes of it, is beyond 64-bit numbers."""
    noise = mechanism.deviation(n) * radius
    # Far enough from the ends that no draw, its square and sums of n of them leave them either.
    if not (sys.float_info.min * n <= noise <= math.sqrt(sys.float_info.max) / (n + 1)):
        raise Refused(
            f"noise multiplier {mechanism.noise_multiplier:g} at radius {radius:g} is no noise that can be computed",
            code="refused.noise-out-of-range",
        )


def grid_step(noise: float, resolution: float) -> float:
    """Return the step of a grid that everybody can compute.

    It is a power of two, at most 1/`NOISE_STEPS` of the noise, but not below the resolution. The noise is the standard
    deviation of a component at the least radius, which is public; never that of the norm of an update.
    """
    return max(2.0 ** math.floor(math.log2(noise / NOISE_STEPS)), resolution)


def round_to_grid(values: Matrix, noise: float, resolution: float) -> Matrix:
    """Round noisy values to the public grid; arguments as of `grid_step`.

    The low bits of a sum of 64-bit numbers tell what was added to what; they must not leave.
    """
    step = grid_step(noise, resolution)
    rounded: Matrix = values / step
    np.rint(rounded, out=rounded)
    rounded *= step
    return rounded


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
        Trained parameters less the chosen hypothesis, a row a client.
    radius : float
        In mode ``public`` the radius r itself, to which updates are clipped. In mode ``update``
        the least radius: r = max(|update|, radius), since an update of norm 0 would otherwise
        go without noise.
    clipping : Clipping
    sources : iterable of NoiseSource, one a client
        Each is used up before the next is asked for.
    parts : sequence of slice, optional
        Columns to be noised by themselves, each within its own radius, as the layers in the
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
    """Do what `sanitise` does to the updates themselves: of large models a copy takes a while."""
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
        sanitised += mechanism.noise([own.stop - own.start for own in columns], radii, generators)
        if next(generators, None) is not None:
            raise ValueError("there are more generators than clients")


def within(mechanism: Mechanism | None, updates: Matrix, radius: float) -> Matrix:
    """Return updates (m, n) moved to within a public radius, as the mechanism has it."""
    return clip(updates, radius) if mechanism is None else mechanism.constrain(updates, radius)


# --- a task's releases


@dataclass(frozen=True)
class Sanitiser:
    """What a site makes of the updates that one task asks for.

    Attributes
    ----------
    task : TrainingSpec
    hypotheses : ndarray, shape (k, n)
    mechanism : Mechanism or None
        None where no noise is asked for.
    radius : float
        The task's clip norm, raised to the site's floor and, outside simulation, to what 32-bit numbers need.
    finest : float
        See `resolution`.
    parts : sequence of slice, optional
        The columns of what is noised by itself; None for the whole vector.
    """

    task: TrainingSpec
    hypotheses: Matrix
    mechanism: Mechanism | None
    radius: float
    finest: float
    parts: Sequence[slice] | None

    @classmethod
    def of(cls, site: Site, hypotheses: Arrays, task: TrainingSpec) -> Sanitiser:
        """Return what a site makes of a task; raise `Refused` for one that no release can come of."""
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
                    f"mechanism {mechanism.name!r} takes clipping = 'public' alone", code="refused.private-radius"
                )
        return cls(task, everything, mechanism, radius, finest, parts)

    @property
    def step(self) -> float:
        """The step of the public grid, if 16 bits hold how many of them a release's numbers are; 0 if they may not.

        That is decided by what everybody knows, so that the length of a message tells nothing of the data.
        """
        if self.mechanism is None or self.task.clipping is not Clipping.PUBLIC:
            return 0.0
        noise = self.mechanism.deviation(self.hypotheses.shape[1]) * self.radius
        step = grid_step(noise, self.finest)
        largest = float(np.abs(self.hypotheses).max()) + self.radius + _FAR * noise
        return step if largest <= min(MOST_STEPS * step, LARGEST) else 0.0

    @property
    def release(self) -> Release:
        """What is paid for."""
        return train_release(self.task, self.hypotheses, self.radius)

    def sanitised(self, trained: Arrays, chosen: NDArray[np.int64], sources: Iterator[NoiseSource]) -> Packed:
        r"""Return the releases of clients that have paid, from what each trained, (clients, \*shape), and chose.

        `sources` has one for each client.
        """
        n, mode = self.hypotheses.shape[1], self.task.clipping
        shapes = {name: value.shape[1:] for name, value in trained.items()}
        releases = Packed(np.empty((len(chosen), n), np.float32), shapes)
        for block in blocks(len(chosen), n):
            mine = chosen[block]
            # Of large models one client is a block, and its hypothesis need not be copied.
            start = self.hypotheses[mine[0] : mine[0] + 1] if len(mine) == 1 else self.hypotheses[mine]
            noisy = updates_in(trained, block, start)
            sanitise_in_place(self.mechanism, noisy, self.radius, mode, islice(sources, len(noisy)), self.parts)
            noisy += start
            if self.mechanism is not None:
                noisy = round_to_grid(noisy, self.mechanism.deviation(n) * self.radius, self.finest)
            np.clip(noisy, -LARGEST, LARGEST, out=noisy)
            releases.matrix[block] = noisy
        return releases


def train_release(task: TrainingSpec, hypotheses: Matrix, radius: float) -> Release:
    """Return what a client releases by itself for a task, of hypotheses (k, n), within the site's radius."""
    k, n = hypotheses.shape
    return Release(
        Kind.TRAIN,
        n,
        task.noise_multiplier,
        task.clipping,
        radius if task.clipping is Clipping.PUBLIC else None,
        task.mechanism,
        hypotheses=k,
        choice_epsilon=task.choice_epsilon if k > 1 else 0.0,
    )


def updates_in(trained: Arrays, block: slice, start: Matrix) -> Matrix:
    r"""Return the updates (m, n) of a block of the clients that trained `trained`, each (clients, \*shape).

    They began at `start` (m, n).

    Training that blew up counts as no update at all. Whether it does depends on the data and on what the
    server asks for, so a release that stayed away would tell about the data.
    """
    updates = flatten({name: value[block] for name, value in trained.items()})
    updates -= start
    updates[~all_finite(updates, axis=1)] = 0.0
    return updates


def blocks(clients: int, n: int) -> Iterator[slice]:
    """Yield clients some at a time: of large models as many as a cache holds, but one at least."""
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
    """Return the columns of each layer: parameters that share a prefix, as weight and bias do."""
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
"""What gives the columns of all that is noised by itself."""
