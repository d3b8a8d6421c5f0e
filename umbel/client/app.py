"""The ClientApp: a node's replies to the server.

The gate (`umbel.privacy.gate.own_app`) stands in front of `take_part`. A learner (`umbel.client.learner`) chooses,
trains and scores behind it.
"""

from __future__ import annotations

from logging import ERROR
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from umbel.client.cohort import Cohort
from umbel.client.crew import Crew
from umbel.client.learner import Learner, best_hypothesis
from umbel.client.local import LocalParameters
from umbel.client.node import Node
from umbel.client.noisy_messages import noisy_messages
from umbel.client.personal.keep import models_to_keep, write_models
from umbel.models.prior import Prior
from umbel.privacy.gate import secure_sums
from umbel.privacy.gate.consent import check_admitted, check_allowed, check_strategy
from umbel.privacy.gate.own_app import RoundGate, local_report, local_result, node_in
from umbel.privacy.gate.randomness import noise, row_sources, streams
from umbel.privacy.gate.refusals import check_hypotheses, guard
from umbel.privacy.gate.runs import Runs
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.undisclosed import Some, log_failure, time_limit, undisclosed
from umbel.privacy.mechanisms.choice import OWN
from umbel.privacy.secure.wire import Request
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ProtocolError, Refused
from umbel.protocol.flower import with_content
from umbel.protocol.log import log
from umbel.protocol.messages import (
    SECURE,
    assigned_in,
    evaluation_in,
    hosting_reply,
    hypotheses_in,
    prior_in,
    run_in,
    training_in,
    version_in,
)
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import VERSION, EvaluationSpec, TrainingSpec

app = ClientApp()


@app.query(mods=[guard])
def query(msg: Message, context: Context) -> Message:
    """Report how many clients this node hosts."""
    version = version_in(msg.content)
    if version != VERSION:
        raise Refused(
            f"the run speaks protocol {version!r}, this site {VERSION}; use the same umbel on both sides",
            code="refused.version",
        )
    # The server asks nothing of a node that it does not know.
    node = _admitting(context)
    return Message(hosting_reply(node.hosting), reply_to=msg)


_gate = RoundGate(Node.at)


@app.evaluate(mods=[_gate])
@app.train(mods=[_gate])
def take_part(msg: Message, context: Context) -> Message:
    """Train the asked clients, or score the hypotheses for them; the gate stands between this and the server.

    A round's message may ask for both. The gate then calls this for one after the other.
    """
    node = node_in(msg.content, Node)
    training, evaluation = training_in(msg.content), evaluation_in(msg.content)
    if training is not None:
        return with_content(msg, _train(node, training, msg.content, context.state))
    if evaluation is not None:
        return with_content(msg, _evaluate(node, evaluation, msg.content, context.state))
    raise ProtocolError("the message asks for nothing", code="protocol.asks-nothing")


def _admitting(context: Context) -> Node:
    """Return the node of a run that the site answers; raise `Refused` for any other run."""
    site, run, run_id = Site.of(context.node_config), RunConfig.of(context.run_config), str(context.run_id)
    check_strategy(site, run)
    try:
        node = Node.at(site, run)
        n = node.model.num_parameters
    except Exception as error:
        check_allowed(site, run_id, run, error)
        raise
    check_admitted(site, run_id, run, n)
    return node


def _train(node: Node, task: TrainingSpec, content: RecordDict, state: RecordDict) -> RecordDict:
    """Train the asked clients, which have been charged, from their best hypotheses (Algorithm 1, lines 5 and 6).

    If the gate assigned a hypothesis to a client, the client trains that one.
    """
    hypotheses, assigned = hypotheses_in(content), assigned_in(content)
    clients, k = node.training_clients(task.clients), len(next(iter(hypotheses.values())))
    kept, hidden = LocalParameters(node.site, state, node.model, task.run, node.seed), task.hides_rows(k)
    before = kept.read(clients, hidden)
    update, names = node.update(task), list(node.model.shapes)
    crew = Crew(node, clients, together=update.rows is None)
    starts = _copied(hypotheses)

    def trained_from(chosen: NDArray[np.int64], some: Some, cohort: Cohort, learner: Learner) -> list[NDArray[Any]]:
        asked, seed, round = np.asarray(clients)[some].tolist(), node.seed, task.round
        draws = row_sources(seed, round, asked) if update.rows else streams(seed, "shuffle", round, asked)
        local = {name: value[some] for name, value in before.items()}
        shared, own = learner.train(starts, chosen, cohort, update, draws, local)
        return [chosen, *(shared[name] for name in names), *(own[name] for name in before)]

    def compute(some: Some) -> list[NDArray[Any]]:
        cohort = Cohort.gather(node.dataset, np.asarray(clients)[some].tolist(), node.learner.device)
        local = {name: value[some] for name, value in before.items()}
        with crew.learner() as learner:
            chosen = np.where(assigned[some] == OWN, learner.choose(starts, cohort, local), assigned[some])
            return trained_from(chosen, some, cohort, learner)

    def nothing(some: Some) -> list[NDArray[Any]]:
        # A client whose training fails keeps its hypothesis.
        kept = np.maximum(assigned[some], 0)
        if update.rows is not None and len(kept):
            # The noise of training is all that hides a row: without it, the release would tell who failed.
            rowless = Cohort.without_rows(len(kept), node.dataset.features.shape[1:], node.learner.device)
            return trained_from(kept, some, rowless, node.learner)
        shapes = [*node.model.shapes.values(), *(value.shape[1:] for value in before.values())]
        return [kept, *(np.full((len(kept), *shape), np.nan, np.float32) for shape in shapes)]

    with crew.threads:
        chosen, *found = undisclosed(node.site, len(clients), compute, nothing, apart=crew.apart)
    trained = dict(zip(names, found, strict=False))
    try:
        kept.write(clients, dict(zip(before, found[len(names) :], strict=True)), trained, hidden)
    except OSError as error:
        # The clients have been charged, and so their releases leave. A full disk says nothing about their data.
        log(
            ERROR,
            "the local parameters of round %d are lost, so clients keep their earlier ones: %s",
            task.round,
            error,
        )
    if task.message_noise:
        sources = noise(node.seed, task.round, clients, "message")
        # Noise only on the changed rows would show which rows those are.
        trained = noisy_messages(
            trained, hypotheses, chosen, task.message_noise, sources, everywhere=not node.site.simulated
        )
    return local_result(trained, chosen, update.rows)


