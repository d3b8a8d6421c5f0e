"""The ServerApp: one of umbel's strategies, in place of one of Flower's."""

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import umbel

app = ServerApp()


def draw(generator):
    """Return the arrays of one model, drawn at random."""
    return {"w": generator.normal(size=2).astype(np.float32)}


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Find both models, from two that are drawn at random."""
    config = context.run_config
    strategy = umbel.GroupPrivacy(fraction_train=config["fraction-train"])
    start = umbel.hypotheses(draw, k=2, seed=0)  # one ArrayRecord, each array (k, *shape)
    result = strategy.start(grid, start, num_rounds=config["num-server-rounds"])
    models = umbel.unstack(result.arrays)  # one ordinary ArrayRecord a group
    print("found", [model["w"].numpy().astype(float).round(1).tolist() for model in models])
