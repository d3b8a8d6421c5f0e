"""Hospital charges (group privacy paper, Sec. 5.2): figures 3 and 4 and Table 1 of its ICISSP version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.figures import COLOURS, MARKERS, figure
from experiments.runs import LOCAL_ONLY, Spec, run_config
from experiments.sweep import Result
from experiments.tables import Section, Value, average, difference, good, plus_minus, write
from federation import find_federation, open_federation

HYPOTHESES = (1, 3, 5, 7)
MULTIPLIERS = (0.0, 0.1, 1.0, 2.0, 3.0, 5.0)
SEEDS = 10

# Table 1: median and maximum privacy budget over clients, averaged over seeds, by (k, nu).
PRINTED = {
    (7, 0.1): (517.0, 1551.0), (5, 0.1): (418.0, 1342.0), (3, 0.1): (473.0, 1386.0), (1, 0.1): (528.0, 1540.0),
    (7, 1.0): (36.3, 126.5), (5, 1.0): (40.7, 127.6), (3, 1.0): (44.0, 138.6), (1, 1.0): (49.5, 147.4),
    (7, 2.0): (15.4, 57.8), (5, 2.0): (14.3, 54.5), (3, 2.0): (22.0, 69.3), (1, 2.0): (21.5, 66.6),
    (7, 3.0): (7.7, 32.3), (5, 3.0): (8.4, 36.7), (3, 3.0): (12.5, 40.0), (1, 3.0): (12.1, 40.0),
    (7, 5.0): (5.7, 21.3), (5, 5.0): (5.9, 22.0), (3, 5.0): (5.5, 21.6), (1, 5.0): (5.3, 20.9),
}  # fmt: skip
CLOSE = 0.25
"""A budget this near to the printed one, as a share of it, counts as reproduced."""


def specs(seeds: int = SEEDS, quick: bool = False) -> list[Spec]:
    """Return the runs: the grid, IFCA for every k above 1, and clients that train by themselves.

    One hypothesis without noise is federated averaging.
    """
    ks, nus = ((1, 5), (0.0, 3.0)) if quick else (HYPOTHESES, MULTIPLIERS)
    base = run_config("hospital", **({"rounds": 20} if quick else {}))
    runs = []
    for seed in range(seeds):
        for k in ks:
            for nu in nus:
                config = base | {"hypotheses": k, "noise-multiplier": nu, "seed": seed}
                runs.append(Spec(_name(k, nu, seed), config))
            if k > 1:
                config = base | {"strategy": "ifca", "hypotheses": k, "noise-multiplier": 0.0, "seed": seed}
                runs.append(Spec(f"ifca-k{k}-seed{seed}", config))
        runs.append(Spec(f"local-seed{seed}", base | {"strategy": LOCAL_ONLY, "seed": seed}))
    return runs


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write tables and figures of the runs of `specs`."""
    config = results[0].spec.config
    manifest = open_federation(find_federation(config["federation"])).manifest
    dollars = float(manifest.units["target"]["scale"])
    grid = _grid(good(results))
    ks = sorted({k for k, _ in grid})
    nus = sorted({nu for _, nu in grid})
    sections = [
        _rmse(grid, ks, nus, dollars),
        _budgets(grid, ks, nus),
        _personal(good(results), grid, dollars),
    ]
    write(folder, "Hospital charges", sections, _rows(grid, dollars), results)
    _figure_3(grid, ks, nus, dollars, folder)
    if (5, 3.0) in grid:
        shown = min(grid[5, 3.0], key=lambda result: abs(result.spec.config["seed"] - 3))
        _figure_4(shown, manifest.train, folder)


def _name(k: int, nu: float, seed: int) -> str:
    return f"k{k}-nu{nu:g}-seed{seed}"


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


def _rmse(
    grid: Mapping[tuple[int, float], Sequence[Result]], ks: list[int], nus: list[float], dollars: float
) -> Section:
    rows = [[f"{nu:g}", *(plus_minus(_errors(grid.get((k, nu), []), dollars), 0) for k in ks)] for nu in nus]
    means = {k: average(e for nu in nus for e in _errors(grid.get((k, nu), []), dollars))[0] for k in ks}
    text = (
        "Lowest validation RMSE of a run in dollars, mean ± standard deviation over seeds: figure 3. The paper prints "
        "no numbers for it. Each round measures 200 validation clients drawn anew. Mean over the noise multipliers: "
        + ", ".join(f"{means[k]:,.0f} for k = {k}" for k in ks)
        + "."
    )
    return Section("RMSE", text, ("ν", *(f"k = {k}" for k in ks)), rows)


