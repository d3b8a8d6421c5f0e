"""Which runs a site answers: by strategy, by the researcher who signed them, or by people's approval."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from flwr.app import RecordDict

from umbel.privacy.site.config import SERVER_CA, Site
from umbel.privacy.site.entry import told
from umbel.privacy.site.policy import AcceptedRelease, Approval, Policy, Role
from umbel.privacy.site.refusals import explain
from umbel.privacy.site.runs import Runs
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import Refused
from umbel.protocol.messages import evaluation_in, training_in
from umbel.protocol.ranges import columns_in
from umbel.protocol.release import ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.protocol.signatures import identity, names_no_server, signer
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

Spec = TypeVar("Spec", TrainingSpec, EvaluationSpec)
_DIGITS = 16  # digits of a fingerprint


def check_admitted(
    site: Site, run: str, config: RunConfig, n: int, content: RecordDict | None = None, hypotheses: Arrays | None = None
) -> str:
    """Raise `Refused` unless the site answers a run, or the task of one of its messages.

    Return the request that its people approved or a researcher signed; empty if the policy alone decided.

    A site that lists researchers answers a run that one of them signed, as long as its messages ask for what was
    signed. Everything else waits for approval there, and at a site that requires it for each run. A run is approved
    with its run config, for `n` shared parameters, which determine the price. A message that asks for something else
    waits for separate approval, so that only approved tasks are carried out.
    """
    policy = site.policy
    check_strategy(site, config)
    if content is not None and hypotheses and not site.simulated and columns_in(config.model):
        if (training := training_in(content)) is None or evaluation_in(content) is not None:
            raise Refused("a question about ranges is for training clients alone", code="refused.ranges")
        policy.check_question(training, n, len(next(iter(hypotheses.values()))))
    if not site.approves:
        return ""
    researcher = _researcher(site, run, config)
    # Without its signature, so that an approval covers later runs with the same settings.
    asks: dict[str, Any] = {"config": config.unsigned(), "n": n, "differs": {}}
    if content is not None and hypotheses is not None:
        asks["differs"] = _differences(config, policy, content, hypotheses)
    if researcher:
        asks["researcher"] = researcher
    if policy.release in (AcceptedRelease.SITE, AcceptedRelease.SECURE):
        asks["release"] = str(policy.release)  # the price depends on it
    if policy.reports_exactly and policy.role is not Role.TRAIN:
        asks["exact-losses"] = True  # of validation clients; no price covers them
    elif policy.report_noise > 0:
        asks["report-noise"] = policy.report_noise
    if site.insecure_seed:
        asks["insecure-seed"] = True  # the server can subtract the noise, so nothing has a price
    signed = researcher if policy.approve is Approval.POLICY and not asks["differs"] else ""
    return Runs.of(site).check_approved(run, asks, policy.digest, signed)


def check_strategy(site: Site, config: RunConfig) -> None:
    """Raise `Refused` unless the site answers runs of this strategy and model: before it looks at its data."""
    accepted = site.policy.strategies
    if not site.simulated and accepted and config.strategy_name not in accepted.split():
        text = f"the run has strategy {config.strategy_name!r}; this site accepts {accepted}"
        raise Refused(text, code="refused.strategy")
    if not site.simulated and (columns := columns_in(config.model)):
        site.policy.check_columns(columns)


def check_allowed(site: Site, run: str, config: RunConfig, fault: Exception) -> None:
    """Raise `Refused`, as for any run that waits, unless the site allows a run that its data do not fit.

    Before that, a server could find out about the data by asking for many models: the fault is for the site's people,
    in the node's own log.
    """
    if not site.approves or (_researcher(site, run, config) and site.policy.approve is Approval.POLICY):
        return
    explain(f"run {run}", fault)
    Runs.of(site).check_allowed(run, config.unsigned(), told(fault))


def most_participations(site: Site, config: RunConfig) -> float:
    """Return how often a client may take part in a run: as often as people were told when they approved its price."""
    return config.most_participations if site.approves else math.inf


def most_reports(site: Site, config: RunConfig) -> float:
    """Return how often a client may report with noise in a run: as often as people were told, like participations."""
    return config.most_reports if site.approves else math.inf


def _researcher(site: Site, run: str, config: RunConfig) -> str:
    """Return the name of the listed researcher who signed a run for this site's server, or an empty name if none
    did."""
    keys = site.policy.keys
    found = signer(config.unsigned(), config.signature, keys)
    if found is None:
        if keys and names_no_server(config.signature):
            text = "the signature names no server; sign the run again: umbel sign --root-certificates ca.crt"
            raise Refused(text, code="refused.signature")
        return ""
    if found.until < datetime.now(UTC):
        text = f"the signature of {found.name} was valid until {found.until:%Y-%m-%d %H:%M} (UTC); sign the run again"
        raise Refused(text, code="refused.signature")
    if not site.server:
        text = f"this site does not know its server's certificate authority, so no signature is for it; set {SERVER_CA}"
        raise Refused(text, code="refused.other-server")
    if found.server != site.server:
        text = (
            f"{found.name} signed the run for the server of authority {found.server[:_DIGITS]}, and this site's has "
            f"{site.server[:_DIGITS]}; sign it for this one: umbel sign --root-certificates ca.crt"
        )
        raise Refused(text, code="refused.other-server")
    Runs.of(site).use_signature(run, identity(config.unsigned(), config.signature, keys[found.name]))
    return found.name


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
            # A run config does not say who adds the noise; a site that accepts one has decided it.
            release_by=_accepted(policy),
        )
        differs |= _unlike(training, said, "clients_per_round")
    if evaluation is not None:
        expected = replace(
            evaluation,
            round=min(evaluation.round, config.rounds + 1),  # one evaluation follows the last round
            step_size=config.step_size,
            # A site that takes part in secure sums has said with how much noise, and people see that price, too.
            report_noise_multiplier=evaluation.report_noise_multiplier * (policy.release is AcceptedRelease.SECURE),
            clients=evaluation.clients[: config.validation.clients or None],
        )
        unlike = _unlike(evaluation, expected, "validation_clients_per_round")
        # Apart from the training's: an approval of the one is none of the other.
        differs |= {
            f"evaluation_{name}" if hasattr(evaluation, name) else name: value for name, value in unlike.items()
        }
    if (k := len(next(iter(hypotheses.values())))) > config.most_hypotheses:
        differs["hypotheses"] = k
    return differs


def _accepted(policy: Policy) -> ReleaseBy:
    return ReleaseBy.CLIENT if policy.release is AcceptedRelease.ANY else ReleaseBy(policy.release.value)


def _unlike(asked: Spec, said: Spec, clients: str) -> dict[str, Any]:
    """Return the fields with a price in which a task differs from another, as text; of the clients only their
    number."""
    differs = {name: str(value) for name in asked.priced() if (value := getattr(asked, name)) != getattr(said, name)}
    if differs.pop("clients", ""):
        differs[clients] = str(len(asked.clients))
    return differs
