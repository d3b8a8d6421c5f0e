"""The ClientApp again: PyTorch trains the linear model."""

import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import umbel
from flower_app.client_app import loss
from flower_app.data import load_rows

app = ClientApp(mods=[umbel.ChooseHypothesis(loss, epsilon=2.0), umbel.LaplaceMod(noise_multiplier=2.0, clip_norm=0.7)])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model for ten epochs, from where the server's model is."""
    x, y = (torch.tensor(rows, dtype=torch.float32) for rows in load_rows(context.node_config["partition-id"]))
    w = torch.tensor(msg.content["arrays"]["w"].numpy(), requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(x @ w, y).backward()
        optimizer.step()
    arrays = ArrayRecord({"w": Array(w.detach().numpy())})
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)
