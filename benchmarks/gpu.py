"""Time cohorts of a convolutional network on a GPU: together, one client after the other, and without umbel.

    python -m benchmarks.gpu [--cohorts 10,30,100] [--times N] [--device cuda] [--out FILE]

Choosing among k = 2 hypotheses and training, of umbel's ``cnn`` on made-up images. Then whole rounds
of the CIFAR10 benchmark of pfl-research, on data of its shape: 1000 clients of 50 images, 50 a round,
minibatches of 10, one model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

from benchmarks import in_process
from benchmarks.measure import Out, Reading, benchmark, console, interleave, show
from benchmarks.peers.tasks import write_images
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.engines import learner_for
from umbel.data import Manifest, offsets_of, open_dataset, write_dataset
from umbel.privacy.gate.randomness import streams
from umbel.protocol.arrays import Arrays
from umbel.server.rounds import draw_hypotheses
from umbel.server.setup import Setup
from umbel.simulation.in_process import run_config

NETWORK = "benchmarks.gpu:cifar_network"
UPDATE = LocalUpdate(local_epochs=1, step_size=0.1, batch_size=20)


def main(
    cohorts: Annotated[str, typer.Option(help="Numbers of clients.")] = "10,30,100",
    times: Annotated[int, typer.Option(min=1, help="Goes of each contestant that count.")] = 5,
    device: Annotated[str, typer.Option(help="cuda; cpu to try the benchmark itself.")] = "cuda",
    out: Out = None,
) -> None:
    """Print a table for each size of cohort, and one of whole rounds."""
    if device == "cuda" and not torch.cuda.is_available():
        console.print("not measured: PyTorch sees no GPU here")
        raise typer.Exit(1)
    with benchmark(out), tempfile.TemporaryDirectory() as scratch:
        if device == "cuda":
            console.print(torch.cuda.get_device_name(), highlight=False)
        sizes = [int(size) for size in cohorts.split(",")]
        for size in sizes:
            cohort_of(size, times, torch.device(device), Path(scratch))
        rounds_like_cifar(times, device, Path(scratch))


def cohort_of(clients: int, times: int, device: torch.device, scratch: Path) -> None:
    """Let the forms of a cohort take turns."""
    write_images(scratch / str(clients), clients + 1, 1)
    config = run_config("femnist", dataset=str(scratch / str(clients)), clients_per_round=1)
    dataset, model = open_dataset(scratch / str(clients)), Setup.parse(config).model
    hypotheses, asked = draw_hypotheses(model, 2, 0, 0), range(clients)
    memory: dict[str, float] = {}

    def umbel(engine: str) -> Arrays:
        learner, cohort = learner_for(model, device.type, engine), Cohort.gather(dataset, asked, device)
        chosen = learner.choose(hypotheses, cohort)
        return learner.train(hypotheses, chosen, cohort, UPDATE, streams(0, "shuffle", 1, asked))[0]

    def contestant(name: str, compute: Callable[[], object]) -> Callable[[], Reading]:
        def go() -> Reading:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            compute()
            if device.type == "cuda":
                torch.cuda.synchronize()
                memory[name] = torch.cuda.max_memory_allocated() / 2**20
            return Reading(time.perf_counter() - began)

        return go

    contestants = {
        "batched": lambda: umbel("batched"),
        "loop": lambda: umbel("loop"),
        "plain PyTorch, one client at a time": lambda: plain(model.network(), hypotheses, dataset, asked, device),
    }
    readings = interleave({name: contestant(name, compute) for name, compute in contestants.items()}, times)
    show(f"{clients} clients choose and train", readings, "batched")
    batched, loop = umbel("batched"), umbel("loop")
    apart = max(float(np.abs(batched[name] - loop[name]).max()) for name in batched)
    console.print(f"Parameters of batched and loop differ by {apart:.1e} at most.", highlight=False)
    for name, mib in memory.items():
        console.print(f"{name}: {mib:.0f} MiB at most", highlight=False)


def plain(module: nn.Module, hypotheses: Arrays, dataset: Any, clients: range, device: torch.device) -> list[Any]:
    """Choose and train as one would write it: a module, an optimiser, a client after the other."""
    k = len(next(iter(hypotheses.values())))
    networks = [{name: torch.from_numpy(value[j]).to(device) for name, value in hypotheses.items()} for j in range(k)]
    trained = []
    module.to(device)
    for client in clients:
        x, y = (torch.from_numpy(np.array(part)).to(device) for part in dataset.client(client))
        losses = []
        for network in networks:
            module.load_state_dict(network)
            with torch.inference_mode():
                losses.append(nn.functional.cross_entropy(module(x), y).item())
        module.load_state_dict(networks[int(np.argmin(losses))])
        optimiser = torch.optim.SGD(module.parameters(), UPDATE.step_size)
        for batch in torch.randperm(len(y), device=device).split(UPDATE.batch_size):
            optimiser.zero_grad()
            nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
            optimiser.step()
        trained.append({name: value.cpu() for name, value in module.state_dict().items()})
    return trained


def rounds_like_cifar(times: int, device: str, scratch: Path, clients: int = 1000, rounds: int = 10) -> None:
    """Time whole rounds of pfl-research's CIFAR10 benchmark, on noise in its shape."""
    rng, rows = np.random.default_rng(0), 50
    split = {"train": clients, "validation": 1}
    manifest = Manifest(name="cifar", clients=clients + 1, split=split, model=NETWORK, loss="cross-entropy")
    images = rng.standard_normal(((clients + 1) * rows, 3, 32, 32), np.float32)
    labels = rng.integers(0, 10, len(images))
    write_dataset(scratch / "cifar", manifest, images, labels, offsets_of([rows] * (clients + 1)))
    config = run_config(
        "femnist",
        dataset=str(scratch / "cifar"),
        hypotheses=1,
        clients_per_round=min(50, clients),
        local_epochs=1,
        step_size=0.1,
        batch_size=10,
        patience=0,
        rounds=rounds,
        device=device,
    )

    go = {engine: partial(in_process.go, {**config, "engine": engine}) for engine in ("batched", "loop")}
    readings = interleave(go, times)
    show(f"{config['clients-per-round']} of {clients} clients a round, as pfl-research's CIFAR10", readings, "batched")


def cifar_network() -> nn.Module:
    """Return two convolutions and two dense layers, for 32x32 images in colour."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
