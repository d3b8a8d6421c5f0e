"""Federated recommendation: one set of item vectors for all clients."""

from __future__ import annotations

import numpy as np

from umbel.models.model import Model
from umbel.protocol.arrays import Matrix
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig
from umbel.strategies.fedavg import FedAvg


class Recommender(FedAvg):
    """Add up what clients changed (PAC identifiability in federated personalization, Protocol 1).

    A sum, not a mean: each item is moved by the few clients that labelled it, and the mean over all
    would hardly move it. Items of a model with priors, as biased factors, also decay: by as much as they
    would if each client in turn stepped down its share of their priors.
    """

    _decay: Matrix | None = None

    def check(self, run: RunConfig, model: Model) -> None:
        """Refuse models without a local part."""
        if not model.local_shapes:
            text = f"strategy {run.strategy!r} is for models with local parameters, as factors, not {model.name!r}; "
            raise ConfigError(
                text + "name a dataset of preferences (umbel data make preferences)", code="config.strategy-model"
            )
        if model.decays.keys() & model.shapes.keys():
            precisions = [np.broadcast_to(model.decays.get(name, 0.0), shape) for name, shape in model.shapes.items()]
            self._decay = run.step_size * np.concatenate([one.ravel() for one in precisions])

    def combine(self, group: Matrix, hypothesis: Matrix, index: int) -> Matrix:
        """Return the item vectors moved by the sum of all changes."""
        moved: Matrix = hypothesis + (group - hypothesis).sum(axis=0)
        if self._decay is not None:
            moved -= len(group) / len(self.fleet.participations) * self._decay * hypothesis
        return moved
