"""The mechanism applied to models: from what clients have trained to what may leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from privacy.laplace import NoiseSource, sanitise
from privacy.precision import round_to_grid
from protocol.arrays import Arrays, all_finite, flatten, unflatten_into
from protocol.demands import Training
from protocol.errors import Refused
from protocol.release import NoisePer

_LARGEST = float(np.finfo(np.float32).max)
_BLOCK = 1 << 17  # numbers that are sanitised together


def sanitised(
    trained: Arrays,
    everything: NDArray[np.float64],
    chosen: NDArray[np.int64],
    demand: Training,
    radius: float,
    finest: float,
    parts: Sequence[slice] | None,
    sources: Iterator[NoiseSource],
) -> Arrays:
    r"""Return the releases of clients that have paid.

    Parameters
    ----------
    trained : dict of ndarray, each (clients, \*shape)
    everything : ndarray, shape (k, n)
        The hypotheses.
    chosen : ndarray of int, shape (clients,)
        Where each client started.
    demand : Training
    radius : float
        As the site has it.
    finest : float
        See `privacy.precision.resolution`.
    parts : sequence of slice, optional
        What is noised by itself.
    sources : iterator of NoiseSource, one a client
    """
    n, nu = everything.shape[1], demand.noise_multiplier
    releases: Arrays = {name: np.empty(value.shape, np.float32) for name, value in trained.items()}
    for block in _blocks(len(chosen), n):
        start = everything[chosen[block]]
        updates = flatten({name: value[block] for name, value in trained.items()})
        updates -= start
        # Training that blew up counts as no update at all. Whether it does depends on the data and
        # on what the server asks for, so a release that stayed away would tell about the data.
        updates[~all_finite(updates, axis=1)] = 0.0
        noisy = sanitise(updates, nu, radius, demand.radius_mode, islice(sources, len(updates)), parts)
        noisy += start
        if nu > 0:
            noisy = round_to_grid(noisy, n, nu, radius, finest)
        np.clip(noisy, -_LARGEST, _LARGEST, out=noisy)
        unflatten_into({name: value[block] for name, value in releases.items()}, noisy)
    return releases


def parts_of(hypotheses: Arrays, noise_per: NoisePer) -> Sequence[slice] | None:
    """Return the columns of what is noised by itself; None for the whole vector."""
    if noise_per is NoisePer.VECTOR:
        return None
    return _layers(hypotheses) if noise_per is NoisePer.LAYER else _rows(hypotheses)


def _rows(hypotheses: Arrays) -> Sequence[slice]:
    """Return the columns of each row of each array; an array of one axis is a single row."""
    rows: list[slice] = []
    start = 0
    for value in hypotheses.values():
        shape = value.shape[1:]
        size = int(np.prod(shape[1:] if len(shape) > 1 else shape))
        stop = start + int(np.prod(shape))
        rows += [slice(begin, begin + size) for begin in range(start, stop, size)]
        start = stop
    return rows


def _layers(hypotheses: Arrays) -> Sequence[slice]:
    """Return the columns of each layer: parameters that share a prefix, as weight and bias do."""
    layers: dict[str, slice] = {}
    start = 0
    for name, value in hypotheses.items():
        stop = start + int(np.prod(value.shape[1:]))
        layer = name.rpartition(".")[0]
        if layer in layers and layers[layer].stop != start:
            raise Refused(f"the parameters of layer {layer!r} are not next to each other")
        layers[layer] = slice(layers[layer].start if layer in layers else start, stop)
        start = stop
    return list(layers.values())


def _blocks(clients: int, n: int) -> Iterator[slice]:
    """Yield clients some at a time: of large models as many as a cache holds, but one at least."""
    size = max(1, _BLOCK // n)
    for begin in range(0, clients, size):
        yield slice(begin, begin + size)