def _copied(hypotheses: Arrays) -> Arrays:
    """Return a message's arrays as ones that PyTorch takes without a copy for each client."""
    return {name: np.array(value) for name, value in hypotheses.items()}


def _evaluate(node: Node, task: EvaluationSpec, content: RecordDict, state: RecordDict) -> RecordDict:
    """Score each asked client's best hypothesis."""
    hypotheses = hypotheses_in(content)
    node.check(hypotheses, task.frozen_digest)
    clients = node.validation_clients(task.clients)
    kept = LocalParameters(node.site, state, node.model, task.run, node.seed)
    crew, scored = Crew(node, clients), _copied(hypotheses)

    def compute(some: Some) -> list[NDArray[Any]]:
        own = np.asarray(clients)[some].tolist()
        cohort = Cohort.gather(node.dataset, own, node.learner.device)
        with crew.learner() as learner:
            if not node.model.local_shapes:
                scores = learner.score(scored, cohort)
            elif node.training_clients_report:
                scores = learner.score(scored, cohort, kept.read(own))
            else:
                scores = learner.score_newcomers(scored, cohort, kept.fresh(own), task.step_size)
        return [one.T for one in scores]

    def nothing(some: Some) -> list[NDArray[Any]]:
        own = np.asarray(clients)[some]
        return list(np.full((2, len(own), len(next(iter(hypotheses.values())))), np.nan))

    noisy = node.site.policy.report_noise > 0
    with crew.threads:
        found = undisclosed(node.site, len(clients), compute, nothing, noisy, crew.apart)
    losses, metrics = (one.T for one in found)
    best = best_hypothesis(losses), np.arange(len(clients))
    # To the server, NaN means that a client did not reply; here it means a diverged model.
    loss, metric = (np.where(np.isnan(own), np.inf, own) for own in (losses[best], metrics[best]))
    return local_report(loss, metric, node.site.local_ids(clients), node.training_clients_report)


@app.query("secure", mods=[guard])
def add_securely(msg: Message, context: Context) -> Message:
    """Do this site's part of a secure sum in which nothing is trained."""
    site = _admitting(context).site
    seed = site.seed(RunConfig.of(context.run_config))
    found = secure_sums.reply(site, seed, context.state, Request.read(msg.content))
    return Message(RecordDict({SECURE: found}), reply_to=msg)


@app.query("keep", mods=[guard])
def keep_models(msg: Message, context: Context) -> Message:
    """Keep each client's best hypothesis, if the site wants that; nothing leaves."""
    node = _admitting(context)
    hypotheses, name = hypotheses_in(msg.content), run_in(msg.content)
    check_hypotheses(hypotheses, node.site.policy)
    node.check(hypotheses)
    arrays, k = prior_in(msg.content), len(next(iter(hypotheses.values())))
    prior = None if arrays is None else Prior.read(arrays, k, node.model.num_parameters)
    # A site that keeps nothing runs the same checks, so that its reply does not reveal that.
    if not node.site.simulated:
        Runs.of(node.site).end(str(context.run_id), name, hypotheses, evaluates=len(node.validation) > 0)
    if (folder := node.site.keep_model) is not None:
        kept = LocalParameters(node.site, context.state, node.model, name, node.seed)
        try:
            with time_limit(node.site.policy.max_seconds):
                models = models_to_keep(node, hypotheses, kept, prior)
            write_models(folder, models)
        except (KeyboardInterrupt, SystemExit):  # a user ends the node
            raise
        except BaseException as error:  # a Rust library raises this when it panics
            if node.site.simulated:
                raise
            log_failure("and keep the best hypothesis of each client", error)
    return Message(RecordDict(), reply_to=msg)
