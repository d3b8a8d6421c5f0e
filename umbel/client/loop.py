"""The operations of an engine, and the reference: one client, and one hypothesis, after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from umbel.client.cohort import Cohort, Schedule, Steps, seeded
from umbel.models.fit import traits_of
from umbel.models.model import Model, Parameters
from umbel.privacy.site.time_limit import check_time

TF32, BF16 = "tf32", "bf16"
"""Precisions below ``float32``, the usual one (`umbel.protocol.run_config.RunConfig.precision`)."""


class Engine(ABC):
    r"""Computes some clients of a model on a device, from tensors to tensors.

    Hypotheses are (k, \*shape) each. Local parameters, and what clients have trained, are (clients, \*shape) each.

    Attributes
    ----------
    exact : bool
        Whether a client's numbers depend on no other client, bit for bit, also if several are computed together.
    """

    exact = False

    def __init__(self, model: Model, device: torch.device, precision: str = "float32") -> None:
        self.model, self.device, self.precision = model, device, precision
        self.frozen = {name: value.detach().to(device) for name, value in model.frozen_values.items()}
        self.decays = {
            name: torch.from_numpy(value).to(device)
            for name, value in model.decays.items()
            if name in model.local_shapes
        }

    def apply(self, parameters: Parameters, inputs: Tensor, training: bool = False) -> Tensor:
        """Return one network's outputs; see `Model.apply`."""
        return self.compute(self.frozen | parameters, inputs, training)

    def compute(self, values: Parameters, inputs: Tensor, training: bool = False) -> Tensor:
        """Return one network's outputs in 32 bits, given all its parameters and buffers; the latter may change."""
        with self.lowered():
            return self.model.apply(values, inputs, training).float()

    def lowered(self) -> AbstractContextManager[Any]:
        """Return a context in which products are in 16 bits, if the precision is ``bf16``."""
        if self.precision != BF16:
            return nullcontext()
        # Inside vmap, a parameter that was cast for one call is no tensor of the next.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    @abstractmethod
    def sums(self, hypotheses: Parameters, cohort: Cohort, local: Parameters) -> Tensor:
        """Return the summed loss and metric of every hypothesis over each client's rows, (2, k, clients) in 64 bits.

        If both sum the same numbers, the shape may be (1, k, clients).
        """

    @abstractmethod
    def outputs(self, parameters: Parameters, cohort: Cohort) -> Tensor:
        r"""Return outputs (rows, \*output shape) where each client has a network, (clients, \*shape)."""

    @abstractmethod
    def descend(self, start: Parameters, cohort: Cohort, schedule: Schedule, names: frozenset[str]) -> Parameters:
        r"""Train the named parameters of all clients, each (clients, \*shape), and return all; `start` may change."""


class Loop(Engine):
    """Computes one client after the other."""

    def sums(self, hypotheses: Parameters, cohort: Cohort, local: Parameters) -> Tensor:
        """See `Engine.sums`."""
        model, k = self.model, len(next(iter(hypotheses.values())))
        sums: list[Tensor] = []
        arrange = self._arrangement(cohort)
        networks = [{name: arrange(value[j]) for name, value in hypotheses.items()} for j in range(k)]
        for c in range(len(cohort)):
            rows = cohort.part(slice(c, c + 1))
            own = {name: arrange(value[c]) for name, value in local.items()}
            for network in networks:
                check_time()
                outputs = self.apply(network | own, rows.features)
                sums += [score.of_rows(outputs, rows.targets).double().sum() for score in (model.loss, model.metric)]
        return torch.stack(sums).reshape(len(cohort), k, 2).permute(2, 1, 0).cpu()

    def outputs(self, parameters: Parameters, cohort: Cohort) -> Tensor:
        """See `Engine.outputs`."""
        arrange, outputs = self._arrangement(cohort), []
        for c in np.flatnonzero(cohort.lengths).tolist():  # many networks do not take no rows
            check_time()
            own = {name: arrange(value[c]) for name, value in parameters.items()}
            outputs.append(self.apply(own, cohort.part(slice(c, c + 1)).features))
        return torch.cat(outputs)

    def descend(self, start: Parameters, cohort: Cohort, schedule: Schedule, names: frozenset[str]) -> Parameters:
        """See `Engine.descend`."""
        arrange = self._arrangement(cohort)
        for c in range(len(cohort)):
            # Steps are made in place: a copy of a large model takes as long as a step.
            own = {name: value[c] for name, value in start.items()}
            values = {name: arrange(value).detach() for name, value in own.items()}
            with seeded(schedule.seeds[c], self.device) if schedule.seeds else nullcontext():
                self._descend_one(values, cohort, schedule, c, names)
            for name, value in values.items():
                own[name].copy_(value.detach())  # where it is not the same memory anyway
        return start

    def _arrangement(self, cohort: Cohort) -> Callable[[Tensor], Tensor]:
        return arrangement(self.model, cohort.shape, self.device, self.precision)

    def _descend_one(
        self, values: Parameters, cohort: Cohort, schedule: Schedule, client: int, names: frozenset[str]
    ) -> None:
        """Train the named parameters of one client in place."""
        model, update, length = self.model, schedule.update, int(cohort.lengths[client])
        parameters = {name: value.requires_grad_() for name, value in values.items() if name in names}
        changing = [name for name in values if name in model.buffers]
        steps = None
        if parameters and not update.descent.plain:
            steps = Steps(update.descent, update.step_size, [parameters], model.shapes)
        for minibatch in schedule.of(client).minibatches(self.device):
            check_time()
            batch = minibatch.rows[0]
            if len(batch) == 1 and model.batch_dependent:
                continue  # a single row has no statistics
            whole = self.frozen | values
            outputs = self.compute(whole, cohort.features[batch], training=True)
            for name in changing:
                values[name] = whole[name].detach()
            if not parameters:
                continue
            loss = model.loss.objective(model.loss.of_rows(outputs, cohort.targets[batch]).mean())
            # Rows may decide which parameters are used, as in a mixture of experts: others get 0, as in batches.
            slopes = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
            gradients = dict(zip(parameters, slopes, strict=True))
            with torch.no_grad():
                for name in self.decays.keys() & gradients.keys():
                    gradients[name] = gradients[name] + self.decays[name] / length * parameters[name]
                if steps:
                    for name in model.summed & gradients.keys():
                        gradients[name] = gradients[name] * len(batch)
                    steps.step([gradients])
                    continue
                for name, value in parameters.items():
                    step = update.step_size * (len(batch) if name in model.summed else 1)
                    value.sub_(gradients[name], alpha=step)


@lru_cache(maxsize=16)
def arrangement(
    model: Model, shape: tuple[int, ...], device: torch.device, precision: str = "float32"
) -> Callable[[Tensor], Tensor]:
    """Return a function that arranges parameters in memory: channels last for convolutions, if the model allows it.

    Pooling and convolutions are then much faster on a CPU, and on a GPU in 16 bits. Later layers inherit the order, and
    a module that needs a view in the usual order fails: its parameters stay as they are.
    """
    if device.type != "cpu" and precision != BF16:
        return _as_it_is
    try:
        with torch.inference_mode():
            parameters = {name: _channels_last(value) for name, value in model.module.named_parameters()}
            zeros = torch.zeros(2, *shape)
            model.apply(parameters, zeros.long() if traits_of(model, shape).tokens else zeros)
    except RuntimeError:
        return _as_it_is
    return _channels_last


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _channels_last(value: Tensor) -> Tensor:
    return value.clone(memory_format=torch.channels_last) if value.ndim == 4 else value
