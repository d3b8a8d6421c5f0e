"""Federated recommendation: one set of item vectors for all clients."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from umbel.models.model import Model
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig
from umbel.strategies.fedavg import FedAvg


class Recommender(FedAvg):
    """Add up what clients changed (PAC identifiability in federated personalization, Protocol 1).

    A sum, not a mean: each item is moved by the few clients that labelled it, and the mean over all
    would hardly move it. Items of a model with priors, as biased factors, also decay: by as much as they
    would if each client in turn stepped down its share of their priors.
    """

    _decay: NDArray[np.float64] | None = None

    def check(self, run: RunConfig, model: Model) -> None:
        """Refuse models without a local part."""
        if not model.local_shapes:
            raise ConfigError(
                f"strategy {run.strategy!r} is for models with local parameters, as factors, not {model.name!r}; "
                "name a dataset of preferences (python datasets/preferences.py)",
                code="config.strategy-model",
            )
        if decays := model.decays.keys() & model.shapes.keys():
            precisions = {
                name: np.broadcast_to(model.decays[name] if name in decays else 0.0, shape)
                for name, shape in model.shapes.items()
            }
            self._decay = run.step_size * np.concatenate([one.ravel() for one in precisions.values()])

    def combine(self, group: NDArray[np.float64], hypothesis: NDArray[np.float64], index: int) -> NDArray[np.float64]:
        """Return the item vectors moved by the sum of all changes."""
        moved: NDArray[np.float64] = hypothesis + (group - hypothesis).sum(axis=0)
        if self._decay is not None:
            moved -= len(group) / len(self.fleet.participations) * self._decay * hypothesis
        return moved
