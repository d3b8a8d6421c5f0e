"""Methods of personalisation under each guarantee: client, site, secure and row release at the same epsilons.

One run serves all methods that make its model each client's own at home, which costs no privacy. MR-MTL has a run with
its proximal term, and Algorithm 1, IFCA and CFL have runs with several models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import torch

from umbel import models, strategies
from umbel.data import find_dataset, open_dataset
from umbel.models.optimizers import descent_of
from umbel.nodes.differences import prior_of
from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.accounting.plan import RowTask, Task, plan_for, row_plan_for, usual_choice
from umbel.privacy.gate.policy import Personal
from umbel.privacy.mechanisms.discrete_gaussian import DiscreteGaussian
from umbel.protocol.release import LAPLACE
from umbel.protocol.run_config import RowSettings, RunConfig
from umbel.server.setup import Setup
from umbel.simulation import in_process
from umbel.simulation.baselines import local_only, personalised
from umbel.simulation.measured import Finished, Spec
from umbel.simulation.sweep import Result
from umbel_lab.experiments import scaffold
from umbel_lab.output import Page, Row, Section, mean, plus_minus

SEEDS = 3
EPSILONS = (1.0, 4.0, 8.0)
SITES = 3
GROUPS = 3
"""Models of Algorithm 1 and IFCA, and the most of CFL."""
_DATA = scaffold.read("methods")
TASKS = _DATA["tasks"]

NONE, CLIENT, SITE, SECURE, ROWS = "no noise", "client", "site", "secure", "rows"
RELEASES = (NONE, CLIENT, SITE, SECURE, ROWS)
ALONE, ONE, MR_MTL, ALGORITHM, IFCA, CFL = "alone", "one model", "MR-MTL", "Algorithm 1", "IFCA", "CFL"
SPLITTING = "umbel_lab.strategies:ClusteredFL"
AT_HOME = {
    "Ditto": "umbel_lab.personal:ditto", "APFL": "umbel_lab.personal:apfl", "FedRep": "umbel_lab.personal:fedrep",
    "kNN-Per": "umbel_lab.personal:knn_per", "auto": Personal.AUTO,
}  # fmt: skip
COLUMNS = (ALONE, ONE, *AT_HOME, MR_MTL, ALGORITHM, f"{ALGORITHM}, auto", IFCA, CFL)
_Guarantee = tuple[str, str, str]  # the dataset, the release and epsilon
_Values = Mapping[_Guarantee, Mapping[str, Mapping[int, Mapping[str, float]]]]  # by column and seed


# --- runs


def specs(folder: Path, seeds: Iterable[int], quick: bool, _of: str) -> list[Spec]:
    """Return the runs: each seed splits the hospitals."""
    found, epsilons = list[Spec](), EPSILONS[-1:] if quick else EPSILONS
    guarantees = [(NONE, 0.0), *((release, one) for release in RELEASES[1:] for one in epsilons)]
    for title, task in list(TASKS.items())[: 1 if quick else None]:
        base = in_process.run_config(task["config"]) | ({"rounds": 2} if quick else {})
        base |= {"hypotheses": 1, "choice-epsilon": 0.0, "restarts": 1, "clipping": "public", "noise-multiplier": 0.0}
        for seed in seeds:
            path = scaffold.draw_data(base["dataset"], folder, seed)
            own = base | {"dataset": path, "seed": seed}
            manifest = open_dataset(find_dataset(path)).manifest
            own["clients-per-round"] = min(own["clients-per-round"], manifest.train)
            parameters = models.load_for(RunConfig.parse(own), manifest).num_parameters
            for release, epsilon in guarantees:
                for name, changes in _programs(task, release).items():
                    config = _protected(task, own | changes, release, epsilon, parameters, manifest.train)
                    found.append(Spec.of((title, release, f"{epsilon:g}", name), config))
    return found


def _programs(task: Mapping[str, Any], release: str) -> dict[str, dict[str, Any]]:
    """Return what is trained under a release: the changes of the settings of one model."""
    found: dict[str, dict[str, Any]] = {
        ONE: {},
        MR_MTL: {"optimizer": f"sgd proximal={task['penalty']!r}"},
        ALGORITHM: {"hypotheses": GROUPS},
    }
    if release == NONE:
        found[IFCA] = {"hypotheses": GROUPS, "strategy": "ifca"}
    if release not in (SITE, SECURE):
        found[CFL] = {"hypotheses": GROUPS, "strategy": SPLITTING}
    return found


def _protected(
    task: Mapping[str, Any], config: dict[str, Any], release: str, epsilon: float, parameters: int, clients: int
) -> dict[str, Any]:
    """Return a run's settings with the noise that (epsilon, DELTA) over the whole run needs."""
    if release == NONE:
        return config
    run, times = RunConfig.parse(config), config["max-participations"]
    hypotheses = strategies.make(run).fewest_hypotheses
    choice = usual_choice(epsilon, times) if hypotheses > 1 else 0.0
    found = config | {"choice-epsilon": choice}
    if release == ROWS:
        steps, clip = task["by_rows"]["local-steps"], task["by_rows"]["clip"]
        planned = RowTask(task["rows"], 1.0, steps, times, hypotheses, choice)
        noise = row_plan_for(planned, epsilon, DELTA).noise_multiplier
        rows = str(RowSettings(clip, noise, 1.0, float(task["rows"])))
        return found | {"protect": "rows", "clipping": "update", "local-steps": steps, "rows": rows}
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
    ways: dict[str, str | None]  # None: clients train alone
    if run.strategy_name in ("ifca", SPLITTING):
        ways = {IFCA if run.strategy_name == "ifca" else CFL: Personal.NO}
    elif run.hypotheses != 1:
        ways = {ALGORITHM: Personal.NO, f"{ALGORITHM}, auto": Personal.AUTO}
    elif descent_of(run.optimizer).proximal:
        ways = {MR_MTL: "umbel_lab.personal:mr_mtl"}
    else:
        ways = {ALONE: None, ONE: Personal.NO, **AT_HOME}
    measured = dict[str, Any]()
    for column, how in ways.items():
        start = process_time()
        if how is None:
            metric = local_only(setup.model, dataset, run)
        else:
            metric = personalised(setup.model, dataset, hypotheses, run, how, prior=prior)
        seconds = process_time() - start + (trained if how else 0.0)
        measured[column] = {what: scale * metric[what] for what in ("mean", "worst_decile")} | {"seconds": seconds}
    return Finished(measured)


