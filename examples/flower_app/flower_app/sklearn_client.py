"""The ClientApp again: scikit-learn trains the linear model."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.linear_model import SGDRegressor

import umbel
from flower_app.client_app import loss
from flower_app.data import load_rows

app = ClientApp(mods=[umbel.ChooseHypothesis(loss, epsilon=2.0), umbel.LaplaceMod(noise_multiplier=2.0, clip_norm=0.7)])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model for ten epochs, from where the server's model is."""
    x, y = load_rows(context.node_config["partition-id"])
    model = SGDRegressor(penalty=None, fit_intercept=False, learning_rate="constant", eta0=0.02, max_iter=10, tol=None)
    model.fit(x, y, coef_init=msg.content["arrays"]["w"].numpy())
    arrays = ArrayRecord({"w": Array(model.coef_.astype(np.float32))})
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)
