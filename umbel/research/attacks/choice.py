"""Which of two hypotheses fits a client? A malicious server sends two that lie far apart and mean something.

They are alike but for the last bias: one leans to the classes below a border and the other to those from there on, so
that the choice tells on which side a client's labels lie. A number that is added to all last biases changes no
prediction; it differs by so much that a release shows where its client started, whatever the noise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from umbel.models.model import Model, Parameters
from umbel.research.attacks.layers import biased, dense_layers, parameter

_LEAN = 1.0
_APART = 64.0  # exact in 32 bits


def apart(model: Model, parameters: Parameters, shape: tuple[int, ...], border: int) -> tuple[list[Parameters], str]:
    """Return the two hypotheses, made from these parameters, and the name of the bias in which they differ.

    `shape` is that of a row, and `border` the first class that the second leans to. Raises `NotApplicableError` when
    the last fully connected layer has no bias.
    """
    name = parameter(dense_layers(model, parameters, shape)[-1], "bias")
    found = []
    for side in (0, 1):
        bias = biased(model, parameters.get(name)).clone()
        bias[border:] += _LEAN * side
        bias[:border] += _LEAN * (1 - side)
        found.append({**parameters, name: bias + _APART * (2 * side - 1)})
    return found, name


def started_from(released: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return which of the two clients trained, by the bias (m, classes) in their releases."""
    started: NDArray[np.int64] = (released.mean(axis=1) > 0).astype(np.int64)
    return started
