"""The ClientApp: what a node does when the server asks."""

from __future__ import annotations

import math
from collections.abc import Callable
from logging import ERROR

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client.cohort import Cohort, LocalUpdate
from client.keep import keep
from client.learner import best_hypothesis
from client.local import LocalParameters
from client.node import Node
from client.noisy_messages import noisy_messages
from mechanisms.choice import OWN
from privacy.consent import check_approved
from privacy.gate import Gate, checked_hypotheses, guard, local_report, local_result
from privacy.policy import Policy
from privacy.randomness import noise, streams
from privacy.runs import Runs
from privacy.time_limit import time_limit
from protocol.arrays import Arrays
from protocol.demands import VERSION, Evaluation, Training
from protocol.errors import ProtocolError, UmbelError
from protocol.flower import log
from protocol.messages import assigned_in, evaluation_in, hosting_reply, hypotheses_in, run_in, training_in, version_in

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
    node, demand = Node.of(context.node_config, context.run_config), training_in(content)
    assert demand is not None, "the gate asks for messages with training alone"
    node.check(hypotheses_in(content), demand.frozen_digest)
    node.training_clients(demand.clients)
    if demand.message_noise and not node.model.local_shapes:
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


def _train(node: Node, demand: Training, content: RecordDict, state: RecordDict) -> RecordDict:
    """Train the asked clients, which have paid, from the hypotheses that fit them best (Algorithm 1, lines 5 and 6).

    Those to which the gate assigned a hypothesis train that one.
    """
    hypotheses, assigned = hypotheses_in(content), assigned_in(content)
    clients, policy = node.training_clients(demand.clients), node.site.policy
    kept = LocalParameters(node.site, state, node.model, demand.run, node.seed)
    before = kept.read(clients)
    learner = node.learner
    # What cannot be trained stays where it is, and nobody learns that: see `_undisclosed`.
    chosen = np.maximum(assigned, 0)
    trained = {name: np.full((len(clients), *shape), np.nan, np.float32) for name, shape in node.model.shapes.items()}
    own: Arrays | None = None

    def compute() -> None:
        nonlocal chosen, trained, own
        cohort = Cohort.gather(node.federation, clients, learner.device)
        chosen = np.where(assigned == OWN, learner.choose(hypotheses, cohort, before), assigned)
        shuffles = streams(node.seed, "shuffle", demand.round, clients)
        trained, own = learner.train(
            hypotheses, chosen, cohort, _update(demand, policy), shuffles, before, policy.balanced_batches
        )

    _undisclosed(node, compute)
    if own is not None:
        kept.write(clients, own, trained)
    if demand.message_noise:
        sources = noise(node.seed, demand.round, clients, "message")
        # Noise on the rows that changed alone would show which those are.
        everywhere = policy.noise_all_items or not node.site.simulated
        trained = noisy_messages(trained, hypotheses, chosen, demand.message_noise, sources, everywhere)
    return local_result(trained, chosen)


def _update(demand: Training, policy: Policy) -> LocalUpdate:
    most = None if math.isinf(policy.max_examples) else int(policy.max_examples)
    return LocalUpdate(demand.local_epochs, demand.step_size, demand.batch_size, demand.local_steps, most)


def _evaluate(node: Node, demand: Evaluation, content: RecordDict, state: RecordDict) -> RecordDict:
    """Score the hypotheses for the asked clients, each by the one that fits it best."""
    hypotheses = hypotheses_in(content)
    node.check(hypotheses, demand.frozen_digest)
    clients = node.validation_clients(demand.clients)
    kept = LocalParameters(node.site, state, node.model, demand.run, node.seed)
    learner = node.learner
    losses, metrics = np.full((2, 1, len(clients)), np.nan)

    def compute() -> None:
        nonlocal losses, metrics
        cohort = Cohort.gather(node.federation, clients, learner.device)
        if not node.model.local_shapes:
            losses, metrics = learner.score(hypotheses, cohort)
        elif node.training_clients_report:
            losses, metrics = learner.score(hypotheses, cohort, kept.read(clients))
        else:
            losses, metrics = learner.score_newcomers(hypotheses, cohort, kept.fresh(clients), demand.step_size)

    _undisclosed(node, compute, node.training_clients_report)
    best = best_hypothesis(losses)[None]
    reported = (np.take_along_axis(values, best, 0)[0] for values in (losses, metrics))
    # To the server, no number at all is a client that did not answer; here it is a model that blew up.
    loss, metric = (np.where(np.isnan(values), np.inf, values) for values in reported)
    return local_report(loss, metric, node.site.local_ids(clients), node.training_clients_report)


def _undisclosed(node: Node, compute: Callable[[], None], needed: bool = True) -> None:
    """Compute on clients' data within the site's time; what goes wrong, the site alone is told.

    Whether memory or time is enough depends on how many rows there are. A reply that stayed away would
    tell that, for nothing. So the clients of the message are charged and answered as if nothing had gone
    wrong, and to the gate, numbers that are not there are those of training that blew up.

    Parameters
    ----------
    node : Node
    compute : callable
    needed : bool
        Whether clients are to be protected; those that report their loss as it is are not. In
        simulation, where nobody is, an error shall be seen.
    """
    try:
        with time_limit(node.site.policy.max_seconds):
            compute()
    except Exception as error:
        if node.site.simulated or not needed:
            raise
        trace = None if isinstance(error, UmbelError) else error
        log(ERROR, "umbel could not compute, and answers as if it could, without an update: %s", error, exc_info=trace)


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
        _undisclosed(node, lambda: keep(node, hypotheses, kept, folder))
    return Message(RecordDict(), reply_to=msg)
