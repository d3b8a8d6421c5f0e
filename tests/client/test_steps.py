"""Local optimizers do as those of PyTorch, for each client by itself, in both learners."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.cohorts import InOrder, Rows, assert_close, cohort_of, draw_client, engines, generators, sgd, train
from tests.helpers.errors import raises
from tests.helpers.models import draw_hypotheses
from umbel import models
from umbel.client.cohort import LocalUpdate
from umbel.models.optimizers import OPTIMIZERS, descent_of
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
MODEL = models.load("mlp", "mse")
RAGGED: list[Rows] = [draw_client(MODEL, rows, np.random.default_rng(rows)) for rows in (7, 3, 5)]
UPDATE = LocalUpdate(local_epochs=2, step_size=0.05, batch_size=2)


@engines
@pytest.mark.parametrize(
    ("name", "options", "make"),
    [
        ("sgd", "weight-decay=0.1", lambda own: torch.optim.SGD(own, 0.05, weight_decay=0.1)),
        ("sgd", "momentum=0.5 nesterov=true", lambda own: torch.optim.SGD(own, 0.05, momentum=0.5, nesterov=True)),
        ("momentum", "", lambda own: torch.optim.SGD(own, 0.05, momentum=0.9)),
        ("adam", "", lambda own: torch.optim.Adam(own, 0.05)),
        ("adam", "beta1=0.5 epsilon=0.01", lambda own: torch.optim.Adam(own, 0.05, (0.5, 0.999), 0.01)),
        ("adamw", "", lambda own: torch.optim.AdamW(own, 0.05)),
    ],
)
@pytest.mark.parametrize("more", [{}, {"clip": 0.3, "proximal": 0.5}], ids=["alone", "clipped and held"])
def test_each_client_has_an_optimizer_of_pytorchs(
    engine: str, name: str, options: str, make: Make, more: dict[str, float]
) -> None:
    """Clients of fewer rows than others take fewer steps, and what an optimizer remembers counts their own."""
    start = draw_hypotheses(MODEL, 1)
    named = f"{name} clip-gradient={more.get('clip', 0.0)} proximal={more.get('proximal', 0.0)} {options}"
    update = replace(UPDATE, descent=descent_of(named.strip()))
    trained = train(MODEL, start, [0, 0, 0], cohort_of(*RAGGED), update, [InOrder()] * 3, engine)
    first = {key: value[0] for key, value in start.items()}
    expected = [sgd(MODEL, first, rows, UPDATE, make=make, **more) for rows in RAGGED]
    assert_close(trained, {key: np.stack([one[key] for one in expected]) for key in trained}, rtol=1e-4, atol=1e-5)


@engines
def test_what_an_optimizer_remembers_it_forgets_after_the_round(engine: str) -> None:
    update = replace(UPDATE, descent=OPTIMIZERS["momentum"]())
    start = draw_hypotheses(MODEL, 1)
    first, again = (train(MODEL, start, [0, 0, 0], cohort_of(*RAGGED), update, generators(3), engine) for _ in range(2))
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])


def test_plain_descent_is_what_a_run_asks_for_that_says_nothing() -> None:
    assert descent_of(RunConfig().optimizer).plain
    assert not descent_of("sgd proximal=0.1").plain
    assert not descent_of("momentum").plain


def test_an_option_of_another_optimizer_is_refused() -> None:
    with raises(ConfigError, "config.unknown-option", "momentum", "beta1", "beta2"):
        descent_of("adam momentum=0.9")


def test_an_option_without_effect_is_refused() -> None:
    with raises(ConfigError, "config.option-value", "nesterov", "momentum"):
        descent_of("sgd nesterov=true")
