"""What a guarantee costs in accuracy: measured error against the epsilon of a client, over its whole training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbel.data import find_dataset, open_dataset
from umbel.privacy.accounting.guarantee import DELTA
from umbel.protocol.errors import ConfigError
from umbel.research.experiments.runs import Finished, Spec, finish, split_by_seed
from umbel.research.experiments.sweep import FIRST_SEED, Result
from umbel.research.experiments.tables import by_arm, page
from umbel.research.output import Columns, Section, figure, numbers, series, spread
from umbel.simulation.in_process import run_config

SEEDS = 10
_COUNTS = 2.0  # choice-epsilon with which a site's counts are hardly disturbed
SITES = 3  # among which the clients are dealt out, where sites release


@dataclass(frozen=True)
class Task:
    """What is learnt, and how it is told; ``configs/NAME-epsilon-E.toml`` has the settings for each epsilon."""

    name: str
    epsilons: tuple[int, ...]
    pure: bool  # whether epsilon is pure, or at `umbel.privacy.accounting.guarantee.DELTA`
    parameters: int
    plain: Mapping[
        str, Mapping[str, Any]
    ]  # runs without noise by name: their changes of the largest epsilon's settings
    multipliers: tuple[float, ...]  # nu of the paper's heuristic
    metric: str
    digits: int
    shuffled: bool  # whether each seed draws which clients train; not where several are of one person


HOSPITAL = Task(
    "hospital", (2, 4, 8, 16), True, 11, {"k = 1": {"hypotheses": 1}, "k = 5": {}}, (1.0, 3.0, 10.0),
    "RMSE in dollars", 0, True,
)  # fmt: skip
HANDWRITING = Task("qmnist-features", (2, 4, 8), False, 100, {"k = 1": {}}, (3.0, 10.0, 30.0), "accuracy", 3, False)
TASKS = {task.name: task for task in (HOSPITAL, HANDWRITING)}

CLIENT, OPEN, ONE, SITE = "client release, private choice", "client release, open choice", "k = 1", "site release"
HEURISTIC, PLAIN = "paper's clip norm, open choice", "no noise"


def specs(
    folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False, task: str = "hospital"
) -> list[Spec]:
    """Return the runs of a task, each arm at each epsilon; data whose split the seed draws are written to `folder`."""
    if task not in TASKS:
        text = f"there is no frontier of {task!r}; name one of {', '.join(TASKS)}"
        raise ConfigError(text, code="config.unknown-experiment")
    own = TASKS[task]
    points = _points(own, own.epsilons[-1:] if quick else own.epsilons)
    data, drawn = points[0][-1]["dataset"], range(first, first + seeds)
    return [
        Spec.of((task, arm, label), config | {"dataset": path, "seed": seed})
        for seed, path in (split_by_seed(data, folder, drawn) if own.shuffled else ((one, data) for one in drawn))
        for arm, label, config in points
    ]


def play(config: Mapping[str, Any]) -> Finished:
    """Do a run, over several sites where sites release."""
    return finish(config, nodes=SITES if config["strategy"] == "site-average" else 1)


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write the table and the picture of the runs of `specs`."""
    task = TASKS[results[0].spec.arm[0]]
    manifest = open_dataset(find_dataset(results[0].spec.config["dataset"])).manifest
    scale = float(manifest.units.get("target", {}).get("scale", 1.0))
    rows = [_row(task, arm, label, runs, scale) for (_, arm, label), runs in by_arm(results).items()]
    what = "pure" if task.pure else f"at delta {DELTA:g}"
    text = (
        f"{task.metric} of all validation clients under their best hypothesis, of the round of lowest validation loss; "
        f"mean ± standard deviation over seeds. Epsilon is {what}, between any two data sets of a client, over its "
        f"whole training, its choice included. Where there is no guarantee it says none, and the paper's budget stands "
        f"alone. Sites: the clients are dealt out among {SITES}, which their clients trust."
    )
    columns: Columns = {
        "who protects what": "arm",
        "setting": "label",
        "epsilon": "epsilon_text",
        "paper's budget": "paper_text",
        task.metric: lambda row: spread(row, "mean", task.digits),
        "worst seed": f"worst:,.{task.digits}f",
        "last round": lambda row: spread(row, "last", task.digits),
    }
    section = Section.of("Accuracy against epsilon", text, columns, rows)
    page(f"The frontier: {task.name}", [section], rows, results).write(folder)
    _picture(task, rows, folder)


