"""Hospital charges (group privacy paper, Sec. 5.2): figures 3 and 4 and Table 1 of its ICISSP version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from umbel.data import Dataset
from umbel.simulation.in_process import run_config
from umbel.simulation.measured import LOCAL_ONLY, Spec
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.experiments.fairness import Grouping, group_fairness
from umbel_lab.experiments.runs import FINE_TUNE, INTERPOLATE, split_by_seed
from umbel_lab.experiments.tables import SAME_CLIENTS, by_arm, manifest_of, page, what_a_client_gets
from umbel_lab.output import COLOURS, Section, difference, figure, mean, numbers, series, spread, verdict

HYPOTHESES = (1, 3, 5, 7)
MULTIPLIERS = (0.0, 0.1, 1.0, 2.0, 3.0, 5.0)
SEEDS = 10
# A local step descends the RMSE of a client's rows, as in the paper, or its square; and what that changes.
LOSSES: Mapping[str, dict[str, Any]] = {"rmse": {}, "mse": {"loss": "mse", "step-size": 0.4}}
STAY, RELOCATE = "stay", "relocate"
# Grids by the loss, and by what k-means does with the centre of an empty cluster, of which the paper says nothing.
GRIDS = (("rmse", STAY), ("rmse", RELOCATE), ("mse", STAY))
# What else there is for every client to have a model that fits it.
OTHERS: Mapping[str, dict[str, Any]] = {
    "CFL, k ≤ 7": {"strategy": "umbel_lab.strategies:ClusteredFL", "hypotheses": 7, "noise-multiplier": 0.0},
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
_SHOWN = {"best": "the best round", "last_ten": "the last ten"}
_LAST = 10  # validations; along the RMSE rounds alternate, so that a single one says whether their number is odd
RESAMPLES = 1000  # of the seeds, for intervals
Grid = Mapping[tuple[int, float], dict[str, Any]]  # what runs came to, by k and ν
Losses = NDArray[np.float64]  # of all runs in dollars, shape (k, ν, seed)
Differences = NDArray[np.float64]


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs: the grids, and for each loss IFCA for every k above 1, and `OTHERS`.

    One hypothesis without noise is federated averaging. A seed draws which clients train and which validate; its data
    are written under `folder`.
    """
    ks, nus = ((1, 5), (0.0, 3.0)) if quick else (HYPOTHESES, MULTIPLIERS)
    base = run_config("hospital", **({"rounds": _QUICK_ROUNDS} if quick else {}))
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for loss, empty in GRIDS:
        for k, nu in product(ks, nus):
            kinds[loss, _name(k, nu, empty)] = {"hypotheses": k, "noise-multiplier": nu} | _options(k, empty)
    ifca = {f"IFCA, k = {k}": {"strategy": "ifca", "noise-multiplier": 0.0, "hypotheses": k} for k in ks if k > 1}
    kinds |= {(loss, name): changes for loss in LOSSES for name, changes in {**ifca, **OTHERS}.items()}
    return [
        Spec.of((loss, kind), base | LOSSES[loss] | changes | {"dataset": path, "seed": seed})
        for seed, path in split_by_seed(base["dataset"], folder, range(first, first + seeds))
        for (loss, kind), changes in kinds.items()
    ]


def _options(k: int, empty: str) -> dict[str, str]:
    return {"strategy": "group-privacy empty=relocate"} if empty == RELOCATE and k > 1 else {}


