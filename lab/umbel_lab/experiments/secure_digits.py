"""Handwriting with a guarantee, by who adds the noise: clients of one image each, and users of at most five digits.

The schedule of each network and epsilon was found by trial training on other seeds, with one trusted sum. All arms of
an epsilon share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.mechanisms.discrete_gaussian import DiscreteGaussian
from umbel.simulation.measured import Finished, Spec, finish
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.experiments import centaur
from umbel_lab.experiments.secure_sums import PLAIN, SECURE, SITE, SITES, TRUSTED, Compared
from umbel_lab.experiments.tables import SAME_SPLIT, by_arm, page
from umbel_lab.output import Section, plus_minus

SEEDS = 1
CONFIG = "qmnist-images-sites-epsilon-8"
CLIENT = "each client"
NONE = "none"
_STRATEGIES = {TRUSTED: "site-average", SECURE: "secure-average", SITE: "site-average", CLIENT: "group-privacy"}
_DISCRETE = {"mechanism": DiscreteGaussian.name}
_SUMS = (TRUSTED, SECURE, SITE)
SMALL, LARGE = (f"tanh-cnn filters={size} outputs=10" for size in ("16,32 hidden=32", "64,128 hidden=512"))
_PARAMETERS = {SMALL: 26_010, LARGE: 1_189_578}


@dataclass(frozen=True)
class Schedule:
    """Rounds, clients of a round, participations of a client, and the clip norm with its decay."""

    rounds: int
    clients: int
    times: int
    clip_norm: float
    decay: float


SCHEDULES = {
    (SMALL, 8.0): Schedule(239, 450, 2, 4.0, 0.99),
    (SMALL, 4.0): Schedule(239, 900, 4, 4.0, 0.99),
    (SMALL, 2.0): Schedule(119, 1800, 4, 4.0, 0.98),
    (SMALL, 1.0): Schedule(119, 1800, 4, 3.0, 0.98),
    (LARGE, 8.0): Schedule(239, 450, 2, 3.0, 0.99),
}
_ARMS = {SMALL: tuple(_STRATEGIES), LARGE: _SUMS}
"""Each client's noise on the large network would take hours, and leave nothing of the small one."""


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs; quick are two rounds of each."""
    few = {"rounds": 2} if quick else {}
    return [
        Spec.of(arm, config | few | {"seed": seed})
        for seed in range(first, first + seeds)
        for arm, config in (*_of_one_image(), *_of_users())
    ]


def _of_one_image() -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """Yield the arms of clients of one image each: network, epsilon, who adds the noise."""
    for (model, epsilon), schedule in SCHEDULES.items():
        weakest = epsilon == max(own for name, own in SCHEDULES if name == model)
        changes = {
            "model": model, "rounds": schedule.rounds, "clients-per-round": schedule.clients,
            "max-participations": schedule.times, "clip-norm": schedule.clip_norm, "clip-norm-decay": schedule.decay,
            "step-size": 1000.0, "validate-every": schedule.rounds, "validation-clients-per-round": 1000,
        }  # fmt: skip
        task = Compared(model, CONFIG, _PARAMETERS[model], (epsilon,), changes)
        base, noise = task.base(), task.noise(epsilon)
        for arm in _ARMS[model]:
            if arm == CLIENT and not weakest:
                continue  # the weakest guarantee leaves nothing already
            yield (model, f"{epsilon:g}", arm), base | _arm(arm) | {"noise-multiplier": noise}
        if weakest:
            yield (model, NONE, PLAIN), base | _arm(TRUSTED) | {"noise-multiplier": 0.0}


def _of_users() -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """Yield the arms of users of at most five digits."""
    for epsilon in centaur.EPSILONS:
        for title, parameters, config in centaur.summed(epsilon):
            times = config["rounds"]
            task = Compared(
                title, centaur.CONFIG, parameters, (epsilon,), config | _DISCRETE | {"max-participations": times}
            )
            base, noise = task.base(), task.noise(epsilon)
            for arm in _SUMS:
                yield (title, f"{epsilon:g}", arm), base | _arm(arm) | {"noise-multiplier": noise}


def _arm(arm: str) -> dict[str, Any]:
    return {"strategy": _STRATEGIES[arm], "min-nodes": SITES if arm in (SITE, SECURE) else 1}


def play(config: Mapping[str, Any]) -> Finished:
    """Do a run over as many sites as it waits for; users also make its last hypothesis their own."""
    users = config["dataset"] in (centaur.IMAGES, centaur.FEATURES)
    return centaur.play(config) if users else finish(config, nodes=config["min-nodes"])


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write the tables of the runs of `specs`."""
    arms, rows = by_arm(results), []
    for (what, epsilon, arm), runs in arms.items():
        own = "own" in runs[0].measures
        accuracies = [run.measures["own"] if own else run.measures["last"]["mean"] for run in runs]
        told = {"accuracies": accuracies, "measured": runs[0].measures.get("epsilon"), "runs": len(runs)}
        rows.append({"what": what, "epsilon": epsilon, "arm": arm, "users": own, **told})
    how = (
        f"Columns: epsilon of a client at delta {DELTA:g}, over the whole training. All add {DiscreteGaussian.name} "
        f"noise of the same size: each client to its own update, each of {SITES} sites to its sum, all sites together "
        "in a secure sum, or one server that all trust."
    )
    one = f"Accuracy of the last round on the images of new writers. {how} {SAME_SPLIT}"
    users = (
        "Accuracy on images that a user of at most five digits did not train on, of users that did not take part, who "
        f"made the last hypothesis their own on a random half of their images. {how} {SAME_SPLIT}"
    )
    sections = [
        _section("Clients of one image each", one, [row for row in rows if not row["users"]]),
        _section("Users of at most five digits", users, [row for row in rows if row["users"]]),
    ]
    page("Handwriting, by who adds the noise", sections, rows, results).write(folder)


def _order(epsilon: str) -> float:
    return math.inf if epsilon == NONE else float(epsilon)


def _section(title: str, text: str, rows: Sequence[dict[str, Any]]) -> Section:
    """Return a table with a line for each task and who adds the noise, and a column for each epsilon."""
    labels = sorted({row["epsilon"] for row in rows}, key=_order)
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        lines.setdefault((row["what"], row["arm"]), {})[row["epsilon"]] = plus_minus(row["accuracies"], 3)
    shown = [[*line, *(cells.get(label, "") for label in labels)] for line, cells in lines.items()]
    return Section(title, text, ("what is learnt", "who adds the noise", *labels), shown)
