"""A recommender beside baselines, on rows of newcomers, over several splits of the users."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from umbel.data import find_dataset, open_dataset
from umbel.models.baselines import baselines
from umbel.protocol.errors import DatasetError
from umbel.research.experiments.runs import Spec
from umbel.research.experiments.splits import split_by_seed
from umbel.research.experiments.sweep import FIRST_SEED, Result
from umbel.research.experiments.tables import Section, Value, good, plus_minus, rate, write
from umbel.simulation.in_process import run_config

SEEDS = 8
ARMS = {"factors": "", "factors and biases": "biased-factors"}
"""Models, under one configuration: the PAC paper's, which the dataset names, and the one with biases."""

_STRONGEST = "item and user bias"
_QUICK_ROUNDS = 60


def specs(dataset: str, folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs, and write the dataset that each seed makes of the users.

    Parameters
    ----------
    dataset : str
        Name or path, of preferences.
    folder : Path
        Of the experiment (`umbel.research.experiments.splits.split_by_seed`).
    seeds, first : int
        Splits of the users, each with one run of each model, and the seed of the first.
    quick : bool
        Fewer rounds.
    """
    data = open_dataset(find_dataset(dataset))
    if not data.manifest.model.startswith("factors ") or not data.manifest.split["validation"]:
        raise DatasetError(
            f"dataset {dataset!r} holds no preferences of users that validate; build one with "
            "python datasets/movielens.py or python datasets/preferences.py"
        )
    runs = []
    for seed, path in split_by_seed(dataset, folder, range(first, first + seeds)):
        for name, model in ARMS.items():
            config = run_config("recommender", dataset=path, model=model, seed=seed)
            if quick:
                config["rounds"] = _QUICK_ROUNDS
            runs.append(Spec(f"{name.replace(' ', '-')}-{seed}", config))
    return runs


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write how often each is right, over the splits."""
    done = good(results)
    rules = {path: baselines(open_dataset(Path(path))) for path in {_data(one) for one in done}}
    rows: list[dict[str, Value]] = [
        {"split": Path(path).name, "who": name, "right": value}
        for path, found in sorted(rules.items())
        for name, value in found.items()
    ]
    cells = [
        [name, plus_minus((found[name] for found in rules.values()), 4), "", ""] for name in next(iter(rules.values()))
    ]
    for name, model in ARMS.items():
        for state in ("last", "best"):
            own = {_data(one): one.measures[state]["mean"] for one in done if one.spec.config["model"] == model}
            rows += [
                {"split": Path(path).name, "who": f"{name}, {state}", "right": value} for path, value in own.items()
            ]
            ahead = [value - rules[path][_STRONGEST] for path, value in own.items()]
            cells.append(
                [
                    f"{name}, {state} round",
                    plus_minus(own.values(), 4),
                    plus_minus(ahead, 4),
                    rate(sum(one > 0 for one in ahead), len(ahead)),
                ]
            )
    text = (
        "Share of the rows of validation users, every fifth, whose sign is right; users count once each, and learn "
        f"from their other rows. Models train for {done[0].spec.config['rounds']} rounds. Mean ± standard deviation "
        f"over {len(rules)} splits of the users; ahead of {_STRONGEST} in mean, and in how many splits. The best round "
        "is that of the lowest loss on these same rows, which flatters a little; the last is not chosen by anything."
    )
    columns = ("who", "right", f"ahead of {_STRONGEST}", "splits")
    write(folder, "A recommender beside baselines", [Section("Newcomers' rows", text, columns, cells)], rows, done)


def _data(result: Result) -> str:
    return str(result.spec.config["dataset"])
