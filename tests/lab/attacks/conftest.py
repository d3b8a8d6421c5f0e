"""What the tests of attacks share: networks small enough to check by hand, true gradients, and a grid elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp import Grid
from torch import Tensor, nn

from tests.helpers.datasets import manifest
from tests.helpers.paper import sites_accept_the_paper as sites_accept_the_paper
from umbel.client.app import app
from umbel.data import offsets_of, write_dataset
from umbel.models.losses import LOSSES, METRICS
from umbel.models.model import Model, Parameters
from umbel.server.callbacks import named
from umbel.server.history import State
from umbel.server.run import Run, initial_hypotheses
from umbel.server.run_folder import RunFolder
from umbel.server.setup import Setup
from umbel.simulation.grid import InProcessGrid

Config = dict[str, Any]

SHAPE = (4, 4)


def write_strokes(folder: Path, name: str) -> Path:
    """Write images of strokes on white paper, 10 rows for each of 40 clients."""
    rng = np.random.default_rng(0)
    images = rng.integers(200, 256, (400, 28, 28)).astype(np.uint8)
    for image in images:
        row, column = rng.integers(2, 18, 2)
        image[row : row + 8, column : column + 3] = rng.integers(0, 120)
    own = manifest(40, name=name, feature_scale=1 / 255)
    write_dataset(folder, own, images, rng.integers(0, 10, 400), offsets_of([10] * 40))
    return folder


def chain(*layers: nn.Module) -> Model:
    """A network of layers on images, for classes."""
    return Model("chain", lambda: nn.Sequential(*layers), LOSSES["cross-entropy"], METRICS["accuracy"])


def drawn(model: Model, seed: int = 0, scale: float = 1.0) -> Parameters:
    """Parameters from N(0, scale^2), in float64."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in model.shapes.items()
    }


def gradient_of(model: Model, parameters: Parameters, image: Tensor, label: int) -> Parameters:
    """The gradient of the cross entropy of one image."""
    own = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    loss = nn.functional.cross_entropy(
        model.apply(own, image[None].to(next(iter(own.values())))), torch.tensor([label])
    )
    return dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))


def noisy(gradient: Parameters, share: float, seed: int = 0) -> Parameters:
    """The gradient with Gaussian noise of `share` times each array's own norm."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value
        + share * value.norm() / value.numel() ** 0.5 * torch.randn(value.shape, generator=generator).to(value)
        for name, value in gradient.items()
    }


@pytest.fixture
def image() -> Tensor:
    """A bright cross on black, shape (4, 4)."""
    cross = torch.zeros(SHAPE, dtype=torch.float64)
    cross[1], cross[:, 2] = 0.75, 1.0
    return cross


def prepared(
    config: Config, grid: Grid | None = None, folder: RunFolder | None = None, state: State | None = None
) -> Run:
    """A run that is ready to begin, by default in this process; with a state, to go on."""
    setup, grid = Setup.parse(config), grid or InProcessGrid(app, config)
    start = initial_hypotheses(setup, grid)
    return Run(setup, grid, state or State.first(start), named(setup), folder=folder)


def passed_on(name: str) -> Any:
    """A method that calls the same of the grid behind."""
    return lambda self, *args, **kwargs: getattr(self._grid, name)(*args, **kwargs)


class RelayGrid(Grid):
    """Stands in front of the in-process grid as a SuperLink does: messages go through, nodes' state is out of sight."""

    in_process = True

    run = property(lambda self: self._grid.run)
    set_run, create_message, get_node_ids = map(passed_on, ("set_run", "create_message", "get_node_ids"))
    push_messages, pull_messages, send_and_receive = map(
        passed_on, ("push_messages", "pull_messages", "send_and_receive")
    )

    def __init__(self, grid: InProcessGrid) -> None:
        self._grid = grid
