"""Time whole runs of large models against a bare loop of PyTorch that trains the same clients.

    python -m benchmarks.big [--model resnet18,bert,lora] [--rounds N] [--times N] [--out FILE]

ResNet-18 on images of 224 x 224, a small BERT, and LoRA on it. Four clients train on 32 rows each, and two validate. A
run of umbel is whole: set-up, trial steps, validation before and after, messages, noise, checkpoints, report. The bare
loop trains and averages, and does nothing else. Contestants take turns. Each go is a new process, and its processor
time counts. All modules that a contestant's first go imported, which does not count, are there from the start.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

import umbel
from benchmarks.measure import Out, Ratio, Reading, benchmark, console, interleave, table_of
from umbel.models.libraries import library_of
from umbel.protocol.plugins import trust

CLIENTS, VALIDATION, ROWS, BATCH, STEP = 4, 2, 32, 16, 0.01
_BERT = (
    "transformers:BertForSequenceClassification hidden_size=256 num_hidden_layers=4 num_attention_heads=4 "
    "intermediate_size=1024 vocab_size=8000 max_position_embeddings=128 num_labels=3"
)
_LONG = 128  # words of a text
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Task:
    """A model by its name in umbel, what builds it without umbel, and its rows."""

    model: str
    build: Callable[[], nn.Module]
    rows: Callable[[np.random.Generator, int], Any]
    classes: int


def lora() -> nn.Module:
    """Return the small BERT with an adapter of low rank; the rest is frozen."""
    from peft import LoraConfig, get_peft_model

    network: nn.Module = get_peft_model(built(_BERT), LoraConfig("SEQ_CLS", r=8))
    return network


def built(name: str) -> nn.Module:
    """Return a library's network by its name in umbel."""
    name, *options = name.split(" ")
    build = library_of(name)
    assert build is not None
    values = (option.split("=") for option in options)
    return build(**{key: int(value) for key, value in values})


def images(generator: np.random.Generator, count: int) -> Any:
    """Draw images in colour."""
    return generator.integers(0, 256, (count, 3, 224, 224), dtype=np.uint8)


def texts(generator: np.random.Generator, count: int) -> Any:
    """Draw texts, by the numbers of their words."""
    return generator.integers(0, 8000, (count, _LONG))


_RESNET = "torchvision:resnet18 num_classes=10"
TASKS = {
    "resnet18": Task(_RESNET, partial(built, _RESNET), images, 10),
    "bert": Task(_BERT, partial(built, _BERT), texts, 3),
    "lora": Task("benchmarks.big:lora", lora, texts, 3),
}


def main(
    model: Annotated[str, typer.Option(help="Models, separated by commas.")] = ",".join(TASKS),
    rounds: Annotated[int, typer.Option(min=1, help="Of a run.")] = 3,
    times: Annotated[int, typer.Option(min=1, help="Goes of each contestant that count.")] = 3,
    out: Out = None,
) -> None:
    """Print what whole runs take, as multiples of the bare loop."""
    with benchmark(out):
        table = table_of(
            f"Whole runs of {rounds} rounds: seconds of one core, and the most memory",
            ("", "parameters", "bare loop", "umbel", "times bare", "with noise", "times bare", "MiB bare", "MiB umbel"),
        )
        for name in model.split(","):
            table.add_row(name, *measured(TASKS[name], rounds, times))
        console.print(table)


