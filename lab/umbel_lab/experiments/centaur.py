"""Handwriting with a guarantee, as CENTAUR was measured (Shen et al., ICLR 2023): users of at most five digits.

Users learn a representation together and keep their heads. They are those of ``umbel data make qmnist_features
--digits 5``, of 30 images each: the images themselves (``--kind images``), or a few public features of them. One
trusted sum is a single site. Measured users did not take part: a user's head, or its whole model, is fitted on a
random half of its images and measured on the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from umbel.client.trial import try_out
from umbel.privacy.gate.policy import Personal
from umbel.privacy.gate.randomness import streams
from umbel.server.setup import Setup
from umbel.simulation.baselines import halves, personalised, validation_cohort
from umbel.simulation.in_process import run_config
from umbel.simulation.measured import LOCAL_ONLY, Finished, dataset_of
from umbel.simulation.sweep import Result
from umbel_lab.experiments import scaffold
from umbel_lab.output import Page, numbers

SEEDS = 3
_DATA = scaffold.read("centaur")

Arm = tuple[str, str, float | None]  # what is learnt, who by, and epsilon


def arms(quick: bool, _of: str) -> dict[Arm, dict[str, Any]]:
    """Return the arms; quick is a round of a few users."""
    few = {"rounds": 1, "local-epochs": 1, "clients-per-round": 4} if quick else {}
    arms = {}
    for name, changes in _DATA["arms"].items():
        config = run_config("qmnist-features-epsilon-2")
        for part in ("plain", *changes["parts"]):
            config |= _DATA["parts"][part]
        arms[_arm(name)] = config | {key: value for key, value in changes.items() if key != "parts"} | few
    return arms


def _arm(name: str) -> Arm:
    what, who, epsilon = (word.strip() for word in name.split("|"))
    return what, who, float(epsilon) if epsilon else None


def play(config: Mapping[str, Any]) -> Finished:
    """Do a run; add what users get on held-out images who make its last hypothesis their own: ``own``.

    ``ditto`` is the same by Ditto's proximal term in place of plain fine-tuning, where whole models are trained.
    """
    done = scaffold.finish(config, nodes=config["min-nodes"])
    if done.state is None:
        return replace(done, measures={**done.measures, "own": done.measures["last"]["held_out"]["mean"]})
    setup = Setup.parse(config)
    model, run, dataset, last = setup.model, setup.config, dataset_of(setup), done.state.hypotheses
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


def page(results: Sequence[Result]) -> Page:
    """Return the table of the runs of `arms`."""
    rows = [_row(arm, runs) for arm, runs in scaffold.by_arm(results).items()]
    displayed = [row | {"epsilon_text": "none" if row["epsilon"] is None else f"{row['epsilon']:.2g}"} for row in rows]
    section = scaffold.section("Users of at most five digits", _DATA, "users", displayed)
    return scaffold.page("Handwriting with a guarantee", [section], rows, results)


def _row(arm: Arm, runs: Sequence[Result]) -> dict[str, Any]:
    config, measures = runs[0].spec.config, runs[0].measures
    alone = config["strategy"] == LOCAL_ONLY
    whole = not alone and not config["local"]
    return {
        "what": arm[0],
        "who": arm[1],
        "parameters": "" if alone else Setup.parse(config).model.num_parameters,
        "epsilon": None if alone else measures["epsilon"],
        "runs": len(runs),
        **numbers("own", (run.measures["own"] for run in runs)),
        "ditto": fmean(run.measures["ditto"] for run in runs) if whole else None,
        "plain": fmean(run.measures["last"]["mean"] for run in runs) if whole else None,
        "printed": {_arm(name): accuracy for name, accuracy in _DATA["printed"].items()}.get(arm),
    }
