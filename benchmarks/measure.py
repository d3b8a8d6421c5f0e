"""How the benchmarks measure: contestants take turns, medians and spread are shown as ratios."""

from __future__ import annotations

import logging
import os
import platform
import re
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from umbel.protocol.cli import errors_in_one_line
from umbel.protocol.errors import ConfigError
from umbel.protocol.home import write_atomically
from umbel_lab.experiments.page import commit_of

console = Console(width=120, record=True)
CUT = "stopped before its end"

Times = Annotated[int, typer.Option(min=1, help="Goes of each contestant that count.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Out = Annotated[Path | None, typer.Option("--out", help="File for what is printed, with the command.")]


@contextmanager
def benchmark(out: Path | None, *packages: str, threads: int = 1) -> Iterator[None]:
    """Do a benchmark on so many threads, and print first where it runs, with versions of packages.

    Its output goes to the file `out` as well, also if it is stopped, which the last line then says. A signal to end
    leaves no process behind.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    level, threads_before = logging.getLogger("flwr").level, torch.get_num_threads()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    console.export_text(clear=True)
    try:
        with errors_in_one_line():
            if out is not None and not out.parent.is_dir():
                raise ConfigError(f"{out}: its folder is missing; make it first", code="config.no-folder")
            if out is not None and out.is_dir():
                raise ConfigError(f"{out} is a folder; name a file in it", code="config.no-file")
            torch.set_num_threads(threads)
            console.print(machine(*packages), highlight=False)
            try:
                yield
            except (KeyboardInterrupt, SystemExit):
                console.print(CUT)
                _write(out)
                raise
            _write(out)
    finally:
        signal.signal(signal.SIGTERM, before)
        logging.getLogger("flwr").setLevel(level)
        torch.set_num_threads(threads_before)


def _write(out: Path | None) -> None:
    if out is not None:
        command = " ".join(["python", *sys.orig_argv[1:]])
        write_atomically(out, f"$ {command}\n\n{console.export_text()}".encode())


@dataclass(frozen=True)
class Reading:
    """The cost of a contestant's round, and its final result: no contestant may win by doing less."""

    seconds: float
    loss: float | None = None


@dataclass(frozen=True)
class Ratio:
    """How many times as long one contestant took as another, turn by turn: median, lowest and highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ones: list[Reading], base: list[Reading]) -> Ratio:
        """Return the ratio of one contestant's readings to those of another in the same turns."""
        ratios = [one.seconds / other.seconds for one, other in zip(ones, base, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    @property
    def turned(self) -> Ratio:
        """The other's to the one."""
        return Ratio(1 / self.median, 1 / self.high, 1 / self.low)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def interleave(contestants: Mapping[str, Callable[[], Reading]], times: int) -> dict[str, list[Reading]]:
    """Let each contestant go once to warm up and then `times` times, in turns.

    Other work of the machine then affects all of them alike.
    """
    readings: dict[str, list[Reading]] = {name: [] for name in contestants}
    for turn in range(times + 1):
        for name, go in contestants.items():
            reading = go()
            if turn:
                readings[name].append(reading)
    console.print(f"turns: {times}, after one to warm up", highlight=False)
    return readings


def table_of(title: str, headings: Iterable[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    """Return a table whose numbers stand to the right; a column without a heading says whose they are."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(*row)
    return table


def show(title: str, readings: Mapping[str, list[Reading]], base: str, unit: str = "round") -> None:
    """Print medians, spread and losses, with ratios to `base` turn by turn: above 1 is slower."""
    table = table_of(title, ("", f"ms a {unit}", "lowest to highest", f"times {base}", "loss"))
    for name, ones in readings.items():
        times = [one.seconds for one in ones]
        median = statistics.median(times)
        losses = [one.loss for one in ones if one.loss is not None]
        spread = f"{1e3 * min(times):.2f} to {1e3 * max(times):.2f}"
        loss = f"{statistics.median(losses):.6f}" if losses else ""
        table.add_row(name, f"{1e3 * median:.2f}", spread, str(Ratio.of(ones, readings[base])), loss)
    console.print(table)


def machine(*packages: str) -> str:
    """Return a line that says where this runs, versions, the commit, and the date."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text(encoding="utf-8")) if info.exists() else []
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "flwr", *packages))
    return (
        f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} "
        f"threads of PyTorch; Python {platform.python_version()}, {versions}; "
        f"commit {commit_of(quick=True)}, {date.today()}"
    )
