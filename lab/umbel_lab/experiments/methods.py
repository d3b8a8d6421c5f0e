"""Methods of personalisation under each guarantee: client, site, secure and row release at the same epsilons.

One run serves all methods that make its model each client's own at home, which costs no privacy. MR-MTL has a run with
its proximal term, and Algorithm 1, IFCA and CFL have runs with several models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import torch

from umbel import models, strategies
from umbel.data import find_dataset, open_dataset
from umbel.models.optimizers import descent_of
from umbel.nodes.differences import prior_of
from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.accounting.plan import Task, plan_for, usual_choice
from umbel.privacy.accounting.row_plan import RowTask, row_plan_for
from umbel.privacy.gate.policy import Personal
from umbel.privacy.mechanisms.discrete_gaussian import DiscreteGaussian
from umbel.protocol.release import LAPLACE
from umbel.protocol.run_config import RowSettings, RunConfig
from umbel.server.setup import Setup
from umbel.simulation import in_process
from umbel.simulation.baselines import local_only, personalised
from umbel.simulation.measured import Finished, Spec
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.experiments.runs import drawn, seeds_won
from umbel_lab.experiments.shipped_tables import imported
from umbel_lab.experiments.tables import by_arm, page
from umbel_lab.output import Row, Section, average, plus_minus

SEEDS = 3
EPSILONS = (1.0, 4.0, 8.0)
SITES = 3
ERRORS = "dollars", "years"
"""Ends of titles of data sets whose metric is an error, where lower is better."""
GROUPS = 3
"""Models of Algorithm 1 and IFCA, and the most of CFL."""

NONE, CLIENT, SITE, SECURE, ROWS = "no noise", "client", "site", "secure", "rows"
RELEASES = (NONE, CLIENT, SITE, SECURE, ROWS)
ONE, MR_MTL, ALGORITHM, IFCA, CFL = "one model", "MR-MTL", "Algorithm 1", "IFCA", "CFL"
ALONE = "alone"
SPLITTING = "umbel_lab.strategies:ClusteredFL"
AT_HOME = {
    "Ditto": "umbel_lab.personal:ditto", "APFL": "umbel_lab.personal:apfl", "FedRep": "umbel_lab.personal:fedrep",
    "kNN-Per": "umbel_lab.personal:knn_per", "auto": Personal.AUTO,
}  # fmt: skip
COLUMNS = (ALONE, ONE, *AT_HOME, MR_MTL, ALGORITHM, f"{ALGORITHM}, auto", IFCA, CFL)
MISSING = (
    "umbel has no pFedMe. These models have a single layer: FedRep then trains all of it, as plain fine-tuning does, "
    "FedPer, which keeps the head, would share nothing, and kNN-Per compares features. IFCA's clients tell their "
    "choices, so it has no guarantee. A secure or site release has no CFL: it reads each client's update."
)


_Guarantee = tuple[str, str, str]  # the dataset, the release and epsilon
_Values = Mapping[_Guarantee, Mapping[str, Mapping[int, Mapping[str, float]]]]  # by column and seed


@dataclass(frozen=True)
class Compared:
    """A dataset, and the schedules of its runs.

    Attributes
    ----------
    title, config : str
        The settings of all but row release; without a name, umbel's own on the public table that begins the title.
    rows : int
        Rows of a typical client.
    base, by_rows : mapping
        Changes of the settings, and those of row release besides.
    penalty : float
        lambda of MR-MTL, which its run has as ``proximal``.
    """

    title: str
    config: str
    rows: int
    digits: int
    base: Mapping[str, Any]
    by_rows: Mapping[str, Any]
    penalty: float

    def settings(self) -> dict[str, Any]:
        """Return the settings of one model without noise."""
        base = in_process.run_config(self.config) if self.config else RunConfig().entries()
        own = {"hypotheses": 1, "choice-epsilon": 0.0, "restarts": 1, "clipping": "public", "noise-multiplier": 0.0}
        return base | own | dict(self.base)


# Schedules of row release and penalties were chosen on seed 100, at epsilon 1 and 4.
TASKS = (
    Compared(
        "hospital services, dollars", "hospital-services", 4, 0, {},
        {"local-steps": 5, "clip": 0.1}, 0.01,
    ),
    Compared(
        "handwriting, accuracy", "qmnist-features-epsilon-8", 30, 3, {},
        {"local-steps": 1, "clip": 1.0}, 1.0,
    ),
    Compared(
        "FEMNIST digits, accuracy", "qmnist-features-epsilon-8", 110, 3, {"dataset": "femnist-features"},
        {"local-steps": 5, "clip": 0.3}, 0.001,
    ),
    Compared(
        "breast-cancer", "", 19, 3,
        {"rounds": 10, "max-participations": 10, "local-epochs": 1, "batch-size": 0, "step-size": 0.5,
         "clip-norm": 1.0, "clip-norm-decay": 1.0},
        {"local-steps": 5, "clip": 1.0}, 0.1,
    ),
    Compared(
        "gapminder, years", "", 12, 2,
        {"rounds": 10, "max-participations": 10, "local-epochs": 1, "batch-size": 0, "step-size": 0.1,
         "clip-norm": 0.1, "clip-norm-decay": 1.0, "clients-per-round": 114},
        {"local-steps": 20, "clip": 0.1}, 0.001,
    ),
)  # fmt: skip


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs: each seed splits the hospitals and deals the rows of the public table."""
    found, every = list[Spec](), range(first, first + seeds)
    for task in TASKS[:1] if quick else TASKS:
        base = task.settings() | ({"rounds": 2} if quick else {})
        if not task.config:
            data = [(seed, str(imported(task.title.partition(",")[0], seed, folder / "data"))) for seed in every]
        else:
            data = list(drawn(base["dataset"], folder, every))
        for seed, path in data:
            own = base | {"dataset": path, "seed": seed}
            manifest = open_dataset(find_dataset(path)).manifest
            own["clients-per-round"] = min(own["clients-per-round"], manifest.train)
            parameters = models.load_for(RunConfig.parse(own), manifest).num_parameters
            for release, epsilon in _guarantees(quick):
                for name, changes in _programs(task, release).items():
                    config = _protected(task, own | changes, release, epsilon, parameters, manifest.train)
                    found.append(Spec.of((task.title, release, f"{epsilon:g}", name), config))
    return found


