"""Measure the ratios that umbel holds itself to, and compare them with those that were saved last.

    python -m benchmarks [--save] [--out FILE]

These are the short benchmarks, a few minutes in all; `benchmarks.peers` and `benchmarks.gpu` are by themselves. All are
ratios of two contestants that took turns on one machine, and so hold on another by and large. The command ends with 1
where one is worse than it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks import adapters, bare, scale, sites
from benchmarks.measure import Out, Ratio, benchmark, console, table_of
from benchmarks.peers import plain_flower
from umbel.protocol.home import write_atomically

SAVED = Path(__file__).with_name("ratios.json")
_WORSE = 1.25  # times what was saved, which is more than machines differ in these ratios

BARE = {
    "hospital: umbel / bare loop": lambda: bare.measure("hospital", times=5),
    "CNN: umbel / bare loop": lambda: bare.measure("cnn", times=2, rounds=2),
    "LoRA: 50 clients' adapters / one adapter": lambda: adapters.measure(times=2),
}
FLOWER = "hospital in Ray: umbel / plain Flower"
SITE = "hospitals at a site: together / one by one"
MANY, LATE = "a million clients / a thousand", "rounds 450 to 500 / rounds 1 to 50"


def main(
    save: Annotated[bool, typer.Option("--save", help="Keep what is measured, to compare with the next time.")] = False,
    out: Out = None,
) -> None:
    """Print each ratio, as it was and as it is; below 1, umbel is the faster."""
    with benchmark(out, "ray"):
        before = read(SAVED)
        now = measured()
        console.print(compared(before, now))
        if save:
            document = {name: asdict(ratio) for name, ratio in now.items()}
            write_atomically(SAVED, (json.dumps(document, indent=1) + "\n").encode())
        elif slower := worse(before, now):
            console.print(f"Slower than it was: {'; '.join(slower)}.", highlight=False)
    if not save and worse(before, now):
        raise typer.Exit(1)


def measured() -> dict[str, Ratio]:
    """Return the ratios of this machine, now."""
    ratios = {name: measure() for name, measure in BARE.items()}
    ratios[SITE] = sites.measure("mlp", clients=600, k=5, times=3)
    ratios[FLOWER] = plain_flower.compare(rounds=2, times=1).turned
    ratios[MANY], ratios[LATE] = scale.measure([1_000, 1_000_000], rounds=500, times=2)
    return ratios


def read(file: Path) -> dict[str, Ratio]:
    """Return the ratios that were saved."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {name: Ratio(**values) for name, values in found.items()}


def compared(before: Mapping[str, Ratio], now: Mapping[str, Ratio]) -> Table:
    """Return the table of what was saved, and what is."""
    table = table_of("Ratios of times, turn by turn: median (lowest to highest)", ("", "saved", "now", "times"))
    for name, ratio in now.items():
        was = before.get(name)
        table.add_row(name, str(was or ""), str(ratio), f"{ratio.median / was.median:.2f}" if was else "")
    return table


def worse(before: Mapping[str, Ratio], now: Mapping[str, Ratio]) -> list[str]:
    """Return what is clearly slower than it was, even in its best turn."""
    return [name for name, ratio in now.items() if name in before and ratio.low > _WORSE * before[name].median]


if __name__ == "__main__":
    typer.run(main)
