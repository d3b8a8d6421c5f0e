"""Federated recommendation: one set of item vectors for all clients."""

from __future__ import annotations

import numpy as np

from umbel.models.model import Model
from umbel.protocol.arrays import Matrix
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig
from umbel.strategies.fedavg import FedAvg


class Recommender(FedAvg):
    """Adds up clients' changes (PAC identifiability in federated personalization, Protocol 1).

    It takes a sum, not a mean: only the few clients that labelled an item move it, and the mean over all would hardly
    move it. Items of a model with priors, such as biased factors, also decay, as if each client in turn stepped by its
    share of their priors.
    """

    _decay: Matrix | None = None

    def check(self, run: RunConfig, model: Model) -> None:
        """Refuse models without a local part."""
        if not model.local_shapes:
            text = (
                f"strategy {run.strategy!r} is for models with local parameters, such as factors, not {model.name!r}; "
            )
            raise ConfigError(
                text + "name a dataset of preferences (umbel data make preferences)", code="config.strategy-model"
            )
        if model.decays.keys() & model.shapes.keys():
            precisions = [np.broadcast_to(model.decays.get(name, 0.0), shape) for name, shape in model.shapes.items()]
            self._decay = run.step_size * np.concatenate([precision.ravel() for precision in precisions])

    def _from_mean(self, mean: Matrix, count: int, hypothesis: Matrix, index: int) -> Matrix:
        """Return the item vectors moved by the sum of all changes."""
        moved = hypothesis + count * (mean - hypothesis)
        if self._decay is not None:
            moved -= count / len(self.nodes.participations) * self._decay * hypothesis
        return moved
