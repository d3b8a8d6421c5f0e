"""Tables of what was measured beside what the papers print, as CSV and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from umbel.research.experiments.baselines import LOCAL_EPOCHS
from umbel.research.experiments.runs import HELD_OUT_ALONE
from umbel.research.experiments.sweep import PACKAGES, Result
from umbel.research.output import Page, Row, Section, plus_minus
from umbel.server.run_folder import versions


def page(title: str, sections: Iterable[Section], rows: Sequence[Row], results: Sequence[Result]) -> Page:
    """Return the page of a sweep: sections, rows of the CSV file, and of all runs the bad ones and configurations."""
    return Page(title, [*sections, _bad_runs(results)], rows, _configuration(results))


def by_arm(results: Sequence[Result]) -> dict[Any, list[Result]]:
    """Return the good runs of each arm that has some, in the order of `results`."""
    arms: dict[Any, list[Result]] = {result.spec.arm: [] for result in results}
    for result in good(results):
        arms[result.spec.arm].append(result)
    return {arm: runs for arm, runs in arms.items() if runs}


def _configuration(results: Sequence[Result]) -> dict[str, Any]:
    """Return versions, what all runs have in common, and what each run has of its own."""
    first, *others = [one.spec.config for one in results]
    common = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    own = {one.spec.name: {k: v for k, v in one.spec.config.items() if k not in common} for one in results}
    return {"versions": versions(PACKAGES), "common": common, "runs": own}


def what_a_client_gets(
    metric: str,
    arms: Iterable[tuple[str, Sequence[Result]]],
    alone: Sequence[Result],
    digits: int,
    scale: float = 1.0,
    own: Iterable[tuple[str, Sequence[Result]]] = (),
) -> Section:
    """Compare runs by what `umbel.research.experiments.baselines` measured on validation clients.

    `metric` is its name and unit, for the text. Each name comes with its seeds: in `arms` the runs to compare, in `own`
    those in which clients make a hypothesis their own; `alone` are clients that train by themselves. Numbers are shown
    times `scale`, with so many digits after the point.
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
        last = [result.measures["last"] for result in runs]
        asked = ((best, "mean"), (best, "worst_decile"), (last, "mean"), (held_out, "mean"), (held_out, "worst_decile"))
        rows.append([name, *(shown(*one) for one in asked), plus_minus(rand, 2) if rand else "unknown"])
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
    bad = [(result.spec.name, trouble) for result in results if (trouble := _trouble(result))]
    if not bad:
        return Section("Bad runs", f"None of {len(results)} runs failed or diverged.")
    text = f"{len(bad)} of {len(results)} runs failed or diverged; they are left out of the figures above."
    return Section("Bad runs", text, ("run", "what happened"), bad)
