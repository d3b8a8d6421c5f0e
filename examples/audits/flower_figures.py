"""The formula figures of Flower's mechanisms, from the noise that Flower's own code adds."""

from math import erfc, exp, sqrt
from types import SimpleNamespace

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import strategy


def epsilon(mu, delta=1e-5):  # of Gaussian noise at a distance of mu deviations (Balle and Wang, 2018)
    low, high = 0.0, 500.0
    for _ in range(100):
        middle = (low + high) / 2
        near, far = (erfc((middle / mu + side * mu / 2) / sqrt(2)) / 2 for side in (-1, 1))
        low, high = (middle, high) if near - exp(middle) * far > delta else (low, middle)
    return high


zeros, small = (ArrayRecord({"w": Array(np.full(100_000, value))}) for value in (0.0, 1e-3))
mod = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)
reply = SimpleNamespace(content=RecordDict({"arrays": small}), has_error=lambda: False)
noise = mod(SimpleNamespace(content=RecordDict({"arrays": zeros})), None, lambda *_: reply).content["arrays"]
print("LocalDpMod", epsilon(2.0 / noise["w"].numpy().std()))  # two clipped updates are two clip norms apart
for side in ("Client", "Server"):
    fixed = {"clipping_norm": 1.0}
    adaptive = {"initial_clipping_norm": 1.0, "clipped_count_stddev": 1.0}
    for kind, options in {"Fixed": fixed, "Adaptive": adaptive}.items():
        name = f"DifferentialPrivacy{side}Side{kind}Clipping"
        wrapper = getattr(strategy, name)(strategy.FedAvg(), noise_multiplier=1.0, num_sampled_clients=4, **options)
        noise = wrapper._add_noise_to_aggregated_arrays(zeros)["w"].numpy()
        print(name, epsilon(2.0 / 4 / noise.std()))  # one client is a fourth of the mean
