"""The ClientApp: as without the gate, but for one line."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import umbel
from quickstart.task import Net, load_data
from quickstart.task import test as test_fn
from quickstart.task import train as train_fn

gate = umbel.Gate(
    noise_multiplier=2.0,
    clip_norm=1.0,
    mechanism="gaussian",
    budget=10.0,
    delta=1e-5,
    reports=["eval_loss", "eval_acc"],
)
app = ClientApp(mods=[gate])


@app.train()
def train(msg: Message, context: Context):
    """Train the model on the client's rows."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data = load_data(context.node_config["partition-id"])
    config = context.run_config
    loss = train_fn(net, data, config["local-epochs"], config["learning-rate"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Score the model on the client's rows; the gate answers for those sites alone that let their clients report."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data = load_data(context.node_config["partition-id"])
    loss, accuracy = test_fn(net, data)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
