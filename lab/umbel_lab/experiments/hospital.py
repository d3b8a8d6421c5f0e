"""Hospital charges (group privacy paper, Sec. 5.2): figures 3 and 4 and Table 1 of its ICISSP version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from umbel.simulation.in_process import run_config
from umbel.simulation.sweep import Result
from umbel_lab.experiments import scaffold
from umbel_lab.experiments.scaffold import WORDS, by_arm, by_seed
from umbel_lab.output import COLOURS, Page, Section, difference, figure, mean, numbers, series, spread, verdict

HYPOTHESES = (1, 3, 5, 7)
MULTIPLIERS = (0.0, 0.1, 1.0, 2.0, 3.0, 5.0)
SEEDS = 10
_DATA = scaffold.read("hospital")
LOSSES, OTHERS = _DATA["losses"], _DATA["others"]
STAY, RELOCATE = "stay", "relocate"
# Grids by the loss, and by what k-means does with the centre of an empty cluster, of which the paper says nothing.
GRIDS = (("rmse", STAY), ("rmse", RELOCATE), ("mse", STAY))

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

FEDAVG = "FedAvg (k = 1, ν = 0)"
_BUDGETS = ("median_budget", "max_budget")
_SHOWN = {"best": "the best round", "last_ten": "the last ten"}
_LAST = 10  # validations; along the RMSE rounds alternate, so that a single one says whether their number is odd
RESAMPLES = 1000  # of the seeds, for intervals
Grid = Mapping[tuple[int, float], dict[str, Any]]  # what runs came to, by k and ν
Runs = Mapping[tuple[int, float], Sequence[Result]]
Losses = NDArray[np.float64]  # of all runs in dollars, shape (k, ν, seed)


def arms(quick: bool, _of: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the arms: the grids, and for each loss IFCA for every k above 1, and `OTHERS`.

    One hypothesis without noise is federated averaging.
    """
    ks, nus = ((1, 5), (0.0, 3.0)) if quick else (HYPOTHESES, MULTIPLIERS)
    base = run_config("hospital", **({"rounds": _QUICK_ROUNDS} if quick else {}))
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for loss, empty in GRIDS:
        for k, nu in product(ks, nus):
            moved = {"strategy": "group-privacy empty=relocate"} if _moves(k, empty) else {}
            kinds[loss, _name(k, nu, empty)] = {"hypotheses": k, "noise-multiplier": nu} | moved
    ifca = {f"IFCA, k = {k}": {"strategy": "ifca", "noise-multiplier": 0.0, "hypotheses": k} for k in ks if k > 1}
    kinds |= {(loss, name): changes for loss in LOSSES for name, changes in {**ifca, **OTHERS}.items()}
    return {arm: base | LOSSES[arm[0]] | changes for arm, changes in kinds.items()}


def _moves(k: int, empty: str) -> bool:
    return empty == RELOCATE and k > 1  # a single cluster is never empty


def _name(k: int, nu: float, empty: str = STAY) -> str:
    moved = ", relocated" if _moves(k, empty) else ""
    return FEDAVG if (k, nu) == (1, 0) else f"Algorithm 1, k = {k}, ν = {nu:g}{moved}"


