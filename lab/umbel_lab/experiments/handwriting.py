"""Handwriting by many writers, half of them turned (group privacy paper, Sec. 5.3): the accuracies of Table 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from umbel.simulation.in_process import run_config
from umbel.simulation.measured import LOCAL_ONLY, STATES, Spec
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.experiments.tables import BEST_ROUND, SAME_SPLIT, by_arm, page, what_a_client_gets
from umbel_lab.output import Columns, Row, Section, figure, mean, numbers, plus_minus, series, spread

SEEDS = 3
LOSSES = ("cross-entropy", "rmse")
COLLAPSE_SEEDS = 8  # show whether hypotheses collapse
COLLAPSE, AS_PRINTED, IFCA = ("cross-entropy", 2, 3.0), ("as printed", 3.0), "IFCA"
_TOLD_APART = 0.9
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
    folder: Path,
    seeds: int = SEEDS,
    first: int = FIRST_SEED,
    quick: bool = False,
    dataset: str = "qmnist",
) -> list[Spec]:
    """Return the runs on a dataset of handwriting, ``femnist`` or ``qmnist``.

    Table 2's grid with two hypotheses; one hypothesis without noise and with nu = 3, IFCA, and writers that train by
    themselves, for comparison. Where hypotheses are reborn, there are eight seeds of nu = 3, which come first, and as
    many of the paper's algorithm as it is, which come last. Quick are two rounds of a few, without comparison.
    """
    losses, nus = (LOSSES[:1], (0.0,)) if quick else (LOSSES, MULTIPLIERS)
    base = run_config(dataset, **({"rounds": 2, "clients_per_round": 4} if quick else {}))
    runs, last = [], []
    plain = base["strategy"].partition(" ")[0]
    if base["strategy"] != plain and not quick:
        for seed in range(first, first + COLLAPSE_SEEDS):
            config = base | {"loss": LOSSES[0], "seed": seed, "noise-multiplier": COLLAPSE[2]}
            runs.append(Spec.of(COLLAPSE, config))
            last.append(Spec.of(AS_PRINTED, config | {"strategy": plain}))
    for seed in range(first, first + seeds):
        for loss in losses:
            for k, nu in [*((2, nu) for nu in nus), *((1, nu) for nu in (0.0, 3.0) if nu in nus)]:
                config = base | {"loss": loss, "seed": seed, "hypotheses": k, "noise-multiplier": nu}
                runs.append(Spec.of((loss, k, nu), config))
        if not quick:
            other = base | {"loss": losses[0], "seed": seed, "strategy": plain}
            runs.append(Spec.of((IFCA,), other | {"strategy": "ifca", "noise-multiplier": 0.0}))
            runs.append(Spec.of((LOCAL_ONLY,), other | {"strategy": LOCAL_ONLY}))
    # The first eight are some of the grid's as well.
    return list({spec.name: spec for spec in [*runs, *last]}.values())


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write tables and the figure of the runs of `specs`."""
    arms = by_arm(results)
    grid = {arm: runs for arm, runs in arms.items() if len(arm) == 3}
    rows = [_row(loss, k, nu, runs) for (loss, k, nu), runs in grid.items()]
    name = results[0].spec.config["dataset"]
    compared = {"by itself": (LOCAL_ONLY,), "FedAvg (k = 1, ν = 0)": (LOSSES[0], 1, 0.0), IFCA: (IFCA,)}
    shown = [(who, arms[arm]) for who, arm in compared.items() if arm in arms]
    shown += [(f"Algorithm 1, ν = {arm[2]:g}", runs) for arm, runs in grid.items() if arm[:2] == (LOSSES[0], 2)]
    gets = what_a_client_gets("Accuracy, cross entropy,", shown, 3, note=SAME_SPLIT)
    page(f"Handwriting: {name}", [_accuracy(rows, name), *_collapse(arms), gets], rows, results).write(folder)
    draw([row for row in rows if row["k"] == 2], "best", "measured, best round", folder)


