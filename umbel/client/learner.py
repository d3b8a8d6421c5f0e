"""A learner: choose, train and score for a model on a device, from tensors to tensors.

Two engines give the same numbers up to rounding: `umbel.client.loop` computes one client after the other and is the
reference, `umbel.client.batched` computes the clients of a chunk together. A learner decides which of them computes a
client, with how many others, and on how many threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from queue import SimpleQueue
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.client import dp_sgd
from umbel.client.batched import ONE_THREAD_BYTES, SLOTS, Batched, is_exact
from umbel.client.cohort import ALL_ROWS, Cohort, LocalUpdate, Schedule, seeded, send
from umbel.client.loop import TF32, Engine, Loop
from umbel.client.row_gradients import gradients_of
from umbel.models.fit import CPU_CHUNK_BYTES, Traits, one_line, training_bytes, traits_of
from umbel.models.model import Model, Parameters
from umbel.privacy.mechanisms.randomness import RowSource
from umbel.privacy.site.time_limit import check_time
from umbel.privacy.site.work import Places
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError, ModelError
from umbel.protocol.project import ENGINE
from umbel.protocol.words import count_of

LOOP, BATCHED, SITE = "loop", "batched", "site"
"""The engines; that of a site is exact: a client's numbers depend on no other client, bit for bit."""

GPU_CHUNK_SHARE = 0.25  # of a GPU's memory; see `CPU_CHUNK_BYTES`
_NEWCOMER_EPOCHS = 50  # for which a newcomer fits its local parameters, all its rows at once
_CLIENTS = 4  # hosted clients for each core: with fewer, some cores could be idle if a message asks only some clients

Scores = tuple[NDArray[np.float64], NDArray[np.float64]]
Compute = Callable[[Engine, slice], None]
Release = Callable[[slice, Tensor, Tensor], None]
"""See `umbel.privacy.site.work.OnGpu.release`."""


