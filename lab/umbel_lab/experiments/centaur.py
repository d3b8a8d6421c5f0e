"""Handwriting with a guarantee, as CENTAUR was measured (Shen et al., ICLR 2023): users of at most five digits.

Users learn a representation together and keep their heads. They are those of ``umbel data make qmnist_features
--digits 5``, of 30 images each: the images themselves (``--kind images``), or a few public features of them. One
trusted sum is a single site. Measured users did not take part: a user's head, or its whole model, is fitted on a
random half of its images and measured on the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from umbel.client.trial import try_out
from umbel.privacy.gate.policy import Personal
from umbel.privacy.gate.randomness import streams
from umbel.server.setup import Setup
from umbel.simulation.baselines import halves, personalised, validation_cohort
from umbel.simulation.in_process import run_config
from umbel.simulation.measured import LOCAL_ONLY, Finished, Spec
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.experiments.runs import finish
from umbel_lab.experiments.tables import by_arm, page
from umbel_lab.output import Columns, Section, numbers, spread

SEEDS = 3
CONFIG = "qmnist-features-epsilon-2"
IMAGES, FEATURES = "qmnist-users-images", "qmnist-users"
LARGE, SMALL = "mlp inputs=784 hidden=256,128 outputs=10", "mlp inputs=784 hidden=32 outputs=10"
HEAD = {LARGE: "5.*", SMALL: "3.*"}
EVERYBODY = 1799
"""Training users, all of whom take part in each round with a guarantee."""
EPSILONS = (0.5, 1.0)
ROUNDS = 10
"""With a guarantee."""
NOISE = {
    (ROUNDS, 0.5): 44.5, (ROUNDS, 1.0): 23.6, (1, 0.5): 14.07, (1, 1.0): 7.47,
}  # fmt: skip
"""Gaussian noise multiplier by rounds and epsilon."""
PRINTED = {("alone", None): 0.907, ("heads", 0.5): 0.918, ("heads", 1.0): 0.928, ("fine-tuned", 1.0): 0.869}
"""CENTAUR's accuracies, on EMNIST digits; by add-or-remove, which is half of the distance that epsilon is for here."""

