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
from umbel.research.experiments.figures import COLOURS, MARKERS, figure
from umbel.research.experiments.runs import FINE_TUNE, INTERPOLATE, LOCAL_ONLY, Spec
from umbel.research.experiments.splits import split_by_seed
from umbel.research.experiments.sweep import FIRST_SEED, Result
from umbel.research.experiments.tables import (
    Section,
    Value,
    alone,
    average,
    difference,
    good,
    plus_minus,
    what_a_client_gets,
    write,
)
from umbel.simulation.in_process import run_config

HYPOTHESES = (1, 3, 5, 7)
MULTIPLIERS = (0.0, 0.1, 1.0, 2.0, 3.0, 5.0)
SEEDS = 10
LOSSES: Mapping[str, dict[str, Any]] = {"rmse": {}, "mse": {"loss": "mse", "step-size": 0.4}}
"""What a local step descends, the RMSE of a client's rows, as in the paper, or its square; and what that changes."""
OTHERS: Mapping[str, dict[str, Any]] = {
    "CFL, k ≤ 7": {"strategy": "cfl", "hypotheses": 7, "noise-multiplier": 0.0},
    "by itself": {"strategy": LOCAL_ONLY},
    "FedAvg, fine-tuned": {"strategy": FINE_TUNE, "hypotheses": 1, "noise-multiplier": 0.0},
    "FedAvg, interpolated": {"strategy": INTERPOLATE, "hypotheses": 1, "noise-multiplier": 0.0},
    "k = 1, ν = 3, fine-tuned": {"strategy": FINE_TUNE, "hypotheses": 1, "noise-multiplier": 3.0},
    "k = 1, ν = 3, interpolated": {"strategy": INTERPOLATE, "hypotheses": 1, "noise-multiplier": 3.0},
    "Algorithm 1, k = 5, ν = 3, fine-tuned": {"strategy": FINE_TUNE, "hypotheses": 5, "noise-multiplier": 3.0},
}
"""What else there is for every client to have a model that fits it."""

# Table 1: median and maximum privacy budget over clients, averaged over seeds, by (k, nu).
PRINTED = {
    (7, 0.1): (517.0, 1551.0), (5, 0.1): (418.0, 1342.0), (3, 0.1): (473.0, 1386.0), (1, 0.1): (528.0, 1540.0),
    (7, 1.0): (36.3, 126.5), (5, 1.0): (40.7, 127.6), (3, 1.0): (44.0, 138.6), (1, 1.0): (49.5, 147.4),
    (7, 2.0): (15.4, 57.8), (5, 2.0): (14.3, 54.5), (3, 2.0): (22.0, 69.3), (1, 2.0): (21.5, 66.6),
    (7, 3.0): (7.7, 32.3), (5, 3.0): (8.4, 36.7), (3, 3.0): (12.5, 40.0), (1, 3.0): (12.1, 40.0),
    (7, 5.0): (5.7, 21.3), (5, 5.0): (5.9, 22.0), (3, 5.0): (5.5, 21.6), (1, 5.0): (5.3, 20.9),
}  # fmt: skip
ALL = 0.99
"""One hypothesis serves all if this share of the validation clients picks it."""
CLOSE = 0.25
"""A budget this near to the printed one, as a share of it, counts as reproduced."""


def _region(dataset: Dataset) -> NDArray[np.int64]:
    """Return for each client on which side of the middle of the country, where the scaled place is 0, it lies."""
    longitude, latitude = dataset.features[dataset.offsets[:-1], 1:].T
    return np.asarray(2 * (longitude > 0) + (latitude > 0), np.int64)


REGIONS = Grouping(("south-west", "north-west", "south-east", "north-east"), _region, 0.6)

