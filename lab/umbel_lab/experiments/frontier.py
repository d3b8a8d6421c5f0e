"""The cost of a guarantee in accuracy: measured error against the epsilon of a client, over its whole training.

Beside it stands what a client gets without one: by itself, and from methods that add no noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.gate.policy import Personal
from umbel.privacy.mechanisms.gaussian import calibrate
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import LAPLACE
from umbel.server.setup import Setup
from umbel.simulation.baselines import LOCAL_EPOCHS
from umbel.simulation.in_process import run_config
from umbel.simulation.measured import LOCAL_ONLY, STATES, Finished, Spec
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.experiments.runs import FINE_TUNE, HELD_OUT_ALONE, drawn, finish, made_own, seeds_won
from umbel_lab.experiments.tables import BEST_ROUND, SAME_CLIENTS, SAME_SPLIT, by_arm, manifest_of, page
from umbel_lab.output import Columns, Row, Section, figure, numbers, series, spread

SEEDS = 10
_COUNTS = 2.0  # choice-epsilon with which a site's counts are hardly disturbed
_CHOICE = 0.0875  # of epsilon for the choice among three hypotheses
_EPOCHS = 40  # local epochs with three hypotheses: the best of 17 settings at epsilon 4, tried on seeds 100 to 105
SITES = 3  # among which the clients are dealt out, where sites release
OWN = Personal.AUTO

CLIENT, OPEN, ONE, SITE = "client release, private choice", "client release, open choice", "k = 1", "site release"
THREE, CENTRAL = "client release, k = 3", "central DP-FedAvg, k = 1"
HEURISTIC, PLAIN = "paper's clip norm, open choice", "no noise"
ALONE, CFL, TUNED, ALGORITHM = "by itself", "CFL, k ≤ 7", "FedAvg, fine-tuned", "Algorithm 1, k = 5, ν = 3"

_SQUARED = {"loss": "mse", "step-size": 0.4}
_WITHOUT: Mapping[str, Mapping[str, Any]] = {
    ALONE: {"strategy": LOCAL_ONLY, **_SQUARED, "step-size": 0.8},
    TUNED: {"strategy": FINE_TUNE, "hypotheses": 1, "noise-multiplier": 0.0, **_SQUARED},
    CFL: {"strategy": "umbel_lab.strategies:ClusteredFL", "hypotheses": 7, "noise-multiplier": 0.0, **_SQUARED},
    ALGORITHM: {"hypotheses": 5, "noise-multiplier": 3.0, **_SQUARED},
}
"""Runs for hospitals without a guarantee, as changes of ``configs/hospital.toml``."""


Compared = tuple[str, dict[str, Any]]  # the settings' name and their changes


@dataclass(frozen=True)
class Task:
    """The task, and its description."""

    name: str
    config: str  # the settings' name, with a place for epsilon; one named as the task costs 2 n / nu
    epsilons: tuple[int, ...]
    pure: bool  # whether epsilon is pure, or at `umbel.privacy.accounting.guarantee.DELTA`
    parameters: int
    plain: Mapping[str, dict[str, Any]]  # runs without noise: their changes of the largest epsilon's settings
    multipliers: tuple[float, ...]  # nu of the paper's heuristic
    metric: str  # an error, or accuracy
    digits: int
    shuffled: bool  # whether each seed draws which clients train; not where several are of one person
    compared: Mapping[str, Compared] = field(default_factory=dict)  # who and a label: what has no guarantee

    def base(self, epsilon: int) -> dict[str, Any]:
        """Return the settings of client release for an epsilon."""
        base = run_config(self.config.format(epsilon))
        return base | {"noise-multiplier": 2 * self.parameters / epsilon} if self.config == self.name else base


def _compared(label: str, **changes: Any) -> dict[str, Compared]:
    """Return what hospitals get without a guarantee."""
    return {f"{who}, {label}": ("hospital", {**own, **changes}) for who, own in _WITHOUT.items()}


_NUMBER, _COLUMNS = "service as a number", "services as columns"
HOSPITAL = Task(
    "hospital", "hospital-epsilon-{}", (2, 4, 8, 16), True, 11, {"k = 1": {"hypotheses": 1}, "k = 5": {}},
    (1.0, 3.0, 10.0), "RMSE in dollars", 0, True, _compared(_NUMBER),
)  # fmt: skip
SERVICES = Task(
    "hospital-services", "hospital-services", (1, 2, 4, 8), True, 7, {"the same schedule": {"clipping": "public"}}, (),
    "RMSE in dollars", 0, True,
    _compared(_COLUMNS, **{"dataset": "hospital-services", "step-size": 0.2}) | _compared(_NUMBER),
)  # fmt: skip
HANDWRITING = Task(
    "qmnist-features", "qmnist-features-epsilon-{}", (2, 4, 8), False, 100, {"k = 1": {}}, (3.0, 10.0, 30.0),
    "accuracy", 3, False,
    {f"{ALONE}, the same features": ("qmnist-features-epsilon-8", {"strategy": LOCAL_ONLY, "step-size": 1.0})},
)  # fmt: skip
TASKS = {task.name: task for task in (HOSPITAL, SERVICES, HANDWRITING)}


def specs(
    folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False, task: str = "hospital"
) -> list[Spec]:
    """Return the runs of a task, each arm at each epsilon; data whose split the seed draws are written to `folder`."""
    if task not in TASKS:
        text = f"there is no frontier of {task!r}; name one of {', '.join(TASKS)}"
        raise ConfigError(text, code="config.unknown-experiment")
    own = TASKS[task]
    points = _points(own, own.epsilons[-1:] if quick else own.epsilons)
    found = []
    for name in dict.fromkeys(config["dataset"] for *_, config in points):
        for seed, path in drawn(name, folder, range(first, first + seeds)):
            found += [
                Spec.of((task, arm, label), config | {"dataset": path, "seed": seed})
                for arm, label, config in points
                if config["dataset"] == name
            ]
    return found


def play(config: Mapping[str, Any]) -> Finished:
    """Do a run, over several sites where sites release, and make what it learnt each client's own.

    The measures are those of `finish`, with ``own`` in each state (`umbel.simulation.baselines.personalised`).
    """
    # One sum that all trust is the release of one site; it alone has Gaussian noise here.
    several = config["strategy"] == "site-average" and config["mechanism"] == LAPLACE
    finished = finish(config, nodes=SITES if several else 1)
    if config["strategy"] in HELD_OUT_ALONE:
        for state in finished.measures.values():
            state["own"] = state.pop("held_out")
    elif finished.state is not None:
        for name, own in made_own(Setup.parse(dict(config)), finished.state, OWN, finished.kept).items():
            finished.measures[name]["own"] = own
    return finished


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write the tables and the picture of the runs of `specs`."""
    task = TASKS[results[0].spec.arm[0]]
    scale = manifest_of(results[0]).error_scale
    arms = {(arm, label): runs for (_, arm, label), runs in by_arm(results).items()}
    rows = [_row(task, arm, label, runs, scale) for (arm, label), runs in arms.items()]
    what = "pure" if task.pure else f"at delta {DELTA:g}"
    text = (
        f"{task.metric} of the validation clients of more than one row. A client picks its hypothesis and makes it its "
        f'own ("{OWN}", docs/guides/strategies.md) on a random half of its rows, and is measured on the rest: as it '
        "is, and made its own, each as the mean over clients and over the tenth that fares worst; mean ± standard "
        "deviation over seeds. Clients that train by themselves or further do so for "
        f"{LOCAL_EPOCHS} epochs. The last round leads; the best round, made each client's own, stands beside it. "
        f"{BEST_ROUND} Epsilon is {what}, between any two data sets of a client, over its whole training, its choice "
        f"included; that of central DP-FedAvg is at delta {DELTA:g} everywhere. Where there is no guarantee it says "
        f"none, and the paper's budget stands alone. Sites: the clients are dealt out among {SITES}, which their "
        "clients trust. Central DP-FedAvg: all clients trust one server, which adds Gaussian noise to the sum of their "
        f"clipped updates (McMahan et al., 2018). {SAME_CLIENTS if task.shuffled else SAME_SPLIT}"
    )

    def column(name: str) -> Any:
        return lambda row: spread(row, name, task.digits) if name in row else ""

    columns: Columns = {
        "who protects what": "arm",
        "setting": "label",
        "epsilon": "epsilon_text",
        "paper's budget": "paper_text",
        "made its own": column("own_last"),
        "worst decile": column("own_last_worst"),
        "as it is": column("held_out_last"),
        "as it is: worst decile": column("held_out_last_worst"),
        "best round": column("own_best"),
    }
    sections = [Section.of("Accuracy against epsilon", text, columns, rows), *_better(task, arms)]
    page(f"The frontier: {task.name}", sections, rows, results).write(folder)
    _picture(task, rows, folder)