def _name(k: int, nu: float, empty: str = STAY) -> str:
    """Return the name of a run; a single cluster is never empty."""
    moved = ", relocated" if _options(k, empty) else ""
    return FEDAVG if (k, nu) == (1, 0) else f"Algorithm 1, k = {k}, ν = {nu:g}{moved}"


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write tables and figures of the runs of `specs`."""
    manifest = manifest_of(results[0])
    dollars = manifest.error_scale
    arms = by_arm(results)
    sections, rows, claims = [], [], []
    for loss, empty in GRIDS:
        own = {name: runs for (of, name), runs in arms.items() if of == loss}
        names = {(k, nu): _name(k, nu, empty) for k in HYPOTHESES for nu in MULTIPLIERS}
        runs = {key: own[name] for key, name in names.items() if name in own}
        grid = {(k, nu): _row(loss, empty, k, nu, found, dollars) for (k, nu), found in runs.items()}
        claims += _claims(_said(loss, empty), runs, dollars)
        parts = [_rmse(grid)]
        if empty == STAY:
            others = [FEDAVG, "CFL, k ≤ 7", *(f"IFCA, k = {k}" for k in HYPOTHESES)]
            shown = [
                (name, own[name]) for name in (*others, *(names[key] for key in grid if key[1] > 0)) if name in own
            ]
            tuned = [(name, own[name]) for name in OTHERS if name in own and name not in others]
            gets = what_a_client_gets("RMSE in dollars", [*tuned, *shown], 0, dollars, SAME_CLIENTS, ("best",))
            parts += [_budgets(grid, runs), gets, _fairness(runs, dollars)]
        sections += [replace(section, title=f"{section.title}: {_said(loss, empty)}") for section in parts]
        _figure_3(grid, folder, "-".join(["figure-3", loss, empty]).removesuffix("-stay").replace("-rmse", ""))
        rows += [row for key, row in grid.items() if empty == STAY or key[0] > 1]
    page("Hospital charges", [*claims, *sections], rows, results).write(folder)
    if shown_in_4 := arms.get(("rmse", _name(5, 3.0))):
        _figure_4(shown_in_4[0], manifest.train, folder)


def _said(loss: str, empty: str) -> str:
    step = LOSSES[loss].get("step-size", run_config("hospital")["step-size"])
    return f"steps of {step:g} along the {loss.upper()}" + ", empty clusters relocated" * (empty == RELOCATE)


def _row(loss: str, empty: str, k: int, nu: float, runs: Sequence[Result], dollars: float) -> dict[str, Any]:
    """Return what an arm came to; ``rmse_best`` is the lowest of each run, which is what the paper shows."""
    # One of several hypotheses serves all.
    chosen = [run.measures["last"]["chosen"] for run in runs if k > 1]
    row = {
        "loss": loss,
        "empty": empty,
        "k": k,
        "nu": nu,
        "runs": len(runs),
        **numbers("rmse_best", (dollars * _loss(losses_of(run), "best") for run in runs)),
        **numbers("rmse_last_ten", (dollars * _loss(losses_of(run), "last_ten") for run in runs)),
        "collapsed": sum(max(one) > ALL * sum(one) for one in chosen),
        "rmse_worst_decile": mean(run.measures["best"]["worst_decile"] * dollars for run in runs),
        "rounds": mean(run.measures["rounds"] for run in runs),
    }
    for name, printed in zip(_BUDGETS, PRINTED.get((k, nu), (None, None)), strict=True):
        measured = mean(run.measures[name] for run in runs) if nu else None
        apart = measured / printed - 1 if measured is not None and printed else None
        row |= {name: measured, f"{name}_printed": printed, f"{name}_difference": apart}
    return row


def losses_of(run: Result) -> list[float]:
    """Return the validation losses of a run, in order: of 200 clients, drawn again each time."""
    return [entry["loss"] for entry in run.history if entry["loss"] is not None]


def until(losses: Sequence[float], patience: int) -> Sequence[float]:
    """Return the losses of a run up to where a lower patience would have ended it."""
    best = 0
    for at, loss in enumerate(losses):
        if loss < losses[best]:
            best = at
        elif at - best >= patience:
            return losses[: at + 1]
    return losses


def _loss(losses: Sequence[float], state: str) -> float:
    """Return the lowest loss of a run, or the mean of its last ten."""
    return min(losses) if state == "best" else mean(losses[-_LAST:])


def _rmse(grid: Grid) -> Section:
    ks, nus = sorted({k for k, _ in grid}), sorted({nu for _, nu in grid})
    wanted = [(k, f"rmse_{state}") for state in _SHOWN for k in ks]
    rows = [
        [f"{nu:g}", *(spread(grid[k, nu], name, 0) if (k, nu) in grid else "none" for k, name in wanted)] for nu in nus
    ]
    text = (
        "Validation RMSE in dollars, mean ± standard deviation over seeds: figure 3, for which the paper prints no "
        "numbers. A client picks its hypothesis on the rows that it is measured on. The best round leads, as in the "
        "paper: the lowest of the exact losses that 200 validation clients, drawn again in each round, tell without a "
        f"guarantee. It is a little too good. The last ten are the mean of a run's last {_LAST} validations, because "
        f"single rounds may alternate between a high and a low loss. {SAME_CLIENTS} "
        "Mean over the noise multipliers, best round: "
    )
    level = {k: mean(row["rmse_best"] for (own, _), row in grid.items() if own == k) for k in ks}
    text += ", ".join(f"{level[k]:,.0f} for k = {k}" for k in ks)
    lost = [f"{row['collapsed']} of {row['runs']} for k = {row['k']}, ν = {row['nu']:g}"
            for row in grid.values() if row["collapsed"]]  # fmt: skip
    several = sum(row["runs"] for (k, _), row in grid.items() if k > 1)
    text += (
        f". In the last round of {sum(row['collapsed'] for row in grid.values())} of the {several} runs with several "
        f"hypotheses, one of them serves {100 * ALL:.0f} % of the validation clients: "
    )
    columns = [f"k = {k}" if "best" in name else f"last ten: k = {k}" for k, name in wanted]
    return Section("RMSE", text + (", ".join(lost) or "none") + ".", ("ν", *columns), rows)


def _claims(said: str, runs: Mapping[tuple[int, float], Sequence[Result]], dollars: float) -> list[Section]:
    """Judge what the paper says of figure 3, for the seeds of which all of it was run."""
    cells = [(k, nu) for k in HYPOTHESES for nu in MULTIPLIERS]
    by_seed = [{run.spec.config["seed"]: run for run in runs.get(cell, ())} for cell in cells]
    seeds = sorted(set.intersection(*map(set, by_seed)))
    if len(seeds) < 2:
        return []
    histories = [losses_of(found[seed]) for found in by_seed for seed in seeds]
    shape, patience = (len(HYPOTHESES), len(MULTIPLIERS), len(seeds)), by_seed[0][seeds[0]].spec.config["patience"]
    found = {
        state: agreed(
            judged(np.reshape([dollars * _loss(until(one, patience - less), state) for one in histories], shape))
            for less in range(3)
        )
        for state in _SHOWN
    }
    text = (
        "The paper's claims about figure 3, in dollars by k, averaged over the noise multipliers. A claim is that some "
        "differences are above 0. The answer is yes if the 95 % interval of each lies above 0, no if that of one lies "
        f"below, and open otherwise ({RESAMPLES:,} bootstrap samples of {len(seeds)} seeds). {SAME_CLIENTS} Runs end "
        f"after {patience} validations without a lower loss. An answer is open as well if it would be another after "
        "one or two validations fewer."
    )
    columns = [column for what in _SHOWN.values() for column in (what, "so here?")]
    rows = [[claim, *(cell for state in _SHOWN for cell in found[state][at][1:])] for at, claim in enumerate(CLAIMS)]
    return [Section(f"The paper's claims: {said}", text, ("the paper says that the RMSE", *columns), rows)]


def agreed(tables: Iterable[list[tuple[str, str, str]]]) -> list[tuple[str, str, str]]:
    """Return the first of several tables of `judged`, but open where the others have another answer."""
    rows = zip(*tables, strict=True)
    return [
        (claim, shown, answer if all(other[2] == answer for other in others) else "open")
        for (claim, shown, answer), *others in rows
    ]


def judged(losses: Losses) -> list[tuple[str, str, str]]:
    """Return of each claim its words, what was measured, and whether it holds: yes, no or open."""
    generator = np.random.default_rng(0)
    seeds = losses.shape[2]
    samples = [losses[:, :, draw] for draw in generator.integers(seeds, size=(RESAMPLES, seeds))]
    answers = []
    for claim, compare in CLAIMS.items():
        shown = ", ".join(f"{name}: {value:,.0f}" for name, value in compare(losses)[0].items())
        found = np.array([compare(sample)[1] for sample in samples])
        # One of several differences is below 0 by chance more often than one alone.
        low, high = (np.quantile(found, q, axis=0).min() for q in (0.025, 1 - 0.025 / found.shape[1]))
        answers.append((claim, shown, verdict(low, high, 0.0)))
    return answers


def _level(losses: Losses, *nus: float) -> NDArray[np.float64]:
    """Return the mean over seeds and over noise multipliers, all or these, by k."""
    return np.asarray(losses[:, [MULTIPLIERS.index(nu) for nu in nus or MULTIPLIERS]].mean(axis=(1, 2)))


def _deviation(losses: Losses, *nus: float) -> NDArray[np.float64]:
    """Return the standard deviation over seeds, averaged over noise multipliers, by k."""
    return np.asarray(losses[:, [MULTIPLIERS.index(nu) for nu in nus or MULTIPLIERS]].std(axis=2, ddof=1).mean(axis=1))


def _by_k(values: NDArray[np.float64]) -> dict[str, float]:
    return dict(zip(map(str, HYPOTHESES), values.tolist(), strict=True))


def _falls_most_at_first(losses: Losses) -> tuple[dict[str, float], Differences]:
    drops = -np.diff(_level(losses))
    named = {f"{a} to {b}": drop for (a, b), drop in zip(pairwise(HYPOTHESES), drops.tolist(), strict=True)}
    return named, drops[0] - np.array([0, drops[1], drops[2]])


def _below(values: NDArray[np.float64]) -> tuple[dict[str, float], Differences]:
    """Return values by k, and by how much those of k = 5 and 7 are below the others."""
    return _by_k(values), np.subtract.outer(values[:2], values[2:]).ravel()


def _rise(losses: Losses) -> NDArray[np.float64]:
    return _level(losses, 3.0, 5.0) - _level(losses, 0.0, 0.1)


def _positive(values: NDArray[np.float64]) -> tuple[dict[str, float], Differences]:
    return _by_k(values), values


def _falling(values: NDArray[np.float64]) -> tuple[dict[str, float], Differences]:
    return _by_k(values), -np.diff(values)


CLAIMS: Mapping[str, Callable[[Losses], tuple[dict[str, float], Differences]]] = {
    "falls most from k = 1 to k = 3": _falls_most_at_first,
    "is lowest at k = 5 and 7": lambda losses: _below(_level(losses)),
    "is steadiest at k = 5 and 7 (standard deviation)": lambda losses: _below(_deviation(losses)),
    "rises with the noise (ν = 3, 5 less ν = 0, .1)": lambda losses: _positive(_rise(losses)),
    "rises less with more hypotheses": lambda losses: _falling(_rise(losses)),
    "falls with k under much noise (ν = 3, 5)": lambda losses: _falling(_level(losses, 3.0, 5.0)),
    "varies more under ν ≥ 2 (standard deviation, less that under ν ≤ 1)": lambda losses: _positive(
        _deviation(losses, 2.0, 3.0, 5.0) - _deviation(losses, 0.0, 0.1, 1.0)
    ),
}
"""The paper's claims about figure 3: the measure, and the differences that must be above 0."""


