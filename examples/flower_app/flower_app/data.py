"""The rows of each client: half of the clients follow one linear model, half another."""

import numpy as np

OPTIMA = np.array([[5.0, 6.0], [4.0, -4.5]])
"""The two models that are to be found."""


def load_rows(partition_id):
    """Return the inputs and targets of one client."""
    draw = np.random.default_rng(partition_id)
    x = draw.uniform(-1, 1, (10, 2))
    return x, x @ OPTIMA[partition_id % 2] + draw.uniform(0, 1, 10)
