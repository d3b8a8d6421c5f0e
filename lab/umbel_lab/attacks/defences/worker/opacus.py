"""Opacus's optimizers, which clip the gradients of a batch's rows, add noise, and step."""

from __future__ import annotations

from typing import Any

import numpy as np

from .kinds import Asked, Kind, Left

_ROWS = 4  # of the batch; one is the canary


def plain_optimizer() -> Any:
    """Return an optimizer to wrap. Each release gives it other parameters."""
    import torch

    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


class Optimizer(Kind):
    """An optimizer with per-row gradients (`grad_sample`): the gradient with which it steps leaves."""

    name = "optimizer with per-row gradients"
    rows = True

    def begin(self) -> None:
        super().begin()
        mean = getattr(self.target, "loss_reduction", "sum") == "mean"
        self.share = 1 / float(self.target.expected_batch_size) if mean else 1.0

    def release(self, asked: Asked) -> Left:
        import torch

        parameters = []
        for value in asked.update.values():
            parameter = torch.nn.Parameter(torch.zeros(value.shape, dtype=torch.from_numpy(np.atleast_1d(value)).dtype))
            rows = np.zeros((_ROWS, *value.shape), value.dtype)
            rows[0] = value
            parameter.grad_sample = torch.from_numpy(rows)  # type: ignore[attr-defined]
            parameter.summed_grad = None  # type: ignore[attr-defined]
            parameters.append(parameter)
        self.target.param_groups[0]["params"] = parameters
        self.target.step()
        return Left({name: np.asarray(one.grad) for name, one in zip(asked.update, parameters, strict=True)})

    def deviation(self) -> float | None:
        return float(self.target.noise_multiplier * self.target.max_grad_norm * self.share)