def _points(task: Task, epsilons: Sequence[int]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return arm, label and configuration of every point."""
    points: list[tuple[str, str, dict[str, Any]]] = []
    for epsilon in epsilons:
        base, label = task.base(epsilon), f"epsilon {epsilon}"
        one = base | {"hypotheses": 1, "choice-epsilon": 0.0}
        if base["hypotheses"] == 1:
            points += [(ONE, label, base), (SITE, label, base | {"strategy": "site-average"})]
        else:
            points += [(CLIENT, label, base), (OPEN, label, base | {"choice-epsilon": 0.0})]
            points.append((SITE, label, _by_sites(task, base, epsilon)))
            if task.pure:
                choice = _CHOICE * epsilon
                nu = math.ceil(2000 * task.parameters / (epsilon - choice)) / 1000
                three = {"hypotheses": 3, "choice-epsilon": choice, "noise-multiplier": nu, "local-epochs": _EPOCHS}
                points.append((THREE, label, base | three))
                points.append((ONE, label, one | {"noise-multiplier": 2 * task.parameters / epsilon}))
        points.append((CENTRAL, label, one | _central(epsilon)))
    base = task.base(task.epsilons[-1]) | {"clipping": "update", "choice-epsilon": 0.0}
    points += [(HEURISTIC, f"nu {nu:g}", base | {"noise-multiplier": nu}) for nu in task.multipliers]
    points += [(PLAIN, what, base | {"noise-multiplier": 0.0, **changes}) for what, changes in task.plain.items()]
    for name, (settings, changes) in task.compared.items():
        who, _, label = name.rpartition(", ")
        points.append((who, label, run_config(settings) | changes))
    return points


def _central(epsilon: float) -> dict[str, Any]:
    """Return the changes for one sum a round that all clients trust, each client in one round."""
    nu = math.ceil(1000 * calibrate(epsilon, DELTA, 2.0)) / 1000
    return {"strategy": "site-average", "mechanism": "gaussian", "noise-multiplier": nu}


def _by_sites(task: Task, base: Mapping[str, Any], epsilon: int) -> dict[str, Any]:
    """Return settings for sites: their counts need more of a small epsilon than a client's choice does."""
    choice = max(base["choice-epsilon"], min(epsilon / 2, _COUNTS))
    nu = math.ceil(200 * task.parameters / (epsilon - choice)) / 100
    return {**base, "strategy": "site-average", "choice-epsilon": choice, "noise-multiplier": nu}


def _row(task: Task, arm: str, label: str, runs: Sequence[Result], scale: float) -> dict[str, Any]:
    pure = task.pure and arm != CENTRAL
    epsilon, paper = (runs[0].measures.get(name) for name in ("pure_epsilon" if pure else "epsilon", "max_budget"))
    row = {
        "arm": arm,
        "label": label,
        "epsilon": epsilon,
        "epsilon_text": "none" if epsilon is None else f"{epsilon:.3g}" + (f", δ {DELTA:g}" if arm == CENTRAL else ""),
        "paper": paper,
        "paper_text": "none" if paper is None else f"{paper:.3g}",
        "runs": len(runs),
    }
    for kind in ("own", "held_out"):
        for state in STATES:
            if found := [one for run in runs if (one := run.measures.get(state, {}).get(kind))]:
                row |= numbers(f"{kind}_{state}", (one["mean"] * scale for one in found))
                row |= numbers(f"{kind}_{state}_worst", (one["worst_decile"] * scale for one in found))
    return row


def _better(task: Task, arms: Mapping[tuple[str, str], Sequence[Result]]) -> Iterator[Section]:
    """Count the seeds in which what is made each client's own is better than what clients get without a guarantee."""
    rivals = [(arm, kind) for arm in arms for kind in ("held_out", "own") if arm[0] == CFL]
    rivals = [(arm, "own") for arm in arms if arm[0] == ALONE] + rivals
    if not rivals:
        return

    def by_seed(arm: tuple[str, str], kind: str) -> dict[int, dict[str, float]]:
        return {run.spec.config["seed"]: run.measures["last"][kind] for run in arms[arm]}

    rows, sign = [], 1 if task.metric == "accuracy" else -1
    for arm in (arm for arm in arms if arm[0] not in _WITHOUT):
        own, cells = by_seed(arm, "own"), [*arm]
        for rival, kind in rivals:
            cells.append(seeds_won(own, by_seed(rival, kind), sign))
        rows.append(cells)
    text = (
        "Seeds in which clients that make the last round's hypothesis their own are better off than without a "
        f"guarantee, in mean and in the worst decile. {SAME_CLIENTS if task.shuffled else SAME_SPLIT}"
    )
    names = [
        f"{who}, {label}" + (", made its own" if who == CFL and kind == "own" else "") for (who, label), kind in rivals
    ]
    yield Section("Better than without a guarantee", text, ("who protects what", "setting", *names), rows)


def _picture(task: Task, rows: Sequence[Row], folder: Path) -> None:
    with figure(folder, "frontier", size=(7, 4)) as ax:
        formal = [arm for arm in (CLIENT, THREE, ONE, SITE, CENTRAL) if any(row["arm"] == arm for row in rows)]
        for i, arm in enumerate(formal):
            points = sorted((row["epsilon"], row["own_last"], row["own_last_sd"]) for row in rows if row["arm"] == arm)
            x, mean, deviation = zip(*points, strict=True)
            ax.errorbar(x, mean, deviation, capsize=3, label=arm, **series(i))
        for i, row in enumerate(row for row in rows if row["arm"] == PLAIN):
            style = {"color": "black", "linewidth": 0.8, "linestyle": ("--", ":")[i % 2]}
            ax.axhline(row["own_last"], label=f"no noise, {row['label']}", **style)
        ax.set_xscale("log", base=2)
        ax.set(xlabel="epsilon of a client, whole training, any two data sets", ylabel=f"{task.metric}, made its own")
        ax.legend()
