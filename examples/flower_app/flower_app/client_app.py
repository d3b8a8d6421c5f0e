"""The ClientApp: NumPy trains a linear model. The Mods are all that it has of umbel."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import umbel
from flower_app.data import load_rows


def loss(arrays: ArrayRecord, context: Context) -> float:
    """Return the loss of one model on the client's rows, by which the client chooses."""
    x, y = load_rows(context.node_config["partition-id"])
    return np.mean((x @ arrays["w"].numpy() - y) ** 2)


app = ClientApp(mods=[umbel.ChooseHypothesis(loss, epsilon=2.0), umbel.LaplaceMod(noise_multiplier=2.0, clip_norm=0.7)])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model for ten epochs: it sees one model, and knows nothing of the others or of the noise."""
    w = msg.content["arrays"]["w"].numpy()
    x, y = load_rows(context.node_config["partition-id"])
    for _ in range(10):
        w = w - 0.1 * 2 * x.T @ (x @ w - y) / len(y)
    arrays = ArrayRecord({"w": Array(w.astype(np.float32))})
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)