Grid = Mapping[tuple[int, float], Sequence[Result]]


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs: the grid, IFCA for every k above 1, and `OTHERS`, for each loss.

    One hypothesis without noise is federated averaging. Which clients train and which validate is drawn by the
    seed; the data of each are written under `folder`.
    """
    ks, nus = ((1, 5), (0.0, 3.0)) if quick else (HYPOTHESES, MULTIPLIERS)
    base = run_config("hospital", **({"rounds": 20} if quick else {}))
    kinds: dict[str, dict[str, Any]] = {
        f"k{k}-nu{nu:g}": {"hypotheses": k, "noise-multiplier": nu} for k in ks for nu in nus
    }
    ifca = {"strategy": "ifca", "noise-multiplier": 0.0}
    kinds |= {f"ifca-k{k}": ifca | {"hypotheses": k} for k in ks if k > 1}
    kinds |= {_plain(name): changes for name, changes in OTHERS.items()}
    return [
        Spec(f"{loss}-{kind}-seed{seed}", base | how | changes | {"dataset": path, "seed": seed})
        for seed, path in split_by_seed(base["dataset"], folder, range(first, first + seeds))
        for loss, how in LOSSES.items()
        for kind, changes in kinds.items()
    ]


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write tables and figures of the runs of `specs`."""
    config = results[0].spec.config
    manifest = open_dataset(find_dataset(config["dataset"])).manifest
    dollars = float(manifest.units["target"]["scale"])
    by_loss = {loss: [r for r in good(results) if (r.spec.config["loss"] or "rmse") == loss] for loss in LOSSES}
    grids = {loss: _grid(fine) for loss, fine in by_loss.items()}
    ks = sorted({k for grid in grids.values() for k, _ in grid})
    nus = sorted({nu for grid in grids.values() for _, nu in grid})
    sections = _claims(grids, dollars)
    for loss, fine in by_loss.items():
        grid = grids[loss]
        gets = what_a_client_gets("RMSE in dollars", _arms(fine, grid), alone(fine), 0, dollars, _own(fine))
        own = [_rmse(grid, ks, nus, dollars), _budgets(grid), gets, _fairness(grid, dollars)]
        sections += [replace(section, title=f"{section.title}: {_said(loss)}") for section in own]
        _figure_3(grid, ks, nus, dollars, folder, "figure-3" if loss == "rmse" else f"figure-3-{loss}")
    rows: list[dict[str, Value]] = [
        {"loss": loss, **row} for loss, grid in grids.items() for row in _rows(grid, dollars)
    ]
    write(folder, "Hospital charges", sections, rows, results)
    if shown := grids["rmse"].get((5, 3.0)):
        _figure_4(shown[0], manifest.train, folder)


def _plain(name: str) -> str:
    """Return what tells a kind of run from the others, for its name."""
    words = name.lower().replace("≤", "").replace("ν", "nu").replace("=", "").replace(",", "").split()
    return "-".join(words)


def _said(loss: str) -> str:
    step = LOSSES[loss].get("step-size", run_config("hospital")["step-size"])
    return f"steps of {step:g} along the {loss.upper()}"


def _grid(results: Sequence[Result]) -> dict[tuple[int, float], list[Result]]:
    grid: dict[tuple[int, float], list[Result]] = {}
    for result in results:
        config = result.spec.config
        if config["strategy"] == "group-privacy":
            grid.setdefault((config["hypotheses"], config["noise-multiplier"]), []).append(result)
    return grid


def _errors(results: Sequence[Result], dollars: float) -> list[float]:
    """Return each run's lowest validation RMSE in dollars, which is what the paper shows."""
    return [result.measures["best_loss"] * dollars for result in results]


def _collapsed(runs: Sequence[Result]) -> int:
    """Return in how many runs one of several hypotheses serves all."""
    chosen = [result.measures["best"]["chosen"] for result in runs]
    return sum(1 for counts in chosen if len(counts) > 1 and max(counts) > ALL * sum(counts))


def _rmse(grid: Grid, ks: list[int], nus: list[float], dollars: float) -> Section:
    rows = [[f"{nu:g}", *(plus_minus(_errors(grid.get((k, nu), []), dollars), 0) for k in ks)] for nu in nus]
    means = {k: average(e for nu in nus for e in _errors(grid.get((k, nu), []), dollars))[0] for k in ks}
    text = (
        "Lowest validation RMSE of a run in dollars, mean ± standard deviation over seeds: figure 3. The paper prints "
        "no numbers for it. Each round measures 200 validation clients drawn anew. Mean over the noise multipliers: "
        + ", ".join(f"{means[k]:,.0f} for k = {k}" for k in ks)
        + ". "
    )
    lost = {key: count for key, runs in sorted(grid.items()) if (count := _collapsed(runs))}
    text += f"Runs in which one of several hypotheses serves {100 * ALL:.0f} % of the validation clients: " + (
        ", ".join(f"{count} of {len(grid[k, nu])} for k = {k}, ν = {nu:g}" for (k, nu), count in lost.items()) or "none"
    )
    text += "."
    return Section("RMSE", text, ("ν", *(f"k = {k}" for k in ks)), rows)


