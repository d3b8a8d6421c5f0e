"""What a network may declare beside its layers: umbel asks these hooks, and never which model it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn

from umbel.data import Dataset

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Hooks:
    r"""The hooks of a network: attributes or methods of its class with these names. Each may be missing.

    Attributes
    ----------
    local_parameters : tuple of str
        Patterns on the names of parameters that are each client's own and never leave its node.
    summed_parameters : tuple of str
        Parameters whose step follows the gradient summed over a minibatch, instead of its mean.
    decays : mapping from str to array, shape (size of the last axis,)
        Precisions of parameters' Gaussian priors of mean 0. That of a local parameter stands beside the loss summed
        over its client's rows. That of a shared one stands beside the loss summed over all clients' rows, and the
        strategy applies it.
    draw_local : callable
        ``(generator) -> arrays``: a client's first local parameters; by default, those of a fresh network.
    fit_local : callable
        ``(shared, features, targets, lengths, loss) -> arrays``, each (clients, \*shape): the local parameters that
        suit newcomers' rows, the shared ones being fixed; by default, 50 epochs of descent. ``shared`` is one
        hypothesis, ``lengths`` the rows of each client, which lie together, and ``loss`` a name.
    misfit : callable
        ``(dataset) -> str``: why the network does not take a dataset, for the end of a sentence; empty if it does.
        A network with this hook is tried on rows of zeros.
    baselines : callable
        ``(dataset, metric) -> scores by name`` on validation clients, to report beside a simulated run; empty for a
        metric that it does not know.
    """

    local_parameters: tuple[str, ...] = ()
    summed_parameters: tuple[str, ...] = ()
    decays: Mapping[str, ArrayLike] = field(default_factory=dict)
    draw_local: Callable[[np.random.Generator], Arrays] | None = None
    fit_local: Callable[[Arrays, NDArray[Any], NDArray[Any], NDArray[np.int64], str], Arrays] | None = None
    misfit: Callable[[Dataset], str] | None = None
    baselines: Callable[[Dataset, str], dict[str, float]] | None = None

    @classmethod
    def of(cls, network: nn.Module) -> Self:
        """Return the hooks that a network has."""
        return cls(**{one.name: getattr(network, one.name) for one in fields(cls) if hasattr(network, one.name)})
