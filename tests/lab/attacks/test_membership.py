"""A trap that one row springs: with it a client's update is long and known, without it there is hardly one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.errors import raises
from umbel.protocol.errors import NotApplicableError
from umbel_lab.attacks.membership import score, shadows, trap

from .conftest import SHAPE, chain, drawn

pytestmark = pytest.mark.rest

LABELS = torch.tensor([0, 1] * 5)
MODEL = chain(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))


@pytest.fixture
def known() -> Tensor:
    return torch.rand(10, *SHAPE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_one_unit_is_on_for_the_candidate_alone(image: Tensor, known: Tensor) -> None:
    start = trap(MODEL, drawn(MODEL), image, 1, known, LABELS)
    hidden = torch.cat([known, image[None]]).flatten(1) @ start["1.weight"].T + start["1.bias"]
    torch.testing.assert_close(hidden[:, 0], torch.tensor([-0.5] * 10 + [0.5], dtype=torch.float64))
    assert (hidden[:, 1] == 2.0**-10).all()
    assert (hidden[:, 2:] == -1).all()
    outputs = MODEL.apply(start, torch.stack([known[0], image]))
    assert outputs.argmax(dim=1).tolist() == [3, 2], "neither of them is its class, and others have them least"


def test_with_the_candidate_an_update_is_much_longer_and_the_release_tells(image: Tensor, known: Tensor) -> None:
    start = trap(MODEL, drawn(MODEL), image, 1, known, LABELS)
    for radius in (None, 0.5):
        without, with_ = shadows(MODEL, start, (image, 1), known, LABELS, 5, radius)
        if radius is None:
            assert np.linalg.norm(with_) > 20 * np.linalg.norm(without)
        else:
            assert max(np.linalg.norm(with_), np.linalg.norm(without)) <= radius + 1e-9
            assert np.linalg.norm(with_ - without) > 0.85 * 2 * radius, "nearly as far apart as two updates can be"
        assert score(without, without, with_) < 0 < score(with_, without, with_)
        assert score(9 * without + with_, without, with_, others=9) > 0 > score(10 * without, without, with_, others=9)


def test_the_score_is_the_side_of_the_midpoint_by_hand() -> None:
    without, with_ = np.array([0.0, 0.0]), np.array([2.0, 0.0])
    assert score(np.array([1.5, 7.0]), without, with_) == pytest.approx(1.0)
    assert score(np.array([0.5, -7.0]), without, with_) == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("layers", "code"),
    [
        ((nn.Linear(16, 12), nn.Sigmoid(), nn.Linear(12, 4)), "attack.no-two-layers"),
        ((nn.Linear(16, 4),), "attack.no-two-layers"),
        ((nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4, bias=False)), "attack.no-two-layers"),
        ((nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 2)), "attack.too-few-classes"),
    ],
)
def test_other_networks_are_refused(layers: Sequence[nn.Module], code: str, image: Tensor, known: Tensor) -> None:
    model = chain(nn.Flatten(), *layers)
    with raises(NotApplicableError, code, "chain"):
        trap(model, drawn(model), image, 1, known, LABELS)


def test_a_row_that_the_server_knows_is_no_candidate(known: Tensor) -> None:
    with raises(NotApplicableError, "attack.known-row"):
        trap(MODEL, drawn(MODEL), known[0], 1, known, LABELS)
