"""Digits by clients of one image each: a whole network with a guarantee, by who adds the noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.mechanisms.discrete_gaussian import DiscreteGaussian
from umbel.research.experiments.runs import Finished, Spec, finish
from umbel.research.experiments.secure_sums import PLAIN, SECURE, SITE, SITES, TRUSTED, Compared
from umbel.research.experiments.sweep import FIRST_SEED, Result
from umbel.research.experiments.tables import SAME_SPLIT, by_arm, page
from umbel.research.output import Section, plus_minus

SEEDS = 3
EPSILONS = (1.0, 2.0, 4.0, 8.0)
PARAMETERS = 26_010
CLIENT = "each client"
_STRATEGIES = {CLIENT: "group-privacy", SITE: "site-average", SECURE: "secure-average", TRUSTED: "site-average"}


class Small(nn.Module):
    """The network of Papernot et al. (AAAI 2021) for digits: two convolutions with tanh, 26,010 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, stride=2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, stride=2)
        self.fc1 = nn.Linear(512, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10) of images (batch, 28, 28)."""
        hidden = nn.functional.max_pool2d(torch.tanh(self.conv1(images.reshape(-1, 1, 28, 28))), 2, 1)
        hidden = nn.functional.max_pool2d(torch.tanh(self.conv2(hidden)), 2, 1).flatten(1)
        logits: Tensor = self.fc2(torch.tanh(self.fc1(hidden)))
        return logits


TASK = Compared(
    "digits of one image each", "qmnist-images-sites-epsilon-8", PARAMETERS, EPSILONS,
    {
        "model": f"{__name__}:{Small.__name__}", "loss": "cross-entropy", "rounds": 119, "clients-per-round": 450,
        "clip-norm": 6.0, "clip-norm-decay": 0.98, "validate-every": 120, "validation-clients-per-round": 1000,
    },
)  # fmt: skip
"""The settings of all runs: 119 rounds of 450 clients, each client in one."""


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs."""
    own, found = TASK.base() | ({"rounds": 2} if quick else {}), []
    noise = {epsilon: TASK.noise(epsilon) for epsilon in EPSILONS}
    for seed in range(first, first + seeds):
        for epsilon in EPSILONS:
            found += [
                Spec.of(
                    (arm, f"{epsilon:g}"),
                    own
                    | {"strategy": strategy, "noise-multiplier": noise[epsilon], "seed": seed}
                    | {"min-nodes": 1 if arm in (TRUSTED, CLIENT) else SITES},
                )
                for arm, strategy in _STRATEGIES.items()
            ]
        plain = {"strategy": "site-average", "noise-multiplier": 0.0, "min-nodes": 1}
        found.append(Spec.of((PLAIN, "none"), own | plain | {"seed": seed}))
    return found


def play(config: Mapping[str, Any]) -> Finished:
    """Do a run over as many sites as it waits for."""
    return finish(config, nodes=config["min-nodes"])


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write the table of the runs of `specs`."""
    arms, rows, base = by_arm(results), [], TASK.base()
    for (arm, epsilon), runs in arms.items():
        accuracies = [run.measures["last"]["mean"] for run in runs]
        told = {"epsilon": runs[0].measures.get("epsilon"), "runs": len(runs)}
        rows.append({"arm": arm, "label": epsilon, "accuracy": mean(accuracies), "all": accuracies, **told})
    labels = [f"{epsilon:g}" for epsilon in EPSILONS]
    cells = {(row["arm"], row["label"]): plus_minus(row["all"], 3) for row in rows}
    shown = [[arm, *(cells.get((arm, label), "") for label in labels)] for arm in _STRATEGIES]
    shown.append([PLAIN, *(cells.get((PLAIN, "none"), "") for _ in labels)])
    text = (
        f"Accuracy of the last round on the images of new writers, of one network of {PARAMETERS:,} parameters that "
        f"clients of one image each train. Each takes part once, in one of {base['rounds']} rounds of "
        f"{base['clients-per-round']}. Columns: epsilon of a client at delta {DELTA:g}. All add "
        f"{DiscreteGaussian.name} noise of the same size: each client to its own update, each of {SITES} sites to its "
        f"sum, all sites together in a secure sum, or one server that all trust. {SAME_SPLIT}"
    )
    section = Section("By who adds the noise", text, ("who adds the noise", *labels), shown)
    page("Digits of one image each", [section], rows, results).write(folder)
