"""The reference: one client after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client.cohort import Cohort, Schedule
from client.learner import Learner
from models.model import Model, Parameters
from privacy.time_limit import check_time


class LoopLearner(Learner):
    """Computes one client, and one hypothesis, after the other."""

    def _sums(self, hypotheses: Parameters, cohort: Cohort, local: Parameters) -> NDArray[np.float64]:
        model, k = self.model, len(next(iter(hypotheses.values())))
        sums = np.empty((2, k, len(cohort)))
        arrange = _arrangement(model, tuple(cohort.features.shape[1:]))
        networks = [{name: arrange(value[j]) for name, value in hypotheses.items()} for j in range(k)]
        for c in range(len(cohort)):
            one = cohort.part(slice(c, c + 1))
            own = {name: arrange(value[c]) for name, value in local.items()}
            for j, parameters in enumerate(networks):
                check_time()
                outputs = model.apply(self._frozen | parameters | own, one.features)
                sums[0, j, c] = model.loss.per_sample(outputs, one.targets).double().sum().item()
                sums[1, j, c] = model.metric.per_sample(outputs, one.targets).double().sum().item()
        return sums

    def _descend(self, start: Parameters, cohort: Cohort, schedule: Schedule, names: frozenset[str]) -> Parameters:
        model, update = self.model, schedule.update
        arrange = _arrangement(model, tuple(cohort.features.shape[1:]))
        for c in range(len(cohort)):
            # Steps are made in place: a copy of a large model takes as long as a step.
            own = {name: value[c] for name, value in start.items()}
            values = {name: arrange(value).detach() for name, value in own.items()}
            parameters = {name: value.requires_grad_() for name, value in values.items() if name in names}
            for order in schedule.passes(c):
                rows = torch.from_numpy(order).to(self.device)
                for begin in update.batches(len(rows)):
                    check_time()
                    batch = rows[begin : begin + update.size(len(rows))]
                    outputs = model.apply(self._frozen | values, cohort.features[batch])
                    loss = model.loss.objective(model.loss.per_sample(outputs, cohort.targets[batch]).mean())
                    gradients = torch.autograd.grad(loss, list(parameters.values()))
                    with torch.no_grad():
                        for (name, value), gradient in zip(parameters.items(), gradients, strict=True):
                            step = update.step_size * (len(batch) if name in model.summed else 1)
                            value.sub_(gradient, alpha=step)
            for name, value in parameters.items():
                own[name].copy_(value.detach())  # where it is not the same memory anyway
        return start


@lru_cache(maxsize=16)
def _arrangement(model: Model, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Return how a loop lays out parameters in memory: a convolution's with the channels last, if the model takes that.

    CPUs pool and convolve much faster then. What comes after takes the order over, and a module that
    asks for a view of it, in the usual order, fails.
    """
    try:
        with torch.inference_mode():
            parameters = {name: _channels_last(value) for name, value in model.module.named_parameters()}
            model.apply(parameters, torch.zeros(2, *shape))
    except RuntimeError:
        return _as_it_is
    return _channels_last


def _channels_last(value: Tensor) -> Tensor:
    return value.clone(memory_format=torch.channels_last) if value.ndim == 4 else value


def _as_it_is(value: Tensor) -> Tensor:
    return value
