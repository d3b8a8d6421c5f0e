"""The ClientApp: what a node does when the server asks."""

from __future__ import annotations

import math
from collections.abc import Callable
from logging import ERROR
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.keep import keep
from umbel.client.learner import best_hypothesis
from umbel.client.local import LocalParameters
from umbel.client.node import Node
from umbel.client.noisy_messages import noisy_messages
from umbel.privacy.gate.consent import check_approved
from umbel.privacy.gate.gate import Gate, checked_hypotheses, guard, local_report, local_result
from umbel.privacy.gate.randomness import noise, streams
from umbel.privacy.gate.runs import Runs
from umbel.privacy.gate.time_limit import time_limit
from umbel.privacy.mechanisms.choice import OWN
from umbel.protocol.errors import ProtocolError, UmbelError
from umbel.protocol.flower import log
from umbel.protocol.messages import (
    assigned_in,
    evaluation_in,
    hosting_reply,
    hypotheses_in,
    run_in,
    training_in,
    version_in,
)
from umbel.protocol.tasks import VERSION, EvaluationSpec, TrainingSpec

app = ClientApp()


@app.query(mods=[guard])
def query(msg: Message, context: Context) -> Message:
    """Say how many clients this node hosts."""
    version = version_in(msg.content)
    if version != VERSION:
        raise ProtocolError(
            f"the server speaks protocol {version!r}, this node {VERSION}; install the same umbel on both"
        )
    node = Node.of(context.node_config, context.run_config)
    # A node that the server does not know of is asked for nothing.
    check_approved(node.site, context, node.model.num_parameters)
    return Message(hosting_reply(node.hosting), reply_to=msg)


def _check_training(content: RecordDict, context: Context) -> None:
    """Raise where this node cannot train what a message asks, whatever its data are."""
    node, task = Node.of(context.node_config, context.run_config), training_in(content)
    assert task is not None, "the gate asks for messages with training alone"
    node.check(hypotheses_in(content), task.frozen_digest)
    node.training_clients(task.clients)
    if task.message_noise and not node.model.local_shapes:
        raise ProtocolError(f"noisy messages are for models with local parameters, not {node.model.name!r}")


_gate = Gate(_check_training)


@app.evaluate(mods=[_gate])
@app.train(mods=[_gate])
def take_part(msg: Message, context: Context) -> Message:
    """Train the asked clients, or score the hypotheses for them; the gate stands between this and the server.

    A round's message may ask for both. The gate then asks here for one after the other.
    """
    node = Node.of(context.node_config, context.run_config)
    training, evaluation = training_in(msg.content), evaluation_in(msg.content)
    if training is not None:
        return Message(_train(node, training, msg.content, context.state), reply_to=msg)
    if evaluation is not None:
        return Message(_evaluate(node, evaluation, msg.content, context.state), reply_to=msg)
    raise ProtocolError("the message asks for nothing")


def _train(node: Node, task: TrainingSpec, content: RecordDict, state: RecordDict) -> RecordDict:
    """Train the asked clients, which have paid, from the hypotheses that fit them best (Algorithm 1, lines 5 and 6).

    Those to which the gate assigned a hypothesis train that one.
    """
    hypotheses, assigned = hypotheses_in(content), assigned_in(content)
    clients, policy = node.training_clients(task.clients), node.site.policy
    kept = LocalParameters(node.site, state, node.model, task.run, node.seed)
    before = kept.read(clients)
    learner, update, names = node.learner, _update(task, node), list(node.model.shapes)

    def compute(some: slice) -> list[NDArray[Any]]:
        cohort = Cohort.gather(node.dataset, clients[some], learner.device)
        local = {name: value[some] for name, value in before.items()}
        chosen = np.where(assigned[some] == OWN, learner.choose(hypotheses, cohort, local), assigned[some])
        shuffles = streams(node.seed, "shuffle", task.round, clients[some])
        shared, own = learner.train(hypotheses, chosen, cohort, update, shuffles, local)
        return [chosen, *(shared[name] for name in names), *(own[name] for name in before)]

    def nothing() -> list[NDArray[Any]]:
        # What cannot be trained stays where it is.
        shapes = [*node.model.shapes.values(), *(value.shape[1:] for value in before.values())]
        return [np.maximum(assigned, 0), *(np.full((len(clients), *shape), np.nan, np.float32) for shape in shapes)]

    chosen, *found = _undisclosed(node, len(clients), compute, nothing)
    trained = dict(zip(names, found, strict=False))
    kept.write(clients, dict(zip(before, found[len(names) :], strict=True)), trained)
    if task.message_noise:
        sources = noise(node.seed, task.round, clients, "message")
        # Noise on the rows that changed alone would show which those are.
        everywhere = policy.noise_all_items or not node.site.simulated
        trained = noisy_messages(trained, hypotheses, chosen, task.message_noise, sources, everywhere)
    return local_result(trained, chosen)