def _claims(grids: Mapping[str, Grid], dollars: float) -> list[Section]:
    """Judge what the paper says of figure 3, for every loss of which all of it was run."""
    judged = {loss: _judged(grid, dollars) for loss, grid in grids.items()}
    judged = {loss: claims for loss, claims in judged.items() if claims}
    if not judged:
        return []
    rows = [
        [claim, *(cell for claims in judged.values() for cell in claims[claim])]
        for claim in next(iter(judged.values()))
    ]
    text = "What the paper says of figure 3, in dollars by k, averaged over the noise multipliers."
    columns = [column for loss in judged for column in (_said(loss), "so here?")]
    return [Section("The paper's claims", text, ("the paper says that the RMSE", *columns), rows)]


def _judged(grid: Grid, dollars: float) -> dict[str, tuple[str, str]]:
    """Return for each claim what was measured and whether it holds; nothing where a part was not run."""
    wanted = [(k, nu) for k in HYPOTHESES for nu in MULTIPLIERS]
    if any(len(grid.get(key, ())) < 2 for key in wanted):
        return {}
    cells = {key: average(_errors(grid[key], dollars)) for key in wanted}

    def mean(k: int, which: int, noise: Sequence[float] = MULTIPLIERS) -> float:
        return average(cells[k, nu][which] for nu in noise)[0]

    level = {k: mean(k, 0) for k in HYPOTHESES}
    spread = {k: mean(k, 1) for k in HYPOTHESES}
    drops = {f"{a} to {b}": level[a] - level[b] for a, b in pairwise(HYPOTHESES)}
    noisy = {k: mean(k, 0, (3.0, 5.0)) for k in HYPOTHESES}
    rise = {k: noisy[k] - mean(k, 0, (0.0, 0.1)) for k in HYPOTHESES}
    more = {k: mean(k, 1, (2.0, 3.0, 5.0)) - mean(k, 1, (0.0, 0.1, 1.0)) for k in HYPOTHESES}

    def below(values: Mapping[int, float]) -> bool:
        return max(values[5], values[7]) < min(values[1], values[3])

    claims: list[tuple[str, Mapping[Any, float], bool]] = [
        ("falls most from k = 1 to k = 3", drops, drops["1 to 3"] > max(0, drops["3 to 5"], drops["5 to 7"])),
        ("is lowest at k = 5 and 7", level, below(level)),
        ("is steadiest at k = 5 and 7 (standard deviation)", spread, below(spread)),
        ("rises with the noise (ν = 3, 5 less ν = 0, .1)", rise, min(rise.values()) > 0),
        ("rises less with more hypotheses", rise, all(rise[a] > rise[b] for a, b in pairwise(HYPOTHESES))),
        ("falls with k under much noise (ν = 3, 5)", noisy, all(noisy[a] > noisy[b] for a, b in pairwise(HYPOTHESES))),
        ("varies more under ν ≥ 2 (standard deviation, less that under ν ≤ 1)", more, min(more.values()) > 0),
    ]
    return {
        claim: (", ".join(f"{key}: {value:,.0f}" for key, value in numbers.items()), "yes" if true else "no")
        for claim, numbers, true in claims
    }


def _budgets(grid: Grid) -> Section:
    rows, close, compared = [], 0, 0
    for (k, nu), printed in PRINTED.items():
        if not (runs := grid.get((k, nu))):
            continue
        row = [f"{nu:g}", str(k)]
        for name, paper in zip(("median_budget", "max_budget"), printed, strict=True):
            measured = average(result.measures[name] for result in runs)[0]
            row += [f"{measured:,.1f}", f"{paper:,.1f}", difference(measured, paper)]
            compared += 1
            close += abs(measured / paper - 1) <= CLOSE
        row.append(f"{average(result.measures['rounds'] for result in runs)[0]:.0f}")
        rows.append(row)
    text = (
        "Median and maximum over the training clients of participations × n/ν, averaged over seeds: Table 1. The "
        "paper's budget is a heuristic that guarantees nothing; it tells the number of rounds before the early stop. "
        f"{close} of {compared} are within {100 * CLOSE:.0f} % of the printed ones."
    )
    columns = ("ν", "k", "median", "printed", "difference", "maximum", "printed", "difference", "rounds")
    return Section("Privacy budgets", text, columns, rows)


def _arms(results: Sequence[Result], grid: Grid) -> list[tuple[str, Sequence[Result]]]:
    arms: list[tuple[str, Sequence[Result]]] = [("FedAvg (k = 1, ν = 0)", grid.get((1, 0.0), []))]
    arms += [(name, runs) for name, runs in _others(results) if runs[0].spec.config["strategy"] == "cfl"]
    ifca: dict[int, list[Result]] = {}
    for result in results:
        if result.spec.config["strategy"] == "ifca":
            ifca.setdefault(result.spec.config["hypotheses"], []).append(result)
    arms += [(f"IFCA, k = {k}", runs) for k, runs in sorted(ifca.items())]
    noisy = [(k, nu, runs) for (k, nu), runs in sorted(grid.items()) if nu > 0]
    return arms + [(f"Algorithm 1, k = {k}, ν = {nu:g}", runs) for k, nu, runs in noisy]


