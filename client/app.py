"""The ClientApp: what a node does when the server asks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client import personal
from client.cohort import Cohort, LocalUpdate, best_hypothesis, choose, choose_engine, pick_device, score, train
from client.keep import keep
from client.node import Node
from client.personal import LocalModels
from privacy.gate import ConsentGate, Gate, ReportGate, guard, local_report, local_result
from privacy.randomness import noise, streams
from protocol.arrays import Arrays
from protocol.errors import ProtocolError
from protocol.messages import CONFIG, COUNTS, HYPOTHESES, VERSION, Demand, asked_clients, local_reply
from protocol.records import from_array_record, record_in

app = ClientApp()


@app.query(mods=[guard])
def query(msg: Message, context: Context) -> Message:
    """Say how many clients this node hosts."""
    version = record_in(msg.content, CONFIG, ConfigRecord)["version"]
    if version != VERSION:
        raise ProtocolError(
            f"the server speaks protocol {version!r}, this node {VERSION}; install the same umbel on both"
        )
    hosting = Node.of(context.node_config, context.run_config).hosting
    return Message(RecordDict({COUNTS: hosting.to_record()}), reply_to=msg)


@app.train(mods=[Gate()])
def train_clients(msg: Message, context: Context) -> Message:
    """Train the asked clients; the gate stands between this and the server."""
    node = Node.of(context.node_config, context.run_config)
    demand = Demand.from_record(record_in(msg.content, CONFIG, ConfigRecord))
    hypotheses = from_array_record(record_in(msg.content, HYPOTHESES, ArrayRecord))
    node.check(hypotheses)
    clients = node.training_clients(demand.clients)
    device = pick_device(str(context.run_config["device"]))
    cohort = Cohort.gather(node.federation, clients, device)
    update = LocalUpdate(demand.local_epochs, demand.step_size, demand.batch_size, demand.local_steps)
    shuffles = streams(node.site.seed(context.run_config), "shuffle", demand.round, clients)
    if node.model.local_size:
        trained = _train_personal(node, context, demand, hypotheses, cohort, update, shuffles)
        return Message(local_result(trained, np.zeros(len(clients), np.int64)), reply_to=msg)
    if demand.message_noise:
        raise ProtocolError(f"the server asks for noisy messages of model {node.model.name!r}, which has no local part")
    engine = choose_engine(str(context.run_config["engine"]), node.model, device)
    chosen = choose(node.model, hypotheses, cohort, engine)
    trained = train(node.model, hypotheses, chosen, cohort, update, shuffles, engine)
    return Message(local_result(trained, chosen), reply_to=msg)


def _train_personal(
    node: Node,
    context: Context,
    demand: Demand,
    hypotheses: Arrays,
    cohort: Cohort,
    update: LocalUpdate,
    shuffles: Sequence[np.random.Generator],
) -> Arrays:
    """Train items and local models; keep the local models here and return the items."""
    items, seed = personal.only(hypotheses), node.site.seed(context.run_config)
    clients = node.training_clients(demand.clients)
    kept = LocalModels(context.state, node.model.local_size, seed)
    trained, users = personal.train(
        node.model, items, kept.read(clients), cohort, update, shuffles, node.policy.balanced_batches
    )
    kept.write(clients, users)
    if demand.message_noise:
        sources = noise(seed, demand.round, clients, "message")
        trained = personal.noisy_messages(trained, items, demand.message_noise, sources, node.policy.noise_all_items)
    return personal.as_arrays(trained)


@app.query("local", mods=[ConsentGate()])
def tell_local_models(msg: Message, context: Context) -> Message:
    """Tell the asked clients' local models, in simulation, so that an attack on them can be judged."""
    node = Node.of(context.node_config, context.run_config)
    clients = node.training_clients(asked_clients(record_in(msg.content, CONFIG, ConfigRecord)))
    kept = LocalModels(context.state, node.model.local_size, node.site.seed(context.run_config))
    return Message(local_reply(kept.read(clients)), reply_to=msg)


@app.query("keep", mods=[guard])
def keep_models(msg: Message, context: Context) -> Message:
    """Keep the hypothesis that fits each client best, where the site wants that; tell nobody."""
    node = Node.of(context.node_config, context.run_config)
    if node.site.keep_model is not None:
        hypotheses = from_array_record(record_in(msg.content, HYPOTHESES, ArrayRecord))
        node.check(hypotheses)
        keep(node, hypotheses, context.run_config)
    return Message(RecordDict(), reply_to=msg)


@app.evaluate(mods=[ReportGate()])
def evaluate_clients(msg: Message, context: Context) -> Message:
    """Report loss and metric of each asked validation client under its best hypothesis.

    The gate stands here as well.
    """
    node = Node.of(context.node_config, context.run_config)
    hypotheses = from_array_record(record_in(msg.content, HYPOTHESES, ArrayRecord))
    node.check(hypotheses)
    clients = node.validation_clients(asked_clients(record_in(msg.content, CONFIG, ConfigRecord)))
    device = pick_device(str(context.run_config["device"]))
    cohort = Cohort.gather(node.federation, clients, device)
    if node.model.local_size:
        losses, metrics = (
            values[None] for values in personal.score_newcomers(node.model, personal.only(hypotheses), cohort)
        )
    else:
        engine = choose_engine(str(context.run_config["engine"]), node.model, device)
        losses, metrics = score(node.model, hypotheses, cohort, engine)
    best = best_hypothesis(losses)[None]
    report = local_report(
        np.take_along_axis(losses, best, 0)[0],
        np.take_along_axis(metrics, best, 0)[0],
        node.site.local_ids(clients),
        node.training_clients_report,
    )
    return Message(report, reply_to=msg)
