"""Hospital charges (group privacy paper, Sec. 5.2): figures 3 and 4 and Table 1 of its ICISSP version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from umbel.data import Dataset, find_dataset, open_dataset
from umbel.research.experiments.fairness import Grouping, group_fairness
from umbel.research.experiments.runs import FINE_TUNE, INTERPOLATE, LOCAL_ONLY, Spec, split_by_seed
from umbel.research.experiments.sweep import FIRST_SEED, Result
from umbel.research.experiments.tables import by_arm, page, what_a_client_gets
from umbel.research.output import COLOURS, Section, difference, figure, mean, numbers, series, spread
from umbel.simulation.in_process import run_config

HYPOTHESES = (1, 3, 5, 7)
MULTIPLIERS = (0.0, 0.1, 1.0, 2.0, 3.0, 5.0)
SEEDS = 10
# A local step descends the RMSE of a client's rows, as in the paper, or its square; and what that changes.
LOSSES: Mapping[str, dict[str, Any]] = {"rmse": {}, "mse": {"loss": "mse", "step-size": 0.4}}
# What else there is for every client to have a model that fits it.
OTHERS: Mapping[str, dict[str, Any]] = {
    "CFL, k ≤ 7": {"strategy": "cfl", "hypotheses": 7, "noise-multiplier": 0.0},
    "by itself": {"strategy": LOCAL_ONLY},
    "FedAvg, fine-tuned": {"strategy": FINE_TUNE, "hypotheses": 1, "noise-multiplier": 0.0},
    "FedAvg, interpolated": {"strategy": INTERPOLATE, "hypotheses": 1, "noise-multiplier": 0.0},
    "k = 1, ν = 3, fine-tuned": {"strategy": FINE_TUNE, "hypotheses": 1, "noise-multiplier": 3.0},
    "k = 1, ν = 3, interpolated": {"strategy": INTERPOLATE, "hypotheses": 1, "noise-multiplier": 3.0},
    "Algorithm 1, k = 5, ν = 3, fine-tuned": {"strategy": FINE_TUNE, "hypotheses": 5, "noise-multiplier": 3.0},
}

# Table 1: median and maximum privacy budget over clients, averaged over seeds, by (k, nu).
PRINTED = {
    (7, 0.1): (517.0, 1551.0), (5, 0.1): (418.0, 1342.0), (3, 0.1): (473.0, 1386.0), (1, 0.1): (528.0, 1540.0),
    (7, 1.0): (36.3, 126.5), (5, 1.0): (40.7, 127.6), (3, 1.0): (44.0, 138.6), (1, 1.0): (49.5, 147.4),
    (7, 2.0): (15.4, 57.8), (5, 2.0): (14.3, 54.5), (3, 2.0): (22.0, 69.3), (1, 2.0): (21.5, 66.6),
    (7, 3.0): (7.7, 32.3), (5, 3.0): (8.4, 36.7), (3, 3.0): (12.5, 40.0), (1, 3.0): (12.1, 40.0),
    (7, 5.0): (5.7, 21.3), (5, 5.0): (5.9, 22.0), (3, 5.0): (5.5, 21.6), (1, 5.0): (5.3, 20.9),
}  # fmt: skip
ALL = 0.99  # one hypothesis serves all if this share of the validation clients picks it
_QUICK_ROUNDS = 20
CLOSE = 0.25  # a budget this near to the printed one, as a share of it, counts as reproduced


def _region(dataset: Dataset) -> NDArray[np.int64]:
    """Return for each client on which side of the middle of the country, where the scaled place is 0, it lies."""
    longitude, latitude = dataset.features[dataset.offsets[:-1], 1:].T
    return np.asarray(2 * (longitude > 0) + (latitude > 0), np.int64)


REGIONS = Grouping(("south-west", "north-west", "south-east", "north-east"), _region, 0.6)

FEDAVG = "FedAvg (k = 1, ν = 0)"
_BUDGETS = ("median_budget", "max_budget")
Grid = Mapping[tuple[int, float], dict[str, Any]]  # what runs came to, by k and ν


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs: the grid, IFCA for every k above 1, and `OTHERS`, for each loss.

    One hypothesis without noise is federated averaging. A seed draws which clients train and which validate; its data
    are written under `folder`.
    """
    ks, nus = ((1, 5), (0.0, 3.0)) if quick else (HYPOTHESES, MULTIPLIERS)
    base = run_config("hospital", **({"rounds": _QUICK_ROUNDS} if quick else {}))
    kinds: dict[str, Any] = {_name(k, nu): {"hypotheses": k, "noise-multiplier": nu} for k in ks for nu in nus}
    kinds |= {f"IFCA, k = {k}": {"strategy": "ifca", "noise-multiplier": 0.0, "hypotheses": k} for k in ks if k > 1}
    return [
        Spec.of((loss, kind), base | how | changes | {"dataset": path, "seed": seed})
        for seed, path in split_by_seed(base["dataset"], folder, range(first, first + seeds))
        for loss, how in LOSSES.items()
        for kind, changes in {**kinds, **OTHERS}.items()
    ]


