"""Count the labels that k-means gives on a random tenth of the columns as it does on all.

    python -m benchmarks.sketch [--out FILE]

For releases that one machine cannot hold: labels from some columns, averages of the rest as they come.
"""

from __future__ import annotations

import math

import numpy as np
import typer

from benchmarks.bare_loops import kmeans, released
from benchmarks.measure import Out, benchmark, console, table_of

DISTANCES = (1.0, 0.3, 0.1, 0.03)


def main(out: Out = None) -> None:
    """Print shares of labels by how far apart the hypotheses are."""
    with benchmark(out):
        title = "k-means on a random tenth of 100,000 columns: 100 clients of two kinds, nu = 3"
        headings = ("distance / radius", "% labels the same", "% right, all columns", "% right, a tenth")
        rows = [(f"{one:g}", *(f"{100 * share:.0f}" for share in sketch(one))) for one in DISTANCES]
        console.print(table_of(title, headings, rows))


def sketch(distance: float, n: int = 100_000, clients: int = 100, draws: int = 3) -> tuple[float, float, float]:
    """Return shares of labels: of a tenth of the columns as of all, right of all, and right of the tenth.

    Clients of two kinds have updates of norm 1, in separate directions, from hypotheses that are so far apart.
    """
    shares, kinds = [], np.arange(clients) % 2
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        seeds = rng.standard_normal((2, n)) / math.sqrt(n)
        seeds[1] = seeds[0] + (seeds[1] - seeds[0]) * distance / np.linalg.norm(seeds[1] - seeds[0])
        updates = rng.standard_normal((clients, n))
        updates /= np.linalg.norm(updates, axis=1, keepdims=True)
        releases = released(seeds[kinds], seeds[kinds] + updates, 3.0, rng)
        some = rng.choice(n, n // 10, replace=False)
        (whole, _), (tenth, _) = kmeans(releases, seeds), kmeans(releases[:, some], seeds[:, some])
        shares.append([(whole == tenth).mean(), (whole == kinds).mean(), (tenth == kinds).mean()])
    same, right, of_tenth = np.mean(shares, axis=0).tolist()
    return same, right, of_tenth


if __name__ == "__main__":
    typer.run(main)
