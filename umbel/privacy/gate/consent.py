"""What a site's people approve, where the site wants to be asked: a run config, and tasks that are as it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import Context, RecordDict

from umbel.privacy.gate.policy import AcceptedRelease, Approval, Policy
from umbel.privacy.gate.runs import Runs
from umbel.privacy.gate.site import Site
from umbel.protocol.arrays import Arrays
from umbel.protocol.messages import evaluation_in, training_in
from umbel.protocol.release import ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

# Fields of a task that a run config says, by the same names.
_SAID = (
    "local_epochs", "local_steps", "step_size", "batch_size", "noise_multiplier", "mechanism", "choice_epsilon",
    "noise_per", "message_noise",
)  # fmt: skip


def check_approved(
    site: Site, context: Context, n: int, content: RecordDict | None = None, hypotheses: Arrays | None = None
) -> None:
    """Raise `Refused` where a site wants to be asked and has not approved what a message is part of.

    A run is approved with its run config. A message that asks for anything else than that says waits by
    itself, so that what was approved is what is done.

    Parameters
    ----------
    site : Site
    context : Context
        Of the run.
    n : int
        Number of shared parameters, of which the price depends.
    content : RecordDict, optional
        Of a round's message, with its `hypotheses`.
    hypotheses : dict of ndarray, optional
    """
    if site.simulated or site.policy.approve is not Approval.ASK:
        return
    config = RunConfig.of(context.run_config)
    differs: dict[str, Any] = {}
    if content is not None and hypotheses is not None:
        differs = _differences(config, site.policy, content, hypotheses)
    asks = {"config": config.entries(), "n": n, "differs": differs}
    if site.policy.release is AcceptedRelease.SITE:
        asks["release"] = str(site.policy.release)  # of which the price depends
    Runs.of(site).check_approved(str(context.run_id), asks)


def _differences(config: RunConfig, policy: Policy, content: RecordDict, hypotheses: Arrays) -> dict[str, Any]:
    """Return what a message asks for otherwise than its run config says."""
    training, evaluation = training_in(content), evaluation_in(content)
    differs: dict[str, Any] = {}
    if training is not None:
        differs = _of_training(config, policy, training)
    if evaluation is not None:
        differs |= _of_evaluation(config, evaluation)
    if (k := len(next(iter(hypotheses.values())))) > config.most_hypotheses:
        differs["hypotheses"] = k
    return differs


def _of_training(config: RunConfig, policy: Policy, task: TrainingSpec) -> dict[str, Any]:
    asked: dict[str, Any] = {name: getattr(task, name) for name in _SAID}
    said: dict[str, Any] = {name: getattr(config, name) for name in _SAID}
    asked |= {"clipping": task.clipping, "disclose_choice": task.disclose_choice}
    said |= {"clipping": config.clipping, "disclose_choice": False}
    # A run config does not say it in words that a site could read; a site that accepts sums alone has said it itself.
    asked["release_by"] = task.release_by
    said["release_by"] = ReleaseBy.SITE if policy.release is AcceptedRelease.SITE else ReleaseBy.CLIENT
    asked["round"], said["round"] = task.round, min(task.round, config.rounds)
    asked["radius"], said["radius"] = task.radius, config.schedule.at(said["round"])
    asked["clients_per_round"] = len(task.clients)
    said["clients_per_round"] = min(len(task.clients), config.clients_per_round)
    return _unlike(asked, said)


def _of_evaluation(config: RunConfig, task: EvaluationSpec) -> dict[str, Any]:
    # One evaluation follows the last round.
    asked = {"round": task.round, "step_size": task.step_size, "validation_clients_per_round": len(task.clients)}
    most = config.validation_clients_per_round or len(task.clients)
    said = {
        "round": min(task.round, config.rounds + 1),
        "step_size": config.step_size,
        "validation_clients_per_round": min(len(task.clients), most),
    }
    return _unlike(asked, said)


def _unlike(asked: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(value) for name, value in asked.items() if value != said[name]}
