"""A recommender beside rules of thumb, on rows of newcomers, over several splits of the users."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.runs import Spec
from experiments.sweep import Result
from experiments.tables import Section, Value, good, plus_minus, rate, write
from federation import Federation, find_federation, offsets_of, open_federation, write_federation
from models import BIASED_FACTORS
from models.rules_of_thumb import rules_of_thumb
from protocol.errors import FederationError
from simulation.in_process import run_config

SEEDS = range(2000, 2008)
ARMS = {"factors": "", "factors and biases": BIASED_FACTORS}
"""Models, under one configuration: the PAC paper's, which the federation names, and the one with biases."""

_STRONGEST = "item and user bias"
_QUICK_ROUNDS = 60


def specs(federation: str, folder: Path, seeds: int = len(SEEDS), quick: bool = False) -> list[Spec]:
    """Return the runs, and write the federation that each seed makes of the users.

    Parameters
    ----------
    federation : str
        Name or path, of preferences.
    folder : Path
        Of the experiment; federations go to ``data/SEED`` in it.
    seeds : int
        Splits of the users, each with one run of each model.
    quick : bool
        Fewer rounds.
    """
    data = open_federation(find_federation(federation))
    if not data.manifest.model.startswith("factors-") or not data.manifest.split["validation"]:
        raise FederationError(
            f"federation {federation!r} holds no preferences of users that validate; build one with "
            "python datasets/movielens.py or python datasets/preferences.py"
        )
    runs = []
    for seed in range(SEEDS.start, SEEDS.start + seeds):
        path = folder / "data" / str(seed)
        if not path.exists():
            deal(data, seed, path)
        for name, model in ARMS.items():
            config = run_config("recommender", federation=str(path), model=model, seed=seed)
            if quick:
                config["rounds"] = _QUICK_ROUNDS
            runs.append(Spec(f"{name.replace(' ', '-')}-{seed}", config))
    return runs


def deal(federation: Federation, seed: int, path: Path) -> None:
    """Write a federation with its clients in another order, so that others train and others validate."""
    order = np.random.default_rng(seed).permutation(federation.manifest.clients)
    offsets = federation.offsets
    rows = np.concatenate([np.arange(offsets[client], offsets[client + 1]) for client in order])
    write_federation(
        path,
        federation.manifest,
        np.asarray(federation.features)[rows],
        np.asarray(federation.targets)[rows],
        offsets_of(np.diff(offsets)[order]),
    )


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write how often each is right, over the splits."""
    done = good(results)
    rules = {path: rules_of_thumb(open_federation(Path(path))) for path in {_data(one) for one in done}}
    rows: list[dict[str, Value]] = [
        {"seed": Path(path).name, "who": name, "right": value}
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
                {"seed": Path(path).name, "who": f"{name}, {state}", "right": value} for path, value in own.items()
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
        f"from their other rows. Mean ± standard deviation over {len(rules)} splits of the users; ahead of "
        f"{_STRONGEST} in mean, and in how many splits. The best round is that of the lowest loss on these same rows, "
        "which flatters a little; the last is not chosen by anything."
    )
    columns = ("who", "right", f"ahead of {_STRONGEST}", "splits")
    write(folder, "A recommender beside rules of thumb", [Section("Newcomers' rows", text, columns, cells)], rows, done)


def _data(result: Result) -> str:
    return str(result.spec.config["federation"])
