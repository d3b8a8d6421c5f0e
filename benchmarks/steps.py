"""Time a step of a cohort as PyTorch does it, compiled, and on a GPU as a captured CUDA graph.

    python -m benchmarks.steps [--clients 10] [--device cpu] [--out FILE]

umbel does its steps as PyTorch does them. The table shows what the others would save, and what they take to begin. On a
GPU the command fails if the host waits for it between the steps of umbel's own training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.measure import Device, Out, Reading, Times, benchmark, console, interleave, show
from umbel import models
from umbel.client.batched import Batched
from umbel.client.cohort import Cohort, LocalUpdate, Schedule
from umbel.models.fit import one_line
from umbel.models.model import Model, Parameters
from umbel.privacy.mechanisms.randomness import streams

NETWORKS = {"cnn": ((28, 28), 62), "mlp inputs=3 hidden=8 outputs=1": ((3,), 0)}
ROWS, STEPS = 20, 20
Step = Callable[[], None]


def main(
    clients: Annotated[int, typer.Option(min=1, help="Clients of a step.")] = 10,
    times: Times = 5,
    device: Device = "cpu",
    out: Out = None,
) -> None:
    """Print what a step takes."""
    with benchmark(out):
        measure(clients, times, device)


def measure(clients: int = 10, times: int = 3, device: str = "cpu") -> None:
    """Time steps of each network, and print what all took."""
    where = torch.device(device)
    for network in NETWORKS:
        if device == "cuda":
            train_without_waiting(network, clients, where)
        step = step_of(network, clients, where)
        contestants, begun = {"PyTorch": partial(timed, step, where)}, dict[str, float]()
        for name, make in ({"compiled": compiled} | ({"CUDA graph": captured} if device == "cuda" else {})).items():
            began = time.perf_counter()
            try:
                other = make(step_of(network, clients, where))
                other()
            except Exception as error:  # PyTorch compiles for few machines
                console.print(f"{name}: {one_line(error)}", markup=False, highlight=False)
                continue
            begun[name] = time.perf_counter() - began
            contestants[name] = partial(timed, other, where)
        show(f"{network}: a step of {clients} clients", interleave(contestants, times), "PyTorch", "step")
        for name, seconds in begun.items():
            console.print(f"{name}: {seconds:.1f} s to begin", highlight=False)


def train_without_waiting(network: str, clients: int, device: torch.device) -> None:
    """Do the steps of some clients of umbel; raise `RuntimeError` if the host waits for the GPU meanwhile."""
    model, start, x, y = made_up(network, clients, device)
    cohort = Cohort(x.flatten(0, 1), y.flatten(), np.full(clients, ROWS))
    update, draws = LocalUpdate(2, 0.1, ROWS // 2), streams(0, "shuffle", 1, range(clients))
    schedule = Schedule.draw(cohort.lengths, update, draws)
    torch.cuda.set_sync_debug_mode("error")
    try:
        Batched(model, device).descend(start, cohort, schedule, frozenset(start))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    console.print(f"{network}: the host never waited during umbel's steps", highlight=False)


def step_of(network: str, clients: int, device: torch.device) -> Step:
    """Return a step of so many clients' networks, each on its own made-up rows, which changes them in place."""
    model, start, x, y = made_up(network, clients, device)
    engine, parameters = Batched(model, device), {name: value.requires_grad_() for name, value in start.items()}

    def step() -> None:
        losses = model.loss.of_rows(engine.forward(parameters, x, training=True), y, 2)
        slopes = torch.autograd.grad(model.loss.objective(losses.mean(1)).sum(), list(parameters.values()))
        with torch.no_grad():
            for value, slope in zip(parameters.values(), slopes, strict=True):
                value.sub_(slope, alpha=0.1)

    return step


def made_up(network: str, clients: int, device: torch.device) -> tuple[Model, Parameters, Tensor, Tensor]:
    """Return a model, each client's parameters (clients, *shape), and rows and targets (clients, ROWS, ...)."""
    (shape, classes), generator = NETWORKS[network], torch.Generator().manual_seed(0)
    model, count = models.load(network, "cross-entropy" if classes else "mse"), (clients, ROWS)
    x = torch.randn(*count, *shape, generator=generator)
    y = torch.randint(classes, count, generator=generator) if classes else torch.randn(count, generator=generator)
    start = {name: torch.from_numpy(np.stack([value] * clients)) for name, value in model.initial(0).items()}
    return model, {name: value.to(device) for name, value in start.items()}, x.to(device), y.to(device)


def compiled(step: Step) -> Step:
    """Return the same step, compiled by PyTorch."""
    faster: Step = torch.compile(step)
    return faster


def captured(step: Step) -> Step:
    """Return the same step, which a GPU repeats as it was captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # what PyTorch prepares once must not be captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    repeat: Step = graph.replay
    return repeat


def timed(step: Step, device: torch.device) -> Reading:
    """Return what one of `STEPS` steps takes."""
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return Reading((time.perf_counter() - began) / STEPS)


if __name__ == "__main__":
    typer.run(main)
