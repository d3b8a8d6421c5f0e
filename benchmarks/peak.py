"""The share of the machine's peak that a round of the CNN reaches, and the causes of the rest.

    python -m benchmarks.peak [--times N] [--out FILE]

The peaks are measured, not looked up: PyTorch's matrix product, and its convolutions of the CNN's own shapes by
themselves, again and again on the same numbers. The operations of a round are those that PyTorch calls, counted as they
are called (`torch.utils.flop_counter`); one multiplication with its addition counts as two.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.bare import ROUNDS
from benchmarks.measure import Out, benchmark, console, table_of
from benchmarks.parts import PARTS, Stopwatch, by_parts
from benchmarks.peers.tasks import TASKS

BATCH = 20
"""Rows of a minibatch of the task, for which the convolutions are measured by themselves."""
_COMPUTED = ("scoring, to choose and to evaluate", "training")
_SECONDS = 0.3  # of a measurement, at least


def main(
    times: Annotated[int, typer.Option(min=1, help="Measurements of each, of which the best counts.")] = 5,
    out: Out = None,
) -> None:
    """Print two tables."""
    with benchmark(out):
        peaks = {name: max(rate(step) for _ in range(times)) for name, step in steps().items()}
        rows = [(name, f"{peak / 1e9:.0f}") for name, peak in peaks.items()]
        console.print(table_of("One thing again and again", ("", "GFLOP/s"), rows))
        show(max(peaks.values()))


def steps() -> dict[str, Callable[[], Any]]:
    """Return what is measured by itself: a large matrix product, and the CNN's layers forwards and backwards."""
    large = torch.randn(1024, 1024), torch.randn(1024, 1024)
    found: dict[str, Callable[[], Any]] = {"matrix product, 1024 x 1024": lambda: large[0] @ large[1]}
    for name, inputs, kernel in (("conv1", (1, 28, 28), (32, 1, 3, 3)), ("conv2", (32, 26, 26), (64, 32, 3, 3))):
        rows, weight = (
            torch.randn(shape).to(memory_format=torch.channels_last) for shape in ((BATCH, *inputs), kernel)
        )
        gradient = torch.randn_like(torch.conv2d(rows, weight))
        wanted = [name != "conv1", True, False]  # the images' own gradient is not needed
        found[f"{name} forwards"] = partial(torch.conv2d, rows, weight)
        found[f"{name} backwards"] = partial(
            torch.ops.aten.convolution_backward,
            *(gradient, rows, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted),
        )
    dense = torch.randn(BATCH, 9216), torch.randn(9216, 128)
    return found | {"fc1 forwards": lambda: dense[0] @ dense[1]}


def rate(step: Callable[[], Any]) -> float:
    """Return the operations a second of a step that is done again and again."""
    with FlopCounterMode(display=False) as counter:
        step()
    steps, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < _SECONDS:
        step()
        steps += 1
    return float(counter.get_total_flops()) * steps / took


def show(peak: float) -> None:
    """Print what the parts of a round of the CNN take, and how much of the peak each reaches."""
    with tempfile.TemporaryDirectory() as scratch:
        config = TASKS["cnn"](Path(scratch)) | {"rounds": ROUNDS["cnn"]}
        operations = {part: count(part, config) for part in _COMPUTED}
        whole, parts, _ = by_parts(config)
    rounds = int(config["rounds"])
    title = "A round of the CNN, by itself and as a share of the best above"
    table = table_of(title, ("", "GFLOP", "ms", "GFLOP/s", "% of peak"))
    seconds = {part: parts[part] for part in _COMPUTED}
    seconds["the rest: noise, messages, averages, policy"] = whole - sum(seconds.values())
    for part, took in [*seconds.items(), ("all", whole)]:
        flops = sum(operations.values()) if part == "all" else operations.get(part, 0.0)
        cells = [f"{flops / rounds / 1e9:.1f}", f"{flops / took / 1e9:.0f}", f"{flops / took / peak:.0%}"]
        gigas, speed, share = cells if flops else [""] * 3
        table.add_row(part, gigas, f"{1e3 * took / rounds:.0f}", speed, share)
    console.print(table)


class Operations(Stopwatch):
    """Counts what is computed inside a part, in place of time."""

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and is counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                found = function(*args, **kwargs)
            self.seconds[part] += counter.get_total_flops()
            return found

        return counted


def count(part: str, config: dict[str, Any]) -> float:
    """Return the operations of a part of all rounds."""
    return by_parts(config, {part: PARTS[part]}, Operations())[1][part]


if __name__ == "__main__":
    typer.run(main)