def _row(loss: str, k: int, nu: float, runs: Sequence[Result]) -> dict[str, Any]:
    last, best = ([run.measures[state] for run in runs] for state in STATES)
    accuracy = numbers("best", (one["mean"] for one in best))
    printed, deviation = PRINTED.get((loss, nu), (None, None)) if k == 2 else (None, None)
    return {
        "loss": loss,
        "k": k,
        "nu": nu,
        "runs": len(runs),
        **numbers("accuracy", (one["mean"] for one in last)),
        **accuracy,
        "printed": printed,
        "printed_sd": deviation,
        "difference": None if printed is None else accuracy["best"] - printed,
        "worst_decile": mean(one["worst_decile"] for one in last),
        "rounds": mean(run.measures["rounds"] for run in runs),
        **(numbers("rand_index", (one["rand_index"] for one in last)) if k > 1 else {"rand_index": None}),
    }


def _printed(row: Row) -> str:
    return "" if row["printed"] is None else f"{row['printed']:.3f} ± {row['printed_sd']:.3f}"


def _accuracy(rows: Sequence[Row], name: str) -> Section:
    text = (
        "Accuracy of every validation client under its best hypothesis: mean over clients, mean ± standard deviation "
        f"over seeds. The last round leads, and the best stands beside it. {BEST_ROUND} The paper's is of the best "
        "round too, on FEMNIST with 62 classes; the difference is from that. The RMSE loss is against one-hot targets. "
        "The adjusted Rand index, in the last round, tells whether the hypotheses tell turned images from upright "
        f"ones: 1 if they do, 0 if one hypothesis serves both. {SAME_SPLIT}"
    )
    columns: Columns = {
        "loss": "loss",
        "k": "k",
        "ν": "nu:g",
        name: lambda row: spread(row, "accuracy", 3),
        "best round": lambda row: spread(row, "best", 3),
        "printed, FEMNIST": _printed,
        "difference": "difference:+.3f",
        "rounds": "rounds:.0f",
        "Rand index": lambda row: spread(row, "rand_index", 2) if row["k"] > 1 else "",
    }
    return Section.of("Accuracy", text, columns, rows)


def _collapse(arms: Mapping[tuple[Any, ...], Sequence[Result]]) -> list[Section]:
    """Return what became of the hypotheses with and without rebirth, where there are such runs."""
    reborn = arms.get(COLLAPSE, [])
    if not any("respawn" in run.spec.config["strategy"] for run in reborn):
        return []
    rows = []
    for arm, runs in (("reborn", reborn), ("paper's algorithm", arms.get(AS_PRINTED, []))):
        last, best = ([float(run.measures[state]["rand_index"]) for run in runs] for state in STATES)
        told = f"{sum(index >= _TOLD_APART for index in last)} of {len(last)}"
        accuracy = plus_minus((float(run.measures["last"]["mean"]) for run in runs), 3) if runs else ""
        rows.append([arm, told, *(" ".join(f"{index:.2f}" for index in found) for found in (last, best)), accuracy])
    text = (
        f"Cross entropy, ν = {COLLAPSE[2]:g}: with hypotheses that are reborn if no client trains them, and the "
        "paper's algorithm as it is. The Rand index of each seed, in order, in the last round and in the best; from "
        f".9 on in the last the clients are told apart. Accuracy is of the last round. {SAME_SPLIT}"
    )
    return [Section("Collapse", text, ("hypotheses", "told apart", "Rand index", "best round", "accuracy"), rows)]


def draw(rows: Sequence[Row], measured: str, label: str, folder: Path) -> None:
    """Draw Table 2: accuracy by noise multiplier, as printed and as an entry of the rows says, called `label`."""
    with figure(folder, "table-2", size=(7, 4)) as ax:
        for i, loss in enumerate(LOSSES):
            own = [row for row in rows if row["loss"] == loss]
            for name, said, how in (
                (measured, label, {}),
                ("printed", "printed", {"linestyle": ":", "markerfacecolor": "none"}),
            ):
                if points := [(row["nu"], row[name], row[f"{name}_sd"]) for row in own]:
                    ax.errorbar(*zip(*points, strict=True), capsize=3, label=f"{loss}, {said}", **series(i) | how)
        # Linear up to the smallest noise, so that 0 has a place.
        ax.set_xscale("symlog", linthresh=0.001)
        ax.set(xlabel="noise multiplier ν", ylabel="accuracy of validation clients", ylim=(0, 1))
        ax.legend()
