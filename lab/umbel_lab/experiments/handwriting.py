"""Handwriting by many writers, half of them turned (group privacy paper, Sec. 5.3): the accuracies of Table 2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from umbel.simulation.in_process import run_config
from umbel.simulation.sweep import LOCAL_ONLY, STATES, Result, Spec
from umbel_lab.experiments import scaffold
from umbel_lab.experiments.scaffold import WORDS, by_arm
from umbel_lab.output import Page, Row, Section, mean, numbers, plus_minus

SEEDS = 3
LOSSES = ("cross-entropy", "rmse")
COLLAPSE_SEEDS = 8  # show whether hypotheses collapse
COLLAPSE, AS_PRINTED, IFCA = ("cross-entropy", 2, 3.0), ("as printed", 3.0), "IFCA"
_TOLD_APART = 0.9
MULTIPLIERS = (0.0, 0.001, 0.01, 0.1, 1.0, 3.0, 5.0, 10.0, 15.0)

_DATA = scaffold.read("handwriting")
# Table 2: accuracy and its standard deviation.
PRINTED = {(loss, nu): pair for loss in LOSSES for nu, pair in zip(MULTIPLIERS, _DATA["printed"][loss], strict=True)}


def specs(_folder: Path, seeds: Iterable[int], quick: bool, of: str) -> list[Spec]:
    """Return the runs on a dataset of handwriting, ``femnist`` or ``qmnist``.

    Table 2's grid with two hypotheses; one hypothesis without noise and with nu = 3, IFCA, and writers that train by
    themselves, for comparison. Where hypotheses are reborn, there are eight seeds of nu = 3, which come first, and as
    many of the paper's algorithm as it is, which come last. Quick are two rounds of a few, without comparison.
    """
    seeds = list(seeds)
    losses, nus = (LOSSES[:1], (0.0,)) if quick else (LOSSES, MULTIPLIERS)
    base = run_config(of, **({"rounds": 2, "clients_per_round": 4} if quick else {}))
    plain = base["strategy"].partition(" ")[0]
    arms: dict[tuple[Any, ...], dict[str, Any]] = {
        (loss, k, nu): {"loss": loss, "hypotheses": k, "noise-multiplier": nu}
        for loss in losses
        for k, nu in [*((2, nu) for nu in nus), *((1, nu) for nu in (0.0, 3.0) if nu in nus)]
    }
    if not quick:
        arms[(IFCA,)] = {"loss": losses[0], "strategy": "ifca", "noise-multiplier": 0.0}
        arms[(LOCAL_ONLY,)] = {"loss": losses[0], "strategy": LOCAL_ONLY}
    runs = [Spec.of(arm, base | own | {"seed": seed}) for seed in seeds for arm, own in arms.items()]
    if base["strategy"] != plain and not quick:
        reborn = {"loss": LOSSES[0], "noise-multiplier": COLLAPSE[2]}
        many = range(seeds[0], seeds[0] + COLLAPSE_SEEDS)
        first = [Spec.of(COLLAPSE, base | reborn | {"seed": seed}) for seed in many]
        last = [Spec.of(AS_PRINTED, base | reborn | {"strategy": plain, "seed": seed}) for seed in many]
        runs = [*first, *runs, *last]
    # The first eight are some of the grid's as well.
    return list({spec.name: spec for spec in runs}.values())


def page(results: Sequence[Result]) -> Page:
    """Return the tables of the runs of `specs`."""
    arms = by_arm(results)
    grid = {arm: runs for arm, runs in arms.items() if len(arm) == 3}
    rows = [_row(loss, k, nu, runs) for (loss, k, nu), runs in grid.items()]
    name = results[0].spec.config["dataset"]
    compared = {"by itself": (LOCAL_ONLY,), "FedAvg (k = 1, ν = 0)": (LOSSES[0], 1, 0.0), IFCA: (IFCA,)}
    shown = [(who, arms[arm]) for who, arm in compared.items() if arm in arms]
    shown += [(f"Algorithm 1, ν = {arm[2]:g}", runs) for arm, runs in grid.items() if arm[:2] == (LOSSES[0], 2)]
    accuracy = scaffold.section("Accuracy", _DATA, "accuracy", with_printed(rows), name=name)
    gets = scaffold.what_a_client_gets("Accuracy, cross entropy,", shown, 3, note=WORDS["same_split"])
    sections = [accuracy, *_collapse(arms), gets]
    return scaffold.page(f"Handwriting: {name}", sections, rows, results)


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


def with_printed(rows: Sequence[Row]) -> list[Row]:
    """Return rows with what the paper prints beside their accuracy, if anything, as text."""
    texts = ["" if row["printed"] is None else f"{row['printed']:.3f} ± {row['printed_sd']:.3f}" for row in rows]
    return [{**row, "printed_text": text} for row, text in zip(rows, texts, strict=True)]


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
    text = scaffold.say(_DATA, "collapse", nu=COLLAPSE[2])
    return [Section("Collapse", text, ("hypotheses", "told apart", "Rand index", "best round", "accuracy"), rows)]
