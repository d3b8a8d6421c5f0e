"""DP-SGD: local training with a guarantee for each row (Abadi et al., CCS 2016, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from umbel.client.cohort import Cohort, LocalUpdate, Steps
from umbel.client.row_gradients import RowGradients
from umbel.models.model import Parameters
from umbel.privacy.mechanisms.base import Matrix
from umbel.privacy.mechanisms.randomness import RowSource
from umbel.privacy.mechanisms.sanitise import round_to_grid
from umbel.privacy.site.time_limit import check_time
from umbel.protocol.release import RowPrivacy

_BLOCK = 1 << 12
"""Numbers that are drawn together, if a step takes fewer."""
AT_ONCE = 320
"""Rows that are added up in 32 bits, a little more than a usual batch of 256. The rounding of more could move a sum by
more than a row may, so more are added up in 64 bits."""


def descend(
    gradients: RowGradients,
    start: Parameters,
    cohort: Cohort,
    update: LocalUpdate,
    sources: Sequence[RowSource],
    shared: Collection[str],
) -> Parameters:
    r"""Train a model's parameters of all clients, each (clients, \\*shape), in place, and return all.

    The loss of a step is a mean over rows also for a loss like RMSE, whose usual objective is no such mean.

    Parameters
    ----------
    gradients : RowGradients
        Computes the clipped sums, and says which parameters are trained.
    start : dict of Tensor
    cohort : Cohort
    update : LocalUpdate
        With `LocalUpdate.rows`.
    sources : sequence of RowSource
        One for each client.
    shared : collection of str
        Parameters that a proximal term holds.
    """
    rows = update.rows
    assert rows is not None, "the rows have a guarantee"
    names = [name for name in start if name in gradients.names]
    steps = None
    if not update.descent.plain:
        own = [{name: start[name][c] for name in names} for c in range(len(cohort))]
        steps = Steps(update.descent, update.step_size, own, shared)
    sizes = [start[name][0].numel() for name in names]
    noises = [_blocks(source.noise.standard_normal, sum(sizes), rows.steps) for source in sources]
    for drawn in _samples(cohort.lengths, rows, sources, update.most_drawn):
        check_time()
        sums = _sums(gradients, start, cohort, drawn, rows.clip_norm)
        flat = torch.cat([sums[name].reshape(len(cohort), -1) for name in names], 1).double().cpu().numpy()
        flat += rows.noise_multiplier * rows.clip_norm * np.stack([next(noise) for noise in noises])
        # The low bits of a sum reveal its summands. The grid is public, and 32-bit numbers can hold it.
        noisy = round_to_grid(flat, rows.noise_multiplier * rows.clip_norm, 0.0) / rows.batch
        parts = torch.from_numpy(noisy.astype(np.float32)).to(cohort.features.device).split(sizes, 1)
        found = {name: part.reshape(start[name].shape) for name, part in zip(names, parts, strict=True)}
        if steps:
            steps.step([{name: found[name][c] for name in names} for c in range(len(cohort))])
            continue
        for name in names:
            start[name].sub_(found[name], alpha=update.step_size)
    return start


def _sums(
    gradients: RowGradients,
    parameters: Parameters,
    cohort: Cohort,
    drawn: list[NDArray[np.int64]],
    clip_norm: float,
) -> Parameters:
    """Return the clipped sums of the drawn rows of each client."""
    most, size = max(map(len, drawn)), min(AT_ONCE, gradients.rows_at_once)
    dtype = torch.float32 if most <= AT_ONCE else torch.float64
    total = {name: torch.zeros_like(parameters[name], dtype=dtype) for name in gradients.names}
    for begin in range(0, most, size):
        parts = [rows[begin : begin + size] for rows in drawn]
        index = np.zeros((len(drawn), max(map(len, parts))), np.int64)
        real = np.zeros(index.shape, bool)
        for c, rows in enumerate(parts):
            index[c, : len(rows)], real[c, : len(rows)] = rows, True
        where, counts = (torch.from_numpy(each).to(cohort.features.device) for each in (index, real))
        inputs, targets = cohort.features[where], cohort.targets[where]
        for name, value in gradients.clipped(parameters, inputs, targets, counts, clip_norm, dtype).items():
            total[name] += value
    return total


def _samples(
    lengths: NDArray[np.int64], rows: RowPrivacy, sources: Sequence[RowSource], most: int
) -> Iterator[list[NDArray[np.int64]]]:
    """Yield, for each step, at most so many drawn rows of each client, counted over the cohort."""
    starts = lengths.cumsum() - lengths
    draws = [
        _blocks(source.sample.random, int(length), rows.steps) for source, length in zip(sources, lengths, strict=True)
    ]
    for _ in range(rows.steps):
        yield [start + np.flatnonzero(next(draw) < rows.rate)[:most] for start, draw in zip(starts, draws, strict=True)]


def _blocks(draw: Callable[[int], Matrix], size: int, steps: int) -> Iterator[Matrix]:
    """Yield the draws of each step, of so many numbers; small ones are drawn for several steps together."""
    many = max(1, _BLOCK // max(size, 1))
    for begin in range(0, steps, many):
        yield from draw(min(many, steps - begin) * size).reshape(-1, size) if size else np.zeros((many, 0))