def _points(task: Task, epsilons: Sequence[int]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return arm, label and configuration of every point."""
    points: list[tuple[str, str, dict[str, Any]]] = []
    for epsilon in epsilons:
        base, label = run_config(f"{task.name}-epsilon-{epsilon}"), f"epsilon {epsilon}"
        if base["hypotheses"] == 1:
            points += [(ONE, label, base), (SITE, label, base | {"strategy": "site-average"})]
            continue
        points += [(CLIENT, label, base), (OPEN, label, base | {"choice-epsilon": 0.0})]
        points.append((SITE, label, _by_sites(task, base, epsilon)))
        if task.pure:
            alone = {"hypotheses": 1, "noise-multiplier": 2 * task.parameters / epsilon}
            points.append((ONE, label, base | alone))
    base = run_config(f"{task.name}-epsilon-{task.epsilons[-1]}") | {"clipping": "update", "choice-epsilon": 0.0}
    points += [(HEURISTIC, f"nu {nu:g}", base | {"noise-multiplier": nu}) for nu in task.multipliers]
    points += [(PLAIN, what, base | {"noise-multiplier": 0.0, **changes}) for what, changes in task.plain.items()]
    return points


def _by_sites(task: Task, base: Mapping[str, Any], epsilon: int) -> dict[str, Any]:
    """Return settings for sites: their counts need more of a small epsilon than a client's choice does."""
    choice = max(base["choice-epsilon"], min(epsilon / 2, _COUNTS))
    nu = math.ceil(200 * task.parameters / (epsilon - choice)) / 100
    return {**base, "strategy": "site-average", "choice-epsilon": choice, "noise-multiplier": nu}


def _row(task: Task, arm: str, label: str, runs: Sequence[Result], scale: float) -> dict[str, Any]:
    measured = [run.measures["best"]["mean"] * scale for run in runs]
    epsilon, paper = (runs[0].measures[name] for name in ("pure_epsilon" if task.pure else "epsilon", "max_budget"))
    return {
        "arm": arm,
        "label": label,
        "epsilon": epsilon,
        "epsilon_text": "none" if epsilon is None else f"{epsilon:.3g}",
        "paper": paper,
        "paper_text": "none" if paper is None else f"{paper:.3g}",
        **numbers("mean", measured),
        "worst": max(measured) if task.pure else min(measured),
        **numbers("last", (run.measures["last"]["mean"] * scale for run in runs)),
        "runs": len(runs),
    }


def _picture(task: Task, rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    with figure(folder, "frontier", size=(7, 4)) as ax:
        formal = [arm for arm in (CLIENT, ONE, SITE) if any(row["arm"] == arm for row in rows)]
        for i, arm in enumerate(formal):
            points = sorted((row["epsilon"], row["mean"], row["mean_sd"]) for row in rows if row["arm"] == arm)
            x, mean, deviation = zip(*points, strict=True)
            ax.errorbar(x, mean, deviation, capsize=3, label=arm, **series(i))
        for i, row in enumerate(row for row in rows if row["arm"] == PLAIN):
            style = {"color": "black", "linewidth": 0.8, "linestyle": ("--", ":")[i % 2]}
            ax.axhline(row["mean"], label=f"no noise, {row['label']}", **style)
        ax.set_xscale("log", base=2)
        ax.set(xlabel="epsilon of a client, whole training, any two data sets", ylabel=task.metric)
        ax.legend()
