"""A recommender beside baselines, on rows of newcomers, over several splits of the users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from umbel.data import find_dataset, open_dataset
from umbel.models.factors import baselines
from umbel.simulation.in_process import run_config
from umbel.simulation.sweep import Result
from umbel_lab.experiments import scaffold
from umbel_lab.output import Page, Section, plus_minus, rate

SEEDS, QUICK_SEEDS = 8, 2  # two splits show whether there is a deviation
ARMS = {"factors": "", "factors and biases": "biased-factors"}
"""Models, under one configuration: the PAC paper's, which the dataset names, and the one with biases."""

_STRONGEST = "item and user bias"
_QUICK_ROUNDS = 60
_DATA = scaffold.read("recommender")

draw_data = scaffold.split_by_seed


def arms(quick: bool, of: str) -> dict[tuple[str], dict[str, Any]]:
    """Return the arms, one for each model."""
    fewer = {"rounds": _QUICK_ROUNDS} if quick else {}
    return {(name,): run_config("recommender", dataset=of, model=model, **fewer) for name, model in ARMS.items()}


def page(results: Sequence[Result]) -> Page:
    """Return how often each is right, over the splits."""
    arms = scaffold.by_arm(results)
    paths = sorted({_data(run) for runs in arms.values() for run in runs})
    known = {path: baselines(open_dataset(find_dataset(path))) for path in paths}
    rows: list[dict[str, Any]] = []
    cells = []

    def add(who: str, right: Mapping[str, float], *more: str) -> None:
        rows.extend({"split": Path(path).name, "who": who, "right": value} for path, value in right.items())
        cells.append([who, plus_minus(right.values(), 4), *more])

    for name in known[paths[0]]:
        add(name, {path: known[path][name] for path in paths}, "", "")
    for (name,), runs in arms.items():
        for state in ("last", "best"):
            right = {_data(run): run.measures[state]["mean"] for run in runs}
            ahead = [value - known[path][_STRONGEST] for path, value in right.items()]
            won = rate(sum(one > 0 for one in ahead), len(ahead))
            add(f"{name}, {state} round", right, plus_minus(ahead, 4), won)
    rounds = results[0].spec.config["rounds"]
    text = scaffold.say(_DATA, "newcomers", rounds=rounds, splits=len(paths), strongest=_STRONGEST)
    columns = ("who", "right", f"ahead of {_STRONGEST}", "splits")
    section = Section("Newcomers' rows", text, columns, cells)
    return scaffold.page("A recommender beside baselines", [section], rows, results)


def _data(result: Result) -> str:
    return str(result.spec.config["dataset"])
