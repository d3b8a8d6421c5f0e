"""A learner: choose, train and score for a model on a device.

The learners give the same numbers up to rounding. `umbel.client.loop` computes one client after the other and is the
reference. `umbel.client.batched` computes the clients of a cohort together, and `umbel.client.invariant` does so at a
site, where a client's numbers depend on no other client. `umbel.client.engines` picks one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.client import dp_sgd
from umbel.client.cohort import Cohort, LocalUpdate, Schedule, seeded
from umbel.client.row_gradients import RowGradients, gradients_of
from umbel.models.fit import CPU_CHUNK_BYTES, Look, look, one_line, training_bytes
from umbel.models.model import Model, Parameters
from umbel.privacy.gate.randomness import RowSource
from umbel.privacy.gate.time_limit import check_time
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ModelError

GPU_CHUNK_SHARE = 0.25  # of a GPU's memory; see `CPU_CHUNK_BYTES`
ONE_THREAD_BYTES = 1 << 22
"""Up to here a single thread computes a chunk: on a busy machine, threads wait far longer than that takes."""
ALL_ROWS = LocalUpdate(1, 1.0, 0)
_NEWCOMER_EPOCHS = 50  # for which a newcomer fits its local parameters, all its rows at once

Scores = tuple[NDArray[np.float64], NDArray[np.float64]]


class Learner(ABC):
    r"""The work of a cohort's clients on a model: choose, train and score, on a device.

    Hypotheses are (k, \*shape) each. Local parameters, and what clients have trained, are (clients, \*shape) each.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model, self.device = model, device
        self._frozen = {name: value.detach().to(device) for name, value in model.frozen_values.items()}
        local = model.local_shapes
        self._decays = {
            name: torch.from_numpy(value).to(device) for name, value in model.decays.items() if name in local
        }
        self._room = math.inf  # bytes of a chunk; less once that was too much

    def choose(self, hypotheses: Arrays, cohort: Cohort, local: Arrays | None = None) -> NDArray[np.int64]:
        """Return the hypothesis that fits each client's rows best; 0 if there is only one."""
        if len(next(iter(hypotheses.values()))) == 1:
            return np.zeros(len(cohort), np.int64)
        return best_hypothesis(self.score(hypotheses, cohort, local)[0])

    def score(self, hypotheses: Arrays, cohort: Cohort, local: Arrays | None = None) -> Scores:
        """Return losses and metrics (k, clients) of every hypothesis on every client's rows.

        They are the reported values (`umbel.models.losses.Score.report`), not the objective of training.
        """
        with torch.inference_mode():
            sums = self._sums(self._tensors(hypotheses), self._readable(cohort), self._tensors(local or {}))
        means = torch.from_numpy(sums / cohort.lengths)
        loss, metric = self.model.loss, self.model.metric
        with one_thread():
            losses = loss.report(means[0]).numpy()
            same = metric.per_sample is loss.per_sample and metric.report is loss.report
            return losses, losses if same else metric.report(means[-1]).numpy()

    def score_newcomers(self, hypotheses: Arrays, cohort: Cohort, fresh: Arrays, step_size: float) -> Scores:
        """Return loss and metric (k, clients) of clients that have no trained local parameters yet.

        For every hypothesis, each client fits local parameters on four fifths of its rows, and is scored on the rest.
        """
        seen, held_out = cohort.split()
        parts = []
        for j in range(len(next(iter(hypotheses.values())))):
            one = {name: value[j : j + 1] for name, value in hypotheses.items()}
            parts.append(self.score(one, held_out, self.fit_local(one, seen, fresh, step_size)))
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def train(
        self,
        hypotheses: Arrays,
        chosen: NDArray[np.int64],
        cohort: Cohort,
        update: LocalUpdate,
        generators: Sequence[np.random.Generator] | Sequence[RowSource],
        local: Arrays | None = None,
        only: frozenset[str] | None = None,
    ) -> tuple[Arrays, Arrays]:
        """Train each client from its chosen hypothesis (Algorithm 1, line 6); return shared and local parameters.

        All parameters are trained, or `only` those named.

        There is one generator for each client, which shuffles its rows: a client's result does not depend on the other
        clients of the cohort. A slice of `umbel.privacy.gate.randomness.streams` has its generators at their
        beginning. If each row has a guarantee (`LocalUpdate.rows`), `generators` are sources of samples and noise.
        """
        trained = self._train_some(hypotheses, chosen, cohort, update, generators, local or {}, only)
        return {name: trained[name] for name in hypotheses}, {name: trained[name] for name in local or {}}

    def outputs(self, parameters: Arrays, features: Tensor) -> Tensor:
        r"""Return one network's outputs for rows (rows, \*feature shape), given shared and local parameters."""
        rows = self._readable(Cohort(features.to(self.device), features, np.array([len(features)]))).features
        with torch.inference_mode():
            return self.model.apply(self._frozen | self._tensors(parameters), rows)

    def objective(self, parameters: Parameters, cohort: Cohort) -> Tensor:
        r"""Return the objective that training minimises, of one network (\*shape) on all rows of a cohort together."""
        outputs = self.model.apply(self._frozen | parameters, self._readable(cohort).features)
        return self.model.loss.objective(self.model.loss.of_rows(outputs, cohort.targets).mean())

    def own_outputs(self, networks: Arrays, cohort: Cohort) -> Tensor:
        r"""Return the outputs of each client's own m networks for its rows, (m, rows, \*output shape).

        Parameters
        ----------
        networks : dict of ndarray, each (clients, m, \*shape)
            Shared and local parameters. If all clients have the same ones, as from ``np.broadcast_to``, each network
            computes the rows of all clients at once.
        """
        cohort = self._readable(cohort)
        same = all(value.strides[0] == 0 or len(value) == 1 for value in networks.values())
        m, parts = next(iter(networks.values())).shape[1], list[list[Tensor]]()

        def compute(part: slice) -> None:
            rows = cohort.part(part)
            with torch.inference_mode():
                if not len(rows.features):  # of no rows, many networks cannot tell the shape of their outputs
                    found = [torch.zeros(0, *self._look(cohort).outputs, device=self.device)] * m
                elif same:
                    ones = [self._tensors({name: value[0, j] for name, value in networks.items()}) for j in range(m)]
                    found = [self.model.apply(self._frozen | one, rows.features) for one in ones]
                else:
                    of = [self._tensors({name: value[part, j] for name, value in networks.items()}) for j in range(m)]
                    found = [self._own_outputs(one, rows) for one in of]
            parts.append(found)

        sizes = self._scoring_bytes(cohort, 1) if same else self._training_bytes(cohort, ALL_ROWS)
        self._in_chunks(cohort, sizes, compute)
        return torch.stack([torch.cat([found[j] for found in parts]) for j in range(m)])

    def _train_some(
        self,
        hypotheses: Arrays,
        chosen: NDArray[np.int64],
        cohort: Cohort,
        update: LocalUpdate,
        generators: Sequence[np.random.Generator] | Sequence[RowSource],
        local: Arrays,
        only: frozenset[str] | None,
    ) -> Arrays:
        """Train all parameters or `only` those named, a chunk of clients at a time."""
        stacked, own, cohort = self._tensors(hypotheses), self._tensors(local), self._readable(cohort)
        draws, on_cpu = self._look(cohort).draws, self.device.type == "cpu"
        every = {name: value.shape[1:] for name, value in (stacked | own).items()}
        trained: Arrays = {name: np.empty((len(cohort), *shape), np.float32) for name, shape in every.items()}

        def train(part: slice) -> None:
            index = torch.from_numpy(chosen[part]).to(self.device)
            # On a CPU in the memory of the result: a copy of large models takes as long as a step.
            places = {name: torch.from_numpy(value[part]) for name, value in trained.items()} if on_cpu else {}
            # `value[index]` begins threads for a few thousand numbers, which takes a millisecond on a busy machine.
            start = {name: torch.index_select(value, 0, index, out=places.get(name)) for name, value in stacked.items()}
            start |= {name: value[part].clone() for name, value in own.items()}
            rows, some = cohort.part(part), generators[part]
            names = frozenset(only or start) - self.model.buffers
            if update.rows is not None:
                found = self._descend_privately(start, rows, update, cast(Sequence[RowSource], some), names)
            else:
                schedule = Schedule.draw(rows.lengths, update, cast(Sequence[np.random.Generator], some), draws)
                found = self._descend(start, rows, schedule, names)
            for name, value in found.items():
                if value is not places.get(name):
                    trained[name][part] = value.cpu().numpy()

        self._in_chunks(cohort, self._training_bytes(cohort, update), train)
        return trained

    def _descend_privately(
        self,
        start: Parameters,
        cohort: Cohort,
        update: LocalUpdate,
        sources: Sequence[RowSource],
        names: frozenset[str],
    ) -> Parameters:
        """Train as `_descend` does, with a guarantee for each row."""
        shape = tuple(cohort.features.shape[1:])
        gradients, shared = self._row_gradients(names, shape), frozenset(self.model.shapes)
        if gradients.together:
            return dp_sgd.descend(gradients, start, cohort, update, sources, shared)
        draws = self._look(cohort).draws
        for c in range(len(cohort)):
            one, own = slice(c, c + 1), {name: value[c : c + 1] for name, value in start.items()}
            seed = int.from_bytes(sources[c].sample.bytes(8)) >> 1 if draws else None
            with seeded(seed, self.device) if seed is not None else nullcontext():
                # In place: `own` is a part of `start`.
                dp_sgd.descend(gradients, own, cohort.part(one), update, sources[one], shared)
        return start

    def _row_gradients(self, names: frozenset[str], shape: tuple[int, ...]) -> RowGradients:
        return gradients_of(self.model, self._frozen, names, shape)

    def fit_local(self, hypothesis: Arrays, cohort: Cohort, fresh: Arrays, step_size: float) -> Arrays:
        """Return local parameters that fit clients' rows and a single hypothesis, starting from fresh ones."""
        if self.model.hooks.fit_local is not None:
            one = {name: value[0] for name, value in hypothesis.items()}
            features, targets = cohort.features.cpu().numpy(), cohort.targets.cpu().numpy()
            return self.model.hooks.fit_local(one, features, targets, cohort.lengths, self.model.loss.name)
        if not len(cohort.features):
            return fresh
        # Training does not read running statistics: every pass over the same rows would measure the same.
        measured = self.model.local_statistics and not self._look(cohort).repeats
        update = LocalUpdate(1 if measured else _NEWCOMER_EPOCHS, step_size, 0)
        chosen = np.zeros(len(cohort), np.int64)
        # All rows at once: no rows are shuffled, and no generator is used.
        with self.model.last_statistics() if measured else nullcontext():
            trained = self._train_some(hypothesis, chosen, cohort, update, (), fresh, frozenset(fresh))
        return {name: trained[name] for name in fresh}

    def batches(self, lengths: NDArray[np.int64]) -> list[slice | list[int]]:
        """Return the batches in which a site computes clients with these numbers of rows: here one client each."""
        return [slice(c, c + 1) for c in range(len(lengths))]

    @abstractmethod
    def _sums(self, hypotheses: Parameters, cohort: Cohort, local: Parameters) -> NDArray[np.float64]:
        """Return the summed loss and metric (2, k, clients) of every hypothesis over each client's rows.

        If both sum the same numbers, the shape may be (1, k, clients).
        """

    @abstractmethod
    def _own_outputs(self, parameters: Parameters, cohort: Cohort) -> Tensor:
        r"""Return outputs (rows, \*output shape) where each client has a network, (clients, \*shape)."""

    @abstractmethod
    def _descend(self, start: Parameters, cohort: Cohort, schedule: Schedule, names: frozenset[str]) -> Parameters:
        r"""Train the named parameters of all clients, each (clients, \*shape), and return all."""

    def _in_chunks(self, cohort: Cohort, sizes: NDArray[np.int64], compute: Callable[[slice], None]) -> None:
        """Compute successive clients, as many at once as their sizes in bytes fit into memory, but at least one.

        Sizes are estimates, and on a GPU other programs may take free memory. If memory runs out, the same clients are
        computed again, half as many at once. From then on no chunk is larger than that.
        """
        ends, limit, begin = sizes.cumsum(), self._chunk_bytes(), 0
        while begin < len(cohort):
            check_time()
            size = min(limit, self._room)
            fits = int(ends.searchsorted(ends[begin] - sizes[begin] + size, side="right"))
            part, trouble = slice(begin, max(begin + 1, fits)), ""
            small = self.device.type == "cpu" and int(sizes[part].sum()) <= ONE_THREAD_BYTES
            try:
                with one_thread() if small else nullcontext():
                    compute(part)
            except torch.OutOfMemoryError as error:
                trouble = one_line(error)
            # Here the error no longer exists, and no longer holds the memory of what was computed.
            if not trouble:
                begin = part.stop
                continue
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            if part.stop - begin == 1:
                name = self.model.name
                raise ModelError(
                    f"model {name!r} and one client of {cohort.lengths[begin]} rows do not fit in the memory of "
                    f'{self.device}: {trouble}; free memory, or set a smaller batch-size, or device = "cpu"',
                    code="model.memory",
                )
            self._room = int(sizes[part].sum()) // 2

    def _training_bytes(self, cohort: Cohort, update: LocalUpdate) -> NDArray[np.int64]:
        """Return the memory for each client while the clients are trained together."""
        rows, shape = update.size(int(cohort.lengths.max())), tuple(cohort.features.shape[1:])
        return np.full(len(cohort), training_bytes(self.model, shape, rows))

    def _scoring_bytes(self, cohort: Cohort, k: int) -> NDArray[np.int64]:
        """Return the memory for each client while k hypotheses are scored together."""
        return cohort.lengths * (4 * k * self._look(cohort).activations)

    def _chunk_bytes(self) -> int:
        if self.device.type != "cuda":
            return CPU_CHUNK_BYTES
        limit = torch.cuda.get_device_properties(self.device).total_memory * GPU_CHUNK_SHARE
        # Memory that PyTorch holds but does not use is free as well.
        free = torch.cuda.mem_get_info(self.device)[0]
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        while limit > free > 0:
            limit /= 2
        return int(limit)

    def _look(self, cohort: Cohort) -> Look:
        return look(self.model, tuple(cohort.features.shape[1:]))

    def _readable(self, cohort: Cohort) -> Cohort:
        return replace(cohort, features=cohort.features.long()) if self._look(cohort).tokens else cohort

    def _tensors(self, arrays: Arrays) -> Parameters:
        # PyTorch has no read-only tensors, and arrays of a message are read-only; so those are copied.
        own = {name: value if value.flags.writeable else np.array(value) for name, value in arrays.items()}
        return {name: torch.from_numpy(value).to(self.device) for name, value in own.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use one thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def best_hypothesis(losses: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return each client's hypothesis of lowest loss (Algorithm 1, line 5), ties to the lowest index.

    A loss that is not a number never wins.
    """
    best: NDArray[np.int64] = np.where(np.isnan(losses), np.inf, losses).argmin(axis=0)
    return best
