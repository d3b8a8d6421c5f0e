"""Approval by a site's people, where the site requires it: of a run config, and of tasks that follow it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from flwr.app import RecordDict

from umbel.privacy.gate.policy import AcceptedRelease, Approval, Policy, Role
from umbel.privacy.gate.runs import Runs
from umbel.privacy.gate.site import Site
from umbel.protocol.arrays import Arrays
from umbel.protocol.messages import evaluation_in, training_in
from umbel.protocol.release import ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

Spec = TypeVar("Spec", TrainingSpec, EvaluationSpec)


def check_approved(
    site: Site, run: str, config: RunConfig, n: int, content: RecordDict | None = None, hypotheses: Arrays | None = None
) -> None:
    """Raise `Refused` if a site requires approval and has not approved the run or the task of a message.

    A run is approved with its run config, for `n` shared parameters, which determine the price. A round's message that
    asks for something else waits for separate approval, so that only approved tasks are carried out.
    """
    if site.simulated or site.policy.approve is not Approval.ASK:
        return
    asks: dict[str, Any] = {"config": config.entries(), "n": n, "differs": {}}
    if content is not None and hypotheses is not None:
        asks["differs"] = _differences(config, site.policy, content, hypotheses)
    if site.policy.release is AcceptedRelease.SITE:
        asks["release"] = str(site.policy.release)  # the price depends on it
    if site.policy.reports_exactly and site.policy.role is not Role.TRAIN:
        asks["exact-losses"] = True  # of validation clients; no price covers them
    Runs.of(site).check_approved(run, asks)


def _differences(config: RunConfig, policy: Policy, content: RecordDict, hypotheses: Arrays) -> dict[str, Any]:
    """Return the differences between a message's task and its run config."""
    training, evaluation = training_in(content), evaluation_in(content)
    differs: dict[str, Any] = {}
    if training is not None:
        round = min(training.round, config.rounds)
        said = replace(
            config.training(round),
            round=round,
            clients=training.clients[: config.clients_per_round],
            # A run config does not say who adds the noise; a site that accepts only sums has decided it.
            release_by=ReleaseBy.SITE if policy.release is AcceptedRelease.SITE else ReleaseBy.CLIENT,
            # These do not change the price: the run's models, and a strategy's own option.
            run=training.run,
            frozen_digest=training.frozen_digest,
            explore=training.explore,
        )
        differs |= _unlike(training, said, "clients_per_round")
    if evaluation is not None:
        expected = replace(
            evaluation,
            round=min(evaluation.round, config.rounds + 1),  # one evaluation follows the last round
            step_size=config.step_size,
            clients=evaluation.clients[: config.validation_clients_per_round or None],
        )
        differs |= _unlike(evaluation, expected, "validation_clients_per_round")
    if (k := len(next(iter(hypotheses.values())))) > config.most_hypotheses:
        differs["hypotheses"] = k
    return differs


def _unlike(asked: Spec, said: Spec, clients: str) -> dict[str, Any]:
    """Return the fields of a task that differ from another's, as text; of the clients only their number."""
    values = {entry.name: getattr(asked, entry.name) for entry in fields(asked)}
    differs = {name: str(value) for name, value in values.items() if value != getattr(said, name)}
    if differs.pop("clients", ""):
        differs[clients] = str(len(asked.clients))
    return differs