def _budgets(grid: Mapping[tuple[int, float], Sequence[Result]], ks: list[int], nus: list[float]) -> Section:
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
        "Median and maximum over the training clients of participations × n/ν, averaged over seeds: Table 1. A budget "
        "tells nothing but the number of rounds before the early stop. "
        f"{close} of {compared} are within {100 * CLOSE:.0f} % of the printed ones."
    )
    columns = ("ν", "k", "median", "printed", "difference", "maximum", "printed", "difference", "rounds")
    return Section("Privacy budgets", text, columns, rows)


def _personal(results: Sequence[Result], grid: Mapping[tuple[int, float], Sequence[Result]], dollars: float) -> Section:
    arms: list[tuple[str, Sequence[Result]]] = []
    arms.append(("FedAvg (k = 1, ν = 0)", grid.get((1, 0.0), [])))
    ifca = [result for result in results if result.spec.config["strategy"] == "ifca"]
    for k in sorted({result.spec.config["hypotheses"] for result in ifca}):
        arms.append((f"IFCA, k = {k}", [result for result in ifca if result.spec.config["hypotheses"] == k]))
    arms += [(f"Algorithm 1, k = {k}, ν = {nu:g}", runs) for (k, nu), runs in sorted(grid.items()) if k > 1 and nu > 0]
    rows = [
        ["by itself", "", "", "", *_held_out([r for r in results if r.spec.config["strategy"] == LOCAL_ONLY], dollars)]
    ]
    for name, runs in arms:
        best = [result.measures["best"] for result in runs]
        last = [result.measures["last"] for result in runs]
        rows.append(
            [
                name,
                plus_minus((m["mean"] * dollars for m in best), 0),
                plus_minus((m["worst_decile"] * dollars for m in best), 0),
                plus_minus((m["mean"] * dollars for m in last), 0),
                *_held_out(runs, dollars),
            ]
        )
    text = (
        "RMSE in dollars of every validation client under its best hypothesis: mean over clients, and mean over the "
        "tenth that fares worst, with the hypotheses of the best and of the last round. Held out: a client picks its "
        "hypothesis, or trains by itself, on every other row and is measured on the rest."
    )
    columns = ("who", "mean", "worst decile", "mean, last round", "held out: mean", "held out: worst decile")
    return Section("What a client gets", text, columns, rows)


def _held_out(runs: Sequence[Result], dollars: float) -> list[str]:
    held_out = [result.measures.get("best", result.measures)["held_out"] for result in runs]
    return [plus_minus((m[name] * dollars for m in held_out), 0) for name in ("mean", "worst_decile")]


def _rows(grid: Mapping[tuple[int, float], Sequence[Result]], dollars: float) -> list[dict[str, Value]]:
    rows: list[dict[str, Value]] = []
    for (k, nu), runs in sorted(grid.items()):
        rmse, deviation = average(_errors(runs, dollars))
        row: dict[str, Value] = {
            "k": k,
            "nu": nu,
            "runs": len(runs),
            "rmse": rmse,
            "rmse_sd": deviation,
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


def _figure_3(
    grid: Mapping[tuple[int, float], Sequence[Result]], ks: list[int], nus: list[float], dollars: float, folder: Path
) -> None:
    with figure(folder, "figure-3", size=(7, 4)) as axes:
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
    price = float(spent["spent"].iloc[0] / spent["participations"].iloc[0])
    counts = np.bincount(participations)
    with figure(folder, "figure-4") as axes:
        ax = axes[0, 0]
        ax.bar(np.arange(len(counts)) * price, counts, width=0.8 * price, color=COLOURS[0])
        config = result.spec.config
        ax.set(
            xlabel="privacy budget of a client, participations × n/ν",
            ylabel=f"clients, {clients} in all",
            title=f"k = {config['hypotheses']}, ν = {config['noise-multiplier']:g}, seed {config['seed']}",
        )
