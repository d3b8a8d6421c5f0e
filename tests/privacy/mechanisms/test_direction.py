"""What noise does to a client's RMSE: the bound knows its length alone (group privacy paper, Proposition 3.2).

J is the Jacobian of the outputs on m rows by the parameters, and |J| its largest singular value. Noise rho raises the
RMSE by at most |J| |rho| / sqrt(m): exactly so for a linear model, and to first order for any.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from umbel import models
from umbel.models import Model
from umbel.privacy.mechanisms import Laplace

Vectors = NDArray[np.float64]
DRAWS = 500
LINEAR, NETWORK = models.load("linear", "rmse"), models.load("mlp")


def outputs(model: Model, vector: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the outputs (m, 1) of a model with these parameters (n,)."""
    parts = vector.split([math.prod(shape) for shape in model.shapes.values()])
    named = {key: part.reshape(model.shapes[key]) for key, part in zip(model.shapes, parts, strict=True)}
    return model.apply(named, inputs)


def rmse(model: Model, parameters: Vectors, inputs: torch.Tensor, targets: torch.Tensor) -> Vectors:
    """Return the RMSE of each of the parameter vectors (m, n)."""
    found = [outputs(model, vector, inputs) for vector in torch.from_numpy(np.atleast_2d(parameters))]
    return np.array([model.loss.objective(model.loss.of_rows(one, targets).mean()).item() for one in found])


def test_the_bound_is_met_in_one_direction_and_the_rmse_stays_in_another() -> None:
    # One row (3, 4) with target 0 under theta = 0: noise rho gives an error of |3 rho_1 + 4 rho_2|, of at most 5 |rho|.
    row, target = torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    directions = np.array([[0.6, 0.8], [0.8, -0.6], [1.0, 0.0]])
    np.testing.assert_allclose(rmse(LINEAR, 2 * directions, row, target), [10, 0, 6], atol=1e-6)


@pytest.mark.parametrize("nu", [0.1, 3.0, 15.0])
def test_no_draw_raises_a_linear_models_rmse_by_more_than_the_bound(nu: float) -> None:
    g = np.random.default_rng(0)
    inputs, targets = torch.from_numpy(g.uniform(-1, 1, (10, 2))), torch.from_numpy(g.normal(0, 3, 10))
    theta = g.normal(size=2)
    rho = Laplace(nu).noise([2], np.ones((DRAWS, 1)), iter([g] * DRAWS))
    rise = rmse(LINEAR, theta + rho, inputs, targets) - rmse(LINEAR, theta, inputs, targets)
    longest = np.linalg.norm(inputs.numpy(), 2)
    assert (rise <= longest * np.linalg.norm(rho, axis=1) / np.sqrt(10) * (1 + 1e-6) + 1e-6).all()
    assert (rise < 0).any(), "some noise helps"


def test_it_holds_to_first_order_for_the_hospital_network_where_directions_differ_by_much() -> None:
    """The part of the rise above the bound shrinks faster than the noise; most directions raise it by far less."""
    g = np.random.default_rng(1)
    inputs, targets = torch.from_numpy(g.uniform(-1, 1, (50, 3))), torch.from_numpy(g.normal(size=50))
    theta = np.concatenate([value.ravel() for value in NETWORK.initial(0).values()]).astype(np.float64)
    rho = Laplace(1.0).noise([11], np.ones((DRAWS, 1)), iter([g] * DRAWS))
    rho /= np.linalg.norm(rho, axis=1, keepdims=True)

    jacobian = torch.autograd.functional.jacobian(
        lambda vector: outputs(NETWORK, vector, inputs)[:, 0], torch.from_numpy(theta)
    ).numpy()
    bound = np.linalg.norm(jacobian, 2) / np.sqrt(50)
    before = rmse(NETWORK, theta, inputs, targets)
    for length in (1e-2, 1e-4):
        rise = (rmse(NETWORK, theta + length * rho, inputs, targets) - before) / length
        assert rise.max() <= bound + 10 * length
    # |J rho| is the same in the mean over directions as that of the Frobenius norm spread over all n.
    moved = np.linalg.norm(rho @ jacobian.T, axis=1) ** 2
    assert moved.mean() == pytest.approx(np.linalg.norm(jacobian) ** 2 / 11, rel=0.2)
    assert moved.max() > 10 * moved.min()
