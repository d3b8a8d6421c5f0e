"""The ClientApp: what a node does when the server asks."""

from __future__ import annotations

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client.cohort import Cohort, LocalUpdate, best_hypothesis, choose_engine, pick_device, score, train
from client.node import Node
from privacy.gate import Gate, ReportGate, guard, local_report, local_result
from privacy.randomness import streams
from protocol import (
    CONFIG,
    COUNTS,
    HYPOTHESES,
    VERSION,
    Demand,
    ProtocolError,
    asked_clients,
    from_array_record,
)

app = ClientApp()


@app.query(mods=[guard])
def query(msg: Message, context: Context) -> Message:
    """Say how many clients this node hosts."""
    version = msg.content.config_records[CONFIG]["version"]
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
    demand = Demand.from_record(msg.content.config_records[CONFIG])
    hypotheses = from_array_record(msg.content.array_records[HYPOTHESES])
    node.check(hypotheses)
    clients = node.training_clients(demand.clients)
    device = pick_device(str(context.run_config["device"]))
    engine = choose_engine(str(context.run_config["engine"]), node.model, device)
    cohort = Cohort.gather(node.federation, clients, device)
    losses, _ = score(node.model, hypotheses, cohort, engine)
    chosen = best_hypothesis(losses)
    shuffles = streams(node.site.seed(context.run_config), "shuffle", demand.round, clients)
    update = LocalUpdate(demand.local_epochs, demand.step_size, demand.batch_size)
    trained = train(node.model, hypotheses, chosen, cohort, update, shuffles, engine)
    return Message(local_result(trained, chosen), reply_to=msg)


@app.evaluate(mods=[ReportGate()])
def evaluate_clients(msg: Message, context: Context) -> Message:
    """Report loss and metric of each asked validation client under its best hypothesis.

    The gate stands here as well.
    """
    node = Node.of(context.node_config, context.run_config)
    hypotheses = from_array_record(msg.content.array_records[HYPOTHESES])
    node.check(hypotheses)
    clients = node.validation_clients(asked_clients(msg.content.config_records[CONFIG]))
    device = pick_device(str(context.run_config["device"]))
    cohort = Cohort.gather(node.federation, clients, device)
    losses, metrics = score(
        node.model, hypotheses, cohort, choose_engine(str(context.run_config["engine"]), node.model, device)
    )
    best = best_hypothesis(losses)[None]
    report = local_report(
        np.take_along_axis(losses, best, 0)[0],
        np.take_along_axis(metrics, best, 0)[0],
        node.site.local_ids(clients),
        node.training_clients_report,
    )
    return Message(report, reply_to=msg)
