"""Time cohorts of a convolutional network on a GPU: together, one client after the other, and without umbel.

    python -m benchmarks.gpu [--cohorts 10,30,100] [--times N] [--minutes 8] [--device cuda] [--out FILE]

Choosing among k = 2 hypotheses and training, of umbel's ``cnn`` on made-up images. Whole rounds of the CIFAR10
benchmark of pfl-research, on data of its shape: 1000 clients of 50 images, 50 a round, minibatches of 10, one model.
Rounds of adapters on one backbone (`benchmarks.adapters`), rounds of the ``cnn`` and of ResNet-18, also by ``flwr run``
(`benchmarks.whole_rounds`), and steps, compiled and captured (`benchmarks.steps`).

Each of these is a part of the table. No part begins after so many minutes. A later go on the same machine, card and
commit, and on the same day, keeps the parts that `--out` has, and does the others.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor, nn

import umbel
from benchmarks import adapters, in_process, steps, whole_rounds
from benchmarks.measure import CUT, Out, Reading, Times, benchmark, console, interleave, show
from benchmarks.parts import PARTS, by_parts
from benchmarks.peers.brief import Brief
from benchmarks.peers.networks import network
from benchmarks.peers.tasks import brief_of, write_images
from umbel.models.fit import one_line
from umbel.protocol.plugins import trust
from umbel.protocol.project import ENGINE
from umbel.simulation.in_process import run_config

NETWORK = "benchmarks.gpu:cifar_network"
PLAIN = "plain PyTorch, one client at a time"
_MARK, _FAILED, _LEFT = "# ", "failed: ", re.compile("^left for another go: .*\n?", re.MULTILINE)
_COMPUTED = ("reading rows", "scoring, to choose and to evaluate", "training")


def main(
    cohorts: Annotated[str, typer.Option(help="Numbers of clients.")] = "10,30,100",
    times: Times = 5,
    minutes: Annotated[float, typer.Option(min=0, help="No part begins later.")] = 8.0,
    device: Annotated[str, typer.Option(help="cuda; cpu to try the benchmark itself.")] = "cuda",
    out: Out = None,
) -> None:
    """Print a table for each size of cohort, and one of each kind of whole rounds."""
    if device == "cuda" and not torch.cuda.is_available():
        console.print("not measured: PyTorch sees no GPU here")
        raise typer.Exit(1)
    parts: dict[str, Callable[[Path], object]] = {
        f"{size} clients choose and train": partial(cohort_of, int(size), times, torch.device(device))
        for size in cohorts.split(",")
    }
    parts["rounds as in pfl-research's CIFAR10"] = partial(rounds_like_cifar, times, device)
    parts["adapters on one backbone"] = lambda _: adapters.measure(times=times, device=device)
    parts["rounds of the cnn"] = lambda _: whole_rounds.measure("cnn", 10, 5, times, device, by_flower=True)
    parts["rounds of ResNet-18"] = lambda _: whole_rounds.measure("resnet18", 10, 5, times, device, by_flower=True)
    parts["steps"] = lambda _: steps.measure(times=times, device=device)
    earlier, begun = out.read_text(encoding="utf-8") if out and out.exists() else "", time.monotonic()
    failed: list[str] = []
    with benchmark(out, "ray"), tempfile.TemporaryDirectory() as scratch:
        if device == "cuda":
            console.print(torch.cuda.get_device_name(), highlight=False)
        done = parts_in(earlier, console.export_text(clear=False), list(parts))
        for name, go in parts.items():
            if name not in done and time.monotonic() - begun > 60 * minutes:
                console.print(f"left for another go: {name}", highlight=False)
                continue
            console.print(f"{_MARK}{name}", highlight=False)
            if name in done:
                console.print(done[name], markup=False, highlight=False, end="")
                continue
            try:
                go(Path(scratch))
            except Exception as error:  # the others are measured all the same
                console.print(f"{_FAILED}{one_line(error)}", markup=False, highlight=False)
                failed.append(name)
    if failed:
        raise typer.Exit(1)


def parts_in(table: str, machine: str, names: Collection[str]) -> dict[str, str]:
    """Return the whole parts in a table that was made earlier, if that was on the same machine, card and commit."""
    header, *parts = table.split(f"\n{_MARK}")
    if " ".join(machine.split()) not in " ".join(header.split()):
        return {}
    whole = (part.partition("\n")[::2] for part in parts if CUT not in part and _FAILED not in part)
    return {name: _LEFT.sub("", text) for name, text in whole if name in names}


def cohort_of(clients: int, times: int, device: torch.device, scratch: Path) -> None:
    """Let the forms of a cohort take turns at one round, of which only the clients' computing is timed."""
    write_images(scratch / str(clients), clients + 1, 1)
    config = run_config(
        "femnist", dataset=str(scratch / str(clients)), hypotheses=2, restarts=1, clients_per_round=clients,
        validation="clients=1", local_epochs=1, step_size=0.1, batch_size=20, noise_multiplier=0.0, patience=0,
        rounds=1, device=device.type, strategy="group-privacy",
    )  # fmt: skip
    brief, memory = brief_of(config), dict[str, float]()

    def umbels(engine: str) -> Reading:
        with computed_by(engine):
            _, seconds, loss = by_parts(config, {part: PARTS[part] for part in _COMPUTED})
        return Reading(sum(seconds.values()), loss)

    def alone() -> Reading:
        began = time.perf_counter()
        plain(brief, device)
        return Reading(time.perf_counter() - began)

    def measured(name: str, go: Callable[[], Reading]) -> Reading:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        reading = go()
        if device.type == "cuda":
            memory[name] = torch.cuda.max_memory_allocated() / 2**20
        return reading

    contestants: dict[str, Callable[[], Reading]] = {name: partial(umbels, name) for name in ("batched", "loop")}
    contestants[PLAIN] = alone
    readings = interleave({name: partial(measured, name, go) for name, go in contestants.items()}, times)
    show(f"{clients} clients choose and train", readings, "batched")
    for name, mib in memory.items():
        console.print(f"{name}: {mib:.0f} MiB at most", highlight=False)