def measured(task: Task, rounds: int, times: int) -> list[str]:
    """Return the cells of a row."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(task, folder / "data" / "big")
        memory: dict[str, float] = {}

        def go(name: str, work: Callable[[int], Any]) -> Reading:
            first = name not in memory  # which only shows what to import
            seconds, memory[name] = in_new_process(partial(work, 1 if first else rounds))
            return Reading(seconds)

        works: dict[str, Callable[[int], Any]] = {
            "bare": partial(bare, task, folder),
            "plain": partial(run, task, folder, 0.0),
            "noisy": partial(run, task, folder, 10.0),
        }
        readings = interleave({name: partial(go, name, work) for name, work in works.items()}, times)
    parameters = sum(value.numel() for value in task.build().parameters() if value.requires_grad)
    seconds = {name: f"{statistics.median(one.seconds for one in ones):.1f}" for name, ones in readings.items()}
    ratios = {name: str(Ratio.of(ones, readings["bare"])) for name, ones in readings.items()}
    used = [f"{memory[name]:.0f}" for name in ("bare", "noisy")]
    return [
        f"{parameters:,}", seconds["bare"], seconds["plain"], ratios["plain"], seconds["noisy"], ratios["noisy"], *used
    ]  # fmt: skip


def write(task: Task, folder: Path) -> None:
    """Write made-up clients of a task."""
    generator, clients = np.random.default_rng(0), CLIENTS + VALIDATION
    trust(task.model)
    rows = task.rows(generator, clients * ROWS)
    manifest = umbel.Manifest(
        name="big", clients=clients, split={"train": CLIENTS, "validation": VALIDATION}, model=task.model,
        loss="cross-entropy", metric="accuracy", feature_scale=1 / 255 if rows.dtype == np.uint8 else 1.0,
    )  # fmt: skip
    targets = generator.integers(0, task.classes, len(rows))
    umbel.write_dataset(folder, manifest, rows, targets, np.arange(clients + 1) * ROWS)


def run(task: Task, home: Path, noise: float, rounds: int) -> None:
    """Do a whole run; raise unless it trains in every round."""
    os.environ["UMBEL_HOME"] = str(home)
    trust(task.model)
    found = umbel.run(
        "big", baselines=False, rounds=rounds, hypotheses=1, clients_per_round=CLIENTS, local_epochs=1,
        batch_size=BATCH, step_size=STEP, noise_multiplier=noise, restarts=1, patience=0,
        max_participations=0, seed=2000, device="cpu",
    )  # fmt: skip
    if (trained := int((found.history["releases"] == CLIENTS).sum())) < rounds:
        raise RuntimeError(f"{trained} of {rounds} rounds were done")


def bare(task: Task, home: Path, rounds: int, device: torch.device = CPU) -> list[float]:
    """Train and average, as one would write it for a single model; return the seconds of each round."""
    folder = home / "data" / "big"
    features, targets = np.load(folder / "features.npy", "r"), torch.from_numpy(np.load(folder / "targets.npy"))
    torch.manual_seed(0)
    network = task.build().to(device)
    trained, laps = [name for name, value in network.named_parameters() if value.requires_grad], []
    for _ in range(rounds):
        began = time.perf_counter()
        start = {name: value.detach().clone() for name, value in network.state_dict().items()}
        sums = {name: torch.zeros_like(start[name]) for name in trained}
        for client in range(CLIENTS):
            network.load_state_dict(start)
            train(network, slice(client * ROWS, (client + 1) * ROWS), features, targets, device)
            for name, value in network.state_dict().items():
                if name in sums:
                    sums[name] += value / CLIENTS
        network.load_state_dict(start | sums)
        if device.type == "cuda":
            torch.cuda.synchronize()
        laps.append(time.perf_counter() - began)
    return laps


def train(network: nn.Module, own: slice, features: Any, targets: Tensor, device: torch.device) -> None:
    """Train a client for one epoch."""
    x, y = torch.from_numpy(np.array(features[own])).to(device), targets[own].to(device)
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    optimizer = torch.optim.SGD([value for value in network.parameters() if value.requires_grad], STEP)
    network.train()
    for batch in torch.randperm(len(y), device=device).split(BATCH):
        outputs = network(x[batch])
        optimizer.zero_grad()
        nn.functional.cross_entropy(getattr(outputs, "logits", outputs), y[batch]).backward()
        optimizer.step()


def in_new_process(work: Callable[[], Any]) -> tuple[float, float]:
    """Do some work in a copy of this process; return the processor time in seconds, and the most memory in MiB."""
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)

    def do() -> None:
        began = time.process_time()
        work()
        seconds, memory = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        tell.send((seconds, memory, [*sys.modules]))

    process = context.Process(target=do)
    process.start()
    tell.close()
    seconds, memory, imported = math.nan, math.nan, list[str]()
    with suppress(EOFError):
        seconds, memory, imported = told.recv()
    process.join()
    if process.exitcode:
        raise RuntimeError("a contestant failed; its error is above")
    for name in imported:
        with suppress(Exception):  # some modules exist only in a process that made them
            import_module(name)
    return seconds, memory


if __name__ == "__main__":
    typer.run(main)
