"""Handwriting by many writers, half of them turned (group privacy paper, Sec. 5.3): the accuracies of Table 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from umbel.research.experiments.figures import COLOURS, MARKERS, figure
from umbel.research.experiments.runs import LOCAL_ONLY, Spec
from umbel.research.experiments.sweep import FIRST_SEED, Result
from umbel.research.experiments.tables import (
    Section,
    Value,
    alone,
    average,
    good,
    plus_minus,
    what_a_client_gets,
    write,
)
from umbel.simulation.in_process import run_config

SEEDS = 3
LOSSES = ("cross-entropy", "rmse")
COLLAPSE_SEEDS = 8
"""How many runs show whether hypotheses collapse."""
_COLLAPSE_NU = 3.0
_AS_IT_IS, _TOLD_APART = "as-printed", 0.9
MULTIPLIERS = (0.0, 0.001, 0.01, 0.1, 1.0, 3.0, 5.0, 10.0, 15.0)

# Table 2: accuracy and its standard deviation by loss, in the order of MULTIPLIERS.
_PRINTED = {
    "cross-entropy": (
        (0.832, 0.012), (0.843, 0.006), (0.832, 0.017), (0.834, 0.026), (0.834, 0.014), (0.835, 0.017),
        (0.812, 0.016), (0.692, 0.002), (0.561, 0.005),
    ),
    "rmse": (
        (0.801, 0.001), (0.813, 0.014), (0.805, 0.008), (0.808, 0.019), (0.814, 0.012), (0.825, 0.010),
        (0.787, 0.003), (0.687, 0.014), (0.622, 0.003),
    ),
}  # fmt: skip
PRINTED = {(loss, nu): pair for loss in LOSSES for nu, pair in zip(MULTIPLIERS, _PRINTED[loss], strict=True)}


def specs(
    name: str, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False, rounds: int | None = None
) -> list[Spec]:
    """Return the runs on a dataset of handwriting, ``femnist`` or ``qmnist``.

    Table 2's grid with two hypotheses; one hypothesis without noise and with nu = 3, IFCA, and
    writers that train by themselves, for comparison. Where hypotheses are reborn, there are eight seeds of nu = 3,
    which come first, and as many of the paper's algorithm as it is, which come last.

    Parameters
    ----------
    name : str
    seeds : int
        Runs of each kind.
    first : int
        The first of their seeds.
    quick : bool
        Whether two rounds of a few of them will do, without those for comparison.
    rounds : int, optional
        At most so many; by default as many as the configuration says.
    """
    losses, nus = (LOSSES[:1], (0.0,)) if quick else (LOSSES, MULTIPLIERS)
    base = run_config(name, **({"rounds": 2, "clients_per_round": 4} if quick else {}))
    if rounds is not None:
        base["rounds"] = min(rounds, base["rounds"])
    runs, last = [], []
    if base["strategy-options"] and not quick:
        for seed in range(first, first + COLLAPSE_SEEDS):
            config = base | {"loss": LOSSES[0], "seed": seed, "noise-multiplier": _COLLAPSE_NU}
            runs.append(Spec(f"{LOSSES[0]}-k2-nu{_COLLAPSE_NU:g}-seed{seed}", config))
            last.append(Spec(f"{_AS_IT_IS}-nu{_COLLAPSE_NU:g}-seed{seed}", config | {"strategy-options": ""}))
    for seed in range(first, first + seeds):
        for loss in losses:
            common = base | {"loss": loss, "seed": seed}
            grid = [(2, nu) for nu in nus] + [(1, nu) for nu in (0.0, 3.0) if nu in nus]
            for k, nu in grid:
                config = common | {"hypotheses": k, "noise-multiplier": nu}
                runs.append(Spec(f"{loss}-k{k}-nu{nu:g}-seed{seed}", config))
        if quick:
            continue
        other = base | {"loss": losses[0], "seed": seed, "strategy-options": ""}
        runs.append(Spec(f"ifca-seed{seed}", other | {"strategy": "ifca", "noise-multiplier": 0.0}))
        runs.append(Spec(f"local-seed{seed}", other | {"strategy": LOCAL_ONLY}))
    # The first eight are some of the grid's as well.
    return list({spec.name: spec for spec in [*runs, *last]}.values())


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write tables and the figure of the runs of `specs`."""
    fine = good(results)
    grid = _grid(fine)
    name = results[0].spec.config["dataset"]
    gets = what_a_client_gets("Accuracy, cross entropy,", _arms(fine, grid), alone(fine), 3)
    sections = [_accuracy(grid, name), *_collapse(fine), gets]
    write(folder, f"Handwriting: {name}", sections, _rows(grid), results)
    _figure(grid, folder)


Grid = Mapping[tuple[str, int, float], Sequence[Result]]


def _grid(results: Sequence[Result]) -> dict[tuple[str, int, float], list[Result]]:
    grid: dict[tuple[str, int, float], list[Result]] = {}
    for result in results:
        config = result.spec.config
        if config["strategy"] == "group-privacy" and not result.spec.name.startswith(_AS_IT_IS):
            key = (config["loss"], config["hypotheses"], config["noise-multiplier"])
            grid.setdefault(key, []).append(result)
    return grid


def _mean(result: Result) -> float:
    return float(result.measures["best"]["mean"])


