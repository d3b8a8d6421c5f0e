"""Tables of what was measured beside what the papers print, as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from umbel.protocol.home import write_atomically
from umbel.research.experiments.baselines import LOCAL_EPOCHS
from umbel.research.experiments.runs import HELD_OUT_ALONE, LOCAL_ONLY
from umbel.research.experiments.sweep import PACKAGES, Result
from umbel.server.run_folder import versions

Value = str | int | float | None


@dataclass(frozen=True)
class Section:
    """A part of the Markdown page: a heading, a paragraph or more, and a table if there are columns."""

    title: str
    text: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default_factory=list)


def write(
    folder: Path,
    title: str,
    sections: Iterable[Section],
    rows: Sequence[Mapping[str, Value]],
    results: Sequence[Result],
) -> None:
    """Write ``table.md``, ``table.csv`` and ``config.toml`` of a sweep.

    Parameters
    ----------
    folder : Path
        Of the sweep.
    title : str
    sections : iterable of Section
        Of the Markdown page, which a list of bad runs is added to.
    rows : sequence of mapping
        Of the CSV file, all with the same keys.
    results : sequence of Result
        All runs; their configurations and the versions go to ``config.toml``.
    """
    write_page(folder, title, [*sections, _bad_runs(results)], rows, _configuration(results))


def write_page(
    folder: Path,
    title: str,
    sections: Iterable[Section],
    rows: Sequence[Mapping[str, Value]],
    document: Mapping[str, Any],
) -> None:
    """Write ``table.md``, ``table.csv`` with the keys of all rows, and ``config.toml`` with a document."""
    page = [f"# {title}\n"]
    for section in sections:
        page.append(f"## {section.title}\n\n{section.text}\n")
        if section.columns:
            lines = [section.columns, ["---"] * len(section.columns), *section.rows]
            page.append("".join(f"| {' | '.join(line)} |\n" for line in lines))
    write_atomically(folder / "table.md", "\n".join(page).encode())
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _plain(value) for key, value in row.items()} for row in rows)
    write_atomically(folder / "table.csv", buffer.getvalue().encode())
    write_atomically(folder / "config.toml", tomli_w.dumps(document).encode())


def _configuration(results: Sequence[Result]) -> dict[str, Any]:
    """Return versions, what all runs have in common, and what each run has of its own."""
    first = results[0].spec.config
    common = {key: first[key] for key in first if all(one.spec.config.get(key) == first[key] for one in results)}
    own = {one.spec.name: {k: v for k, v in one.spec.config.items() if k not in common} for one in results}
    return {"versions": versions(PACKAGES), "common": common, "runs": own}


def average(values: Iterable[float]) -> tuple[float, float]:
    """Return mean and empirical standard deviation (divisor n - 1, 0 for a single value)."""
    array = np.asarray(list(values), float)
    if not len(array):
        return math.nan, math.nan
    return float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else 0.0


def difference(measured: float, printed: float) -> str:
    """Return by how many per cent a measured number lies above or below a printed one."""
    return f"{100 * (measured / printed - 1):+.0f} %"


def plus_minus(values: Iterable[float], digits: int) -> str:
    """Return mean and standard deviation as text; of a single value there is no deviation."""
    numbers = list(values)
    mean, deviation = average(numbers)
    if math.isnan(mean):
        return "none"
    return f"{mean:,.{digits}f}" + (f" ± {deviation:,.{digits}f}" if len(numbers) > 1 else "")


def rate(successes: int, runs: int) -> str:
    """Return a count of runs with its 95 % Wilson interval, as text."""
    if not runs:
        return "no runs"
    z = 1.959964
    centre = (successes + z**2 / 2) / (runs + z**2)
    half = z * math.sqrt(successes * (runs - successes) / runs + z**2 / 4) / (runs + z**2)
    return f"{successes} of {runs} ({100 * max(centre - half, 0):.0f} to {100 * min(centre + half, 1):.0f} %)"


def what_a_client_gets(
    metric: str,
    arms: Iterable[tuple[str, Sequence[Result]]],
    alone: Sequence[Result],
    digits: int,
    scale: float = 1.0,
    own: Iterable[tuple[str, Sequence[Result]]] = (),
) -> Section:
    """Compare runs by what `umbel.research.experiments.baselines` measured on validation clients.

    Parameters
    ----------
    metric : str
        Name and unit of what was measured, for the text.
    arms : iterable of (str, sequence of Result)
        The runs to compare, each name with its seeds.
    alone : sequence of Result
        Clients that train by themselves.
    digits : int
        After the point.
    scale : float
        Measured numbers times `scale` are shown.
    own : iterable of (str, sequence of Result)
        Runs in which clients make a hypothesis their own, each name with its seeds.
    """

    def shown(values: Iterable[dict[str, float]], name: str) -> str:
        return plus_minus((scale * value[name] for value in values), digits)

    rows = []
    for name, runs in (("by itself", alone), *own):
        held_out = [result.measures["held_out"] for result in runs]
        rows.append([name, "", "", "", shown(held_out, "mean"), shown(held_out, "worst_decile"), ""])
    for name, runs in arms:
        best = [result.measures["best"] for result in runs]
        held_out = [measures["held_out"] for measures in best]
        rand = [measures["rand_index"] for measures in best if measures["rand_index"] is not None]
        rows.append(
            [
                name,
                shown(best, "mean"),
                shown(best, "worst_decile"),
                shown((result.measures["last"] for result in runs), "mean"),
                shown(held_out, "mean"),
                shown(held_out, "worst_decile"),
                plus_minus(rand, 2) if rand else "unknown",
            ]
        )
    text = (
        f"{metric} of every validation client under its best hypothesis: mean over clients, and mean over the tenth "
        "that fares worst, with the hypotheses of the best and of the last round; mean ± standard deviation over "
        "seeds. Held out: a client of more than one row picks its hypothesis, or trains by itself, on every other row "
        f"and is measured on the rest; who trains by itself or further, does for {LOCAL_EPOCHS} epochs with the run's "
        "step. The adjusted Rand index compares what clients pick with the distribution that their data come from, "
        "where that is known: 1 if they agree, 0 if one hypothesis serves all."
    )
    columns = ("who", "mean", "worst decile", "mean, last round", "held out: mean", "held out: worst decile")
    return Section("What a client gets", text, (*columns, "Rand index"), rows)


def alone(results: Iterable[Result]) -> list[Result]:
    """Return the runs in which clients train by themselves."""
    return [result for result in results if result.spec.config["strategy"] == LOCAL_ONLY]


def trained(results: Iterable[Result]) -> list[Result]:
    """Return the runs of which more than what clients get in the end was measured."""
    return [result for result in results if result.spec.config["strategy"] not in HELD_OUT_ALONE]


def good(results: Iterable[Result]) -> list[Result]:
    """Return the runs that ended, with a finite loss."""
    return [result for result in results if _trouble(result) is None]


def _trouble(result: Result) -> str | None:
    if result.error:
        return f"failed: {result.error.strip().splitlines()[-1]}"
    numbers = (result.measures.get("best_loss", 0.0), result.measures.get("last", {}).get("mean", 0.0))
    return None if all(map(math.isfinite, numbers)) else "diverged: the loss became infinite"


def _bad_runs(results: Sequence[Result]) -> Section:
    bad = [(result.spec.name, trouble) for result in results if (trouble := _trouble(result)) is not None]
    if not bad:
        return Section("Bad runs", f"None of {len(results)} runs failed or diverged.")
    text = f"{len(bad)} of {len(results)} runs failed or diverged; they are left out of the figures above."
    return Section("Bad runs", text, ("run", "what happened"), bad)


def _plain(value: Value) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
