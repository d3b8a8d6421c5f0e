"""FedJAX's part: its hyp_cluster, which is IFCA; k hypotheses, clients tell which they chose, no noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms.hyp_cluster import hyp_cluster
from jax import lax

from benchmarks.peers.brief import TINY, Arrays, Brief, serve

MASK = fedjax.EXAMPLE_MASK_KEY


def mlp(params: Any, x: Any) -> Any:
    """Return outputs (batch,)."""
    hidden = jax.nn.relu(x @ params["0.weight"] + params["0.bias"])
    return (hidden @ params["2.weight"] + params["2.bias"])[:, 0]


def cnn(params: Any, x: Any) -> Any:
    """Return logits (batch, classes), with channels last, which suits XLA on a CPU."""
    hidden = x[..., None]
    for name in ("conv1", "conv2"):
        kernel = params[f"{name}.weight"]
        hidden = lax.conv_general_dilated(hidden, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        hidden = hidden + params[f"{name}.bias"]
        if name == "conv2":
            hidden = lax.reduce_window(hidden, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        hidden = jax.nn.relu(hidden)
    hidden = jax.nn.relu(hidden.reshape(len(x), -1) @ params["fc1.weight"] + params["fc1.bias"])
    return hidden @ params["fc2.weight"] + params["fc2.bias"]


def rmse(params: Any, batch: Any, rng: Any) -> Any:
    """Return the batch's RMSE for each of its rows: FedJAX descends and reports the mean."""
    squares = jnp.square(mlp(params, batch["x"]) - batch["y"])
    real = batch.get(MASK, jnp.ones_like(squares))
    return jnp.broadcast_to(jnp.sqrt(jnp.sum(squares * real) / jnp.sum(real) + TINY), squares.shape)


def cross_entropy(params: Any, batch: Any, rng: Any) -> Any:
    """Return the loss of each row."""
    logits = jax.nn.log_softmax(cnn(params, batch["x"]))
    return -jnp.take_along_axis(logits, batch["y"][:, None], 1)[:, 0]


def channels_last(parameters: Arrays) -> Arrays:
    """Return PyTorch's parameters in the layout that is computed with here."""
    turned = {}
    for name, value in parameters.items():
        if value.ndim == 4:
            value = value.transpose(2, 3, 1, 0)
        elif name == "fc1.weight":
            value = value.reshape(128, 64, 12, 12).transpose(2, 3, 1, 0).reshape(-1, 128)
        elif value.ndim == 2:
            value = value.T
        turned[name] = np.ascontiguousarray(value)
    return turned


def filled_batch(brief: Brief) -> int:
    """Return the batch size for training.

    FedJAX fills a minibatch by repeating rows. Where it holds all of a client's rows anyway, this
    size has each repeated equally often, so that the gradient is that of the rows once each.
    """
    sizes = set(brief.lengths.tolist())
    return math.lcm(*sizes) if max(sizes) <= min(brief.settings.batch_size, 4) else brief.settings.batch_size


def prepare(brief: Brief, variant: str) -> Callable[[], float]:
    """Return what does a run."""
    settings = brief.settings
    loss = rmse if settings.network == "mlp" else cross_entropy
    clients = (brief.client(c) for c in range(len(brief.lengths)))
    rows = [fedjax.ClientDataset({"x": x, "y": y}) for x, y in clients]
    # Few sizes, so that little is compiled, and little padding. A client of mlp fits in one batch.
    padded = fedjax.PaddedBatchHParams(min(settings.batch_size, int(brief.lengths.max())), num_batch_size_buckets=4)
    algorithm = hyp_cluster(
        loss,
        fedjax.optimizers.sgd(settings.step_size),
        fedjax.optimizers.sgd(1.0),
        padded,
        fedjax.ShuffleRepeatBatchHParams(filled_batch(brief), num_epochs=settings.local_epochs, seed=0),
    )
    evaluator = fedjax.AverageLossEvaluator(loss)
    initial = [jax.tree_util.tree_map(jnp.asarray, channels_last(brief.initial(j))) for j in range(brief.k)]

    def validate(hypotheses: Any, clients: Iterable[int]) -> float:
        key = jax.random.PRNGKey(0)  # nothing here is random
        asked = [(place, rows[c].padded_batch(padded), key) for place, c in enumerate(clients)]
        losses = [
            [value for _, value in evaluator.evaluate_global_params(parameters, asked)] for parameters in hypotheses
        ]
        return float(np.asarray(jax.device_get(losses)).min(0).mean())

    def run() -> float:
        state = algorithm.init(initial)
        for number, clients in enumerate(settings.train):
            validate(state.cluster_params, settings.validate[number])
            keys = np.asarray(jax.random.split(jax.random.PRNGKey(number), len(clients)))
            # Numbered within the round: hyp_cluster compiles a function again for each new set of names.
            asked = [(place, rows[c], key) for place, (c, key) in enumerate(zip(clients, keys, strict=True))]
            state, _ = algorithm.apply(state, asked)
        return validate(state.cluster_params, settings.validate[-1])

    return run


if __name__ == "__main__":
    serve(prepare)
