"""A hypothesis that counts images into bins gives each image that is alone in its bin away, in a sum of any size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.errors import raises
from umbel.models.model import Parameters
from umbel.protocol.errors import NotApplicableError
from umbel_lab.attacks.bins import binning, bins_of, inputs_by_bin

from .conftest import SHAPE, chain, drawn, gradient_of

MODEL = chain(nn.Flatten(), nn.Linear(16, 50), nn.ReLU(), nn.Linear(50, 4))
KNOWN = torch.rand(200, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def start() -> Parameters:
    return binning(MODEL, drawn(MODEL), KNOWN, torch.Generator().manual_seed(0))


def summed(images: torch.Tensor) -> Parameters:
    """The sum of what a client for each image shows."""
    parts = [gradient_of(MODEL, start(), image, i % 4) for i, image in enumerate(images)]
    return {name: torch.stack([part[name] for part in parts]).sum(dim=0) for name in parts[0]}


def test_bins_are_about_equally_likely() -> None:
    """Of 200 known images and 50 bins, 4 in each on average; none has more than 14, a chance of 1 in 2,000."""
    places = bins_of(MODEL, start(), KNOWN)
    assert max(places.count(place) for place in range(50)) <= 14


def test_an_image_that_is_alone_in_its_bin_is_found_exactly_and_two_in_one_bin_are_not() -> None:
    images = torch.cat([KNOWN[:30], KNOWN[:1].flip(1)])  # the last is as bright as the first
    places = bins_of(MODEL, start(), images)
    found = inputs_by_bin(MODEL, start(), summed(images), SHAPE)
    alone = [i for i, place in enumerate(places) if place >= 0 and places.count(place) == 1]
    assert len(alone) >= 8
    for i in alone:
        inputs = found[places[i]] / found[places[i], -1]
        torch.testing.assert_close(inputs[:-1], images[i].flatten(), rtol=0, atol=1e-6)
    assert places[0] == places[-1]
    together = found[places[0]] / found[places[0], -1]
    assert (together[:-1] - images[0].flatten()).abs().max() > 0.1


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Flatten(), nn.Linear(16, 4)],
        [nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 4)],
        [nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)],
    ],
    ids=["one layer", "no ReLU", "three layers"],
)
def test_a_network_without_the_two_layers_is_refused(layers: list[nn.Module]) -> None:
    model = chain(*layers)
    with raises(NotApplicableError, "attack.no-two-layers"):
        binning(model, drawn(model), KNOWN, torch.Generator())