def _own(results: Sequence[Result]) -> list[tuple[str, Sequence[Result]]]:
    return [one for one in _others(results) if one[1][0].spec.config["strategy"] in (FINE_TUNE, INTERPOLATE)]


def _others(results: Sequence[Result]) -> list[tuple[str, Sequence[Result]]]:
    """Return the runs of each of `OTHERS` of which there are some."""
    found = {name: [r for r in results if changes.items() <= r.spec.config.items()] for name, changes in OTHERS.items()}
    return [(name, runs) for name, runs in found.items() if runs]


def _fairness(grid: Grid, dollars: float) -> Section:
    arms = {
        "FedAvg (k = 1, ν = 0)" if (k, nu) == (1, 0) else f"k = {k}, ν = {nu:g}": runs
        for (k, nu), runs in sorted(grid.items(), key=lambda one: one[0][::-1])
        if nu in (0.0, 3.0, 5.0)
    }
    threshold = f"{REGIONS.threshold * dollars:,.0f} dollars"
    text = (
        f"Groups of clients are the four parts of the country around 100° W, 40° N: {', '.join(REGIONS.names)}. Losses "
        f"are RMSE in dollars; what is decided is whether a stay costs more than {threshold}, near the median."
    )
    return group_fairness(arms, REGIONS, text, 0, dollars)


def _rows(grid: Grid, dollars: float) -> list[dict[str, Value]]:
    rows: list[dict[str, Value]] = []
    for (k, nu), runs in sorted(grid.items()):
        rmse, deviation = average(_errors(runs, dollars))
        row: dict[str, Value] = {
            "k": k,
            "nu": nu,
            "runs": len(runs),
            "rmse": rmse,
            "rmse_sd": deviation,
            "collapsed": _collapsed(runs),
            "rmse_all_clients": average(result.measures["best"]["mean"] * dollars for result in runs)[0],
            "rmse_worst_decile": average(result.measures["best"]["worst_decile"] * dollars for result in runs)[0],
            "rounds": average(result.measures["rounds"] for result in runs)[0],
        }
        for i, name in enumerate(("median_budget", "max_budget")):
            measured = average(r.measures[name] for r in runs)[0] if nu else None
            printed = PRINTED[k, nu][i] if (k, nu) in PRINTED else None
            row |= {
                name: measured,
                f"{name}_printed": printed,
                f"{name}_difference": measured / printed - 1 if measured and printed else None,
            }
        rows.append(row)
    return rows


def _figure_3(grid: Grid, ks: list[int], nus: list[float], dollars: float, folder: Path, name: str) -> None:
    with figure(folder, name, size=(7, 4)) as axes:
        ax = axes[0, 0]
        for i, nu in enumerate(nus):
            points = [(k, *average(_errors(grid[k, nu], dollars))) for k in ks if (k, nu) in grid]
            x, mean, deviation = (np.array(column) for column in zip(*points, strict=True))
            # Side by side, so that error bars do not cover each other.
            ax.errorbar(
                x + 0.12 * (i - (len(nus) - 1) / 2), mean, deviation,
                color=COLOURS[i], marker=MARKERS[i], capsize=3, linewidth=1, label=f"ν = {nu:g}",
            )  # fmt: skip
        ax.set(xticks=ks, xlabel="hypotheses k", ylabel="validation RMSE, dollars")
        ax.legend(ncols=2)


def _figure_4(result: Result, clients: int, folder: Path) -> None:
    spent = pd.read_csv(result.folder / "ledger.csv")
    participations = np.zeros(clients, int)
    participations[spent["client"]] = spent["participations"]
    price = float(spent["paper_budget"].iloc[0] / spent["participations"].iloc[0])
    counts = np.bincount(participations)
    with figure(folder, "figure-4") as axes:
        ax = axes[0, 0]
        ax.bar(np.arange(len(counts)) * price, counts, width=0.8 * price, color=COLOURS[0])
        config = result.spec.config
        ax.set(
            xlabel="paper's budget of a client, participations × n/ν",
            ylabel=f"clients, {clients} in all",
            title=f"k = {config['hypotheses']}, ν = {config['noise-multiplier']:g}, seed {config['seed']}",
        )
