"""How the benchmarks measure: contestants take turns, medians and spread are shown as ratios."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

console = Console(width=120)


@dataclass(frozen=True)
class Reading:
    """What one go of a contestant took.

    Attributes
    ----------
    seconds : float
        Of a round.
    loss : float or None
        What it had learnt at the end, so that nobody wins by doing less.
    """

    seconds: float
    loss: float | None = None


def interleave(contestants: Mapping[str, Callable[[], Reading]], times: int) -> dict[str, list[Reading]]:
    """Let each contestant go once to warm up and then `times` times, in turns.

    What else the machine does then falls on all of them alike.
    """
    readings: dict[str, list[Reading]] = {name: [] for name in contestants}
    for turn in range(times + 1):
        for name, go in contestants.items():
            reading = go()
            if turn:
                readings[name].append(reading)
    return readings


def show(title: str, readings: Mapping[str, list[Reading]], base: str) -> None:
    """Print medians, spread and losses, with ratios to `base`: above 1 is slower."""
    yardstick = statistics.median(one.seconds for one in readings[base])
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("ms a round", "lowest to highest", f"times {base}", "loss"):
        table.add_column(heading, justify="right")
    for name, ones in readings.items():
        times = [one.seconds for one in ones]
        median = statistics.median(times)
        losses = [one.loss for one in ones if one.loss is not None]
        table.add_row(
            name,
            f"{1e3 * median:.2f}",
            f"{1e3 * min(times):.2f} to {1e3 * max(times):.2f}",
            f"{median / yardstick:.2f}",
            f"{statistics.median(losses):.6f}" if losses else "",
        )
    console.print(table)


def machine(*packages: str) -> str:
    """Return a line that says where this runs, and versions."""
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "flwr", *packages))
    return (
        f"{names[0] if names else platform.machine()}, {cores} cores, {torch.get_num_threads()} threads of PyTorch; "
        f"Python {platform.python_version()}, {versions}"
    )


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
