"""Steps of clients' optimizers, and a seed for the draws of a network, as in dropout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from umbel.models.model import Parameters
from umbel.models.optimizers import Descent


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
