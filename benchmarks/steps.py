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

from benchmarks.measure import Out, Reading, benchmark, console, interleave, show
from umbel import models
from umbel.client.batched import Batched
from umbel.client.cohort import Cohort, LocalUpdate, Schedule, send
from umbel.models.fit import one_line
from umbel.privacy.mechanisms.randomness import streams

NETWORKS = {"cnn": ((28, 28), 62), "mlp inputs=3 hidden=8 outputs=1": ((3,), 0)}
ROWS, STEPS = 20, 20
Step = Callable[[], None]


def main(
    clients: Annotated[int, typer.Option(min=1, help="Clients of a step.")] = 10,
    times: Annotated[int, typer.Option(min=1, help="Goes of each contestant that count.")] = 5,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
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
    (shape, classes), rows = NETWORKS[network], clients * ROWS
    model = models.load(network, "cross-entropy" if classes else "mse")
    features = np.random.default_rng(0).standard_normal((rows, *shape), np.float32)
    targets = np.zeros(rows, np.int64 if classes else np.float32)
    x, y = send([features, targets], device)
    cohort, update = Cohort(x, y, np.full(clients, ROWS)), LocalUpdate(2, 0.1, ROWS // 2)
    schedule = Schedule.draw(cohort.lengths, update, streams(0, "shuffle", 1, range(clients)))
    values = [np.stack([value] * clients) for value in model.initial(0).values()]
    start = dict(zip(model.initial(0), send(values, device), strict=True))
    torch.cuda.set_sync_debug_mode("error")
    try:
        Batched(model, device).descend(start, cohort, schedule, frozenset(start))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    console.print(f"{network}: the host never waited during umbel's steps", highlight=False)


def step_of(network: str, clients: int, device: torch.device) -> Step:
    """Return a step of so many clients' networks, each on its own made-up rows, which changes them in place."""
    (shape, classes), generator = NETWORKS[network], torch.Generator().manual_seed(0)
    model = models.load(network, "cross-entropy" if classes else "mse")
    engine, count = Batched(model, device), (clients, ROWS)
    x = torch.randn(*count, *shape, generator=generator).to(device)
    drawn = torch.randint(classes, count, generator=generator) if classes else torch.randn(count, generator=generator)
    y, parameters = drawn.to(device), {}
    for name, value in model.initial(0).items():
        own = torch.from_numpy(value).expand(clients, *value.shape).to(device)
        parameters[name] = own.clone().requires_grad_()

    def step() -> None:
        losses = model.loss.of_rows(engine.forward(parameters, x, training=True), y, 2)
        slopes = torch.autograd.grad(model.loss.objective(losses.mean(1)).sum(), list(parameters.values()))
        with torch.no_grad():
            for value, slope in zip(parameters.values(), slopes, strict=True):
                value.sub_(slope, alpha=0.1)

    return step


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
