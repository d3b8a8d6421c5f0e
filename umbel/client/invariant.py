"""Clients of a site with a small dense network, computed together: each gets, bit for bit, the numbers it gets alone.

A release must not depend on the other clients of its batch, not even by rounding. Matrix products do: a library picks
its kernel by shape, and MKL sums in another order if a matrix begins at another address. So clients are computed in
chunks of one fixed shape, padded with clients that have no rows. A client's rows are padded to a width that depends
only on their number. A chunk contains only

- additions, multiplications, divisions and roots of single numbers, which IEEE 754 rounds in one way;
- exponentials and similar functions on a multiple of 64 numbers: the same vector code computes all of them, and the
  code for a remainder is never used;
- sums over an axis within one client, whose order depends only on the shape.

One thread computes a chunk, since several threads would split it. Larger networks and clients are computed one client
after the other: for them a chunk saves little time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from umbel.client.batched import BatchedLearner, Minibatch, dense_layers
from umbel.client.cohort import Cohort, Schedule
from umbel.client.learner import ONE_THREAD_BYTES, one_thread
from umbel.client.loop import LoopLearner
from umbel.client.row_gradients import RowGradients
from umbel.models.losses import LOSSES, METRICS
from umbel.models.model import Model, Parameters
from umbel.models.networks import Softmax
from umbel.privacy.gate.time_limit import check_time

SLOTS = 64  # clients of a chunk: a multiple of the numbers that any processor computes at once
_NARROWEST = 8  # minimum rows to which a client is padded, so that few widths occur


class InvariantLearner(BatchedLearner):
    """Computes clients in chunks of one fixed shape: a client's result depends on no other client."""

    def __init__(self, model: Model, device: torch.device) -> None:
        super().__init__(model, device)
        self._loop = LoopLearner(model, device)

    @staticmethod
    def takes(model: Model) -> bool:
        """Return whether a model has only the operations that the module's docstring lists."""
        known = LOSSES.get(model.loss.name) == model.loss and METRICS.get(model.metric.name) == model.metric
        return known and not model.frozen_values and _layers(model.module) is not None

    @cached_property
    def _chain(self) -> list[tuple[str, nn.Module]] | None:
        return _layers(self.model.module)

    def batches(self, lengths: NDArray[np.int64]) -> list[slice | list[int]]:
        """See `Learner.batches`: chunks of clients of one width, in their order."""
        widths = [_width(int(length)) for length in lengths]
        alike: dict[int, list[int]] = {}
        for c, width in enumerate(widths):
            if width <= self._widest:
                alike.setdefault(width, []).append(c)
        chunks = [some[i : i + SLOTS] for some in alike.values() for i in range(0, len(some), SLOTS)]
        return [*chunks, *(slice(c, c + 1) for c, width in enumerate(widths) if width > self._widest)]

    @cached_property
    def _widest(self) -> int:
        """Maximum rows of a client in a chunk: a layer's single products must not be too much work for a thread."""
        layers = [layer for _, layer in self._chain or [] if isinstance(layer, nn.Linear)]
        products = max((layer.weight.numel() for layer in layers), default=1)
        return ONE_THREAD_BYTES // (4 * SLOTS * products)

    def _together(self, cohort: Cohort) -> bool:
        """Return whether clients of one width are computed in a chunk."""
        return _width(int(cohort.lengths.max(initial=0))) <= self._widest

    def _in_chunks(self, cohort: Cohort, sizes: NDArray[np.int64], compute: Callable[[slice], None]) -> None:
        """Compute runs of clients of one width, at most a chunk."""
        for part in self._runs(cohort):
            rows = cohort.part(part)
            if not self._together(rows):
                super()._in_chunks(rows, sizes[part], partial(_whole, compute, part))
                continue
            check_time()
            with one_thread():
                compute(part)

    def _runs(self, cohort: Cohort) -> Iterator[slice]:
        widths, begin = [_width(int(length)) for length in cohort.lengths], 0
        for end in range(1, len(cohort) + 1):
            most = SLOTS if widths[begin] <= self._widest else 1
            if end == len(cohort) or end - begin == most or widths[end] != widths[begin]:
                yield slice(begin, end)
                begin = end

    def _sums(self, hypotheses: Parameters, cohort: Cohort, local: Parameters) -> NDArray[np.float64]:
        sums = np.empty((2, len(next(iter(hypotheses.values()))), len(cohort)))

        def add(part: slice) -> None:
            rows, own = cohort.part(part), {name: value[part] for name, value in local.items()}
            if self._together(rows):
                sums[:, :, part] = self._own_sums(hypotheses, _padded(rows), _slots(own))[:, :, : len(rows)]
            else:
                sums[:, :, part] = self._loop._sums(hypotheses, rows, own)

        self._in_chunks(cohort, self._scoring_bytes(cohort, 1), add)
        return sums

    def _own_outputs(self, parameters: Parameters, cohort: Cohort) -> Tensor:
        return self._loop._own_outputs(parameters, cohort)

    def _descend(self, start: Parameters, cohort: Cohort, schedule: Schedule, names: frozenset[str]) -> Parameters:
        if not self._together(cohort):
            return self._loop._descend(start, cohort, schedule, names)
        schedule = replace(schedule, lengths=_padded_lengths(schedule.lengths))
        trained = super()._descend(_slots(start), _padded(cohort), schedule, names)
        return {name: value[: len(cohort)] for name, value in trained.items()}

    def _row_gradients(self, names: frozenset[str], shape: tuple[int, ...]) -> RowGradients:
        return self._loop._row_gradients(names, shape)

    def _minibatches(self, cohort: Cohort, schedule: Schedule) -> Iterator[Minibatch]:
        """Yield the schedule's minibatches, each padded to the width for a client's number of rows.

        As in all padding, the added columns repeat a client's first row of the step.
        """
        width = _width(schedule.update.size(int(cohort.lengths.max(initial=0))))
        for rows, weights, counts in super()._minibatches(cohort, schedule):
            missing = width - rows.shape[1]
            rows = np.concatenate([rows, np.repeat(rows[:, :1], missing, axis=1)], axis=1)
            yield rows, np.pad(weights, ((0, 0), (0, missing))), counts

    def _forward(self, parameters: Parameters, inputs: Tensor, training: bool = False) -> Tensor:
        if inputs.ndim != 3:
            raise NotImplementedError("a client's rows are no vectors")
        return super()._forward(parameters, inputs, training)

    def _product(self, inputs: Tensor, weight: Tensor) -> Tensor:
        return (inputs[:, :, None] * weight[:, None]).sum(-1)

    def _moved(self, value: Tensor, gradient: Tensor, step_size: float) -> Tensor:
        # Two operations, each rounded: a single call would round once or twice, depending on a number's position.
        return value - gradient * step_size


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return the layers of a plain chain of dense layers; None for other networks."""
    return dense_layers(module.linear, "linear.") if type(module) is Softmax else dense_layers(module)


def _whole(compute: Callable[[slice], None], part: slice, _inside: slice) -> None:
    compute(part)


def _width(rows: int) -> int:
    """Return the power of two to which so many rows are padded."""
    return max(_NARROWEST, 1 << max(rows - 1, 0).bit_length())


def _slots(values: Parameters) -> Parameters:
    """Return the values of some clients, followed by zeros for the other slots of a chunk."""
    return {
        name: torch.cat([value, value.new_zeros(SLOTS - len(value), *value.shape[1:])])
        for name, value in values.items()
    }


def _padded(cohort: Cohort) -> Cohort:
    """Return a cohort with as many clients as a chunk has slots; the added clients have no rows."""
    return replace(cohort, lengths=_padded_lengths(cohort.lengths))


def _padded_lengths(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.pad(lengths, (0, SLOTS - len(lengths)))
