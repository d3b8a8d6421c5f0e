"""A batch is taken apart exactly by the units that ReLU switches off, and the attack says where it cannot be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.errors import raises
from umbel.models.model import Model, Parameters
from umbel.protocol.errors import NotApplicableError
from umbel_lab.attacks.small_batch import SURE, poised, rectified, rows_in

from .conftest import chain, drawn, noisy

pytestmark = pytest.mark.rest

SHAPE = (8, 8)


def dense(*after: nn.Module, bias: bool = True) -> Model:
    return chain(nn.Flatten(), nn.Linear(64, 40, bias=bias), *after, nn.Linear(40, 10))


def batch(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient_of(model: Model, parameters: Parameters, rows: Tensor, steps: int = 1) -> Parameters:
    """What a client of these rows shows: the sum of the gradients of its steps, of size 5."""
    now, total = dict(parameters), {name: torch.zeros_like(value) for name, value in parameters.items()}
    for _ in range(steps):
        own = {name: value.detach().requires_grad_() for name, value in now.items()}
        loss = nn.functional.cross_entropy(
            model.apply(own, rows), torch.arange(len(rows)) % model.apply(parameters, rows).shape[1]
        )
        for name, value in zip(own, torch.autograd.grad(loss, list(own.values())), strict=True):
            total[name] += value
            now[name] = now[name] - 5 * value
    return total


def directions(rows: Tensor) -> Tensor:
    ones = torch.ones(len(rows), 1, dtype=rows.dtype)
    return nn.functional.normalize(torch.cat([rows.flatten(1), ones], dim=1), dim=1)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


MODEL = dense(nn.ReLU())
START = drawn(MODEL, scale=0.15)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_each_row_of_a_batch_is_found_exactly(rows: int) -> None:
    given = batch(rows)
    found = rows_in(MODEL, START, gradient_of(MODEL, START, given), SHAPE, generator())
    match = found.inputs @ directions(given).T
    torch.testing.assert_close(match.max(dim=0).values, torch.ones(rows, dtype=torch.float64), rtol=0, atol=1e-9)
    assert match.argmax(dim=0).unique().numel() == rows, "a row each"
    assert found.agreement == (1.0,) * rows, "and the attacker knows"
    assert max(found.noise) < 1e-12


def test_the_units_that_are_on_tell_two_rows_by_hand() -> None:
    """Units 1 and 2 are on for the first row alone, 3 and 4 for the second: the rows of the gradient are the rows."""
    model = chain(nn.Flatten(), nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    start = {
        "1.weight": torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]),
        "1.bias": -torch.ones(4),
        "3.weight": torch.tensor([[1.0, 2.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0]]),
        "3.bias": torch.zeros(2),
    }
    given = torch.tensor([[[2.0, 0.0]], [[0.0, 3.0]]])
    found = rows_in(model, start, gradient_of(model, start, given), (1, 2), generator())
    rows = {tuple(row) for row in (found.inputs / found.inputs[:, -1:])[:, :-1].round(decimals=5).tolist()}
    assert rows == {(2.0, 0.0), (0.0, 3.0)}


def test_noise_blurs_rows_as_much_as_it_says_and_nobody_is_sure() -> None:
    given = batch(2)
    found = rows_in(MODEL, START, noisy(gradient_of(MODEL, START, given), 0.03), SHAPE, generator())
    off = 1 - (found.inputs @ directions(given).T).max(dim=1).values.square()
    assert 0 < max(off.tolist()) < 10 * max(found.noise)
    assert max(found.noise) < 0.05


@pytest.mark.parametrize(("rows", "noise", "said"), [(2, 50.0, "0 rows"), (12, 0.0, "1 to 8")])
def test_it_says_when_noise_hides_the_rows_or_there_are_too_many(rows: int, noise: float, said: str) -> None:
    gradient = noisy(gradient_of(MODEL, START, batch(rows)), noise)
    with raises(NotApplicableError, "attack.no-low-rank", said):
        rows_in(MODEL, START, gradient, SHAPE, generator(), most=8)


def test_several_steps_on_the_same_rows_hide_nothing() -> None:
    given = batch(2)
    found = rows_in(MODEL, START, gradient_of(MODEL, START, given, steps=5), SHAPE, generator())
    assert (found.inputs @ directions(given).T).max(dim=1).values.min() > 1 - 1e-9
    assert min(found.agreement) >= SURE


def test_where_training_has_moved_the_units_it_is_not_sure() -> None:
    """As if half of the steps had been taken by a network that has come far away from the one that was sent."""
    given = batch(2)
    both = (gradient_of(MODEL, one, given) for one in (START, drawn(MODEL, 1, 0.15)))
    total = {name: sum(values) for name, *values in zip(START, *(one.values() for one in both), strict=True)}
    found = rows_in(MODEL, START, total, SHAPE, generator())
    assert max(found.agreement) < SURE


def test_it_says_when_rows_share_their_units() -> None:
    """Both rows switch on the same units: nothing tells them apart."""
    model, given = dense(nn.ReLU()), batch(1).repeat(2, 1, 1)
    given[1] *= 1.5
    start = drawn(model, scale=0.15)
    start["1.bias"] *= 0
    with raises(NotApplicableError, "attack.no-sparse-rows", "0 of 2"):
        rows_in(model, start, gradient_of(model, start, given), SHAPE, generator())


def test_only_relu_tells_rows_apart() -> None:
    start = drawn(dense(nn.ReLU()))
    assert rectified(dense(nn.ReLU()), start, "1", SHAPE)
    for other in (dense(nn.Sigmoid()), dense(nn.LeakyReLU())):
        assert not rectified(other, start, "1", SHAPE)
        with raises(NotApplicableError, "attack.no-relu"):
            rows_in(other, start, start, SHAPE, generator())
    model = dense(nn.ReLU(), bias=False)
    with raises(NotApplicableError, "attack.no-bias"):
        rows_in(model, drawn(model), drawn(model), SHAPE, generator())


def test_public_images_poise_the_network() -> None:
    model = chain(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 2, 5), nn.ReLU(), nn.Flatten(), nn.Linear(32, 6), nn.ReLU())
    images = torch.rand(21, *SHAPE, generator=generator(), dtype=torch.float64)
    start = poised(model, drawn(model), images)
    features = nn.functional.conv2d(images[:, None], start["1.weight"], start["1.bias"]).relu().flatten(1)
    on = features @ start["4.weight"].T + start["4.bias"] > 0
    assert on.sum(dim=0).tolist() == [10] * 6, "of 21 images, since one is the median"
    blank = nn.functional.conv2d(images.median().expand(1, 1, 8, 8), start["1.weight"], start["1.bias"])
    torch.testing.assert_close(blank, torch.zeros_like(blank))