def _accuracy(grid: Grid, name: str) -> Section:
    rows = []
    for (loss, k, nu), runs in grid.items():
        printed = PRINTED.get((loss, nu)) if k == 2 else None
        row = [loss, str(k), f"{nu:g}", plus_minus(map(_mean, runs), 3)]
        row += [f"{printed[0]:.3f} ± {printed[1]:.3f}"] if printed else [""]
        row += [f"{average(map(_mean, runs))[0] - printed[0]:+.3f}"] if printed else [""]
        row += [f"{average(r.measures['rounds'] for r in runs)[0]:.0f}"]
        row += [plus_minus((r.measures["best"]["rand_index"] for r in runs), 2) if k > 1 else ""]
        rows.append(row)
    text = (
        "Accuracy of every validation client under its best hypothesis, of the round of lowest validation loss: mean "
        "over clients, mean ± standard deviation over seeds. The paper's is on FEMNIST with 62 classes. The RMSE loss "
        "is against one-hot targets. The adjusted Rand index tells whether the hypotheses tell turned images from "
        "upright ones: 1 if they do, 0 if one hypothesis serves both."
    )
    columns = ("loss", "k", "ν", f"{name}", "printed, FEMNIST", "difference", "rounds", "Rand index")
    return Section("Accuracy", text, columns, rows)


def _collapse(results: Sequence[Result]) -> list[Section]:
    """Return what became of the hypotheses with and without rebirth, where there are such runs."""
    arms = {
        "reborn": [result for result in results if result.spec.name.startswith(f"{LOSSES[0]}-k2-nu{_COLLAPSE_NU:g}-")],
        "paper's algorithm": [result for result in results if result.spec.name.startswith(_AS_IT_IS)],
    }
    if not any(result.spec.config["strategy-options"] for result in arms["reborn"]):
        return []
    rows = []
    for arm, runs in arms.items():
        best, last = ([float(result.measures[when]["rand_index"]) for result in runs] for when in ("best", "last"))
        told = f"{sum(index >= _TOLD_APART for index in best)} of {len(best)}"
        accuracy = plus_minus(map(_mean, runs), 3) if runs else ""
        rows.append([arm, told, *(" ".join(f"{index:.2f}" for index in found) for found in (best, last)), accuracy])
    text = (
        f"Cross entropy, ν = {_COLLAPSE_NU:g}: with hypotheses that are reborn where nobody trains them, and the "
        "paper's algorithm as it is. The Rand index of each seed, in order, in the best round and in the last; from "
        ".9 on in the best the clients are told apart."
    )
    return [Section("Collapse", text, ("hypotheses", "told apart", "Rand index", "last round", "accuracy"), rows)]


def _arms(results: Sequence[Result], grid: Grid) -> list[tuple[str, Sequence[Result]]]:
    return [
        ("FedAvg (k = 1, ν = 0)", grid.get((LOSSES[0], 1, 0.0), [])),
        ("IFCA", [result for result in results if result.spec.config["strategy"] == "ifca"]),
        *((f"Algorithm 1, ν = {nu:g}", runs) for (loss, k, nu), runs in grid.items() if (loss, k) == (LOSSES[0], 2)),
    ]


def _rows(grid: Grid) -> list[dict[str, Value]]:
    rows: list[dict[str, Value]] = []
    for (loss, k, nu), runs in grid.items():
        accuracy, deviation = average(map(_mean, runs))
        printed = PRINTED.get((loss, nu)) if k == 2 else None
        values: dict[str, Any] = {
            "loss": loss,
            "k": k,
            "nu": nu,
            "runs": len(runs),
            "accuracy": accuracy,
            "accuracy_sd": deviation,
            "printed": printed[0] if printed else None,
            "printed_sd": printed[1] if printed else None,
            "difference": accuracy - printed[0] if printed else None,
            "worst_decile": average(r.measures["best"]["worst_decile"] for r in runs)[0],
            "last_round": average(r.measures["last"]["mean"] for r in runs)[0],
            "rounds": average(r.measures["rounds"] for r in runs)[0],
            "rand_index": average(r.measures["best"]["rand_index"] for r in runs)[0] if k > 1 else None,
        }
        rows.append(values)
    return rows


def _figure(grid: Grid, folder: Path) -> None:
    """Draw Table 2: accuracy by noise multiplier, measured and printed."""
    with figure(folder, "table-2", size=(7, 4)) as axes:
        ax = axes[0, 0]
        for i, loss in enumerate(LOSSES):
            points = [
                (nu, *average(map(_mean, runs))) for (name, k, nu), runs in grid.items() if (name, k) == (loss, 2)
            ]
            if not points:
                continue
            nu, mean, deviation = zip(*points, strict=True)
            style: dict[str, Any] = {"color": COLOURS[i], "marker": MARKERS[i], "capsize": 3, "linewidth": 1}
            ax.errorbar(nu, mean, deviation, **style, label=f"{loss}, measured")
            paper = [PRINTED[loss, x] for x in nu]
            ax.errorbar(
                nu, *zip(*paper, strict=True), **style, linestyle=":", markerfacecolor="none", label=f"{loss}, printed"
            )
        # Linear up to the smallest noise, so that 0 has a place.
        ax.set_xscale("symlog", linthresh=0.001)
        ax.set(xlabel="noise multiplier ν", ylabel="accuracy of validation clients", ylim=(0, 1))
        ax.legend()
