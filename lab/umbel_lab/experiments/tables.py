"""Tables of measurements beside the papers' numbers, as CSV and as Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from umbel.data import Manifest, find_dataset, open_dataset
from umbel.server.run_folder import versions
from umbel.simulation.baselines import LOCAL_EPOCHS
from umbel.simulation.measured import STATES
from umbel.simulation.sweep import PACKAGES, Result
from umbel_lab.experiments.runs import HELD_OUT_ALONE
from umbel_lab.output import Page, Row, Section, plus_minus

BEST_ROUND = (
    "The best round has the lowest validation loss. Validation clients tell that loss exactly, which guarantees them "
    "nothing. They are also the clients that are measured, so the best round looks a little too good."
)
SAME_CLIENTS = (
    "Each seed splits the same clients differently into those that train and those that validate. Seeds are therefore "
    "no independent data sets, and ± says nothing about other clients."
)
SAME_SPLIT = "All seeds train and measure the same clients, so ± is that of the draws of training alone."
"""For the text of tables: the column beside the last round, and the meaning of a deviation over seeds."""


def page(title: str, sections: Iterable[Section], rows: Sequence[Row], results: Sequence[Result]) -> Page:
    """Return the page of a sweep, with what is true of all runs: the bad ones, their code and their configurations."""
    return Page(title, [*sections, _bad_runs(results), *_code(results)], rows, _configuration(results))


def by_arm(results: Sequence[Result]) -> dict[Any, list[Result]]:
    """Return the good runs of each arm that has any, in the order of `results`."""
    arms: dict[Any, list[Result]] = {result.spec.arm: [] for result in results}
    for result in good(results):
        arms[result.spec.arm].append(result)
    return {arm: runs for arm, runs in arms.items() if runs}


def _configuration(results: Sequence[Result]) -> dict[str, Any]:
    """Return versions, the common part of all runs, and the rest of each run."""
    first, *others = [one.spec.config for one in results]
    common = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    own = {one.spec.name: {k: v for k, v in one.spec.config.items() if k not in common} for one in results}
    return {"versions": versions(PACKAGES), "common": common, "runs": own}


def what_a_client_gets(
    metric: str,
    arms: Iterable[tuple[str, Sequence[Result]]],
    digits: int,
    scale: float = 1.0,
    note: str = "",
    states: Sequence[str] = STATES,
) -> Section:
    """Compare runs by the measures of `umbel.simulation.baselines` on validation clients.

    `metric` is its name and unit, for the text, and `note` ends it. Each arm is a name with its seeds. Numbers are
    multiplied by `scale`, and shown with `digits` digits after the point. The first of `states` leads.
    """

    def shown(runs: Sequence[Result], state: str, name: str) -> str:
        led = [result.measures.get(state, result.measures["last"] if state == states[0] else None) for result in runs]
        values = [one["held_out"][name] for one in led if one]
        return plus_minus((scale * value for value in values), digits) if values else ""

    rows = []
    for name, runs in arms:
        # Clients that train alone have no rounds, and so no best one.
        led = [result.measures.get(states[0], result.measures["last"]) for result in runs]
        rand = [one["rand_index"] for one in led if one.get("rand_index") is not None]
        same = plus_minus((scale * one["mean"] for one in led), digits) if all("mean" in one for one in led) else ""
        held_out = [shown(runs, state, what) for state in states for what in ("mean", "worst_decile")]
        rows.append([name, *held_out, same, plus_minus(rand, 2) if rand else ""])
    which = "The last round leads, and the best stands beside it." if len(states) > 1 else "All are of the best round."
    text = (
        f"{metric} of the validation clients of more than one row. A client picks its hypothesis, or trains by itself "
        "or further, on a random half of its rows, and is measured on the rest: mean over clients, and mean over the "
        f"tenth that fares worst; mean ± standard deviation over seeds. {which} {BEST_ROUND} Same rows: every client "
        f"picks on all its rows and is measured on them, as in the paper, with the {states[0]} round's hypotheses. "
        f"Clients that train by themselves or further do so for {LOCAL_EPOCHS} epochs with the run's step. The "
        "adjusted Rand index compares what clients pick with the distribution that their data come from, where that is "
        "known: 1 if they agree, 0 if one hypothesis serves all."
    )
    beside = ("best round: mean", "best round: worst decile") * (len(states) > 1)
    columns = ("who", "mean", "worst decile", *beside, "same rows: mean", "Rand index")
    return Section("What a client gets", f"{text} {note}".strip(), columns, rows)


def manifest_of(result: Result) -> Manifest:
    """Return the manifest of a run's dataset."""
    return open_dataset(find_dataset(result.spec.config["dataset"])).manifest


def trained(results: Iterable[Result]) -> list[Result]:
    """Return the runs with more measures than the final results of clients."""
    return [result for result in results if result.spec.config["strategy"] not in HELD_OUT_ALONE]


def good(results: Iterable[Result]) -> list[Result]:
    """Return the finished runs with a finite loss."""
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


def _code(results: Sequence[Result]) -> list[Section]:
    """Return what to say if different versions of the code made the runs."""
    made = Counter(result.code for result in results if not result.error)
    if len(made) < 2:
        return []
    text = f"{len(made)} versions of the code made these runs, from the same data and with the same settings."
    rows = [(code, str(runs)) for code, runs in sorted(made.items())]
    return [Section("Code", text, ("digest of the code", "runs"), rows)]
