"""The formula figure of an Opacus step, from the noise that Opacus's own code adds."""

from math import erfc, exp, sqrt

import torch
from opacus.optimizers import DPOptimizer


def epsilon(mu, delta=1e-5):  # of Gaussian noise at a distance of mu deviations (Balle and Wang, 2018)
    low, high = 0.0, 500.0
    for _ in range(100):
        middle = (low + high) / 2
        near, far = (erfc((middle / mu + side * mu / 2) / sqrt(2)) / 2 for side in (-1, 1))
        low, high = (middle, high) if near - exp(middle) * far > delta else (low, middle)
    return high


weights = torch.nn.Parameter(torch.zeros(100_000))
weights.grad_sample = torch.zeros(4, 100_000)
inner = torch.optim.SGD([weights], lr=1.0)
DPOptimizer(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4).step()
print("DPOptimizer", epsilon(2.0 / 4 / weights.grad.std().item()))  # one row is a fourth of the mean
