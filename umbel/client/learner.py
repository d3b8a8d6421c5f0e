"""A learner: choose, train and score for a model on a device.

Two engines give the same numbers up to rounding: `umbel.client.loop` computes one client after the other and is the
reference, `umbel.client.batched` computes the clients of a chunk together. A learner decides which of them computes a
client, with how many others, and on how many threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.client import dp_sgd
from umbel.client.batched import SLOTS, Batched, is_exact
from umbel.client.cohort import ALL_ROWS, Cohort, LocalUpdate, Schedule, seeded
from umbel.client.engines import ONE_THREAD_BYTES, Engine
from umbel.client.loop import Loop
from umbel.client.row_gradients import gradients_of
from umbel.models.fit import CPU_CHUNK_BYTES, Look, look, one_line, training_bytes
from umbel.models.model import Model, Parameters
from umbel.privacy.gate.time_limit import check_time
from umbel.privacy.mechanisms.randomness import RowSource
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError, ModelError
from umbel.protocol.project import ENGINE

LOOP, BATCHED, SITE = "loop", "batched", "site"
"""The engines; that of a site is exact: a client's numbers depend on no other client, bit for bit."""

GPU_CHUNK_SHARE = 0.25  # of a GPU's memory; see `CPU_CHUNK_BYTES`
_NEWCOMER_EPOCHS = 50  # for which a newcomer fits its local parameters, all its rows at once

Scores = tuple[NDArray[np.float64], NDArray[np.float64]]
Compute = Callable[[Engine, slice], None]


