"""The cost of a guarantee in accuracy: measured error against the epsilon of a client, over its whole training.

Beside it stands what a client gets without one: by itself, and from methods that add no noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.mechanisms.gaussian import calibrate
from umbel.privacy.site.policy import Personal
from umbel.protocol.release import LAPLACE
from umbel.server.setup import Setup
from umbel.simulation.baselines import LOCAL_EPOCHS
from umbel.simulation.in_process import run_config
from umbel.simulation.sweep import STATES, Finished, Result
from umbel_lab.experiments import scaffold
from umbel_lab.experiments.scaffold import by_arm, by_seed
from umbel_lab.output import Page, Section, numbers

SEEDS = 10
_COUNTS = 2.0  # choice-epsilon with which a site's counts are hardly disturbed
_CHOICE = 0.0875  # of epsilon for the choice among three hypotheses
_EPOCHS = 40  # local epochs with three hypotheses: the best of 17 settings at epsilon 4, tried on seeds 100 to 105
SITES = 3  # among which the clients are dealt out, where sites release

CLIENT, OPEN, ONE, SITE = "client release, private choice", "client release, open choice", "k = 1", "site release"
THREE, CENTRAL = "client release, k = 3", "central DP-FedAvg, k = 1"
HEURISTIC, PLAIN = "paper's clip norm, open choice", "no noise"
ALONE, CFL = "by itself", "CFL, k ≤ 7"
_DATA = scaffold.read("frontier")
_WITHOUT = [ALONE, "FedAvg, fine-tuned", CFL, "Algorithm 1, k = 5, ν = 3"]


TASKS: Mapping[str, Mapping[str, Any]] = _DATA["tasks"]

Arms = dict[tuple[str, str, str], dict[str, Any]]  # by task, arm and label


def base_of(name: str, epsilon: int) -> dict[str, Any]:
    """Return the settings of client release for an epsilon."""
    task = TASKS[name]
    base = run_config(task["config"].format(epsilon))
    return base | {"noise-multiplier": 2 * task["parameters"] / epsilon} if task["config"] == name else base


def arms(quick: bool, of: str) -> Arms:
    """Return the arms of a task at each epsilon; quick at the largest alone."""
    task, arms = TASKS[of], Arms()

    def add(arm: str, label: str, config: dict[str, Any]) -> None:
        arms[of, arm, label] = config

    for epsilon in task["epsilons"][-1:] if quick else task["epsilons"]:
        base, label = base_of(of, epsilon), f"epsilon {epsilon}"
        one = base | {"hypotheses": 1, "choice-epsilon": 0.0}
        if base["hypotheses"] == 1:
            add(ONE, label, base)
            add(SITE, label, base | {"strategy": "site-average"})
        else:
            add(CLIENT, label, base)
            add(OPEN, label, base | {"choice-epsilon": 0.0})
            # Sites' counts need more of a small epsilon than a client's choice does.
            choice = max(base["choice-epsilon"], min(epsilon / 2, _COUNTS))
            nu = math.ceil(200 * task["parameters"] / (epsilon - choice)) / 100
            add(SITE, label, base | {"strategy": "site-average", "choice-epsilon": choice, "noise-multiplier": nu})
            choice = _CHOICE * epsilon
            nu = math.ceil(2000 * task["parameters"] / (epsilon - choice)) / 1000
            three = {"hypotheses": 3, "choice-epsilon": choice, "noise-multiplier": nu, "local-epochs": _EPOCHS}
            add(THREE, label, base | three)
            add(ONE, label, one | {"noise-multiplier": 2 * task["parameters"] / epsilon})
        add(CENTRAL, label, one | central(epsilon))
    base = base_of(of, task["epsilons"][-1])
    schedule, base = base["clipping"], base | {"clipping": "update", "choice-epsilon": 0.0}
    for nu in task["multipliers"]:
        add(HEURISTIC, f"nu {nu:g}", base | {"noise-multiplier": nu})
    for label, changes in task["plain"].items():
        clipped = {"clipping": schedule} if "clipping" in changes else {}
        add(PLAIN, label, base | {"noise-multiplier": 0.0, **changes} | clipped)
    for entry in task["compared"]:
        for who in _WITHOUT:
            own = _DATA["without"][who] | entry.get("changes", {})
            add(who, entry["label"], run_config(entry["config"]) | own)
    return arms


def central(epsilon: float) -> dict[str, Any]:
    """Return the changes for one sum a round that all clients trust, each client in one round."""
    nu = math.ceil(1000 * calibrate(epsilon, DELTA, 2.0)) / 1000
    return {"strategy": "site-average", "mechanism": "gaussian", "noise-multiplier": nu}


def play(config: Mapping[str, Any]) -> Finished:
    """Do a run, over several sites where sites release, and personalise what it learnt by ``auto``.

    The measures are those of `scaffold.finish`, with ``own`` in each state (`umbel.simulation.baselines.personalised`).
    """
    # One sum that all trust is the release of one site; it alone has Gaussian noise here.
    several = config["strategy"] == "site-average" and config["mechanism"] == LAPLACE
    finished = scaffold.finish(config, SITES if several else 1)
    if config["strategy"] in scaffold.HELD_OUT_ALONE:
        for measures in finished.measures.values():
            measures["own"] = measures.pop("held_out")
    elif finished.state is not None:
        setup = Setup.parse(dict(config))
        personal = scaffold.personalise(setup, finished.state, Personal.AUTO, finished.kept)
        for state, measures in personal.items():
            finished.measures[state]["own"] = measures
    return finished


def page(results: Sequence[Result]) -> Page:
    """Return the tables of the runs of `arms`."""
    name = results[0].spec.arm[0]
    scale = scaffold.manifest_of(results[0]).error_scale
    arms = {(arm, label): runs for (_, arm, label), runs in by_arm(results).items()}
    rows = [_row(arm, label, runs, scale) for (arm, label), runs in arms.items()]
    words = {"auto": Personal.AUTO, "epochs": LOCAL_EPOCHS, "delta": DELTA, "sites": SITES}
    accuracy = scaffold.section("Accuracy against epsilon", _DATA, "accuracy", rows, **words)
    sections = [accuracy, *better(arms)]
    return scaffold.page(f"The frontier: {name}", sections, rows, results)


def _row(arm: str, label: str, runs: Sequence[Result], scale: float) -> dict[str, Any]:
    kind = "epsilon" if arm == CENTRAL else "pure_epsilon"
    epsilon, paper = (runs[0].measures.get(name) for name in (kind, "max_budget"))
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


def better(arms: Mapping[tuple[str, str], Sequence[Result]]) -> Iterator[Section]:
    """Count the seeds in which what is made each client's own is better than what clients get without a guarantee."""
    rivals = [(arm, "own") for arm in arms if arm[0] == ALONE]
    rivals += [(arm, kind) for arm in arms for kind in ("held_out", "own") if arm[0] == CFL]
    if not rivals:
        return

    def measures(arm: tuple[str, str], kind: str) -> dict[int, dict[str, float]]:
        return {seed: run.measures["last"][kind] for seed, run in by_seed(arms[arm]).items()}

    rows = [
        [*arm, *(scaffold.seeds_won(measures(arm, "own"), measures(*rival)) for rival in rivals)]
        for arm in arms
        if arm[0] not in _WITHOUT
    ]
    names = [
        f"{who}, {label}" + (", made its own" if who == CFL and kind == "own" else "") for (who, label), kind in rivals
    ]
    yield Section(
        "Better than without a guarantee",
        scaffold.say(_DATA, "better"),
        ("who protects what", "setting", *names),
        rows,
    )
