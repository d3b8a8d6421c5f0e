"""pfl-research's part: federated averaging in its simulated backend, with or without local Laplace noise; one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.common_types import Population
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.laplace_mechanism import LaplaceMechanism
from torch import Tensor, nn

from benchmarks.peers.brief import Brief, serve
from benchmarks.peers.networks import loss_of, network

# umbel hides each update within its own norm. pfl clips to a bound that is set beforehand: this one
# is about the L1 norm of a client's first update in either task.
BOUND = {"mlp": 0.7, "cnn": 300.0}


class Learner(nn.Module):
    """A network that knows its loss, as pfl wants it."""

    def __init__(self, inner: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self._loss = inner, loss

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return what a step descends, as a copy: pfl changes it before it asks for gradients."""
        return self._loss(self.inner(features), targets).clone()

    @torch.no_grad()
    def metrics(self, features: Tensor, targets: Tensor) -> dict[str, Any]:
        """Return the loss, each client counting once."""
        return {"loss": Weighted(self.loss(features, targets).item(), 1)}


class Averaging(FederatedAveraging):
    """Without measuring the training clients before and after, as pfl does when it validates."""

    def get_next_central_contexts(self, *args: Any, **kwargs: Any) -> Any:
        """Return what is to be done in a round."""
        contexts, model, metrics = super().get_next_central_contexts(*args, **kwargs)
        apart = contexts and tuple(replace(one, do_evaluation=one.population != Population.TRAIN) for one in contexts)
        return apart, model, metrics


def prepare(brief: Brief, variant: str) -> Callable[[], float]:
    """Return what does a run; variant ``laplace`` adds noise."""
    settings = brief.settings
    torch.set_num_threads(settings.cores)
    np.random.seed(0)  # noqa: NPY002, pfl draws from it
    torch.manual_seed(0)
    rows = [[torch.from_numpy(part) for part in brief.client(c)] for c in range(len(brief.lengths))]

    def asked(clients: list[list[int]]) -> Any:
        # Taken in their order, round after round.
        return FederatedDataset.from_slices(rows, get_user_sampler("minimize_reuse", list(chain(*clients))))

    postprocessors: list[Any] = [WeightByUser()]
    if variant == "laplace":
        n = sum(value[0].size for value in brief.hypotheses.values())
        postprocessors.append(LaplaceMechanism(BOUND[settings.network], epsilon=n / settings.noise_multiplier))
    train = NNTrainHyperParams(
        local_num_epochs=settings.local_epochs,
        local_learning_rate=settings.step_size,
        local_batch_size=settings.batch_size,
    )
    params = NNAlgorithmParams(
        central_num_iterations=brief.rounds,
        evaluation_frequency=1,
        train_cohort_size=len(settings.train[0]),
        val_cohort_size=len(settings.validate[0]),
    )

    def run() -> float:
        learner = Learner(network(brief), loss_of(brief))
        model = PyTorchModel(learner, torch.optim.SGD, torch.optim.SGD(learner.parameters(), lr=1.0))
        backend = SimulatedBackend(asked(settings.train), asked(settings.validate), postprocessors)
        Averaging().run(
            params, backend, model, train, NNEvalHyperParams(local_batch_size=None), send_metrics_to_platform=False
        )
        last = [model.evaluate(Dataset(rows[c])) for c in settings.validate[-1]]
        return float(np.mean([value.overall_value for metrics in last for _, value in metrics]))

    return run


if __name__ == "__main__":
    serve(prepare)
