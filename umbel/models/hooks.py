"""Optional declarations of a network beside its layers; umbel asks these hooks, and never which model it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn

from umbel.data import Dataset

Arrays = dict[str, NDArray[Any]]
Rows = tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]
"""Features (rows, ...), targets (rows, ...) and the number of rows of each client (clients,), grouped by client."""


@dataclass(frozen=True)
class Hooks:
    r"""The hooks of a network: attributes or methods of its class with these names. All are optional.

    Attributes
    ----------
    local_parameters : tuple of str
        Patterns on the names of parameters that each client keeps: they never leave its node.
    summed_parameters : tuple of str
        Parameters whose step follows the gradient summed over a minibatch, instead of the mean.
    decays : mapping from str to array, shape (size of the last axis,)
        Precisions of parameters' Gaussian priors of mean 0. For a local parameter it is relative to the loss summed
        over its client's rows. For a shared one it is relative to the loss summed over all clients' rows, and the
        strategy applies it.
    draw_local : callable
        ``(generator) -> arrays``: a client's initial local parameters; by default, those of a new network.
    fit_local : callable
        ``(shared, features, targets, lengths, loss) -> arrays``, each (clients, \*shape): the local parameters that
        fit newcomers' rows best, with fixed shared ones; by default, 50 epochs of gradient descent. ``shared`` is one
        hypothesis, ``lengths`` the clients' numbers of rows, which are grouped by client, and ``loss`` a name.
    misfit : callable
        ``(dataset) -> str``: why the network does not take a dataset, to complete a sentence; empty if it does.
        A network with this hook is tried on rows of zeros.
    baselines : callable
        ``(known, support, query, metric) -> arrays (clients,) by name``: baselines that learn no model, with which a
        simulated run is compared; empty for an unknown metric. Each of the first three is a `Rows`: those of training
        clients; and of the measured clients those that a baseline may know, and those that it is scored on.
    """

    local_parameters: tuple[str, ...] = ()
    summed_parameters: tuple[str, ...] = ()
    decays: Mapping[str, ArrayLike] = field(default_factory=dict)
    draw_local: Callable[[np.random.Generator], Arrays] | None = None
    fit_local: Callable[[Arrays, NDArray[Any], NDArray[Any], NDArray[np.int64], str], Arrays] | None = None
    misfit: Callable[[Dataset], str] | None = None
    baselines: Callable[[Rows, Rows, Rows, str], dict[str, NDArray[np.float64]]] | None = None

    @classmethod
    def of(cls, network: nn.Module) -> Self:
        """Return the hooks of a network."""
        return cls(**{one.name: getattr(network, one.name) for one in fields(cls) if hasattr(network, one.name)})