class Learner:
    r"""The work of a cohort's clients on a model: choose, train and score, on a device.

    Hypotheses are (k, \*shape) each. Local parameters, and what clients have trained, are (clients, \*shape) each.

    Attributes
    ----------
    engine : str
        `LOOP`, `BATCHED` or `SITE`. At a site, clients of many rows are computed by the loop.
    """

    def __init__(self, model: Model, device: torch.device, engine: str = LOOP) -> None:
        self.model, self.device, self.engine = model, device, engine
        self._loop = Loop(model, device)
        self._batched = None if engine == LOOP else Batched(model, device, exact=engine == SITE)
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
        shared, own, cohort = self._tensors(hypotheses), self._tensors(local or {}), self._readable(cohort)
        k, together = len(next(iter(shared.values()))), self.engine == BATCHED
        sums = torch.empty(2, k, len(cohort), dtype=torch.float64)

        def add(engine: Engine, part: slice) -> None:
            some = {name: value[part] for name, value in own.items()}
            sums[:, :, part] = engine.sums(shared, cohort.part(part), some)

        stacked = together and bool(own)
        sizes = self._training_bytes(cohort, ALL_ROWS) if stacked else self._scoring_bytes(cohort, k if together else 1)
        with torch.inference_mode():
            self._in_chunks(cohort, sizes, add)
        with one_thread():
            loss, metric = sums / torch.from_numpy(cohort.lengths)
            return self.model.loss.report(loss).numpy(), self.model.metric.report(metric).numpy()

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
        clients of the cohort. A slice of `umbel.privacy.mechanisms.randomness.streams` has its generators at their
        beginning. If each row has a guarantee (`LocalUpdate.rows`), `generators` are sources of samples and noise.
        """
        shared, own, cohort = self._tensors(hypotheses), self._tensors(local or {}), self._readable(cohort)
        names = frozenset(only or shared | own) - self.model.buffers
        draws, on_cpu, choice = self._look(cohort).draws, self.device.type == "cpu", torch.from_numpy(chosen)
        trained = {name: torch.empty(len(cohort), *value.shape[1:]) for name, value in (shared | own).items()}
        gradients = None
        if update.rows is not None:
            chain = self._batched.chain if self._batched else None
            shape = tuple(cohort.features.shape[1:])
            gradients = gradients_of(self.model, self._loop.frozen, names, shape, chain)

        def train(engine: Engine, part: slice) -> None:
            index = choice[part].to(self.device)
            # On a CPU in the memory of the result: a copy of large models takes as long as a step.
            places = {name: value[part] for name, value in trained.items()} if on_cpu else {}
            # `value[index]` begins threads for a few thousand numbers, which takes a millisecond on a busy machine.
            start = {name: torch.index_select(value, 0, index, out=places.get(name)) for name, value in shared.items()}
            start |= {name: value[part].clone() for name, value in own.items()}
            rows, some = cohort.part(part), generators[part]
            if gradients is None:
                schedule = Schedule.draw(rows.lengths, update, cast(Sequence[np.random.Generator], some), draws)
                found = engine.descend(start, rows, schedule, names)
            else:
                sources = cast(Sequence[RowSource], some)
                with seeded(int.from_bytes(sources[0].sample.bytes(8)) >> 1, self.device) if draws else nullcontext():
                    found = dp_sgd.descend(gradients, start, rows, update, sources, self.model.shapes)
            for name, value in found.items():
                if value is not places.get(name):
                    trained[name][part] = value

        alone = gradients is not None and not gradients.together
        self._in_chunks(cohort, self._training_bytes(cohort, update), train, alone)
        arrays: Arrays = {name: value.numpy() for name, value in trained.items()}
        return {name: arrays[name] for name in shared}, {name: arrays[name] for name in own}

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
            return self.train(hypothesis, chosen, cohort, update, (), fresh, frozenset(fresh))[1]

    def outputs(self, parameters: Arrays, features: Tensor) -> Tensor:
        r"""Return one network's outputs for rows (rows, \*feature shape), given shared and local parameters."""
        rows = self._readable(Cohort(features.to(self.device), features, np.array([len(features)]))).features
        with torch.inference_mode():
            return self._loop.apply(self._tensors(parameters), rows)

    def objective(self, parameters: Parameters, cohort: Cohort) -> Tensor:
        r"""Return the objective that training minimises, of one network (\*shape) on all rows of a cohort together."""
        outputs = self._loop.apply(parameters, self._readable(cohort).features)
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
        m, parts = next(iter(networks.values())).shape[1], list[Tensor]()

        def compute(engine: Engine, part: slice) -> None:
            rows, of = cohort.part(part), 0 if same else part
            each = [self._tensors({name: value[of, j] for name, value in networks.items()}) for j in range(m)]
            if not len(rows.features):  # of no rows, many networks cannot tell the shape of their outputs
                found = [torch.zeros(0, *self._look(cohort).outputs, device=self.device)] * m
            elif same:
                found = [engine.apply(one, rows.features) for one in each]
            else:
                found = [engine.outputs(one, rows) for one in each]
            parts.append(torch.stack(found))

        sizes = self._scoring_bytes(cohort, 1) if same else self._training_bytes(cohort, ALL_ROWS)
        with torch.inference_mode():
            self._in_chunks(cohort, sizes, compute)
        return torch.cat(parts, 1)

    def batches(self, lengths: NDArray[np.int64]) -> list[slice | list[int]]:
        """Return the batches in which a site computes clients with these numbers of rows.

        Clients of one width are together, in their order; all others are alone.
        """
        alike: dict[int, list[int]] = {}
        for c, rows in enumerate(lengths.tolist()):
            alike.setdefault(self._batched.width(rows) if self._batched else 0, []).append(c)
        alone = [slice(c, c + 1) for c in alike.pop(0, [])]
        return [*(some[i : i + SLOTS] for some in alike.values() for i in range(0, len(some), SLOTS)), *alone]

    def _chunk(self, lengths: NDArray[np.int64], begin: int, most: int) -> tuple[Engine, slice]:
        """Return the next clients, which end before `most`, and what computes them."""
        if self._batched is None or not self._batched.exact:
            return self._batched or self._loop, slice(begin, most)
        width, end = self._batched.width(int(lengths[begin])), begin + 1
        if not width:
            return self._loop, slice(begin, end)
        while end < min(most, begin + SLOTS) and self._batched.width(int(lengths[end])) == width:
            end += 1
        return self._batched, slice(begin, end)

    def _in_chunks(self, cohort: Cohort, sizes: NDArray[np.int64], compute: Compute, alone: bool = False) -> None:
        """Compute successive clients, as many at once as their sizes in bytes fit into memory, but at least one.

        Sizes are estimates, and on a GPU other programs may take free memory. If memory runs out, the same clients are
        computed again, half as many at once. From then on no chunk is larger than that. With `alone`, a chunk is one
        client.
        """
        ends, limit, begin = sizes.cumsum(), self._chunk_bytes(), 0
        while begin < len(cohort):
            check_time()
            size = 0 if alone else min(limit, self._room)
            fits = int(ends.searchsorted(ends[begin] - sizes[begin] + size, side="right"))
            engine, part = self._chunk(cohort.lengths, begin, max(begin + 1, fits))
            few = engine.exact or int(sizes[part].sum()) <= ONE_THREAD_BYTES
            trouble = ""
            try:
                with one_thread() if few and self.device.type == "cpu" else nullcontext():
                    compute(engine, part)
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


def engine_asked() -> str:
    """Return the engine that the environment variable `ENGINE` names, to look for a fault; by default ``auto``.

    Raises
    ------
    ConfigError
        If there is none of that name.
    """
    engine = os.environ.get(ENGINE, "auto")
    if engine not in ("auto", LOOP, BATCHED):
        text = f"{ENGINE} = {engine!r} names no engine; set it to auto, loop or batched"
        raise ConfigError(text, code="config.unknown-name")
    return engine


def learner_for(model: Model, device: str = "auto", engine: str = "auto") -> Learner:
    """Return the learner of a model on ``cpu``, ``cuda`` or ``auto`` (the GPU if there is one).

    The engine is one of `LOOP`, `BATCHED`, `SITE` or ``auto``. A batched convolution becomes a grouped one, which the
    CPU computes more slowly than one client after the other. In every other case the batched form is faster.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device = "cuda" but PyTorch sees no GPU here; set device = "auto"', code="config.no-device")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if engine == "auto":
        engine = LOOP if device == "cpu" and model.convolves else BATCHED
    if engine == SITE and not (device == "cpu" and is_exact(model)):
        engine = LOOP
    return _made(model, torch.device(device), engine)


_made = lru_cache(maxsize=16)(Learner)