# --- tables


def page(results: Sequence[Result]) -> Page:
    """Return the tables of the runs of `specs`, and how often a method beats MR-MTL under row release."""
    values = dict[_Guarantee, dict[str, dict[int, Mapping[str, float]]]]()
    for (title, release, epsilon, _), runs in scaffold.by_arm(results).items():
        cells = values.setdefault((title, release, epsilon), {})
        for run in runs:
            for column, measures in run.measures.items():
                cells.setdefault(column, {})[run.spec.config["seed"]] = measures
    others = [column for column in COLUMNS if column not in (MR_MTL, IFCA)]
    columns = ("dataset", "release", "ε", *COLUMNS)
    sections = [
        Section(
            "Mean over clients", scaffold.say(_DATA, "mean", delta=DELTA, sites=SITES), columns, _shown(values, "mean")
        ),
        Section("Worst tenth of the clients", scaffold.say(_DATA, "worst"), columns, _shown(values, "worst_decile")),
        Section(
            "Against MR-MTL", scaffold.say(_DATA, "against"), ("dataset", "ε", *others), count_wins(values, others)
        ),
        Section("Seconds", scaffold.say(_DATA, "seconds"), columns, _shown(values, "seconds")),
    ]
    rows: list[Row] = [
        {"dataset": title, "release": release, "epsilon": epsilon, "method": column, "runs": len(seeds)}
        | {what: mean(one[what] for one in seeds.values()) for what in ("mean", "worst_decile", "seconds")}
        for (title, release, epsilon), cells in values.items()
        for column, seeds in cells.items()
    ]
    return scaffold.page("Methods of personalisation, by guarantee", sections, rows, results)


def _shown(values: _Values, what: str) -> list[list[str]]:
    rows = []
    for (title, release, epsilon), cells in values.items():
        digits = 1 if what == "seconds" else TASKS[title]["digits"]
        shown = [
            plus_minus([one[what] for one in cells[column].values()], digits) if column in cells else ""
            for column in COLUMNS
        ]
        rows.append([title, release, "none" if release == NONE else epsilon, *shown])
    return rows


def count_wins(values: _Values, others: Sequence[str]) -> list[list[str]]:
    """Count the seeds in which each method beats MR-MTL under row release, in mean and worst decile."""
    return [
        [title, epsilon]
        + [scaffold.seeds_won(cells.get(column, {}), cells[MR_MTL], -1 if title.endswith("dollars") else 1)
           for column in others]
        for (title, release, epsilon), cells in values.items()
        if release == ROWS and MR_MTL in cells
    ]  # fmt: skip
