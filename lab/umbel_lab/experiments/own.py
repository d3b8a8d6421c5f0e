"""Hypotheses made each client's own, on rows that no method saw, beside clients that train alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from umbel import models
from umbel.data import find_dataset, open_dataset
from umbel.privacy.gate.policy import Personal
from umbel.protocol.run_config import RunConfig
from umbel.server.setup import Setup
from umbel.simulation import in_process
from umbel.simulation.baselines import local_only, personalised
from umbel.simulation.measured import Finished, Spec, split_by_seed
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel.strategies.differences import prior_of
from umbel_lab.experiments.tables import by_arm, page
from umbel_lab.output import Section, plus_minus

SEEDS = 10
ALONE = "alone"
METHODS = (
    Personal.NO, Personal.FINE_TUNE, Personal.CALIBRATE, Personal.MIXTURE, Personal.BAYES, Personal.AUTO,
)  # fmt: skip
ARMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "hospital-services, k = 1, pure epsilon 4": ("hospital-services", {}),
    "hospital-services, k = 1, pure epsilon 2": ("hospital-services", {"noise-multiplier": 7.0}),
    "hospital, k = 5, pure epsilon 4": ("hospital-epsilon-4", {}),
    "hospital, k = 5, ν = 3": ("hospital", {"rounds": 60}),
    "synthetic, k = 2, ν = 5": ("synthetic", {}),
    "synthetic, fedavg, ν = 5": ("synthetic", {"strategy": "fedavg", "hypotheses": 1}),
    "qmnist-features, k = 1, epsilon 4": ("qmnist-features-epsilon-4", {}),
}
"""Runs by name: a config, and what is changed of it."""
_TITLES = {"mean": "Mean over clients", "worst_decile": "Worst tenth of the clients"}


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
    played = in_process.play(config)
    hypotheses = played.state.hypotheses
    prior = prior_of(played.strategy.state, run.hypotheses)
    model = models.load_for(run, dataset.manifest)
    measured = {how.value: personalised(model, dataset, hypotheses, run, how, prior=prior) for how in METHODS}
    measured[ALONE] = local_only(model, dataset, run)
    scale = dataset.manifest.error_scale if model.metric.name == "rmse" else 1.0
    return Finished(
        {how: {name: scale * one[name] for name in ("mean", "worst_decile")} for how, one in measured.items()}
    )


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write the tables of the runs of `specs`: each method, and ``auto`` against what a client has without it."""
    names = [ALONE, *(how.value for how in METHODS)]
    rows, sections, behind = [], [], []
    for (arm,), runs in by_arm(results).items():
        higher = Setup.parse(runs[0].spec.config).model.metric.higher_is_better
        for what in _TITLES:
            values = {name: [run.measures[name][what] for run in runs] for name in names}
            means = {name: sum(own) / len(own) for name, own in values.items()}
            rows.append({"arm": arm, "what": what, "values": values, "behind": _behind(means, higher), **means})
    for what, title in _TITLES.items():
        own = [row for row in rows if row["what"] == what]
        shown = [
            [
                row["arm"],
                *(plus_minus(row["values"][name], 0 if row["arm"].startswith("hospital") else 3) for name in names),
            ]
            for row in own
        ]
        text = (
            "Each validation client chooses and trains on a random half of its rows, and is measured on the rest: "
            "dollars, RMSE, or accuracy. Mean ± standard deviation over seeds. Hypotheses of the last round."
        )
        sections.append(Section(title, text, ("run", *names), shown))
    for arm in dict.fromkeys(row["arm"] for row in rows):
        behind.append([arm, *(f"{row['behind']:+.1f} %" for row in rows if row["arm"] == arm)])
    text = (
        "How far `auto` is behind the better of the best hypothesis (`no`) and training alone, as a share of that "
        "figure. Below 0, it is ahead. Means over seeds, as above."
    )
    sections.append(Section("Behind the better of both", text, ("run", "mean", "worst tenth"), behind))
    rows = [{name: value for name, value in row.items() if name != "values"} for row in rows]
    page("Hypotheses made each client's own", sections, rows, results).write(folder)


def _behind(means: Mapping[str, float], higher: bool) -> float:
    """Return how far ``auto`` is behind the better of ``no`` and clients alone, in percent of that."""
    without = [means[Personal.NO.value], means[ALONE]]
    best = max(without) if higher else min(without)
    share = means[Personal.AUTO.value] / best - 1
    return 100 * (-share if higher else share)
