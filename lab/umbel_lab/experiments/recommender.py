"""A recommender beside baselines, on rows of newcomers, over several splits of the users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from umbel.data import find_dataset, open_dataset
from umbel.models.factors import baselines
from umbel.protocol.errors import DatasetError
from umbel.simulation.in_process import run_config
from umbel.simulation.measured import Spec
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.experiments.runs import split_by_seed
from umbel_lab.experiments.tables import BEST_ROUND, SAME_CLIENTS, by_arm, page
from umbel_lab.output import Section, plus_minus, rate

SEEDS, QUICK_SEEDS = 8, 2  # two splits show whether there is a deviation
ARMS = {"factors": "", "factors and biases": "biased-factors"}
"""Models, under one configuration: the PAC paper's, which the dataset names, and the one with biases."""

_STRONGEST = "item and user bias"
_QUICK_ROUNDS = 60


def specs(
    folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False, dataset: str = "movielens"
) -> list[Spec]:
    """Return a run of each model for each split of a dataset of preferences by seed, which is written to `folder`."""
    data = open_dataset(find_dataset(dataset))
    if not data.manifest.model.startswith("factors ") or not data.manifest.split["validation"]:
        raise DatasetError(
            f"dataset {dataset!r} holds no preferences of users that validate; build one with "
            "umbel data make movielens or umbel data make preferences",
            code="data.no-preferences",
        )
    fewer = {"rounds": _QUICK_ROUNDS} if quick else {}
    return [
        Spec.of((name,), run_config("recommender", dataset=path, model=model, seed=seed, **fewer))
        for seed, path in split_by_seed(dataset, folder, range(first, first + seeds))
        for name, model in ARMS.items()
    ]


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write how often each is right, over the splits."""
    arms = by_arm(results)
    paths = sorted({_data(run) for runs in arms.values() for run in runs})
    found = {path: baselines(open_dataset(Path(path))) for path in paths}
    rows: list[dict[str, Any]] = []
    cells = []

    def add(who: str, right: Mapping[str, float], *more: str) -> None:
        rows.extend({"split": Path(path).name, "who": who, "right": value} for path, value in right.items())
        cells.append([who, plus_minus(right.values(), 4), *more])

    for name in next(iter(found.values())):
        add(name, {path: found[path][name] for path in paths}, "", "")
    for (name,), runs in arms.items():
        for state in ("last", "best"):
            own = {_data(one): one.measures[state]["mean"] for one in runs}
            ahead = [value - found[path][_STRONGEST] for path, value in own.items()]
            won = rate(sum(one > 0 for one in ahead), len(ahead))
            add(f"{name}, {state} round", own, plus_minus(ahead, 4), won)
    rounds = results[0].spec.config["rounds"]
    text = (
        "Share of the rows of validation users, every fifth, whose sign is right; users count once each, and learn "
        f"from their other rows. Models train for {rounds} rounds. Mean ± standard deviation "
        f"over {len(paths)} splits of the users; ahead of {_STRONGEST} in mean, and in how many splits. {SAME_CLIENTS} "
        f"{BEST_ROUND}"
    )
    columns = ("who", "right", f"ahead of {_STRONGEST}", "splits")
    section = Section("Newcomers' rows", text, columns, cells)
    page("A recommender beside baselines", [section], rows, results).write(folder)


def _data(result: Result) -> str:
    return str(result.spec.config["dataset"])
