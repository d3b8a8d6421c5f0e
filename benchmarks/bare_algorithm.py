"""The hospital experiment by `examples/algorithm.py`: Algorithm 1 as the paper states it, client by client.

It shows what computing the clients one by one costs. `bare_hospital` computes the same rounds in batches.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.peers.brief import TINY, Brief

PATH = Path(__file__).resolve().parents[1] / "examples" / "algorithm.py"


@lru_cache(maxsize=1)
def algorithm() -> ModuleType:
    """Return the example as a module. It is a script, so no package holds it."""
    spec = importlib.util.spec_from_file_location("algorithm", PATH)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Asked:
    """Stands in for the generator of a round's sample, so that the clients are those that umbel draws."""

    clients: list[int]

    def choice(self, *_: Any, **__: Any) -> NDArray[np.int64]:
        """Return the clients of the round."""
        return np.array(self.clients)


def rmse(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the cost of the network 3 -> 2 -> 1 with ReLU on a client's rows (Eq. 10 and Sec. 5.2)."""
    weight, bias, outer, constant = theta.split([6, 2, 2, 1])
    outputs = torch.relu(torch.addmm(bias, x, weight.view(2, 3).T)) @ outer + constant
    mean: Tensor = (outputs - y).square().mean()
    return (mean + TINY).sqrt()


def play(brief: Brief, nu: float) -> list[float]:
    """Play the task from its initial hypotheses; return the validation loss of each round and after the last."""
    settings, draws = brief.settings, np.random.default_rng(0)
    clients = [brief.client(c) for c in range(len(brief.lengths))]
    Z = [(torch.from_numpy(x), torch.from_numpy(y).flatten()) for x, y in clients]
    theta = np.concatenate([value.reshape(brief.k, -1) for value in brief.hypotheses.values()], 1, dtype=np.float64)
    rounds = algorithm().algorithm_1(
        theta, Z, rmse, lambda purpose, t, c: Asked(settings.train[t]) if purpose == "sample" else draws,
        T=brief.rounds, U=len(settings.train[0]), E=settings.local_epochs, s=settings.step_size,
        B_s=settings.batch_size, nu=nu,
    )  # fmt: skip
    history = [validate(theta, Z, settings.validate[0])]
    for (theta, _, _), judges in zip(rounds, [*settings.validate[1:], settings.validate[-1]], strict=False):
        history.append(validate(theta, Z, judges))
    return history


def validate(theta: NDArray[np.float64], Z: list[tuple[Tensor, Tensor]], clients: list[int]) -> float:
    """Return the mean loss of clients under their best hypothesis."""
    return float(np.mean([min(algorithm().costs(theta, Z[c], rmse)) for c in clients]))
