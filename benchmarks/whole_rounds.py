"""Time whole rounds of large networks on a device, and what ``flwr run`` adds to them.

    python -m benchmarks.whole_rounds [--network cnn,resnet18] [--clients 10] [--device cpu] [--flower] [--out FILE]

The clients of a round choose between k = 2 hypotheses, train, and release with noise, in plain PyTorch one after the
other, and by umbel in this process. With `--flower` also by ``flwr run``, beside the same run with a ClientApp that
computes nothing: the difference is what umbel's clients take there.
"""

from __future__ import annotations

import copy
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

import umbel
from benchmarks import flower, in_process
from benchmarks.measure import Device, Out, Ratio, Reading, Times, benchmark, console, interleave, show
from benchmarks.peers.tasks import write_images
from umbel import models
from umbel.data import open_dataset
from umbel.protocol.errors import ConfigError
from umbel.protocol.plugins import TRUST
from umbel.simulation.in_process import run_config

RESNET = "benchmarks.whole_rounds:ResNet18"
EMPTY = "benchmarks.empty_client:app"
NETWORKS = ("cnn", "resnet18")
ROWS, CLASSES, CLIP_NORM = 40, 10, 1.0


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, outputs) for _ in range(2))
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            self.shortcut.extend([nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(8, outputs)])

    def forward(self, images: Tensor) -> Tensor:
        """Return (batch, outputs, height / stride, width / stride)."""
        hidden = self.norms[0](self.first(images)).relu()
        outputs: Tensor = (self.norms[1](self.second(hidden)) + self.shortcut(images)).relu()
        return outputs


class ResNet18(nn.Module):
    """ResNet-18 for images (batch, 3, 32, 32), with groups in place of batches: clients share no statistics."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        widths, blocks = [64, 64, 128, 256, 512], list[nn.Module]()
        for inputs, outputs in pairwise(widths):
            blocks += [Block(inputs, outputs, 1 if outputs == 64 else 2), Block(outputs, outputs, 1)]
        self.begin = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(8, 64), nn.ReLU())
        self.blocks = nn.Sequential(*blocks)
        self.end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes)."""
        logits: Tensor = self.end(self.blocks(self.begin(images)))
        return logits


def main(
    network: Annotated[str, typer.Option(help="Networks, separated by commas.")] = ",".join(NETWORKS),
    clients: Annotated[int, typer.Option(min=1, help="Clients of a round.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of a go in this process.")] = 2,
    times: Times = 5,
    device: Device = "cpu",
    by_flower: Annotated[bool, typer.Option("--flower", help="Also by flwr run.")] = False,
    out: Out = None,
) -> None:
    """Print what rounds take."""
    with benchmark(out, "ray"):
        for name in network.split(","):
            if name not in NETWORKS:
                raise ConfigError(f"--network: {name!r} is none of {', '.join(NETWORKS)}", code="config.bad-option")
            measure(name, clients, rounds, times, device, by_flower)


def measure(
    network: str, clients: int = 10, rounds: int = 1, times: int = 3, device: str = "cpu", by_flower: bool = False
) -> Ratio:
    """Time rounds, print what all took, and return how many times as long umbel takes as plain PyTorch."""
    with tempfile.TemporaryDirectory() as scratch:
        config = config_of(network, Path(scratch), clients, rounds, device)

        def ours() -> Reading:
            return Reading(in_process.go(config).seconds)  # the loss is of other rows

        contestants: dict[str, Callable[[], Reading]] = {"plain PyTorch": partial(bare, config), "umbel": ours}
        readings = interleave(contestants, times)
        show(f"{network}: {clients} clients choose, train and release on {device}", readings, "plain PyTorch")
        if by_flower:
            compare_flower(config | {"rounds": 30}, statistics.median(one.seconds for one in readings["plain PyTorch"]))
    return Ratio.of(readings["umbel"], readings["plain PyTorch"])


def compare_flower(config: dict[str, Any], plain: float) -> None:
    """Print the median of a round by ``flwr run``, with umbel's clients and with clients that compute nothing."""
    gpus, found = int(config["device"] == "cuda"), dict[str, float]()
    for client in ("", EMPTY):
        with busy(bool(gpus)) as shares:
            history, _ = flower.history_of(config, 1, gpus, client)
        found[client] = statistics.median([one["seconds"] for one in history if one["asked"]][1:])
        if not client and any(shares):
            at = np.flatnonzero(shares)
            share = statistics.mean(shares[at[0] : at[-1] + 1])
            console.print(f"flwr run: from its first to its last work the GPU was busy {share:.0f} % of the time")
    added = (found[""] - found[EMPTY]) / plain
    console.print(
        f"flwr run, a round: {1e3 * found['']:.0f} ms, with an empty ClientApp {1e3 * found[EMPTY]:.0f} ms; the "
        f"difference is {added:.2f} times the round of plain PyTorch",
        highlight=False,
    )