def _name(k: int, nu: float) -> str:
    return FEDAVG if (k, nu) == (1, 0) else f"Algorithm 1, k = {k}, ν = {nu:g}"


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write tables and figures of the runs of `specs`."""
    manifest = open_dataset(find_dataset(results[0].spec.config["dataset"])).manifest
    dollars = float(manifest.units["target"]["scale"])
    arms = by_arm(results)
    sections, grids = [], {}
    for loss in LOSSES:
        own = {name: runs for (of, name), runs in arms.items() if of == loss}
        runs = {(k, nu): own[_name(k, nu)] for k in HYPOTHESES for nu in MULTIPLIERS if _name(k, nu) in own}
        grid = grids[loss] = {(k, nu): _row(loss, k, nu, found, dollars) for (k, nu), found in runs.items()}
        others = [FEDAVG, "CFL, k ≤ 7", *(f"IFCA, k = {k}" for k in HYPOTHESES)]
        shown = [(name, own[name]) for name in (*others, *(_name(*key) for key in grid if key[1] > 0)) if name in own]
        tuned = [(name, own[name]) for name in OTHERS if name in own and name.endswith(("tuned", "interpolated"))]
        gets = what_a_client_gets("RMSE in dollars", shown, own.get("by itself", []), 0, dollars, tuned)
        parts = [_rmse(grid), _budgets(grid), gets, _fairness(runs, dollars)]
        sections += [replace(section, title=f"{section.title}: {_said(loss)}") for section in parts]
        _figure_3(grid, folder, "figure-3" if loss == "rmse" else f"figure-3-{loss}")
    rows = [row for grid in grids.values() for row in grid.values()]
    page("Hospital charges", [*_claims(grids), *sections], rows, results).write(folder)
    if shown_in_4 := arms.get(("rmse", _name(5, 3.0))):
        _figure_4(shown_in_4[0], manifest.train, folder)


def _said(loss: str) -> str:
    step = LOSSES[loss].get("step-size", run_config("hospital")["step-size"])
    return f"steps of {step:g} along the {loss.upper()}"


def _row(loss: str, k: int, nu: float, runs: Sequence[Result], dollars: float) -> dict[str, Any]:
    """Return what an arm came to; its ``rmse`` is the lowest of each run, which is what the paper shows."""
    best = [run.measures["best"] for run in runs]
    # One of several hypotheses serves all.
    lost = sum(1 for one in best if k > 1 and max(one["chosen"]) > ALL * sum(one["chosen"]))
    row = {
        "loss": loss,
        "k": k,
        "nu": nu,
        "runs": len(runs),
        **numbers("rmse", (run.measures["best_loss"] * dollars for run in runs)),
        "collapsed": lost,
        "rmse_all_clients": mean(one["mean"] * dollars for one in best),
        "rmse_worst_decile": mean(one["worst_decile"] * dollars for one in best),
        "rounds": mean(run.measures["rounds"] for run in runs),
    }
    for name, printed in zip(_BUDGETS, PRINTED.get((k, nu), (None, None)), strict=True):
        measured = mean(run.measures[name] for run in runs) if nu else None
        apart = measured / printed - 1 if measured and printed else None
        row |= {name: measured, f"{name}_printed": printed, f"{name}_difference": apart}
    return row


def _rmse(grid: Grid) -> Section:
    ks, nus = sorted({k for k, _ in grid}), sorted({nu for _, nu in grid})
    rows = [[f"{nu:g}", *(spread(grid[k, nu], "rmse", 0) if (k, nu) in grid else "none" for k in ks)] for nu in nus]
    text = (
        "Lowest validation RMSE of a run in dollars, mean ± standard deviation over seeds: figure 3. The paper prints "
        "no numbers for it. Each round measures 200 validation clients drawn anew. Mean over the noise multipliers: "
    )
    level = {k: mean(row["rmse"] for (own, _), row in grid.items() if own == k) for k in ks}
    text += ", ".join(f"{level[k]:,.0f} for k = {k}" for k in ks)
    lost = [f"{row['collapsed']} of {row['runs']} for k = {row['k']}, ν = {row['nu']:g}"
            for row in grid.values() if row["collapsed"]]  # fmt: skip
    text += f". Runs in which one of several hypotheses serves {100 * ALL:.0f} % of the validation clients: "
    return Section("RMSE", text + (", ".join(lost) or "none") + ".", ("ν", *(f"k = {k}" for k in ks)), rows)


def _claims(grids: Mapping[str, Grid]) -> list[Section]:
    """Judge what the paper says of figure 3, for every loss of which all of it was run."""
    judged = {loss: claims for loss, grid in grids.items() if (claims := _judged(grid))}
    if not judged:
        return []
    said = next(iter(judged.values()))
    rows = [[claim, *(cell for claims in judged.values() for cell in claims[claim])] for claim in said]
    text = "What the paper says of figure 3, in dollars by k, averaged over the noise multipliers."
    columns = [column for loss in judged for column in (_said(loss), "so here?")]
    return [Section("The paper's claims", text, ("the paper says that the RMSE", *columns), rows)]


def _judged(grid: Grid) -> dict[str, tuple[str, str]]:
    """Return for each claim what was measured and whether it holds; nothing where a part was not run."""
    if any((k, nu) not in grid or grid[k, nu]["runs"] < 2 for k in HYPOTHESES for nu in MULTIPLIERS):
        return {}

    def by_k(name: str, noise: Sequence[float] = MULTIPLIERS) -> dict[int, float]:
        return {k: mean(grid[k, nu][name] for nu in noise) for k in HYPOTHESES}

    def less(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
        return {k: one[k] - other[k] for k in HYPOTHESES}

    def below(values: Mapping[int, float]) -> bool:
        return max(values[5], values[7]) < min(values[1], values[3])

    level, steady, noisy = by_k("rmse"), by_k("rmse_sd"), by_k("rmse", (3.0, 5.0))
    drops = {f"{a} to {b}": level[a] - level[b] for a, b in pairwise(HYPOTHESES)}
    rise = less(noisy, by_k("rmse", (0.0, 0.1)))
    more = less(by_k("rmse_sd", (2.0, 3.0, 5.0)), by_k("rmse_sd", (0.0, 0.1, 1.0)))
    claims: list[tuple[str, Mapping[Any, float], bool]] = [
        ("falls most from k = 1 to k = 3", drops, drops["1 to 3"] > max(0, drops["3 to 5"], drops["5 to 7"])),
        ("is lowest at k = 5 and 7", level, below(level)),
        ("is steadiest at k = 5 and 7 (standard deviation)", steady, below(steady)),
        ("rises with the noise (ν = 3, 5 less ν = 0, .1)", rise, min(rise.values()) > 0),
        ("rises less with more hypotheses", rise, all(rise[a] > rise[b] for a, b in pairwise(HYPOTHESES))),
        ("falls with k under much noise (ν = 3, 5)", noisy, all(noisy[a] > noisy[b] for a, b in pairwise(HYPOTHESES))),
        ("varies more under ν ≥ 2 (standard deviation, less that under ν ≤ 1)", more, min(more.values()) > 0),
    ]
    return {
        claim: (", ".join(f"{key}: {value:,.0f}" for key, value in found.items()), "yes" if true else "no")
        for claim, found, true in claims
    }


def _budgets(grid: Grid) -> Section:
    rows = [grid[key] for key in PRINTED if key in grid]
    apart = [row[f"{name}_difference"] for row in rows for name in _BUDGETS]
    close = sum(abs(one) <= CLOSE for one in apart)
    shown = []
    for row in rows:
        pairs = [(row[name], row[f"{name}_printed"]) for name in _BUDGETS]
        cells = [cell for one, other in pairs for cell in (f"{one:,.1f}", f"{other:,.1f}", difference(one, other))]
        shown.append([f"{row['nu']:g}", str(row["k"]), *cells, f"{row['rounds']:.0f}"])
    text = (
        "Median and maximum over the training clients of participations × n/ν, averaged over seeds: Table 1. The "
        "paper's budget is a heuristic that guarantees nothing; it tells the number of rounds before the early stop. "
        f"{close} of {len(apart)} are within {100 * CLOSE:.0f} % of the printed ones."
    )
    columns = ("ν", "k", "median", "printed", "difference", "maximum", "printed", "difference", "rounds")
    return Section("Privacy budgets", text, columns, shown)


def _fairness(runs: Mapping[tuple[int, float], Sequence[Result]], dollars: float) -> Section:
    arms = {
        FEDAVG if (k, nu) == (1, 0) else f"k = {k}, ν = {nu:g}": found
        for (k, nu), found in sorted(runs.items(), key=lambda one: one[0][::-1])
        if nu in (0.0, 3.0, 5.0)
    }
    threshold = f"{REGIONS.threshold * dollars:,.0f} dollars"
    text = (
        f"Groups of clients are the four parts of the country around 100° W, 40° N: {', '.join(REGIONS.names)}. Losses "
        f"are RMSE in dollars; what is decided is whether a stay costs more than {threshold}, near the median."
    )
    return group_fairness(arms, REGIONS, text, 0, dollars)


def _figure_3(grid: Grid, folder: Path, name: str) -> None:
    nus = sorted({nu for _, nu in grid})
    with figure(folder, name, size=(7, 4)) as ax:
        for i, nu in enumerate(nus):
            points = [(k, row["rmse"], row["rmse_sd"]) for (k, own), row in grid.items() if own == nu]
            x, centre, deviation = (np.array(column) for column in zip(*points, strict=True))
            # Side by side, so that error bars do not cover each other.
            x = x + 0.12 * (i - (len(nus) - 1) / 2)
            ax.errorbar(x, centre, deviation, capsize=3, label=f"ν = {nu:g}", **series(i))
        ax.set(xticks=sorted({k for k, _ in grid}), xlabel="hypotheses k", ylabel="validation RMSE, dollars")
        ax.legend(ncols=2)


def _figure_4(result: Result, clients: int, folder: Path) -> None:
    spent, config = pd.read_csv(result.folder / "ledger.csv"), result.spec.config
    price = float(spent["paper_budget"].iloc[0] / spent["participations"].iloc[0])
    counts = np.bincount(spent["participations"])
    counts[0] += clients - len(spent)
    with figure(folder, "figure-4") as ax:
        ax.bar(np.arange(len(counts)) * price, counts, width=0.8 * price, color=COLOURS[0])
        ax.set(xlabel="paper's budget of a client, participations × n/ν", ylabel=f"clients, {clients} in all")
        ax.set_title(f"k = {config['hypotheses']}, ν = {config['noise-multiplier']:g}, seed {config['seed']}")
