"""The rows of some clients, and the order in which each goes through its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.data import Dataset, held_out
from umbel.models.optimizers import PLAIN, LocalOptimizer
from umbel.protocol.release import RowPrivacy

_FAR = 6.0  # deviations above the mean
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

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """First row of each client."""
        return self.lengths.cumsum() - self.lengths

    @classmethod
    def gather(cls, dataset: Dataset, clients: Sequence[int], device: torch.device) -> Cohort:
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
        return cls(_send(features, device), _send(targets, device), lengths)

    def part(self, clients: slice) -> Cohort:
        """Return consecutive clients as a cohort, without a copy."""
        if clients.indices(len(self)) == (0, len(self), 1):
            return self
        starts, lengths = self.starts[clients], self.lengths[clients]
        rows = slice(int(starts[0]), int(starts[-1] + lengths[-1]))
        return Cohort(self.features[rows], self.targets[rows], lengths)

    def split(self) -> tuple[Cohort, Cohort]:
        """Return each client's rows in two parts: all but every fifth, and every fifth.

        A client of few rows has its last in the second part; the first may then be empty.
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

    A client whose rows would be computed on more than `max_examples` times in all leaves out its last
    passes, but never the first. The server is not told.

    With `balanced`, every minibatch holds as many rows with a target above 0 as below; the rest of a client's rows
    waits for another pass.

    `descent` is what a step makes of a gradient. An optimizer's state is reset after the round.

    With `rows`, a client trains with a guarantee for each row (`umbel.client.dp_sgd`). Then `rows` decides steps and
    samples, and only step size and `descent` are read: nothing may depend on the number of rows.
    """

    local_epochs: int
    step_size: float
    batch_size: int
    local_steps: int = 0
    max_examples: float = math.inf
    descent: LocalOptimizer = PLAIN
    balanced: bool = False
    rows: RowPrivacy | None = None

    @property
    def passes(self) -> int:
        """How often the rows are put in a new order: once an epoch, or once a step."""
        return self.rows.steps if self.rows else self.local_steps or self.local_epochs

    def passes_over(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many passes clients of so many rows make."""
        if math.isinf(self.max_examples):
            return np.full_like(rows, self.passes)
        a_pass = np.minimum(self.batch_size or rows, rows) if self.local_steps else rows
        most: NDArray[np.int64] = np.maximum(int(min(self.max_examples, _MANY)) // np.maximum(a_pass, 1), 1)
        return np.minimum(self.passes, most)

    def batches(self, rows: int) -> range:
        """Return where, in a pass over so many rows, each minibatch begins."""
        size = self.size(rows)
        return range(0, size if self.local_steps else rows, size)

    def size(self, rows: int) -> int:
        """Return the number of rows of a full minibatch; of a random one, a number that it hardly exceeds."""
        if self.rows:
            mean = self.rows.rate * rows
            return min(math.ceil(mean + _FAR * math.sqrt(mean)), rows)
        return min(self.batch_size or rows, rows)


Draw = Callable[[], NDArray[np.int64]]
"""Draws a client's rows in the order of its next pass."""


@dataclass(frozen=True)
class Schedule:
    """In which order clients go through their rows, drawn pass by pass.

    A server says how many passes there are. Were all drawn at once, the memory for them would be
    passes times rows, and whether there is enough would tell the number of rows.

    `lengths` (clients,) is how many rows of each client take part in a pass, and `rows` are these, one client's after
    the other's. `draws` has what draws the order of a client, by its place. `seeds`, one a client, are of what the
    network itself draws, as in dropout; there are none where it draws nothing.
    """

    update: LocalUpdate
    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    draws: Mapping[int, Draw]
    seeds: tuple[int, ...] = ()

    @classmethod
    def draw(
        cls, cohort: Cohort, update: LocalUpdate, generators: Sequence[np.random.Generator], seeded: bool = False
    ) -> Schedule:
        """Have the order of each client's rows drawn from its generator; it can be gone through once.

        The order of a client that takes all its rows at once is of no consequence, and no draw is
        spent on it. With `seeded`, a seed is drawn first for what the network draws; without generators
        it is 0.
        """
        if seeded:
            generators = list(generators)  # each access would restart a generator
            seeds = [int(generator.integers(2**63)) for generator in generators] or [0] * len(cohort)
            return replace(cls.draw(cohort, update, generators), seeds=tuple(seeds))
        if update.balanced:
            return cls._balanced(cohort, update, generators)
        return cls.shuffled(cohort.lengths, update, generators)

    @classmethod
    def shuffled(
        cls, lengths: NDArray[np.int64], update: LocalUpdate, generators: Sequence[np.random.Generator]
    ) -> Schedule:
        """Have the order of clients of so many rows drawn, those of a client together."""
        starts, rows = lengths.cumsum() - lengths, np.arange(int(lengths.sum()))
        longer = np.flatnonzero(lengths > update.batch_size).tolist() if update.batch_size else []
        # Each generator is accessed once, since each access would restart it.
        draws = {c: partial(generators[c].permutation, rows[starts[c] : starts[c] + lengths[c]]) for c in longer}
        return cls(update, lengths, rows, draws)

    @classmethod
    def _balanced(cls, cohort: Cohort, update: LocalUpdate, generators: Sequence[np.random.Generator]) -> Schedule:
        labels, draws, lengths = cohort.targets.float().cpu().numpy(), {}, np.zeros(len(cohort), np.int64)
        for c, (start, length) in enumerate(zip(cohort.starts, cohort.lengths, strict=True)):
            own = np.arange(start, start + length)
            liked, others = own[labels[own] > 0], own[labels[own] < 0]
            lengths[c] = 2 * min(len(liked), len(others))
            draws[c] = partial(_pairs, liked, others, generators[c])
        if update.batch_size:
            update = replace(update, batch_size=max(2, update.batch_size // 2 * 2))
        return cls(update, lengths, np.zeros(int(lengths.sum()), np.int64), draws)

    def passes(self, client: int) -> Iterator[NDArray[np.int64]]:
        """Yield a client's rows in the order of each of its passes."""
        start, length = int(self.lengths[:client].sum()), int(self.lengths[client])
        draw = self.draws.get(client)
        for _ in range(int(self.update.passes_over(self.lengths[client])) if length else 0):
            yield self.rows[start : start + length] if draw is None else draw()

    def minibatches(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]]:
        """Yield, a step, the rows (clients, b), their shares of the mean, and how many each client has.

        A client that has fewer rows than others is padded, at share 0, with the first that it has in this step, so
        that padding blows up only where a row does. One that has none left in this step has 0.
        """
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
                position = np.arange(begin, min(begin + self.update.size(longest), longest))[None, :]
                real = (position < lengths) & going[:, None]
                # A client without rows in this step has none to be padded with.
                padding = np.where(begin < lengths, begin, 0)
                rows = order[np.minimum(starts + np.where(real, position, padding), len(order) - 1)]
                count = real.sum(1, keepdims=True)
                weights = real / np.maximum(count, 1)
                yield rows, weights.astype(np.float32), count[:, 0].astype(np.float32)


def _pairs(liked: NDArray[np.int64], others: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
    """Return liked and other items in turns, as many of the one as of the other."""
    pairs = min(len(liked), len(others))
    return np.stack([generator.permutation(liked)[:pairs], generator.permutation(others)[:pairs]], axis=1).ravel()


def _send(rows: NDArray[Any], device: torch.device) -> Tensor:
    """Return rows on a device; to a GPU by way of pinned memory, which it reads itself."""
    tensor = torch.from_numpy(rows)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