def _budgets(grid: Grid, runs: Mapping[tuple[int, float], Sequence[Result]]) -> Section:
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
        f"{close} of the {len(apart)} budgets are within {100 * CLOSE:.0f} % of the printed ones"
    )
    if likely := _likely([runs[key] for key in PRINTED if key in grid]):
        text += f"; other seeds would give {likely[0]} to {likely[1]} (95 % of {RESAMPLES:,} bootstrap samples)"
    text += ". That is no confirmation: the step size was chosen to match the printed budgets."
    columns = ("ν", "k", "median", "printed", "difference", "maximum", "printed", "difference", "rounds")
    return Section("Privacy budgets", text, columns, shown)


def _likely(cells: Sequence[Sequence[Result]]) -> tuple[int, int] | None:
    """Return how many budgets of Table 1 are close for other seeds: a 95 % interval; None for too few seeds."""
    seeds = sorted(set.intersection(*({run.spec.config["seed"] for run in runs} for runs in cells))) if cells else []
    if len(seeds) < 2:
        return None
    by_seed = [{run.spec.config["seed"]: run for run in runs} for runs in cells]
    budgets = np.array([[found[seed].measures[name] for seed in seeds] for found in by_seed for name in _BUDGETS])
    configs = [runs[0].spec.config for runs in cells]
    printed = np.ravel([PRINTED[config["hypotheses"], config["noise-multiplier"]] for config in configs])
    draws = np.random.default_rng(0).integers(len(seeds), size=(RESAMPLES, len(seeds)))
    close = (np.abs(budgets[:, draws].mean(axis=2) / printed[:, None] - 1) <= CLOSE).sum(axis=0)
    low, high = np.quantile(close, (0.025, 0.975), method="nearest")
    return int(low), int(high)


