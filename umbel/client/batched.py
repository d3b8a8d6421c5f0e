"""The clients of a cohort computed together: parameters stacked, rows padded and masked."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import vmap

from umbel.client.cohort import Cohort, Schedule, Steps
from umbel.client.layout import unfused_attention
from umbel.client.learner import ALL_ROWS, Learner
from umbel.client.row_gradients import RowGradients, gradients_of
from umbel.models.model import Parameters
from umbel.models.networks import Linear, Units
from umbel.privacy.gate.time_limit import check_time

Minibatch = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]

_ELEMENTWISE = (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.Identity, Units)


class BatchedLearner(Learner):
    """Computes the clients of a chunk at once, and scores all hypotheses at once."""

    @cached_property
    def _chain(self) -> list[tuple[str, nn.Module]] | None:
        return dense_layers(self.model.module)

    @property
    def _alike(self) -> bool:
        """Whether loss and metric come from the same sum."""
        return self.model.metric.per_sample is self.model.loss.per_sample

    def _sums(self, hypotheses: Parameters, cohort: Cohort, local: Parameters) -> NDArray[np.float64]:
        k = len(next(iter(hypotheses.values())))
        sums = np.empty((1 if self._alike and not local else 2, k, len(cohort)))

        def add(part: slice) -> None:
            own, rows = {name: value[part] for name, value in local.items()}, cohort.part(part)
            sums[:, :, part] = self._own_sums(hypotheses, rows, own) if own else self._row_sums(hypotheses, rows)

        sizes = self._training_bytes(cohort, ALL_ROWS) if local else self._scoring_bytes(cohort, k)
        self._in_chunks(cohort, sizes, add)
        return sums

    def _row_sums(self, stacked: Parameters, cohort: Cohort) -> NDArray[np.float64]:
        """Return the sums (2, k, clients); (1, k, clients) if loss and metric sum the same."""
        model, k = self.model, len(next(iter(stacked.values())))
        outputs = self._forward(stacked, cohort.features.expand(k, *cohort.features.shape))
        targets = cohort.targets.expand(len(outputs), *cohort.targets.shape)
        scores = model.loss.of_rows(outputs, targets, 2)[None]
        if not self._alike:
            scores = torch.cat([scores, model.metric.of_rows(outputs, targets, 2)[None]])
        sums: NDArray[np.float64] = np.add.reduceat(scores.double().cpu().numpy(), cohort.starts, axis=2)
        return sums

    def _own_sums(self, stacked: Parameters, cohort: Cohort, local: Parameters) -> NDArray[np.float64]:
        """Return the sums (2, k, clients) where each client has its own parameters."""
        model, m = self.model, len(cohort)
        rows, weights, _ = next(self._minibatches(cohort, Schedule.draw(cohort.lengths, ALL_ROWS, ())))
        index, real = torch.from_numpy(rows).to(self.device), torch.from_numpy(weights > 0).to(self.device)
        inputs, targets = cohort.features[index], cohort.targets[index]
        sums = []
        for j in range(len(next(iter(stacked.values())))):
            shared = {name: value[j].expand(m, *value.shape[1:]) for name, value in stacked.items()}
            outputs = self._forward(shared | local, inputs)
            scores = torch.stack([one.of_rows(outputs, targets, 2).double() for one in (model.loss, model.metric)])
            sums.append(torch.where(real, scores, 0.0).sum(-1).cpu().numpy())
        return np.stack(sums, axis=1)

    def _own_outputs(self, parameters: Parameters, cohort: Cohort) -> Tensor:
        rows, weights, _ = next(Schedule.draw(cohort.lengths, ALL_ROWS, ()).minibatches())
        index, real = torch.from_numpy(rows).to(self.device), torch.from_numpy(weights > 0).to(self.device)
        return self._forward(parameters, cohort.features[index])[real]

    def _descend(self, start: Parameters, cohort: Cohort, schedule: Schedule, names: frozenset[str]) -> Parameters:
        model, update = self.model, schedule.update
        parameters = start
        rows_of = torch.from_numpy(cohort.lengths).to(self.device)
        steps = None
        if not update.descent.plain:
            own = [{name: start[name][c] for name in start if name in names} for c in range(len(cohort))]
            steps = Steps(update.descent, update.step_size, own, model.shapes)
        for rows, weights, counts in self._minibatches(cohort, schedule):
            check_time()
            index = torch.from_numpy(rows).to(self.device)
            share, padding = (torch.from_numpy(one).to(self.device) for one in (weights, weights == 0))
            parameters = {name: value.detach() for name, value in parameters.items()}
            trained = {name: value.requires_grad_() for name, value in parameters.items() if name in names}
            outputs = self._forward(parameters, cohort.features[index], training=True)
            if not trained:
                continue  # running statistics have changed in place
            losses = model.loss.of_rows(outputs, cohort.targets[index], 2)
            # Each client's loss depends on its own parameters alone, so the gradient of the sum
            # holds the gradient of each.
            # Padding is left out, not multiplied by 0: an infinite loss times 0 is no number.
            objective = model.loss.objective((losses * share).masked_fill(padding, 0.0).sum(1))
            found = torch.autograd.grad(objective.sum(), list(trained.values()))
            gradients = dict(zip(trained, found, strict=True))
            with torch.no_grad():
                for name in self._decays.keys() & gradients.keys():
                    shares = self._decays[name] / rows_of.reshape(-1, *[1] * (gradients[name].ndim - 1))
                    gradients[name] = gradients[name] + shares * trained[name]
                for name in model.summed & gradients.keys():
                    many = torch.from_numpy(counts).to(self.device)
                    gradients[name] = gradients[name] * many.reshape(-1, *[1] * (gradients[name].ndim - 1))
                if steps:
                    parts = [{name: value[c] for name, value in gradients.items()} for c in range(len(cohort))]
                    steps.step([part if count else None for part, count in zip(parts, counts, strict=True)])
                    continue
                still = None if counts.all() else torch.from_numpy(np.flatnonzero(counts == 0)).to(self.device)
                for name, value in trained.items():
                    # Not multiplied by 0, for the same reason.
                    gradient = gradients[name] if still is None else gradients[name].index_fill(0, still, 0.0)
                    parameters[name] = self._moved(value, gradient, update.step_size)
        return {name: value.detach() for name, value in parameters.items()}

    def _row_gradients(self, names: frozenset[str], shape: tuple[int, ...]) -> RowGradients:
        return gradients_of(self.model, self._frozen, names, shape, self._chain)

    def _forward(self, parameters: Parameters, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the outputs (m, b, ...) of m networks, each with its own parameters and inputs (m, b, ...)."""
        model, frozen = self.model, self._frozen
        layers = self._chain  # which builds the module if need be: inside vmap its initialisers could not draw
        if layers is None or inputs.ndim != 3 or frozen:
            with unfused_attention():
                outputs: Tensor = vmap(lambda own, rows: model.apply(frozen | own, rows, training))(parameters, inputs)
            return outputs
        # A network of dense layers is a chain of products of stacked matrices, several times faster than vmap.
        for name, layer in layers:
            if not isinstance(layer, nn.Linear):
                inputs = layer(inputs)
                continue
            inputs = self._product(inputs, parameters[f"{name}weight"])
            if layer.bias is not None:
                inputs += parameters[f"{name}bias"][:, None]  # baddbmm spreads it out first, which takes far longer
        return inputs

    def _minibatches(self, cohort: Cohort, schedule: Schedule) -> Iterator[Minibatch]:
        """Yield the rows of each step; see `Schedule.minibatches`."""
        return schedule.minibatches()

    def _product(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return the products (m, b, o) of inputs (m, b, i) and weights (m, o, i)."""
        return torch.bmm(inputs, weight.mT)

    def _moved(self, value: Tensor, gradient: Tensor, step_size: float) -> Tensor:
        """Return parameters after a plain step."""
        return value.sub(gradient, alpha=step_size)


def dense_layers(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]] | None:
    """Return the layers of a plain chain of dense layers and activations, by name; None for other networks."""
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) in (*_ELEMENTWISE, nn.Linear, Linear):
        return [(prefix, module)]
    if type(module) is nn.Flatten and module.start_dim == 1:
        return []  # rows are vectors here, and stay as they are
    if type(module) is not nn.Sequential:
        return None
    chain: list[tuple[str, nn.Module]] = []
    for name, child in module._modules.items():  # with layers that are used twice, unlike named_children
        layers = dense_layers(child, f"{prefix}{name}.") if child else None
        if layers is None:
            return None
        chain += layers
    return chain