def config_of(network: str, scratch: Path, clients: int, rounds: int, device: str) -> dict[str, Any]:
    """Write made-up images, and return the run config of some rounds with them; one client validates at both ends."""
    folder = scratch / "images"
    if network == "cnn":
        write_images(folder, clients + 1, 1)
    else:
        os.environ[TRUST] = RESNET  # for the processes of flwr run too
        rng, count = np.random.default_rng(0), (clients + 1) * ROWS
        split = {"train": clients, "validation": 1}
        manifest = umbel.Manifest(name="images", clients=clients + 1, split=split, model=RESNET, loss="cross-entropy")
        images, targets = rng.standard_normal((count, 3, 32, 32), np.float32), rng.integers(0, CLASSES, count)
        umbel.write_dataset(folder, manifest, images, targets, np.arange(clients + 2) * ROWS)
    return run_config(
        "femnist", dataset=str(folder), model="", loss="", hypotheses=2, restarts=1, clients_per_round=clients,
        validation=f"every={10**6} clients=1", local_epochs=1, step_size=0.1, batch_size=20, patience=0,
        max_participations=0, rounds=rounds, device=device, strategy="group-privacy", noise_per="vector",
        clipping=f"public norm={CLIP_NORM} decay=1", noise_multiplier=3.0,
    )  # fmt: skip


def bare(config: dict[str, Any]) -> Reading:
    """Return what a round takes in plain PyTorch, once data and networks are there; a client validates at both ends."""
    data = open_dataset(Path(config["dataset"]))
    clients, device = [data.client(c) for c in range(data.manifest.train)], torch.device(config["device"])
    networks = networks_of(data.manifest.model, device)
    began, validating = time.perf_counter(), data.client(data.manifest.train)
    losses_of(networks, validating)
    for _ in range(int(config["rounds"])):
        bare_round(networks, clients, config)
    losses_of(networks, validating)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return Reading((time.perf_counter() - began) / int(config["rounds"]))


def networks_of(name: str, device: torch.device) -> list[nn.Module]:
    """Return two networks on a device, with the initial parameters of umbel's hypotheses."""
    model, networks = models.load(name, "cross-entropy"), list[nn.Module]()
    for j in range(2):
        networks.append(copy.deepcopy(model.module).to(device))
        networks[j].load_state_dict({name: torch.from_numpy(value) for name, value in model.initial(j).items()})
    return networks


def bare_round(networks: list[nn.Module], clients: Sequence[Sequence[Any]], config: dict[str, Any]) -> None:
    """Do a round as one would write it: a module, an optimiser, a client after the other, all on the device."""
    releases: list[list[Tensor]] = [[], []]
    for client in clients:
        chosen, trained = choose_and_train(networks, client, config["step-size"], config["batch-size"])
        releases[chosen].append(noisy(trained, networks[chosen], config["noise-multiplier"]))
    for one, own in zip(networks, releases, strict=True):
        if own:
            nn.utils.vector_to_parameters(torch.stack(own).mean(0), one.parameters())


def choose_and_train(
    networks: Sequence[nn.Module], client: Sequence[Any], step_size: float, batch_size: int
) -> tuple[int, nn.Module]:
    """Return which network a client chooses, and a copy of it that has made a pass over the client's rows."""
    losses, x, y = losses_of(networks, client)
    chosen = int(np.argmin(losses))
    trained = copy.deepcopy(networks[chosen])
    optimiser = torch.optim.SGD(trained.parameters(), step_size)
    for batch in torch.randperm(len(y), device=y.device).split(batch_size):
        optimiser.zero_grad()
        nn.functional.cross_entropy(trained(x[batch]), y[batch]).backward()
        optimiser.step()
    return chosen, trained


def losses_of(networks: Sequence[nn.Module], client: Sequence[Any]) -> tuple[list[float], Tensor, Tensor]:
    """Return each network's loss on a client's rows, and the rows and their targets on the device."""
    device = next(networks[0].parameters()).device
    x, y = (torch.tensor(part, device=device) for part in client)
    with torch.inference_mode():
        return [nn.functional.cross_entropy(one(x), y).item() for one in networks], x, y


@torch.no_grad()
def noisy(trained: nn.Module, start: nn.Module, nu: float) -> Tensor:
    """Return trained parameters, clipped around those at the start, with Laplace noise."""
    ends, begin = (nn.utils.parameters_to_vector(one.parameters()) for one in (trained, start))
    update, n = ends - begin, len(begin)
    update *= (CLIP_NORM / update.norm()).clamp(max=1)
    scale = nu * CLIP_NORM / n * torch.randn(n + 1, device=begin.device).norm()
    release: Tensor = begin + update + scale * torch.randn_like(begin)
    return release


@contextmanager
def busy(gpu: bool) -> Iterator[list[int]]:
    """Give the shares of time in percent, twice a second, in which the GPU computes meanwhile; none without a GPU."""
    shares, ended = list[int](), threading.Event()

    def watch() -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        while not ended.wait(0.5):
            with suppress(OSError, ValueError, subprocess.CalledProcessError):  # not every card says it
                shares.append(int(subprocess.check_output(command, text=True).split()[0]))

    thread = threading.Thread(target=watch)
    if gpu:
        thread.start()
    try:
        yield shares
    finally:
        ended.set()
        if gpu:
            thread.join()


if __name__ == "__main__":
    typer.run(main)