def _update(task: TrainingSpec, node: Node) -> LocalUpdate:
    policy = node.site.policy
    most = None if math.isinf(policy.max_examples) else int(policy.max_examples)
    steps = task.local_epochs, task.step_size, task.batch_size, task.local_steps
    return LocalUpdate(*steps, most, node.descent, policy.balanced_batches)


def _evaluate(node: Node, task: EvaluationSpec, content: RecordDict, state: RecordDict) -> RecordDict:
    """Score the hypotheses for the asked clients, each by the one that fits it best."""
    hypotheses = hypotheses_in(content)
    node.check(hypotheses, task.frozen_digest)
    clients = node.validation_clients(task.clients)
    kept = LocalParameters(node.site, state, node.model, task.run, node.seed)
    learner = node.learner

    def compute(some: slice) -> list[NDArray[Any]]:
        own = clients[some]
        cohort = Cohort.gather(node.dataset, own, learner.device)
        if not node.model.local_shapes:
            scores = learner.score(hypotheses, cohort)
        elif node.training_clients_report:
            scores = learner.score(hypotheses, cohort, kept.read(own))
        else:
            scores = learner.score_newcomers(hypotheses, cohort, kept.fresh(own), task.step_size)
        return [one.T for one in scores]

    def nothing() -> list[NDArray[Any]]:
        return list(np.full((2, len(clients), len(next(iter(hypotheses.values())))), np.nan))

    needed = node.training_clients_report
    losses, metrics = (one.T for one in _undisclosed(node, len(clients), compute, nothing, needed))
    best = best_hypothesis(losses)[None]
    reported = (np.take_along_axis(values, best, 0)[0] for values in (losses, metrics))
    # To the server, no number at all is a client that did not answer; here it is a model that blew up.
    loss, metric = (np.where(np.isnan(values), np.inf, values) for values in reported)
    return local_report(loss, metric, node.site.local_ids(clients), node.training_clients_report)


def _undisclosed(
    node: Node,
    clients: int,
    compute: Callable[[slice], list[NDArray[Any]]],
    nothing: Callable[[], list[NDArray[Any]]],
    needed: bool = True,
) -> list[NDArray[Any]]:
    """Compute on clients' data within the site's time; what goes wrong, the site alone is told.

    Whether memory or time is enough depends on how many rows there are. A reply that stayed away would
    tell that, for nothing. So clients are charged and answered as if nothing had gone wrong, and to the
    gate, numbers that are not there are those of training that blew up.

    Each client is computed by itself, in its own share of the time. Of clients that are computed
    together, one's rows change the last digits of another's update, and training that a server makes
    chaotic turns last digits into first ones: then one client's release would tell of another.

    Parameters
    ----------
    node : Node
    clients : int
    compute : callable
        Returns arrays of some of the clients, one a row.
    nothing : callable
        Returns the rows of clients that could not be computed.
    needed : bool
        Whether clients are to be protected; those that report their loss as it is are not. In
        simulation, where nobody is, an error shall be seen.
    """
    seconds = node.site.policy.max_seconds
    if node.site.simulated or not needed:
        with time_limit(seconds):
            return compute(slice(0, clients))
    found = nothing()
    for client in range(clients):
        try:
            with time_limit(seconds / clients):
                own = compute(slice(client, client + 1))
        except Exception as error:
            _log_failure("for a client, and answers as if it could, without an update", error)
            continue
        for rows, row in zip(found, own, strict=True):
            rows[client] = row[0]
    return found


def _log_failure(what: str, error: Exception) -> None:
    trace = None if isinstance(error, UmbelError) else error
    log(ERROR, "umbel could not compute %s: %s", what, error, exc_info=trace)


@app.query("keep", mods=[guard])
def keep_models(msg: Message, context: Context) -> Message:
    """Keep the hypothesis that fits each client best, where the site wants that; tell nobody."""
    node = Node.of(context.node_config, context.run_config)
    hypotheses, name = checked_hypotheses(msg.content, node.site.policy), run_in(msg.content)
    node.check(hypotheses)
    check_approved(node.site, context, node.model.num_parameters)
    # All of it is checked by a site that keeps nothing too: which it is, is its own affair.
    if not node.site.simulated:
        Runs.of(node.site).end(str(context.run_id), name, hypotheses, evaluates=len(node.validation) > 0)
    if (folder := node.site.keep_model) is not None:
        kept = LocalParameters(node.site, context.state, node.model, name, node.seed)
        try:
            with time_limit(node.site.policy.max_seconds):
                keep(node, hypotheses, kept, folder)
        except Exception as error:
            if node.site.simulated:
                raise
            _log_failure("what fits each client best, and keeps nothing", error)
    return Message(RecordDict(), reply_to=msg)
