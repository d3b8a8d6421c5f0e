"""The model of all rows is believed only if it is likely to be the best: on curves that are worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.cohorts import ByArrays
from umbel import models
from umbel.client.cohort import Cohort
from umbel.client.learner import Learner
from umbel.server.run import draw_hypotheses
from umbel.simulation import worth
from umbel.simulation.worth import fit_pooled

CPU = torch.device("cpu")
ROWS = Cohort(torch.zeros(2, 1), torch.zeros(2), np.array([1, 1]))
LOW = -1.0467
"""The lower of the two minima of `valleys`; the other is 0.9456, at losses of -0.102 and 0.098."""


def valleys(w: Tensor) -> Tensor:
    return (w**2 - 1) ** 2 / 4 + 0.1 * w


def bowl(w: Tensor) -> Tensor:
    return (w - 3) ** 2


def fitted(
    patch: pytest.MonkeyPatch, starts: list[float], curve: Any = valleys, other: float = 2.0
) -> tuple[float, str]:
    """Return the parameter that is fitted to a curve from some starts, and the doubt."""
    drawn = {"w": np.array(starts, np.float32)[:, None]}
    patch.setattr(worth, "draw_hypotheses", lambda *_: drawn)
    model = SimpleNamespace(linear=curve is bowl, module=nn.Sequential())
    learner: Any = SimpleNamespace(device="cpu", model=model, objective=lambda own, _: curve(own["w"]).sum())
    found, doubt = fit_pooled(learner, ROWS, 0, {"w": np.array([[other]], np.float32)})
    return float(found["w"].item()), doubt


@pytest.mark.parametrize(
    ("starts", "curve", "other", "lowest", "doubted"),
    [
        # Two fits that agree are too few: the first two end at the same bad place.
        ([0.5, 0.7, -0.5, -0.7], valleys, 2.0, LOW, False),
        # A lowest loss that one fit reaches is doubted; the fourth starts from the run's hypothesis.
        ([0.5, 0.7, -0.5], valleys, 2.0, LOW, True),
        ([0.5, 0.7, -0.5], valleys, -2.0, LOW, False),
        # So is a model behind the run's own.
        ([0.5, 0.6, 0.7], valleys, LOW, LOW, True),
        # A linear model has one minimum, so one fit is enough.
        ([0.0], bowl, 2.0, 3.0, False),
    ],
)
def test_the_lowest_minimum_is_found_or_doubted(
    monkeypatch: pytest.MonkeyPatch, starts: list[float], curve: Any, other: float, lowest: float, doubted: bool
) -> None:
    where, doubt = fitted(monkeypatch, starts, curve, other)
    assert (where, "4 fits" in doubt, bool(doubt)) == (pytest.approx(lowest, abs=1e-3), doubted, doubted)


def test_a_fit_that_is_cut_short_is_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "STEPS", 2)
    assert fitted(monkeypatch, [40.0, 50.0, 60.0, 70.0])[1]
    assert fitted(monkeypatch, [0.0], bowl)[1], "however few minima it has"


# --- images of two kinds of clients, at which a start in four leaves a network without a slope


def network(classes: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 7 * 7, classes))


def images(clients: int, seed: int) -> Cohort:
    """Return 40 images of each client: one corner is bright, and for every other client dark."""
    draw = np.random.default_rng(seed)
    labels, pixels = draw.integers(0, 4, 40 * clients), draw.normal(60, 25, (40 * clients, 16, 16))
    for i, label in enumerate(labels):
        corner = np.s_[(label // 2) * 8 : (label // 2) * 8 + 8, (label % 2) * 8 : (label % 2) * 8 + 8]
        pixels[i][corner] += 90 if i // 40 % 2 else -50
    scaled = pixels.clip(0, 255).astype(np.float32)[:, None] / 255
    return Cohort(torch.from_numpy(scaled), torch.from_numpy(labels), np.full(clients, 40))


def test_images_that_one_model_tells_apart_are_told_apart() -> None:
    """From this seed, the first two fits end at a loss of 0.68."""
    learner = Learner(models.load(f"{__name__}:network", "cross-entropy"), CPU)
    found, doubt = fit_pooled(learner, images(8, 0), 7, draw_hypotheses(learner.model, 1, 7, 0))
    assert doubt == ""
    assert ByArrays(learner).score(found, images(4, 1))[1].min() > 0.95