def _guarantees(quick: bool) -> list[tuple[str, float]]:
    epsilons = EPSILONS[-1:] if quick else EPSILONS
    return [(NONE, 0.0), *((release, one) for release in RELEASES[1:] for one in epsilons)]


def _programs(task: Compared, release: str) -> dict[str, dict[str, Any]]:
    """Return what is trained under a release: the changes of the settings of one model."""
    found: dict[str, dict[str, Any]] = {
        ONE: {},
        MR_MTL: {"optimizer": f"sgd proximal={task.penalty!r}"},
        ALGORITHM: {"hypotheses": GROUPS},
    }
    if release == NONE:
        found[IFCA] = {"hypotheses": GROUPS, "strategy": "ifca"}
    if release not in (SITE, SECURE):
        found[CFL] = {"hypotheses": GROUPS, "strategy": SPLITTING}
    return found


def _protected(
    task: Compared, config: Mapping[str, Any], release: str, epsilon: float, parameters: int, clients: int
) -> dict[str, Any]:
    """Return a run's settings with the noise that (epsilon, DELTA) over the whole run needs."""
    if release == NONE:
        return dict(config)
    run, times = RunConfig.parse(config), config["max-participations"]
    hypotheses = strategies.make(run).fewest_hypotheses
    choice = usual_choice(epsilon, times) if hypotheses > 1 else 0.0
    found = dict(config) | {"choice-epsilon": choice}
    if release == ROWS:
        found |= {"protect": "rows", "clipping": "update", "local-steps": task.by_rows["local-steps"]}
        planned = RowTask(task.rows, 1.0, found["local-steps"], times, hypotheses, choice)
        noise = row_plan_for(planned, epsilon, DELTA).noise_multiplier
        return found | {"rows": str(RowSettings(task.by_rows["clip"], noise, 1.0, float(task.rows)))}
    mechanism = LAPLACE if release == CLIENT else DiscreteGaussian.name
    sites = {CLIENT: 0, SITE: SITES, SECURE: 1}[release]
    planned_for = Task(parameters, hypotheses, clients, config["clients-per-round"], mechanism, sites)
    noise = plan_for(planned_for, epsilon, DELTA, times, choice).release.noise_multiplier
    strategy = {CLIENT: config["strategy"], SITE: "site-average", SECURE: "secure-average"}[release]
    return found | {"mechanism": mechanism, "noise-multiplier": noise, "strategy": strategy}