_PLAIN = {
    "hypotheses": 1, "restarts": 1, "patience": 0, "max-participations": 0, "choice-epsilon": 0.0,
    "clipping": "update", "noise-multiplier": 0.0,
}  # fmt: skip
_PRIVATE = {"clipping": "public", "clip-norm-decay": 1.0, "mechanism": "gaussian", "clients-per-round": EVERYBODY}
_LEARNT = {
    "batch-size": 10, "step-size": 0.1, "rounds": 60, "validate-every": 60, "clients-per-round": 100,
    "local-epochs": 5,
}  # fmt: skip
_SUMMED = {
    "strategy": "site-average", "rounds": ROUNDS, "validate-every": ROUNDS, "batch-size": 10, "step-size": 0.3,
    "clip-norm": 3.0,
}  # fmt: skip
_EPOCHS = {LARGE: 2, SMALL: 5}  # a round, where all take part
_LINEAR = {"dataset": FEATURES, "rounds": 1, "local-epochs": 1, "batch-size": 0, "step-size": 10.0, "clip-norm": 8.0}


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs; quick are two rounds of a few users."""
    images = {"dataset": IMAGES, "model": LARGE}
    arms: list[tuple[tuple[str, str, float | None], dict[str, Any]]] = [
        (("images, large", "alone", None), images | _LEARNT | {"strategy": LOCAL_ONLY}),
        (("images, large", "fine-tuned", None), images | _LEARNT),
        (("images, large", "heads", None), images | _LEARNT | {"local": HEAD[LARGE]}),
        (("features", "alone", None), _LINEAR | {"strategy": LOCAL_ONLY}),
        (("features", "fine-tuned", None), _LINEAR | {"clients-per-round": EVERYBODY}),
    ]
    for epsilon in EPSILONS:
        summed = _SUMMED | _PRIVATE | {"noise-multiplier": NOISE[ROUNDS, epsilon]}
        once = _LINEAR | _PRIVATE | {"noise-multiplier": NOISE[1, epsilon]}
        # The large network takes minutes of a core, and the noise leaves little of it at the larger epsilon.
        for model in (LARGE, SMALL) if epsilon == EPSILONS[-1] else (SMALL,):
            own = summed | {"dataset": IMAGES, "model": model, "local-epochs": _EPOCHS[model]}
            arms.append(((f"images, {_size(model)}", "heads", epsilon), own | {"local": HEAD[model]}))
            arms.append(((f"images, {_size(model)}", "fine-tuned", epsilon), own))
        arms.append((("features, site", "fine-tuned", epsilon), once | {"strategy": "site-average"}))
        arms.append((("features, client", "fine-tuned", epsilon), once))
    few = {"rounds": 1, "local-epochs": 1, "clients-per-round": 4} if quick else {}
    base = run_config(CONFIG) | _PLAIN
    return [
        Spec.of(arm, base | config | few | {"seed": seed})
        for seed in range(first, first + seeds)
        for arm, config in arms
    ]


def _size(model: str) -> str:
    return "small" if model == SMALL else "large"


def play(config: Mapping[str, Any]) -> Finished:
    """Do a run; add what users get on held-out images who make its last hypothesis their own: ``own``.

    ``ditto`` is the same by Ditto's proximal term in place of plain fine-tuning, where whole models are trained.
    """
    done = finish(config, nodes=config["min-nodes"])
    if done.state is None:
        return replace(done, measures={**done.measures, "own": done.measures["last"]["held_out"]["mean"]})
    setup = Setup.parse(config)
    dataset = setup.open_dataset()
    assert dataset is not None, "its training read it"
    model, run, last = setup.model, setup.config, done.state.hypotheses
    if not model.local_shapes:
        ways = {"own": Personal.FINE_TUNE, "ditto": "umbel_lab.personal:ditto"}
        own = {name: personalised(model, dataset, last, run, way)["mean"] for name, way in ways.items()}
    else:
        learner = try_out(model, dataset)
        support, query = halves(validation_cohort(dataset, learner), run.seed)
        fresh = model.initial_local(streams(run.seed, "local", 0, range(len(support))))
        local = learner.fit_local(last, support, fresh, run.step_size)
        own = {"own": float(learner.score(last, query, local)[1].mean())}
    return replace(done, measures={**done.measures, **own})


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write the table of the runs of `specs`."""
    rows = [_row(arm, runs) for arm, runs in by_arm(results).items()]
    text = (
        "Accuracy on images that a user of at most five digits did not train on: mean over the users that did not "
        "take part in training, with the hypothesis of the last round, made their own on a random half of their "
        "images; mean ± standard deviation over seeds. Epsilon at delta 1e-5 is between any two data sets of a user, "
        "over the whole training. CENTAUR's epsilon is for a user more or less, about half of that; its users are "
        "2,000 of EMNIST."
    )
    columns: Columns = {
        "what is learnt": "what",
        "who": "who",
        "numbers released": "parameters",
        "epsilon": lambda row: "none" if row["epsilon"] is None else f"{row['epsilon']:.2g}",
        "accuracy": lambda row: spread(row, "own", 3),
        "by Ditto": lambda row: "" if row["ditto"] is None else f"{row['ditto']:.3f}",
        "not made one's own": lambda row: "" if row["plain"] is None else f"{row['plain']:.3f}",
        "CENTAUR": lambda row: "" if row["printed"] is None else f"{row['printed']:.3f}",
    }
    section = Section.of("Users of at most five digits", text, columns, rows)
    page("Handwriting with a guarantee", [section], rows, results).write(folder)


def _row(arm: tuple[str, str, float | None], runs: Sequence[Result]) -> dict[str, Any]:
    what, who, epsilon = arm
    config, measures = runs[0].spec.config, runs[0].measures
    alone = config["strategy"] == LOCAL_ONLY
    return {
        "what": what,
        "who": who,
        "parameters": "" if alone else Setup.parse(config).model.num_parameters,
        "epsilon": None if alone else measures["epsilon"],
        "runs": len(runs),
        **numbers("own", (run.measures["own"] for run in runs)),
        "ditto": None if alone or config["local"] else fmean(run.measures["ditto"] for run in runs),
        "plain": None if alone or config["local"] else fmean(run.measures["last"]["mean"] for run in runs),
        "printed": PRINTED.get((who, epsilon)) if what == "images, large" else None,
    }
