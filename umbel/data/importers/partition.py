"""Partitioners: they assign the rows of a central data set to clients.

Any object with ``deal(rows, labels)`` is one. `umbel.from_datasets` accepts Flower Datasets' partitioners as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.errors import DatasetError

_TRIES = 100  # maximum draws until every client has a row


@runtime_checkable
class Partitioner(Protocol):
    """Assigns rows to clients."""

    def deal(self, rows: int, labels: NDArray[Any]) -> NDArray[np.int64]:
        """Return each row's client (rows,), from 0; `labels` (rows,) are the targets, read-only."""


@dataclass(frozen=True)
class Uniform:
    """Random rows; the clients' numbers of rows differ by at most one."""

    clients: int
    seed: int = 0

    def deal(self, rows: int, labels: NDArray[Any]) -> NDArray[np.int64]:
        """See `Partitioner.deal`."""
        _enough(self.clients, rows)
        return np.random.default_rng(self.seed).permutation(np.arange(rows) % self.clients)


@dataclass(frozen=True)
class Dirichlet:
    """Label skew: clients' shares of each class are drawn from Dir(alpha, ..., alpha).

    After Yurochkin et al., *Bayesian nonparametric federated learning of neural networks* (ICML 2019),
    Sec. 4. Shares are drawn again until every client has a row.

    Attributes
    ----------
    alpha : float
        Above 0; the smaller it is, the fewer classes a client has.
    """

    clients: int
    alpha: float
    seed: int = 0

    def deal(self, rows: int, labels: NDArray[Any]) -> NDArray[np.int64]:
        """See `Partitioner.deal`."""
        _enough(self.clients, rows)
        if labels.ndim != 1 or labels.dtype.kind == "f":
            raise DatasetError(
                "Dirichlet assigns classes; for other targets leave out alpha, or use umbel.Uniform",
                code="data.classes",
            )
        generator = np.random.default_rng(self.seed)
        own: NDArray[np.int64] = np.empty(rows, np.int64)
        for _ in range(_TRIES):
            for label in np.unique(labels):
                of_class = generator.permutation(np.flatnonzero(labels == label))
                shares = self._shares(generator)
                borders = np.rint(np.cumsum(shares) / shares.sum() * len(of_class)).astype(np.int64)
                own[of_class] = np.repeat(np.arange(self.clients), np.diff(borders, prepend=0))
            if len(np.unique(own)) == self.clients:
                return own
        fix = f"ask for fewer than {self.clients} clients, or for an alpha above {self.alpha:g}"
        raise DatasetError(f"{_TRIES} draws left a client without a row; {fix}", code="data.partition")

    def _shares(self, generator: np.random.Generator) -> NDArray[np.float64]:
        if not self.alpha > 0:
            raise DatasetError(f"alpha must be above 0, got {self.alpha!r}", code="data.partition")
        shares = generator.dirichlet(np.full(self.clients, self.alpha))
        if not shares.sum() > 0:  # also where it is no number
            raise DatasetError(f"alpha = {self.alpha:g} leaves the range of numbers", code="data.partition")
        return shares


def names_dealt(partitioner: Partitioner, labels: NDArray[Any]) -> NDArray[Any]:
    """Return the name of each row's client, by a partitioner; raise `DatasetError` if it gives rows no numbers.

    The labels are read-only: a partitioner that sorted them would give rows the targets of others.
    """
    name, shown = type(partitioner).__name__, labels.view()
    shown.flags.writeable = False
    if isinstance(partitioner, type):
        raise DatasetError(f"client is a class: give a partitioner, as {partitioner.__name__}()", code="data.partition")
    dealt = np.asarray(partitioner.deal(len(labels), shown))
    if dealt.shape != labels.shape[:1] or dealt.dtype.kind not in "biu" or dealt.min(initial=0) < 0:
        wanted, found = f"an integer from 0 for each of {len(labels)} rows", f"{dealt.dtype} of shape {dealt.shape}"
        raise DatasetError(f"{name}.deal must return {wanted}, got {found}", code="data.partition")
    return numbered(dealt)


def numbered(owners: NDArray[Any]) -> NDArray[Any]:
    """Return names for dealt clients that sort like their numbers."""
    width = len(str(int(owners.max(initial=0))))
    return np.array([f"client-{one:0{width}d}" for one in owners], dtype=object)


def _enough(clients: int, rows: int) -> None:
    if not isinstance(clients, (int, np.integer)) or not 1 <= clients <= rows:
        raise DatasetError(f"{rows} rows can make 1 to {rows} clients, not {clients}", code="data.partition")
