"""Table 2 of the group privacy paper at full length: all images of a writer, up to 500 rounds (Sec. 5.3).

No run stops early. When the paper's patience would have stopped one is read off its history, so that one run gives both
figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from umbel.simulation.in_process import run_config
from umbel.simulation.sweep import Result, Spec
from umbel_lab.experiments import scaffold
from umbel_lab.experiments.handwriting import LOSSES, PRINTED, with_printed
from umbel_lab.output import Page, Section, mean, numbers

SEEDS = 3
PATIENCE = 5
"""Validations without a better loss after which the paper stops."""
_DATA = scaffold.read("femnist_full")
_GRID = _DATA["grid"]
_STEP = 0.2

play = scaffold.resumable


def specs(_folder: Path, seeds: Iterable[int], quick: bool, _of: str) -> list[Spec]:
    """Return the runs, those first that tell most; quick are six rounds of four clients, without noise."""
    seeds = list(seeds)
    base = run_config("femnist", local_epochs=1, patience=0)
    if quick:
        changes = {"rounds": 6, "clients-per-round": 4, "loss": LOSSES[0], "seed": seeds[0], "noise-multiplier": 0.0}
        return [Spec.of((LOSSES[0], 0.0, 4), base | changes)]

    def one(loss: str, nu: float, seed: int, clients: int = _GRID["clients"], **change: Any) -> Spec:
        own = {"loss": loss, "seed": seed, "noise-multiplier": nu, "clients-per-round": clients}
        own["step-size"] = _DATA["steps"][loss].get(f"{nu:g}", _STEP)
        return Spec.of((loss, nu, clients, *chain(*change.items())), base | own | change)

    runs = [one(loss, nu, seed) for seed in seeds for loss in LOSSES for nu in _GRID["order"]]
    runs += [one(entry["loss"], entry["nu"], seeds[0], **entry["change"]) for entry in _DATA["reasons"]]
    runs += [one(loss, nu, seeds[0], _GRID["many-clients"]) for nu in _GRID["many"] for loss in LOSSES]
    return runs


def with_patience(history: Sequence[Mapping[str, Any]]) -> tuple[float, int]:
    """Return the metric of the best round up to where `PATIENCE` stops the run, and that last round."""
    lowest, metric, stale, last = math.inf, math.nan, 0, 0
    for entry in history:
        if entry["loss"] is None:
            continue
        stale, last = stale + 1, entry["number"]
        if entry["loss"] < lowest:
            lowest, metric, stale = entry["loss"], entry["metric"], 0
        if stale == PATIENCE:
            break
    return metric, last


def page(results: Sequence[Result]) -> Page:
    """Return the tables of the runs of `specs`, or of those of them that are done."""
    arms = scaffold.by_arm(results)
    order = sorted(arms, key=lambda arm: (len(arm), arm[2], LOSSES.index(arm[0]), arm[1]))
    found = [(_row(arm, arms[arm]), arm) for arm in order]
    many = [row for row, arm in found if len(arm) == 3 and arm[2] == _GRID["many-clients"]]
    main = [row for row, arm in found if len(arm) == 3 and row not in many]
    other = [row for row, arm in found if len(arm) > 3]
    columns = _DATA["columns"]["accuracy"]
    kinds = {
        "Accuracy": ("accuracy", main, columns),
        "Many clients": ("many", many, columns),
        "Reasons": ("reasons", other, {"dataset": "dataset", **columns}),
    }
    words = {"patience": PATIENCE, "clients": _GRID["many-clients"]}
    sections = [
        Section.of(title, scaffold.say(_DATA, key, **words), shown, with_printed(rows))
        for title, (key, rows, shown) in kinds.items()
        if rows or key == "accuracy"
    ]
    return scaffold.page("Handwriting: Table 2 at full length", sections, [row for row, _ in found], results)


def _row(arm: tuple[Any, ...], runs: Sequence[Result]) -> dict[str, Any]:
    loss, nu, clients = arm[:3]
    printed, deviation = PRINTED[loss, nu]
    stopped = [with_patience(run.history) for run in runs]
    best = [run.measures["best"] for run in runs]
    return {
        "loss": loss,
        "nu": nu,
        "clients": clients,
        "dataset": runs[0].spec.config["dataset"],
        "step": runs[0].spec.config["step-size"],
        "runs": len(runs),
        **numbers("accuracy", (one["mean"] for one in best)),
        "best_round": mean(run.measures["best_round"] for run in runs),
        **numbers("patience", (metric for metric, _ in stopped)),
        "stopped": mean(last for _, last in stopped),
        "printed": printed,
        "printed_sd": deviation,
        "difference": mean(one["mean"] for one in best) - printed,
        "worst_decile": mean(one["worst_decile"] for one in best),
        "last_round": mean(run.measures["last"]["mean"] for run in runs),
        **numbers("rand_index", (one["rand_index"] for one in best)),
    }