def _fairness(runs: Mapping[tuple[int, float], Sequence[Result]], dollars: float) -> Section:
    arms = {
        FEDAVG if (k, nu) == (1, 0) else f"k = {k}, ν = {nu:g}": found
        for (k, nu), found in sorted(runs.items(), key=lambda one: one[0][::-1])
        if nu in (0.0, 3.0, 5.0)
    }
    threshold = f"{REGIONS.threshold * dollars:,.0f} dollars"
    text = (
        f"Groups of clients are the four parts of the country around 100° W, 40° N: {', '.join(REGIONS.names)}. Losses "
        f"are RMSE in dollars; what is decided is whether a stay costs more than {threshold}, near the median. "
        f"{SAME_CLIENTS}"
    )
    return group_fairness(arms, REGIONS, text, 0, dollars, "best")


def _figure_3(grid: Grid, folder: Path, name: str) -> None:
    nus = sorted({nu for _, nu in grid})
    with figure(folder, name, 1, 2, size=(11, 4)) as axes:
        for ax, key, title in zip(axes[0], (f"rmse_{state}" for state in _SHOWN), _SHOWN.values(), strict=True):
            for i, nu in enumerate(nus):
                points = [(k, row[key], row[f"{key}_sd"]) for (k, own), row in grid.items() if own == nu]
                x, centre, deviation = (np.array(column) for column in zip(*points, strict=True))
                # Side by side, so that error bars do not cover each other.
                x = x + 0.12 * (i - (len(nus) - 1) / 2)
                ax.errorbar(x, centre, deviation, capsize=3, label=f"ν = {nu:g}", **series(i))
            ax.set(xticks=sorted({k for k, _ in grid}), xlabel="hypotheses k", ylabel="validation RMSE, dollars")
            ax.set_title(title)
        axes[0, 0].legend(ncols=2)


def _figure_4(result: Result, clients: int, folder: Path) -> None:
    spent, config = pd.read_csv(result.folder / "ledger.csv"), result.spec.config
    price = float(spent["paper_budget"].iloc[0] / spent["participations"].iloc[0])
    counts = np.bincount(spent["participations"])
    counts[0] += clients - len(spent)
    with figure(folder, "figure-4") as ax:
        ax.bar(np.arange(len(counts)) * price, counts, width=0.8 * price, color=COLOURS[0])
        ax.set(xlabel="paper's budget of a client, participations × n/ν", ylabel=f"clients, {clients} in all")
        ax.set_title(f"k = {config['hypotheses']}, ν = {config['noise-multiplier']:g}, seed {config['seed']}")
