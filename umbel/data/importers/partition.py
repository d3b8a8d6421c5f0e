"""Partitioners: which client each row of a central data set goes to.

Any object with ``deal(rows, labels)`` will do. `umbel.from_datasets` takes Flower Datasets' own as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.errors import DatasetError

_TRIES = 100  # draws until every client has a row


@runtime_checkable
class Partitioner(Protocol):
    """Deals rows to clients."""

    def deal(self, rows: int, labels: NDArray[Any]) -> NDArray[np.int64]:
        """Return each row's client (rows,), from 0 on; `labels` (rows,) are the targets."""


@dataclass(frozen=True)
class Uniform:
    """Rows at random, as many for each client as for any other, or one more."""

    clients: int
    seed: int = 0

    def deal(self, rows: int, labels: NDArray[Any]) -> NDArray[np.int64]:
        """See `Partitioner.deal`."""
        _enough(self.clients, rows)
        return np.random.default_rng(self.seed).permutation(np.arange(rows) % self.clients)


@dataclass(frozen=True)
class _Skewed:
    clients: int
    alpha: float
    seed: int = 0

    def _shares(self, generator: np.random.Generator) -> NDArray[np.float64]:
        if not self.alpha > 0:
            raise DatasetError(f"alpha must be above 0, got {self.alpha!r}", code="data.partition")
        return generator.dirichlet(np.full(self.clients, self.alpha))


class Dirichlet(_Skewed):
    """Label skew: each class is dealt in shares drawn from Dir(alpha, ..., alpha).

    After Yurochkin et al., *Bayesian nonparametric federated learning of neural networks* (ICML 2019),
    Sec. 4. Shares are drawn again until every client has a row.

    Attributes
    ----------
    alpha : float
        Above 0; the smaller, the fewer classes a client has.
    """

    def deal(self, rows: int, labels: NDArray[Any]) -> NDArray[np.int64]:
        """See `Partitioner.deal`."""
        _enough(self.clients, rows)
        if labels.ndim != 1 or labels.dtype.kind == "f":
            raise DatasetError("Dirichlet deals classes; for other targets take Quantity", code="data.classes")
        generator = np.random.default_rng(self.seed)
        own: NDArray[np.int64] = np.empty(rows, np.int64)
        for _ in range(_TRIES):
            for label in np.unique(labels):
                of_class = generator.permutation(np.flatnonzero(labels == label))
                own[of_class] = _by_share(self._shares(generator), len(of_class))
            if len(np.unique(own)) == self.clients:
                return own
        fix = f"ask for fewer than {self.clients} clients, or for an alpha above {self.alpha:g}"
        raise DatasetError(f"{_TRIES} draws left a client without a row; {fix}", code="data.partition")


class Quantity(_Skewed):
    """Quantity skew: rows at random, in numbers drawn from Dir(alpha, ..., alpha), and one at least for each client.

    After Li et al., *Federated learning on non-IID data silos: an experimental study* (ICDE 2022), Sec. 4.3.

    Attributes
    ----------
    alpha : float
        Above 0; the smaller, the less even.
    """

    def deal(self, rows: int, labels: NDArray[Any]) -> NDArray[np.int64]:
        """See `Partitioner.deal`."""
        _enough(self.clients, rows)
        generator = np.random.default_rng(self.seed)
        shares = self._shares(generator)
        first = np.arange(self.clients)
        return generator.permutation(np.concatenate([first, _by_share(shares, rows - self.clients)]))


def _by_share(shares: NDArray[np.float64], rows: int) -> NDArray[np.int64]:
    """Return clients in order, each as often as its share of the rows says, to rounding."""
    borders = np.rint(np.cumsum(shares) / shares.sum() * rows).astype(np.int64)
    return np.repeat(np.arange(len(shares)), np.diff(borders, prepend=0))


def _enough(clients: int, rows: int) -> None:
    if not 1 <= clients <= rows:
        raise DatasetError(f"{rows} rows make 1 to {rows} clients, not {clients}", code="data.partition")