def play(config: Mapping[str, Any]) -> Finished:
    """Do a run; return by column the mean, the worst decile and the seconds of a core, run included.

    Figures are of the held-out metric, in the target's unit.
    """
    torch.set_num_threads(1)
    began = process_time()
    played = in_process.play(config, nodes=SITES if config["strategy"] in ("site-average", "secure-average") else 1)
    trained = process_time() - began
    setup, hypotheses = Setup.parse(dict(config)), played.state.hypotheses
    run, dataset = setup.config, open_dataset(find_dataset(config["dataset"]))
    prior = prior_of(played.strategy.state, run.hypotheses if isinstance(run.hypotheses, int) else 1)
    scale = dataset.manifest.error_scale if setup.model.metric.name == "rmse" else 1
    measured = dict[str, Any]()

    def measure(column: str, how: str | None) -> None:
        start = process_time()
        if how is None:
            one = local_only(setup.model, dataset, run)
        else:
            one = personalised(setup.model, dataset, hypotheses, run, how, prior=prior)
        seconds = process_time() - start + (trained if how else 0.0)
        measured[column] = {what: scale * one[what] for what in ("mean", "worst_decile")} | {"seconds": seconds}

    if run.strategy_name in ("ifca", SPLITTING):
        measure(IFCA if run.strategy_name == "ifca" else CFL, Personal.NO)
    elif run.hypotheses != 1:
        measure(ALGORITHM, Personal.NO)
        measure(f"{ALGORITHM}, auto", Personal.AUTO)
    elif descent_of(run.optimizer).proximal:
        measure(MR_MTL, "umbel_lab.personal:mr_mtl")
    else:
        measure(ALONE, None)
        measure(ONE, Personal.NO)
        for column, how in AT_HOME.items():
            measure(column, how)
    return Finished(measured)


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write the tables of the runs of `specs`, and how often a method beats MR-MTL under row release."""
    values = dict[_Guarantee, dict[str, dict[int, Mapping[str, float]]]]()
    for (title, release, epsilon, _), runs in by_arm(results).items():
        cells = values.setdefault((title, release, epsilon), {})
        for run in runs:
            for column, one in run.measures.items():
                cells.setdefault(column, {})[run.spec.config["seed"]] = one
    sections = [
        Section(title, text, ("dataset", "release", "ε", *COLUMNS), _shown(values, what))
        for what, title, text in (
            ("mean", "Mean over clients", _text()),
            ("worst_decile", "Worst tenth of the clients", "As above, over the tenth that fares worst."),
            ("seconds", "Seconds", "Of a core, for a run and for the models of all validation clients after it."),
        )
    ]
    text = (
        "Seeds in which a method is better than MR-MTL under row release, in mean and in the worst tenth. The penalty "
        f"of MR-MTL, and the schedules of row release, were chosen on seed 100. {MISSING}"
    )
    others = [column for column in COLUMNS if column not in (MR_MTL, IFCA)]
    sections.insert(2, Section("Against MR-MTL", text, ("dataset", "ε", *others), _against(values, others)))
    rows: list[Row] = [
        {"dataset": title, "release": release, "epsilon": epsilon, "method": column, "runs": len(seeds)}
        | {what: average(one[what] for one in seeds.values())[0] for what in ("mean", "worst_decile", "seconds")}
        for (title, release, epsilon), cells in values.items()
        for column, seeds in cells.items()
    ]
    page("Methods of personalisation, by guarantee", sections, rows, results).write(folder)


def _text() -> str:
    return (
        "Each validation client chooses and trains on a random half of its rows, and is measured on the rest: RMSE in "
        "dollars or years, where lower is better, or the share of right labels. Mean ± standard deviation over seeds. "
        f"Epsilon is at delta {DELTA:g} over the whole run: of a client, or under row release of a row of a client. "
        "These two promise different things, and their figures cannot be ranked against each other. Models made at "
        f"home leave no node and get no noise. Site and secure release have {SITES} sites."
    )


def _digits(title: str) -> int:
    return next(task.digits for task in TASKS if task.title == title)


def _shown(values: _Values, what: str) -> list[list[str]]:
    found = []
    for (title, release, epsilon), cells in values.items():
        digits = 1 if what == "seconds" else _digits(title)
        shown = [
            plus_minus([one[what] for one in cells[column].values()], digits) if column in cells else ""
            for column in COLUMNS
        ]
        found.append([title, release, "none" if release == NONE else epsilon, *shown])
    return found


def _against(values: _Values, others: Sequence[str]) -> list[list[str]]:
    """Count the seeds in which each method beats MR-MTL under row release, in mean and worst decile."""
    found = []
    for (title, release, epsilon), cells in values.items():
        if release != ROWS or MR_MTL not in cells:
            continue
        sign, own, line = -1 if title.endswith(ERRORS) else 1, cells[MR_MTL], [title, epsilon]
        for column in others:
            line.append(seeds_won(cells.get(column, {}), own, sign))
        found.append(line)
    return found
