"""Secure sums over several sites, beside one sum that all trust and each site's own sum, at the same guarantee."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.accounting.plan import Task, plan_for
from umbel.privacy.gate.policy import Personal
from umbel.privacy.mechanisms.discrete_gaussian import DiscreteGaussian
from umbel.simulation.in_process import run_config
from umbel.simulation.measured import Finished
from umbel.simulation.sweep import Result
from umbel_lab.experiments import scaffold
from umbel_lab.experiments.scaffold import by_arm, by_seed
from umbel_lab.output import Page, Section, plus_minus

SEEDS = 10
SITES = 20
TRUSTED, SECURE, SITE, PLAIN = "one trusted sum", "secure sums", "site release", "no noise"
_STRATEGIES = {TRUSTED: "site-average", SECURE: "secure-average", SITE: "site-average"}
_DATA = scaffold.read("secure_sums")
TASKS = _DATA["tasks"]


def arms(quick: bool, _of: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the arms by task, epsilon and who adds the noise."""
    arms = {}
    for title, task in TASKS.items():
        base = run_config(task["config"]) | {
            "mechanism": DiscreteGaussian.name, "clipping": "public", "choice-epsilon": 0.0, "restarts": 1,
            **task.get("changes", {}),
        }  # fmt: skip
        clients, times = base["clients-per-round"], base["max-participations"] or base["rounds"]
        planned = Task(task["parameters"], base["hypotheses"], clients, clients, DiscreteGaussian.name, sites=1)
        short = {"rounds": 2} if quick else {}
        for epsilon in task["epsilons"]:
            noise = plan_for(planned, epsilon, DELTA, times, choice_epsilon=0.0).release.noise_multiplier
            for arm, strategy in _STRATEGIES.items():
                nodes = 1 if arm == TRUSTED else SITES
                changes = {"strategy": strategy, "noise-multiplier": noise, "min-nodes": nodes}
                arms[title, f"{epsilon:g}", arm] = base | short | changes
        plain = {"strategy": "site-average", "noise-multiplier": 0.0, "min-nodes": 1}
        arms[title, "none", PLAIN] = base | short | plain
    return arms


def play(config: Mapping[str, Any]) -> Finished:
    """Do a run over as many sites as it waits for, and personalise what it learnt."""
    return scaffold.finish_and_personalise(config, config["min-nodes"])


def page(results: Sequence[Result]) -> Page:
    """Return the table of the runs of `arms`."""
    rows, shown = [], []
    arms = by_arm(results)
    for (title, epsilon, arm), runs in arms.items():
        values, trusted = _measured(runs), _measured(arms.get((title, epsilon, TRUSTED), ()))
        # Relative to the mean over seeds: a mean of ratios would be above 1 without any difference.
        away = [100 * (values[seed] - one) / mean(trusted.values()) for seed, one in trusted.items() if seed in values]
        row = {"task": title, "epsilon": epsilon, "arm": arm, "value": mean(values.values()), "away": away}
        rows.append(row | {"measured_epsilon": runs[0].measures.get("epsilon"), "runs": len(runs)})
        change = "" if not away or arm == TRUSTED else f"{mean(away):+.2f} ± {_error(away):.2f}"
        shown.append([title, epsilon, arm, plus_minus(values.values(), TASKS[title]["digits"]), change])
    words = {"sites": SITES, "delta": DELTA, "mechanism": DiscreteGaussian.name, "auto": Personal.AUTO}
    text = scaffold.say(_DATA, "sums", **words)
    columns = ("task", "epsilon", "who adds the noise", "result", "% away from one trusted sum")
    return scaffold.page("Secure sums", [Section("Beside one trusted sum", text, columns, shown)], rows, results)


def _measured(runs: Sequence[Result]) -> dict[int, float]:
    """Return the error or accuracy of the runs' personal models, in the target's unit, by seed."""
    scale = scaffold.manifest_of(runs[0]).error_scale if runs else 1
    return {seed: scale * run.measures["last"]["own"]["mean"] for seed, run in by_seed(runs).items()}


def _error(values: Sequence[float]) -> float:
    """Return the standard error of a mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