def page(results: Sequence[Result]) -> Page:
    """Return tables and figures of the runs of `arms`."""
    manifest = scaffold.manifest_of(results[0])
    dollars = manifest.error_scale
    arms = by_arm(results)
    sections, rows, claims, figures = [], [], [], list[Callable[[Path], None]]()
    for loss, empty in GRIDS:
        own = {name: runs for (of, name), runs in arms.items() if of == loss}
        names = {(k, nu): _name(k, nu, empty) for k in HYPOTHESES for nu in MULTIPLIERS}
        runs = {key: own[name] for key, name in names.items() if name in own}
        grid = {(k, nu): _row(loss, empty, k, nu, found, dollars) for (k, nu), found in runs.items()}
        claims += _claims(_titled(loss, empty), runs, dollars)
        parts = [_rmse(grid)]
        if empty == STAY:
            others = [FEDAVG, "CFL, k ≤ 7", *(f"IFCA, k = {k}" for k in HYPOTHESES)]
            tuned = [name for name in OTHERS if name not in others]
            shown = [*tuned, *others, *(names[key] for key in grid if key[1] > 0)]
            compared = [(name, own[name]) for name in shown if name in own]
            gets = scaffold.what_a_client_gets(
                "RMSE in dollars", compared, 0, dollars, WORDS["same_clients"], ("best",)
            )
            parts += [_budgets(grid, runs), gets]
        sections += [replace(section, title=f"{section.title}: {_titled(loss, empty)}") for section in parts]
        name = "-".join(["figure-3", loss, empty]).removesuffix("-stay").replace("-rmse", "")
        figures.append(partial(_figure_3, grid, name))
        rows += [row for key, row in grid.items() if empty == STAY or key[0] > 1]
    if shown_in_4 := arms.get(("rmse", _name(5, 3.0))):
        figures.append(partial(_figure_4, shown_in_4[0], manifest.train))

    def draw(folder: Path) -> None:
        for one in figures:
            one(folder)

    return scaffold.page("Hospital charges", [*claims, *sections], rows, results, draw)


def _titled(loss: str, empty: str) -> str:
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
    level = {k: mean(row["rmse_best"] for (own, _), row in grid.items() if own == k) for k in ks}
    levels = ", ".join(f"{level[k]:,.0f} for k = {k}" for k in ks)
    lost = [row for row in grid.values() if row["collapsed"]]
    told = ", ".join(f"{row['collapsed']} of {row['runs']} for k = {row['k']}, ν = {row['nu']:g}" for row in lost)
    words = {"last": _LAST, "levels": levels, "all": 100 * ALL, "told": told or "none"}
    words |= {"lost": sum(row["collapsed"] for row in lost)}
    words |= {"runs": sum(row["runs"] for (k, _), row in grid.items() if k > 1)}
    columns = [f"k = {k}" if "best" in name else f"last ten: k = {k}" for k, name in wanted]
    return Section("RMSE", scaffold.say(_DATA, "rmse", **words), ("ν", *columns), rows)


def _claims(titled: str, runs: Runs, dollars: float) -> list[Section]:
    """Judge what the paper says of figure 3, for the seeds of which all of it was run."""
    cells = [by_seed(runs.get((k, nu), ())) for k in HYPOTHESES for nu in MULTIPLIERS]
    seeds = sorted(set.intersection(*map(set, cells)))
    if len(seeds) < 2:
        return []
    histories = [losses_of(found[seed]) for found in cells for seed in seeds]
    shape, patience = (len(HYPOTHESES), len(MULTIPLIERS), len(seeds)), cells[0][seeds[0]].spec.config["patience"]
    found = {
        state: agreed(
            judged(np.reshape([dollars * _loss(until(one, patience - less), state) for one in histories], shape))
            for less in range(3)
        )
        for state in _SHOWN
    }
    text = scaffold.say(_DATA, "claims", resamples=RESAMPLES, seeds=len(seeds), patience=patience)
    columns = [column for what in _SHOWN.values() for column in (what, "so here?")]
    rows = [[claim, *(cell for state in _SHOWN for cell in found[state][at][1:])] for at, claim in enumerate(CLAIMS)]
    return [Section(f"The paper's claims: {titled}", text, ("the paper says that the RMSE", *columns), rows)]


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
    for claim, (measure, differences) in CLAIMS.items():
        values = measure(losses).tolist()
        names = (
            map(str, HYPOTHESES) if len(values) == len(HYPOTHESES) else (f"{a} to {b}" for a, b in pairwise(HYPOTHESES))
        )
        shown = ", ".join(f"{name}: {value:,.0f}" for name, value in zip(names, values, strict=True))
        found = np.array([differences(measure(sample)) for sample in samples])
        # One of several differences is below 0 by chance more often than one alone.
        low, high = (np.quantile(found, q, axis=0).min() for q in (0.025, 1 - 0.025 / found.shape[1]))
        answers.append((claim, shown, verdict(low, high, 0.0)))
    return answers


