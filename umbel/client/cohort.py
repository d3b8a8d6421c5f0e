"""The rows of some clients, and the order in which each client trains on its rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from umbel.data import Dataset, held_out
from umbel.models.model import Parameters
from umbel.models.optimizers import PLAIN, Descent
from umbel.protocol.release import RowPrivacy

_FAR = 6.0  # deviations above the mean
_AT_ONCE = 1 << 26  # bytes of minibatches that go to a GPU in one copy
_MANY = 2**62  # more examples than any client has


@dataclass(frozen=True)
class Cohort:
    """The rows of some clients, those of a client together.

    Attributes
    ----------
    features : Tensor, shape (rows, \\*feature shape), float32, or int64 for tokens
    targets : Tensor, shape (rows,) or (rows, outputs), float32, or int64 for classes
    lengths : ndarray of int64, shape (clients,)
        Number of rows of each client.
    """

    features: Tensor
    targets: Tensor
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row's features."""
        return tuple(self.features.shape[1:])

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """First row of each client."""
        return self.lengths.cumsum() - self.lengths

    @classmethod
    def gather(cls, dataset: Dataset, clients: ArrayLike, device: torch.device) -> Cohort:
        """Read the rows of `clients`, and no others, in one copy."""
        chosen = np.asarray(clients, dtype=np.int64)
        first = dataset.offsets[chosen]
        lengths = dataset.offsets[chosen + 1] - first
        ends = lengths.cumsum()
        rows = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - lengths), lengths)
        kind: Any = np.int64 if dataset.manifest.tokens else np.float32
        features: NDArray[Any] = np.asarray(dataset.features[rows], kind)
        if dataset.manifest.feature_scale != 1.0:
            features = features * np.float32(dataset.manifest.feature_scale)
        targets = np.asarray(dataset.targets[rows])
        targets = targets.astype(np.float32 if targets.dtype.kind == "f" else np.int64, copy=False)
        features_there, targets_there = send([features, targets], device)
        return cls(features_there, targets_there, lengths)

    @classmethod
    def without_rows(cls, clients: int, shape: tuple[int, ...], device: torch.device) -> Cohort:
        """Return clients that have no rows, given the shape of a row."""
        return cls(torch.zeros(0, *shape, device=device), torch.zeros(0, device=device), np.zeros(clients, np.int64))

    def part(self, clients: slice) -> Cohort:
        """Return consecutive clients as a cohort, without a copy."""
        if clients.indices(len(self)) == (0, len(self), 1):
            return self
        starts, lengths = self.starts[clients], self.lengths[clients]
        rows = slice(int(starts[0]), int(starts[-1] + lengths[-1]))
        return Cohort(self.features[rows], self.targets[rows], lengths)

    def to(self, device: torch.device) -> Cohort:
        """Return the same clients on a device."""
        return Cohort(self.features.to(device), self.targets.to(device), self.lengths)

    def split(self) -> tuple[Cohort, Cohort]:
        """Return each client's rows in two parts: all but every fifth, and every fifth.

        If a client has fewer than five rows, only its last row is in the second part. The first may then be empty.
        """
        kept = held_out(self.lengths)
        return self.rows(~kept), self.rows(kept)

    def rows(self, chosen: NDArray[np.bool_]) -> Cohort:
        """Return the same clients with some of their rows, (rows,)."""
        owner = np.repeat(np.arange(len(self)), self.lengths)
        index = torch.from_numpy(np.flatnonzero(chosen)).to(self.features.device)
        return Cohort(self.features[index], self.targets[index], np.bincount(owner[chosen], minlength=len(self)))