class Learner:
    r"""The work of a cohort's clients on a model: choose, train and score, on a device.

    Hypotheses are (k, \*shape) each. Local parameters, and what clients have trained, are (clients, \*shape) each.

    Attributes
    ----------
    engine : str
        `LOOP`, `BATCHED` or `SITE`. At a site, clients of many rows are computed by the loop.
    precision : str
        See `umbel.protocol.run_config.RunConfig.precision`.
    """

    def __init__(self, model: Model, device: torch.device, engine: str = LOOP, precision: str = "float32") -> None:
        self.model, self.device, self.engine, self.precision = model, device, engine, precision
        self._loop = Loop(model, device, precision)
        self._batched = None if engine == LOOP else Batched(model, device, precision, exact=engine == SITE)
        self._room = math.inf  # bytes of a chunk; less once that was too much

    def tensors(self, arrays: Arrays) -> Parameters:
        """Return arrays as tensors on the device; see `umbel.client.cohort.send`."""
        return dict(zip(arrays, send([*arrays.values()], self.device), strict=True))

    def choose(self, hypotheses: Parameters, cohort: Cohort, local: Parameters | None = None) -> Tensor:
        """Return the hypothesis that fits each client's rows best, (clients,); 0 if there is only one."""
        if len(next(iter(hypotheses.values()))) == 1:
            return torch.zeros(len(cohort), dtype=torch.int64)
        return torch.from_numpy(best_hypothesis(self.score(hypotheses, cohort, local)[0]))

    def score(self, hypotheses: Parameters, cohort: Cohort, local: Parameters | None = None) -> Scores:
        """Return losses and metrics (k, clients) of every hypothesis on every client's rows.

        They are the reported values (`umbel.models.losses.Score.report`), not the objective of training.
        """
        own, cohort = local or {}, self._readable(cohort)
        k, together = len(next(iter(hypotheses.values()))), self.engine == BATCHED
        sums = np.empty((2, k, len(cohort)))

        def add(engine: Engine, part: slice) -> None:
            sums[:, :, part] = engine.sums(
                hypotheses, cohort.part(part), {name: own[name][part] for name in own}
            ).numpy()

        stacked = together and bool(own)
        sizes = self._training_bytes(cohort, ALL_ROWS) if stacked else self._scoring_bytes(cohort, k if together else 1)
        with torch.inference_mode():
            self._in_chunks(cohort, sizes, add)
        loss, metric = (torch.from_numpy(mean) for mean in sums / cohort.lengths)
        with one_thread():
            return self.model.loss.report(loss).numpy(), self.model.metric.report(metric).numpy()

    def score_newcomers(self, hypotheses: Parameters, cohort: Cohort, fresh: Parameters, step_size: float) -> Scores:
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
        hypotheses: Parameters,
        chosen: Tensor,
        cohort: Cohort,
        update: LocalUpdate,
        generators: Sequence[np.random.Generator] | Sequence[RowSource],
        local: Parameters | None = None,
        only: frozenset[str] | None = None,
        release: Release | None = None,
    ) -> tuple[Parameters, Parameters]:
        """Train each client from its chosen hypothesis (Algorithm 1, line 6); return shared and local parameters.

        All parameters are trained, or `only` those named. Trained parameters are in the CPU's memory. With `release`
        they are not returned: on a GPU it gets the clients of each chunk, what they trained and where they started.

        There is one generator for each client, which shuffles its rows: a client's result does not depend on the other
        clients of the cohort. A slice of `umbel.privacy.mechanisms.randomness.streams` has its generators at their
        beginning. If each row has a guarantee (`LocalUpdate.rows`), `generators` are sources of samples and noise.
        """
        own, cohort = local or {}, self._readable(cohort)
        names = frozenset(only or hypotheses | own) - self.model.buffers
        draws, on_cpu = self._traits(cohort).draws, self.device.type == "cpu"
        shapes = {name: value.shape[1:] for name, value in (hypotheses | own).items()}
        if on_cpu:
            trained = {name: torch.empty(len(cohort), *shape) for name, shape in shapes.items()}
        elif release:
            trained, whole = {}, _joined(hypotheses, shapes)
        else:  # a GPU copies all of a client's numbers at once, while it computes the next clients
            sizes = [math.prod(shape) for shape in shapes.values()]
            flat = torch.empty(len(cohort), sum(sizes)).pin_memory()
            parts = zip(shapes.items(), flat.split(sizes, 1), strict=True)
            trained = {name: part.view(len(cohort), *shape) for (name, shape), part in parts}
        gradients = None
        if update.rows is not None:
            chain = self._batched.layers if self._batched and self.engine == BATCHED else None
            gradients = gradients_of(self.model, self._loop.frozen, names, cohort.shape, chain)

        def train(engine: Engine, part: slice) -> None:
            index = chosen[part].to(self.device)
            # On a CPU in the memory of the result: a copy of large models takes as long as a step.
            places = {name: value[part] for name, value in trained.items()} if on_cpu else {}
            # `value[index]` begins threads for a few thousand numbers, which takes a millisecond on a busy machine.
            start = {
                name: torch.index_select(value, 0, index, out=places.get(name)) for name, value in hypotheses.items()
            }
            start |= {name: value[part].clone() for name, value in own.items()}
            rows, some = cohort.part(part), generators[part]
            if gradients is None:
                schedule = Schedule.draw(rows.lengths, update, cast(Sequence[np.random.Generator], some), draws)
                after = engine.descend(start, rows, schedule, names)
            else:
                sources = cast(Sequence[RowSource], some)
                with seeded(int.from_bytes(sources[0].sample.bytes(8)) >> 1, self.device) if draws else nullcontext():
                    after = dp_sgd.descend(gradients, start, rows, update, sources, self.model.shapes)
            if release:
                ends = _joined(after, shapes)
                del after, start
                release(part, ends, whole.index_select(0, index))
                return
            if not on_cpu:
                flat[part].copy_(_joined(after, shapes), non_blocking=True)
                return
            for name, value in after.items():
                if value is not places.get(name):
                    trained[name][part] = value

        alone = gradients is not None and not gradients.together
        self._in_chunks(cohort, self._training_bytes(cohort, update), train, alone)
        if not on_cpu:
            torch.cuda.synchronize(self.device)
        if release:
            return {}, {}
        return {name: trained[name] for name in hypotheses}, {name: trained[name] for name in own}

    def fit_local(self, hypothesis: Parameters, cohort: Cohort, fresh: Parameters, step_size: float) -> Parameters:
        """Return local parameters that fit clients' rows and a single hypothesis, starting from fresh ones."""
        if self.model.hooks.fit_local is not None:
            one = {name: value[0] for name, value in arrays_of(hypothesis).items()}
            features, targets = cohort.features.cpu().numpy(), cohort.targets.cpu().numpy()
            return self.tensors(
                self.model.hooks.fit_local(one, features, targets, cohort.lengths, self.model.loss.name)
            )
        if not len(cohort.features):
            return fresh
        # Training does not read running statistics: every pass over the same rows would measure the same.
        measured = self.model.local_statistics and not self._traits(cohort).repeats
        update = LocalUpdate(1 if measured else _NEWCOMER_EPOCHS, step_size, 0)
        chosen = torch.zeros(len(cohort), dtype=torch.int64)
        # All rows at once: no rows are shuffled, and no generator is used.
        with self.model.last_statistics() if measured else nullcontext():
            _, fitted = self.train(hypothesis, chosen, cohort, update, (), fresh, frozenset(fresh))
        return {name: value.to(self.device) for name, value in fitted.items()}

    def objective(self, parameters: Parameters, cohort: Cohort) -> Tensor:
        r"""Return the objective that training minimises, of one network (\*shape) on all rows of a cohort together."""
        outputs = self._loop.apply(parameters, self._readable(cohort).features)
        return self.model.loss.objective(self.model.loss.of_rows(outputs, cohort.targets).mean())

    def outputs(self, networks: Arrays, cohort: Cohort) -> Tensor:
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
            each = [self.tensors({name: value[of, j] for name, value in networks.items()}) for j in range(m)]
            if not len(rows.features):  # of no rows, many networks cannot tell the shape of their outputs
                parts.append(torch.zeros(m, 0, *self._traits(cohort).outputs, device=self.device))
            elif same:
                parts.append(torch.stack([engine.apply(one, rows.features) for one in each]))
            else:
                parts.append(torch.stack([engine.outputs(one, rows) for one in each]))

        sizes = self._scoring_bytes(cohort, 1) if same else self._training_bytes(cohort, ALL_ROWS)
        with torch.inference_mode():
            self._in_chunks(cohort, sizes, compute)
        return torch.cat(parts, 1)

    def width(self, rows: int) -> int:
        """Return the number of rows to which a site pads a client of so many rows; 0 for one computed by the loop."""
        return self._batched.width(rows) if self._batched and self._batched.exact else 0

    def room(self, shape: tuple[int, ...], rows: int) -> str:
        """Return how many clients with so many rows a step are trained at once, and in which memory, in words."""
        size, most = training_bytes(self.model, shape, rows), self._chunk_bytes()
        together = max(1, most // size) if self.engine == BATCHED else 1
        return f"{count_of(together, 'client')} at a time on {self.device}, {size / 2**20:,.1f} MiB each"

    def _in_chunks(self, cohort: Cohort, sizes: NDArray[np.int64], compute: Compute, alone: bool = False) -> None:
        """Compute successive clients, as many at once as their sizes in bytes fit into memory, but at least one.

        Sizes are estimates, and on a GPU other programs may take free memory. If memory runs out, the same clients are
        computed again, half as many at once. From then on no chunk is larger than that. With `alone`, a chunk is one
        client.
        """
        ends, limit, begin = sizes.cumsum(), self._chunk_bytes(), 0
        while begin < len(cohort):
            check_time()
            before, room = ends[begin] - sizes[begin], 0 if alone else min(limit, self._room)
            fits = max(begin + 1, int(ends.searchsorted(before + room, side="right")))
            engine, part = self._chunk(cohort.lengths, begin, fits)
            size, trouble = int(ends[part.stop - 1] - before), ""
            few = engine.exact or size <= ONE_THREAD_BYTES
            try:
                with one_thread() if few and self.device.type == "cpu" else self._products():
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
                raise ModelError(
                    f"model {self.model.name!r} and one client of {cohort.lengths[begin]} rows do not fit in the "
                    f"memory of {self.device}: {trouble}; free memory, or set a smaller batch-size, or "
                    'device = "cpu"',
                    code="model.memory",
                )
            self._room = size // 2

    def _chunk(self, lengths: NDArray[np.int64], begin: int, most: int) -> tuple[Engine, slice]:
        """Return what computes the next clients, and which: they end before `most`, and are of one width at a site."""
        if self.engine != SITE or self._batched is None:
            return self._batched or self._loop, slice(begin, most)
        width, end = self.width(int(lengths[begin])), begin + 1
        while width and end < min(most, begin + SLOTS) and self.width(int(lengths[end])) == width:
            end += 1
        return self._batched if width else self._loop, slice(begin, end)

    def _training_bytes(self, cohort: Cohort, update: LocalUpdate) -> NDArray[np.int64]:
        """Return the memory for each client while the clients are trained together."""
        rows, shape = update.size(int(cohort.lengths.max())), cohort.shape
        return np.full(len(cohort), training_bytes(self.model, shape, rows))

    def _scoring_bytes(self, cohort: Cohort, k: int) -> NDArray[np.int64]:
        """Return the memory for each client while k hypotheses are scored together."""
        return cohort.lengths * (4 * k * self._traits(cohort).activations)

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

    def _products(self) -> AbstractContextManager[None]:
        return _tf32() if self.precision == TF32 and self.device.type == "cuda" else nullcontext()

    def _traits(self, cohort: Cohort) -> Traits:
        return traits_of(self.model, cohort.shape)

    def _readable(self, cohort: Cohort) -> Cohort:
        return replace(cohort, features=cohort.features.long()) if self._traits(cohort).tokens else cohort


class Turns:
    """How a message's clients are divided into batches, and threads among these; in a simulation all are one batch.

    At a site, clients of one width are computed together, in their order. All others, and all without `together`, are
    alone, so that no other client's rows take of their time. The number of threads that compute a client may change its
    numbers, so it does not depend on the clients that are asked. If a site hosts several clients for each core, each
    thread computes one client, and all cores work at once. Otherwise all cores compute one client after the other.

    Attributes
    ----------
    batches : list of slice or list of int
        The places of the clients that a site computes together.
    size : int
        Number of batches that are computed at a time.
    """

    def __init__(
        self,
        learner: Learner,
        lengths: Sequence[int] = (),
        hosted: int = 0,
        shape: tuple[int, ...] = (),
        together: bool = True,
    ) -> None:
        alike: dict[int, list[int]] = {}
        for c, rows in enumerate(lengths):
            alike.setdefault(learner.width(rows) if together else 0, []).append(c)
        alone, learners = alike.pop(0, []), [learner]
        self._single = _one_thread_each(learner, hosted, shape)
        if self._single:
            alone.sort(key=lambda c: -lengths[c])  # so that all threads end at about the same time
            size = training_bytes(learner.model, shape, max(lengths, default=1))
            most = min(torch.get_num_threads(), len(alone), CPU_CHUNK_BYTES // size)
            # Copies alone: a thread that has not ended in the site's time still computes on its network.
            learners = (_copies(learner, most) if most > 1 else []) or learners
        self.batches: list[Places] = [
            *(some[i : i + SLOTS] for some in alike.values() for i in range(0, len(some), SLOTS)),
            *(slice(c, c + 1) for c in alone),
        ]
        self.size = len(learners)
        self._idle: SimpleQueue[Learner] = SimpleQueue()
        for one in learners:
            self._idle.put(one)

    @property
    def threads(self) -> AbstractContextManager[None]:
        """A context that sets the number of threads that compute a client."""
        return one_thread() if self._single else nullcontext()

    @contextmanager
    def learner(self) -> Iterator[Learner]:
        """Lend a learner to a thread: a network computes for one thread at a time."""
        learner = self._idle.get()
        try:
            yield learner
        finally:
            self._idle.put(learner)


def _joined(parameters: Parameters, names: Iterable[str]) -> Tensor:
    """Return the named parameters of clients as a matrix (clients, n)."""
    return torch.cat([parameters[name].reshape(len(parameters[name]), -1) for name in names], 1)


def _copies(learner: Learner, count: int) -> list[Learner]:
    """Return so many learners with a network each; none if the network cannot be copied."""
    try:
        return [Learner(deepcopy(learner.model), learner.device, precision=learner.precision) for _ in range(count)]
    except Exception:  # a module may hold anything
        return []


def _one_thread_each(learner: Learner, hosted: int, shape: tuple[int, ...]) -> bool:
    """Return whether one thread computes each of so many hosted clients.

    PyTorch has one generator for all threads, so clients of a network that draws take turns. Fresh local parameters may
    be drawn from it too.
    """
    many = learner.engine == LOOP and learner.device.type == "cpu" and hosted >= _CLIENTS * torch.get_num_threads()
    return many and not learner.model.local_shapes and not traits_of(learner.model, shape).draws


def arrays_of(parameters: Parameters) -> Arrays:
    """Return tensors as arrays."""
    return {name: value.cpu().numpy() for name, value in parameters.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use one thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _tf32() -> Iterator[None]:
    """Let a GPU round the factors of products inside the block, by PyTorch's own switch."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def best_hypothesis(losses: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return each client's hypothesis of lowest loss (Algorithm 1, line 5), ties to the lowest index.

    A loss that is not a number never wins.
    """
    return np.asarray(np.where(np.isnan(losses), np.inf, losses).argmin(axis=0), np.int64)


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


def learner_for(model: Model, device: str = "auto", engine: str = "auto", precision: str = "float32") -> Learner:
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
    if engine == SITE and not (is_exact(model) and precision == "float32"):
        engine = LOOP
    return _made(model, torch.device(device), engine, precision)


_made = lru_cache(maxsize=16)(Learner)