@contextmanager
def computed_by(engine: str) -> Iterator[None]:
    """Inside, an engine of this name computes simulated clients."""
    os.environ[ENGINE] = engine
    try:
        yield
    finally:
        del os.environ[ENGINE]


def plain(brief: Brief, device: torch.device) -> list[dict[str, Tensor]]:
    """Choose and train as one would write it: a module, an optimiser, a client after the other."""
    networks, settings, trained = [network(brief, j).to(device) for j in range(brief.k)], brief.settings, []
    for client in settings.train[0]:
        rows, step_size = brief.client(client), settings.step_size
        _, module = whole_rounds.choose_and_train(networks, rows, step_size, settings.batch_size)
        trained.append({name: value.cpu() for name, value in module.state_dict().items()})
    return trained


def rounds_like_cifar(
    times: int, device: str, scratch: Path, clients: int = 1000, rows: int = 50, rounds: int = 10
) -> None:
    """Time whole rounds of pfl-research's CIFAR10 benchmark, on noise in its shape."""
    rng, split = np.random.default_rng(0), {"train": clients, "validation": 1}
    trust(NETWORK)
    manifest = umbel.Manifest(name="cifar", clients=clients + 1, split=split, model=NETWORK, loss="cross-entropy")
    images = rng.standard_normal(((clients + 1) * rows, 3, 32, 32), np.float32)
    umbel.write_dataset(
        scratch / "cifar", manifest, images, rng.integers(0, 10, len(images)), np.arange(clients + 2) * rows
    )
    config = run_config(
        "femnist", dataset=str(scratch / "cifar"), hypotheses=1, clients_per_round=min(50, clients), local_epochs=1,
        step_size=0.1, batch_size=10, patience=0, rounds=rounds, device=device,
    )  # fmt: skip

    def go(engine: str) -> Reading:
        with computed_by(engine):
            return in_process.go(config)

    readings = interleave({engine: partial(go, engine) for engine in ("batched", "loop")}, times)
    show(f"{config['clients-per-round']} of {clients} clients a round, as pfl-research's CIFAR10", readings, "batched")


def cifar_network() -> nn.Module:
    """Return two convolutions and two dense layers, for 32x32 images in colour."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
