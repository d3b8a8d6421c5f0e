"""Time rounds of ``flwr run`` on a GPU against a bare loop of PyTorch on the same GPU.

    python -m benchmarks.gpu_runs [--model cnn,resnet18,lora] [--rounds N] [--times N] [--nodes N] [--out FILE]

umbel's ``cnn``, ResNet-18, and LoRA on a small BERT. Four clients train on 32 rows each, and two validate. Flower
starts the nodes in Ray, with ``client-resources-num-gpus`` as suits the GPUs. A round of umbel includes choice,
training, validation, noise, messages and checkpoint. The first round, in which processes load what they need, does not
count. The bare loop trains and averages, and does nothing else. Contestants take turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any

import numpy as np
import torch
import typer

import umbel
from benchmarks import big
from benchmarks.measure import Out, Ratio, Reading, benchmark, console, interleave, table_of
from umbel import models
from umbel.protocol.plugins import trust
from umbel.simulation.launch import federation_config

_LOOK_S = 0.2  # between two looks at the GPU
_QUERY = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")


def digits(generator: np.random.Generator, count: int) -> Any:
    """Draw images of handwriting's size."""
    return generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)


TASKS = {
    "cnn": big.Task("cnn", lambda: models.load("cnn").network(), digits, 62),
    "resnet18": big.TASKS["resnet18"],
    "lora": big.TASKS["lora"],
}


def main(
    model: Annotated[str, typer.Option(help="Models, separated by commas.")] = ",".join(TASKS),
    rounds: Annotated[int, typer.Option(min=2, help="Of a run; the first does not count.")] = 6,
    times: Annotated[int, typer.Option(min=1, help="Goes of each contestant that count.")] = 3,
    nodes: Annotated[int, typer.Option(min=1, help="Simulated nodes, which share the GPU.")] = 1,
    device: Annotated[str, typer.Option(help="cuda; cpu to try the benchmark itself.")] = "cuda",
    out: Out = None,
) -> None:
    """Print what rounds take, as multiples of the bare loop, and how busy the GPU is."""
    if device == "cuda" and not torch.cuda.is_available():
        console.print("not measured: PyTorch sees no GPU here")
        raise typer.Exit(1)
    with benchmark(out, "ray"):
        if device == "cuda":
            console.print(torch.cuda.get_device_name(), highlight=False)
        console.print(f"flwr run . --federation-config '{federation_config(nodes)}'", highlight=False)
        headings = "parameters", "bare loop", "flwr run", "times bare", "% GPU bare", "% GPU", "MiB GPU bare", "MiB GPU"
        for name in model.split(","):
            row = measured(TASKS[name], rounds, times, nodes, device)
            console.print(table_of("Seconds of a round", ("", *headings), [[name, *row]]))


def measured(task: big.Task, rounds: int, times: int, nodes: int, device: str, ray: bool = True) -> list[str]:
    """Return the cells of a row; without `ray`, umbel's rounds are done in this process."""
    meters: dict[str, Meter] = {"bare": Meter(), "umbel": Meter()}
    with tempfile.TemporaryDirectory() as scratch, home(Path(scratch)):
        big.write(task, Path(scratch) / "data" / "big")
        trust(task.model)

        def bare() -> Reading:
            with meters["bare"].watching():
                laps = big.bare(task, Path(scratch), rounds, torch.device(device))
            return Reading(statistics.median(laps[1:]))

        def run() -> Reading:
            with meters["umbel"].watching():
                found = umbel.run(
                    "big", baselines=False, ray=ray, nodes=nodes, rounds=rounds, hypotheses=1, restarts=1, patience=0,
                    clients_per_round=big.CLIENTS, local_epochs=1, batch_size=big.BATCH, step_size=big.STEP,
                    noise_multiplier=10.0, max_participations=0, device=device,
                )  # fmt: skip
            trained = found.history[found.history["releases"] == big.CLIENTS]
            if len(trained) < rounds:
                raise RuntimeError(f"{len(trained)} of {rounds} rounds were done")
            return Reading(float(trained["seconds"].iloc[1:].median()))

        readings = interleave({"bare": bare, "umbel": run}, times)
    parameters = sum(value.numel() for value in task.build().parameters() if value.requires_grad)
    seconds = {name: f"{statistics.median(one.seconds for one in ones):.3g}" for name, ones in readings.items()}
    ratio = str(Ratio.of(readings["umbel"], readings["bare"]))
    busy = [meter.busy for meter in meters.values()]
    return [
        f"{parameters:,}", seconds["bare"], seconds["umbel"], ratio, *busy, *(meter.most for meter in meters.values())
    ]  # fmt: skip


class Meter:
    """Looks how busy the first GPU is, and how much of its memory is taken."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look regularly at the GPU, by NVIDIA's tool; see nothing where there is none."""
        over = Event()
        thread = Thread(target=partial(self._look, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @property
    def busy(self) -> str:
        """The mean share of the time in which the GPU computed, in percent, from its first to its last work."""
        at_work = [i for i, (share, _) in enumerate(self._seen) if share]
        if not at_work:
            return ""
        return f"{statistics.mean(share for share, _ in self._seen[at_work[0] : at_work[-1] + 1]):.0f}"

    @property
    def most(self) -> str:
        """The most memory that was taken, in MiB."""
        return str(max(memory for _, memory in self._seen)) if self._seen else ""

    def _look(self, over: Event) -> None:
        while not over.is_set():
            try:
                said = subprocess.run(_QUERY, check=True, capture_output=True, text=True).stdout
            except (OSError, subprocess.CalledProcessError):
                return
            share, memory = said.splitlines()[0].split(",")
            self._seen.append((int(share), int(memory)))
            time.sleep(_LOOK_S)


@contextmanager
def home(folder: Path) -> Iterator[None]:
    """Have umbel's home be a folder."""
    before = os.environ.get("UMBEL_HOME")
    os.environ["UMBEL_HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["UMBEL_HOME"]
        else:
            os.environ["UMBEL_HOME"] = before


if __name__ == "__main__":
    typer.run(main)
