"""The ClientApp of one client."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from . import task

app = ClientApp()


def hypotheses_of(msg: Message) -> list[task.State]:
    """Return the hypotheses in a message, in order."""
    records = msg.content.array_records
    return [dict(records[f"hypothesis-{j}"].to_torch_state_dict()) for j in range(len(records))]


@app.query()
def query(msg: Message, context: Context) -> Message:
    """Say whether this client trains or validates."""
    trains = task.trains(str(context.run_config["data"]), int(context.node_config["partition-id"]))
    return Message(RecordDict({"role": MetricRecord({"trains": int(trains)})}), reply_to=msg)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the hypothesis that fits best, and release it under noise."""
    config = context.run_config
    features, targets = task.load_data(str(config["data"]), int(context.node_config["partition-id"]))
    hypotheses = hypotheses_of(msg)
    losses = task.losses(hypotheses, features, targets)
    start = hypotheses[losses.index(min(losses))]
    trained = task.train(
        start, features, targets, int(config["local-epochs"]), float(config["step-size"]), int(config["batch-size"])
    )
    release = task.sanitise(start, trained, float(config["noise-multiplier"]), float(config["clip-norm-floor"]))
    return Message(RecordDict({"arrays": ArrayRecord(release)}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Report the loss of the hypothesis that fits best."""
    data = task.load_data(str(context.run_config["data"]), int(context.node_config["partition-id"]))
    loss = min(task.losses(hypotheses_of(msg), *data))
    return Message(RecordDict({"metrics": MetricRecord({"loss": loss})}), reply_to=msg)