def _level(losses: Losses, *nus: float) -> Losses:
    """Return the mean over seeds and over noise multipliers, all or these, by k."""
    return np.asarray(losses[:, [MULTIPLIERS.index(nu) for nu in nus or MULTIPLIERS]].mean(axis=(1, 2)))


def _deviation(losses: Losses, *nus: float) -> Losses:
    """Return the standard deviation over seeds, averaged over noise multipliers, by k."""
    return np.asarray(losses[:, [MULTIPLIERS.index(nu) for nu in nus or MULTIPLIERS]].std(axis=2, ddof=1).mean(axis=1))


def _rise(losses: Losses) -> Losses:
    return _level(losses, 3.0, 5.0) - _level(losses, 0.0, 0.1)


def _falling(values: Losses) -> Losses:
    return np.asarray(-np.diff(values))


def _below(values: Losses) -> Losses:
    """Return by how much the values of k = 5 and 7 are below the others."""
    return np.asarray(np.subtract.outer(values[:2], values[2:]).ravel())


CLAIMS: Mapping[str, tuple[Callable[[Losses], Losses], Callable[[Losses], Losses]]] = {
    "falls most from k = 1 to k = 3": (
        lambda losses: _falling(_level(losses)), lambda drops: drops[0] - np.array([0, drops[1], drops[2]])
    ),
    "is lowest at k = 5 and 7": (_level, _below),
    "is steadiest at k = 5 and 7 (standard deviation)": (_deviation, _below),
    "rises with the noise (ν = 3, 5 less ν = 0, .1)": (_rise, np.asarray),
    "rises less with more hypotheses": (_rise, _falling),
    "falls with k under much noise (ν = 3, 5)": (lambda losses: _level(losses, 3.0, 5.0), _falling),
    "varies more under ν ≥ 2 (standard deviation, less that under ν ≤ 1)": (
        lambda losses: _deviation(losses, 2.0, 3.0, 5.0) - _deviation(losses, 0.0, 0.1, 1.0), np.asarray
    ),
}  # fmt: skip
"""The paper's claims about figure 3: the measure by k, and its differences that must be above 0."""


def _budgets(grid: Grid, runs: Runs) -> Section:
    rows = [grid[key] for key in PRINTED if key in grid]
    apart = [row[f"{name}_difference"] for row in rows for name in _BUDGETS]
    close = sum(abs(one) <= CLOSE for one in apart)
    shown = []
    for row in rows:
        pairs = [(row[name], row[f"{name}_printed"]) for name in _BUDGETS]
        cells = [cell for one, other in pairs for cell in (f"{one:,.1f}", f"{other:,.1f}", difference(one, other))]
        shown.append([f"{row['nu']:g}", str(row["k"]), *cells, f"{row['rounds']:.0f}"])
    likely = _likely({key: runs[key] for key in PRINTED if key in grid})
    words = {"close": close, "budgets": len(apart), "within": 100 * CLOSE, "likely": likely}
    columns = ("ν", "k", "median", "printed", "difference", "maximum", "printed", "difference", "rounds")
    return Section("Privacy budgets", scaffold.say(_DATA, "budgets", **words), columns, shown)


def _likely(cells: Runs) -> str:
    """Return what to say of other seeds: how many budgets would be close; nothing for too few seeds."""
    found = [by_seed(runs) for runs in cells.values()]
    seeds = sorted(set.intersection(*map(set, found))) if found else []
    if len(seeds) < 2:
        return ""
    budgets = np.array([[own[seed].measures[name] for seed in seeds] for own in found for name in _BUDGETS])
    printed = np.ravel([PRINTED[key] for key in cells])
    draws = np.random.default_rng(0).integers(len(seeds), size=(RESAMPLES, len(seeds)))
    close = (np.abs(budgets[:, draws].mean(axis=2) / printed[:, None] - 1) <= CLOSE).sum(axis=0)
    low, high = np.quantile(close, (0.025, 0.975), method="nearest")
    return f"; other seeds would give {int(low)} to {int(high)} (95 % of {RESAMPLES:,} bootstrap samples)"


def _figure_3(grid: Grid, name: str, folder: Path) -> None:
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