@dataclass(frozen=True)
class LocalUpdate:
    """How a client trains: E epochs, or R steps, of minibatch descent with step size s and batch size B.

    A batch size of 0 takes all rows at once. The last minibatch of an epoch may be smaller. With
    steps, each minibatch is drawn afresh from all rows (PAC paper, Protocol 1).

    A client computes at most `max_examples` rows, all passes counted: it leaves out its last passes, but never the
    first. The server is not told.

    `descent` turns a gradient into a step. Each round starts with a new optimizer state.

    With `rows`, a client trains with a guarantee for each row (`umbel.client.dp_sgd`). Then `rows` sets the number of
    steps and their samples, and of the other fields only step size, `descent` and `most_drawn` count: nothing may
    depend on the number of rows. A step takes at most `most_drawn` rows.
    """

    local_epochs: int
    step_size: float
    batch_size: int
    local_steps: int = 0
    max_examples: float = math.inf
    descent: Descent = PLAIN
    rows: RowPrivacy | None = None
    most_drawn: int = sys.maxsize

    def passes_over(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of passes, one an epoch or one a step, of clients with these numbers of rows."""
        passes = self.local_steps or self.local_epochs
        if math.isinf(self.max_examples):
            return np.full_like(rows, passes)
        a_pass = np.minimum(self.batch_size or rows, rows) if self.local_steps else rows
        most: NDArray[np.int64] = np.maximum(int(min(self.max_examples, _MANY)) // np.maximum(a_pass, 1), 1)
        return np.minimum(passes, most)

    def batches(self, rows: int) -> range:
        """Return the first row of each minibatch in a pass over so many rows."""
        size = self.size(rows)
        return range(0, size if self.local_steps else rows, size)

    def size(self, rows: int) -> int:
        """Return the number of rows of a full minibatch; for random ones, a number that they hardly ever exceed."""
        if self.rows:
            mean = self.rows.rate * rows
            return min(math.ceil(mean + _FAR * math.sqrt(mean)), rows, self.most_drawn)
        return min(self.batch_size or rows, rows)


ALL_ROWS = LocalUpdate(1, 1.0, 0)


Draw = Callable[[], NDArray[np.int64]]
"""Draws a client's rows in the order of its next pass."""


@dataclass(frozen=True)
class Minibatch:
    """The rows that some clients take in a step.

    If a client has fewer rows than others, its first row of the step fills the rest, with weight 0. So padding
    overflows only if one of its rows does.

    Attributes
    ----------
    rows : Tensor of int64, shape (clients, b)
        Those of a client before its padding.
    counts : Tensor of int64, shape (clients,)
        The number of each client's rows, which may be 0.
    known : ndarray of int64, shape (clients,)
        The same in the host's memory.
    """

    rows: Tensor
    counts: Tensor
    known: NDArray[np.int64]

    @property
    def real(self) -> Tensor:
        """Which rows are no padding, (clients, b)."""
        return torch.arange(self.rows.shape[1], device=self.rows.device) < self.counts[:, None]


@dataclass(frozen=True)
class Schedule:
    """The order of each client's rows in training, drawn pass by pass.

    The server sets the number of passes. If all were drawn at once, they would take memory for passes times rows, and
    a lack of memory would reveal the number of rows.

    Attributes
    ----------
    update : LocalUpdate
    lengths : ndarray of int64, shape (clients,)
        Number of rows of each client in a pass.
    rows : ndarray of int64
        These rows, those of a client together.
    draws : mapping from int to Draw
        By a client's position: draws the order of its next pass. Other clients keep the order of `rows`.
    seeds : tuple of int
        A seed for each client, for draws of the network itself, as in dropout; empty if it draws nothing.
    """

    update: LocalUpdate
    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    draws: Mapping[int, Draw]
    seeds: tuple[int, ...] = ()

    @classmethod
    def draw(
        cls,
        lengths: NDArray[np.int64],
        update: LocalUpdate,
        generators: Sequence[np.random.Generator],
        seeded: bool = False,
    ) -> Schedule:
        """Return a schedule for clients with these numbers of rows, those of a client together; it can be used once.

        It draws the order of each client's rows from its generator. If a client takes all its rows at once, their order
        does not matter, and nothing is drawn. With `seeded`, each generator first draws a seed for the network; without
        generators the seeds are 0.
        """
        seeds: list[int] = []
        if seeded:
            generators = list(generators)  # each access would restart a generator
            seeds = [int(generator.integers(2**63)) for generator in generators] or [0] * len(lengths)
        starts, rows = lengths.cumsum() - lengths, np.arange(int(lengths.sum()))
        longer = np.flatnonzero(lengths > update.batch_size).tolist() if update.batch_size else []
        # Each generator is accessed once, since each access would restart it.
        draws = {c: partial(generators[c].permutation, rows[starts[c] : starts[c] + lengths[c]]) for c in longer}
        return cls(update, lengths, rows, draws, tuple(seeds))

    def of(self, client: int) -> Schedule:
        """Return the schedule of one client."""
        start, length = int(self.lengths[:client].sum()), self.lengths[client : client + 1]
        draws = {0: self.draws[client]} if client in self.draws else {}
        return replace(self, lengths=length, rows=self.rows[start : start + int(length[0])], draws=draws)

    def minibatches(self, device: torch.device, width: int = 0) -> Iterator[Minibatch]:
        """Yield the minibatch of each step, with its tensors on the device.

        A GPU gets as many at once as `_AT_ONCE` allows, since each copy takes longer than a small step.
        """
        waiting, size = list[NDArray[np.int64]](), 0
        for rows, counts in self._steps(width):
            waiting += [rows, counts]
            size += rows.nbytes
            if device.type == "cpu" or size >= _AT_ONCE:
                yield from _sent(waiting, device)
                waiting, size = [], 0
        yield from _sent(waiting, device)

    def _steps(self, width: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield rows and numbers of rows of each step, as in `Minibatch`."""
        starts, lengths = (self.lengths.cumsum() - self.lengths)[:, None], self.lengths[:, None]
        passes = self.update.passes_over(self.lengths)
        order = self.rows.copy() if self.draws else self.rows
        for pass_ in range(int(passes.max(initial=0))):
            going = passes > pass_
            longest = int(self.lengths[going].max())
            if not longest:
                return
            for c, draw in self.draws.items():
                if going[c]:
                    order[starts[c, 0] : starts[c, 0] + lengths[c, 0]] = draw()
            for begin in self.update.batches(longest):
                end = min(begin + self.update.size(longest), longest)
                position = np.arange(begin, max(end, begin + width))[None, :]
                real = (position < np.minimum(lengths, end)) & going[:, None]
                # A client without rows in this step has none to be padded with.
                padding = np.where(begin < lengths, begin, 0)
                rows = order[np.minimum(starts + np.where(real, position, padding), len(order) - 1)]
                yield rows, real.sum(1)


def _sent(parts: Sequence[NDArray[np.int64]], device: torch.device) -> Iterator[Minibatch]:
    tensors = send(parts, device)
    for rows, counts, known in zip(tensors[::2], tensors[1::2], parts[1::2], strict=True):
        yield Minibatch(rows, counts, known)


def send(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return arrays as tensors on a device. A GPU gets all in one copy from pinned memory, and nobody waits.

    On the CPU they share memory, but for read-only arrays, such as those of a message, which are copied.
    """
    if device.type == "cpu" or not arrays:
        return [torch.from_numpy(value if value.flags.writeable else np.array(value)) for value in arrays]
    sizes = [-(-value.nbytes // 8) * 8 for value in arrays]  # each begins where its numbers may lie
    packed = torch.empty(sum(sizes), dtype=torch.uint8).pin_memory()
    for value, part in zip(arrays, packed.split(sizes), strict=True):
        part.numpy()[: value.nbytes].view(value.dtype)[:] = value.reshape(-1)
    there = zip(arrays, packed.to(device, non_blocking=True).split(sizes), strict=True)
    types = {value.dtype: torch.from_numpy(np.empty(0, value.dtype)).dtype for value in arrays}
    return [part[: value.nbytes].view(types[value.dtype]).reshape(value.shape) for value, part in there]


class Steps:
    """Steps of some clients by an optimizer other than plain descent, which starts with an empty state.

    One optimizer has the parameters of all clients, and a separate state for each client. A client without a gradient
    does not change.

    The trained parameters of each of `clients` change in place. The proximal term concerns the `shared` parameters.
    """

    def __init__(
        self, descent: Descent, step_size: float, clients: Sequence[Parameters], shared: Collection[str]
    ) -> None:
        self._descent, self._clients = descent, clients
        self._optimizer = descent.make((value for own in clients for value in own.values()), step_size)
        self._anchors: list[Parameters] = [
            {name: value.detach().clone() for name, value in own.items() if descent.proximal and name in shared}
            for own in clients
        ]

    @torch.no_grad()
    def step(self, gradients: Sequence[Mapping[str, Tensor] | None]) -> None:
        """Make a step along the gradient of each client; a client with None stays unchanged."""
        for own, anchors, gradient in zip(self._clients, self._anchors, gradients, strict=True):
            for name, value in own.items():
                value.grad = None if gradient is None else gradient[name]
                if value.grad is not None and name in anchors:
                    value.grad = value.grad.add(value - anchors[name], alpha=self._descent.proximal)
            if gradient is not None and self._descent.clip_gradient:
                torch.nn.utils.clip_grad_norm_(list(own.values()), self._descent.clip_gradient)
        self._optimizer.step()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed PyTorch's own generators, from which layers draw, inside the block; restore their state afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
