"""Hypotheses made each client's own, on rows that no method saw, beside clients that train alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from umbel import models
from umbel.data import find_dataset, open_dataset
from umbel.privacy.gate.policy import Personal
from umbel.protocol.run_config import RunConfig
from umbel.research.experiments.runs import Finished, Spec, split_by_seed
from umbel.research.experiments.sweep import FIRST_SEED, Result
from umbel.research.experiments.tables import by_arm, page
from umbel.research.output import Section, plus_minus
from umbel.simulation import in_process
from umbel.simulation.baselines import local_only, personalised

SEEDS = 10
ALONE = "alone"
METHODS = (
    Personal.NO, Personal.FINE_TUNE, Personal.CALIBRATE, Personal.MIXTURE, Personal.BAYES, Personal.AUTO,
)  # fmt: skip
_SERVICES = {
    "dataset": "hospital-services", "model": "", "loss": "", "hypotheses": 1, "choice-epsilon": 0.0, "rounds": 10,
    "clients-per-round": 206, "clip-norm": 0.5, "clip-norm-decay": 0.8,
}  # fmt: skip
ARMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "hospital-services, k = 1, pure epsilon 4": ("hospital-epsilon-4", {**_SERVICES, "noise-multiplier": 3.5}),
    "hospital-services, k = 1, pure epsilon 2": ("hospital-epsilon-4", {**_SERVICES, "noise-multiplier": 7.0}),
    "hospital, k = 5, pure epsilon 4": ("hospital-epsilon-4", {}),
    "hospital, k = 5, ν = 3": ("hospital", {"rounds": 60}),
    "synthetic, k = 2, ν = 5": ("synthetic", {}),
    "synthetic, fedavg, ν = 5": ("synthetic", {"strategy": "fedavg", "hypotheses": 1}),
    "qmnist-features, k = 1, epsilon 4": ("qmnist-features-epsilon-4", {}),
}
"""Runs by name: a config, and what is changed of it."""


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs; on the hospital datasets, each on a split that its seed draws."""
    runs = []
    for arm, (base, changes) in ARMS.items():
        config = in_process.run_config(base) | dict(changes) | ({"rounds": 2} if quick else {})
        drawn = range(first, first + seeds)
        shuffled = config["dataset"].startswith("hospital")
        data = split_by_seed(config["dataset"], folder, drawn) if shuffled else ((s, config["dataset"]) for s in drawn)
        runs += [Spec.of((arm,), config | {"dataset": path, "seed": seed}) for seed, path in data]
    return runs


def play(config: Mapping[str, Any]) -> Finished:
    """Do a run; return mean and worst decile of the held-out metric of each method, in the target's unit."""
    run, dataset = RunConfig.parse(dict(config)), open_dataset(find_dataset(config["dataset"]))
    hypotheses = in_process.play(config).state.hypotheses
    model = models.load_for(run, dataset.manifest)
    measured = {how.value: personalised(model, dataset, hypotheses, run, how) for how in METHODS}
    measured[ALONE] = local_only(model, dataset, run)
    scale = float(dataset.manifest.units.get("target", {}).get("scale", 1.0)) if model.metric.name == "rmse" else 1.0
    return Finished(
        {how: {name: scale * one[name] for name in ("mean", "worst_decile")} for how, one in measured.items()}
    )


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write the table of the runs of `specs`: of the mean over clients, and of the worst tenth."""
    names = [ALONE, *(how.value for how in METHODS)]
    rows, sections = [], []
    for what, title in (("mean", "Mean over clients"), ("worst_decile", "Worst tenth of the clients")):
        shown = []
        for (arm,), runs in by_arm(results).items():
            values = {name: [run.measures[name][what] for run in runs] for name in names}
            digits = 0 if arm.startswith("hospital") else 3
            shown.append([arm, *(plus_minus(values[name], digits) for name in names)])
            rows.append({"arm": arm, "what": what, **{name: sum(own) / len(own) for name, own in values.items()}})
        text = (
            "Each validation client chooses and trains on half of its rows, and is measured on the rest: dollars, "
            "RMSE, or accuracy. Mean ± standard deviation over seeds. Hypotheses of the last round."
        )
        sections.append(Section(title, text, ("run", *names), shown))
    page("Hypotheses made each client's own", sections, rows, results).write(folder)
