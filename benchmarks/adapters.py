"""Time rounds of clients that share a frozen backbone, and train adapters of their own beside it.

    python -m benchmarks.adapters [--clients 50] [--times N] [--device cpu] [--out FILE]

The backbone is a transformer, and a hypothesis is an adapter (LoRA). The bare contestant has a single adapter, which
it scores and trains on the same rows, in as many steps. So the ratio shows the cost of an adapter for each client, and
of everything else in a round of umbel.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.func import functional_call

import umbel
from benchmarks import in_process
from benchmarks.measure import Device, Out, Ratio, Reading, Times, benchmark, interleave, show
from umbel import models
from umbel.data import open_dataset
from umbel.protocol.plugins import trust
from umbel.simulation.in_process import run_config

NETWORK = "benchmarks.adapters:Adapted"
SIGNS, LENGTH = 32, 32
ROWS, BATCH, HYPOTHESES = 20, 10, 2


class Block(nn.Module):
    """Attention and two dense layers, all frozen, and an adapter beside the projection to queries, keys and values."""

    def __init__(self, width: int, heads: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, 3 * width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (rows, time, width)."""
        rows, steps, width = hidden.shape
        inputs = self.before(hidden)
        projected = self.project(inputs) + self.up(self.down(inputs))
        q, k, v = projected.reshape(rows, steps, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.join(attended.transpose(1, 2).reshape(rows, steps, width))
        outputs: Tensor = hidden + self.dense(self.between(hidden))
        return outputs


class Adapted(nn.Module):
    """A language model of `SIGNS` signs, of which only the adapters are trained."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, rank: int = 4) -> None:
        super().__init__()
        self.signs = nn.Embedding(SIGNS, width).requires_grad_(False)
        self.places = nn.Embedding(LENGTH, width).requires_grad_(False)
        self.blocks = nn.Sequential(*(Block(width, heads, rank) for _ in range(layers)))
        self.scores = nn.Linear(width, SIGNS).requires_grad_(False)

    def forward(self, signs: Tensor) -> Tensor:
        """Return a score of each next sign, (rows, time, signs)."""
        hidden = self.signs(signs) + self.places.weight[: signs.shape[1]]
        scores: Tensor = self.scores(self.blocks(hidden))
        return scores


def main(
    clients: Annotated[int, typer.Option(min=1, help="Clients of a round.")] = 50,
    times: Times = 5,
    device: Device = "cpu",
    out: Out = None,
) -> None:
    """Print what rounds take."""
    with benchmark(out):
        measure(clients, times, device)


def measure(clients: int = 50, times: int = 3, device: str = "cpu", rounds: int = 2) -> Ratio:
    """Time rounds, print what all took, and return how many times as long umbel takes as one adapter."""
    with tempfile.TemporaryDirectory() as scratch:
        config = config_of(Path(scratch), clients, rounds, device)
        contestants = {"one adapter": partial(bare, config), "umbel": partial(in_process.go, config)}
        readings = interleave(contestants, times)
    show(f"{clients} clients train adapters of a frozen transformer, k = {HYPOTHESES}", readings, "one adapter")
    return Ratio.of(readings["umbel"], readings["one adapter"])


def config_of(scratch: Path, clients: int, rounds: int, device: str) -> dict[str, Any]:
    """Write random texts, and return the run config of some rounds with them."""
    trust(NETWORK)
    texts = np.random.default_rng(0).integers(0, SIGNS, ((clients + 1) * ROWS, LENGTH + 1))
    split = {"train": clients, "validation": 1}
    manifest = umbel.Manifest(
        name="texts", clients=clients + 1, split=split, model=NETWORK, loss="cross-entropy", tokens=SIGNS
    )
    offsets = np.arange(clients + 2) * ROWS
    umbel.write_dataset(scratch / "texts", manifest, texts[:, :-1], texts[:, 1:], offsets)
    return run_config(
        "synthetic", dataset=str(scratch / "texts"), model="", loss="", hypotheses=HYPOTHESES, restarts=1,
        clients_per_round=clients, validation=f"every={rounds + 1} clients=1", local_epochs=1, step_size=0.1,
        batch_size=BATCH, patience=0, max_participations=0, rounds=rounds, device=device, strategy="group-privacy",
    )  # fmt: skip


def bare(config: dict[str, Any]) -> Reading:
    """Score and train a single adapter on the rows of all clients."""
    dataset, device = open_dataset(Path(config["dataset"])), torch.device(config["device"])
    model = models.load(NETWORK, "cross-entropy")
    network, count = model.module.to(device), int(config["clients-per-round"]) * ROWS
    x, y = (torch.from_numpy(np.array(part[:count])).to(device) for part in (dataset.features, dataset.targets))
    own = {name: torch.from_numpy(value).to(device) for name, value in model.initial(0).items()}
    steps = torch.arange(count, device=device).reshape(-1, ROWS // BATCH, BATCH).transpose(0, 1).flatten(1)

    def loss(theta: dict[str, Tensor], rows: Tensor) -> Tensor:
        scores = functional_call(network, theta, (x[rows],))
        return nn.functional.cross_entropy(scores.flatten(0, 1), y[rows].flatten())

    began = time.perf_counter()
    for _ in range(int(config["rounds"])):
        with torch.inference_mode():
            least = min(float(loss(own, torch.arange(count, device=device))) for _ in range(HYPOTHESES))
        for rows in steps:
            theta = {name: value.detach().requires_grad_() for name, value in own.items()}
            slopes = torch.autograd.grad(loss(theta, rows), list(theta.values()))
            with torch.no_grad():
                moved = zip(theta.items(), slopes, strict=True)
                own = {name: value - config["step-size"] * slope for (name, value), slope in moved}
    if device.type == "cuda":
        torch.cuda.synchronize()
    return Reading((time.perf_counter() - began) / int(config["rounds"]), least)


if __name__ == "__main__":
    typer.run(main)
