"""The hospital experiment by `examples/algorithm.py`: Algorithm 1 as the paper states it, client by client.

It shows what computing the clients one by one costs. `bare_loops` computes the same rounds in batches.
"""

from __future__ import annotations

import runpy
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.brief import TINY, Brief

PATH = Path(__file__).resolve().parents[1] / "examples" / "algorithm.py"


@lru_cache(maxsize=1)
def algorithm() -> SimpleNamespace:
    """Return the names of the example. It is a script, so no package holds it."""
    return SimpleNamespace(**runpy.run_path(str(PATH)))


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

    def streams(purpose: str, t: int, c: int) -> Any:
        # In place of the generator of a round's sample, so that the clients are those that umbel draws.
        asked = SimpleNamespace(choice=lambda *_, **__: np.array(settings.train[t]))
        return asked if purpose == "sample" else draws

    rounds = algorithm().algorithm_1(
        theta, Z, rmse, streams, T=brief.rounds, U=len(settings.train[0]), E=settings.local_epochs,
        s=settings.step_size, B_s=settings.batch_size, nu=nu,
    )  # fmt: skip
    models = [theta, *(theta for theta, _, _ in rounds)]
    return [
        float(np.mean([min(algorithm().costs(theta, Z[c], rmse)) for c in judges]))
        for theta, judges in zip(models, settings.validate, strict=True)
    ]
