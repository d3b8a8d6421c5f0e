"""The clients of a cohort computed together: parameters stacked, rows padded and masked.

At a site a release must not depend on the other clients of its batch, not even by rounding. Matrix products do: a
library picks its kernel by shape, and MKL sums in another order if a matrix begins at another address. So there the
engine is exact. It computes chunks of one fixed shape, padded with clients that have no rows, and pads a client's rows
to a width that depends only on their number. A chunk contains only

- additions, multiplications, divisions and roots of single numbers, which IEEE 754 rounds in one way;
- exponentials and similar functions on a multiple of 64 numbers: the same vector code computes all of them, and the
  code for a remainder is never used;
- sums over an axis within one client, whose order depends only on the shape.

On a CPU one thread computes a chunk, since several threads would split it. Whether all this holds on the processor or
the GPU at hand, a trial shows at the start (`umbel.client.trial`); otherwise the loop computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from umbel.client.cohort import ALL_ROWS, Cohort, Minibatch, Schedule, Steps, send
from umbel.client.loop import Engine
from umbel.models.losses import LOSSES, METRICS, Score
from umbel.models.model import Model, Parameters
from umbel.models.networks import Linear, Softmax, Units
from umbel.privacy.site.time_limit import check_time

ONE_THREAD_BYTES = 1 << 22
"""Up to here a single thread computes a chunk: on a busy machine, threads wait far longer than that takes."""
SLOTS = 64  # clients of an exact chunk: a multiple of the numbers that any processor computes at once
_NARROWEST = 8  # minimum rows to which an exact engine pads a client, so that few widths occur
_ELEMENTWISE = (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.Identity, Units)

Chain = list[tuple[str, nn.Module]]
"""The layers of a plain chain of dense layers and activations, each with the prefix of its parameters' names."""
Counted = TypeVar("Counted", Cohort, Schedule)


class Batched(Engine):
    """Computes the clients of a chunk at once, and scores all hypotheses at once.

    An exact engine differs in two operations, products and steps, and in the padding. It takes the models that
    `is_exact` names, and chunks of at most `SLOTS` clients that have one `width`.
    """

    def __init__(self, model: Model, device: torch.device, precision: str = "float32", exact: bool = False) -> None:
        super().__init__(model, device, precision)
        self.exact = exact
        self._product, self._moved = (_single_products, _rounded_twice) if exact else (_matrix_products, _rounded_once)

    @cached_property
    def layers(self) -> Chain | None:
        """The layers, if the network is a plain chain of dense layers and activations."""
        return dense_layers(self.model.module)

    def width(self, rows: int) -> int:
        """Return the power of two to which an exact engine pads so many rows; 0 if that is too much for a chunk."""
        width = max(_NARROWEST, 1 << max(rows - 1, 0).bit_length())
        return width if width <= self._widest else 0

    @cached_property
    def _widest(self) -> int:
        layers = [layer for _, layer in self.layers or [] if isinstance(layer, nn.Linear)]
        return ONE_THREAD_BYTES // (4 * SLOTS * max((layer.weight.numel() for layer in layers), default=1))

    def sums(self, hypotheses: Parameters, cohort: Cohort, local: Parameters) -> Tensor:
        """See `Engine.sums`."""
        if not (local or self.exact):
            return self._sums_of_rows(hypotheses, cohort)
        clients, own, sums = len(cohort), self._slots(local), []
        index, real = self._all_rows(cohort)
        inputs, targets = cohort.features[index], cohort.targets[index]
        for j in range(len(next(iter(hypotheses.values())))):
            shared = {name: value[j].expand(len(index), *value.shape[1:]) for name, value in hypotheses.items()}
            outputs = self.forward(shared | own, inputs)
            scores = [one.of_rows(outputs, targets, 2).double() for one in (self.model.loss, self.model.metric)]
            sums.append(torch.where(real, torch.stack(scores), 0.0).sum(-1))
        return torch.stack(sums, 1)[:, :, :clients].cpu()

    def _sums_of_rows(self, hypotheses: Parameters, cohort: Cohort) -> Tensor:
        """Return the sums where clients share the hypotheses, so that no row is padded."""
        k = len(next(iter(hypotheses.values())))
        outputs = self.forward(hypotheses, cohort.features.expand(k, *cohort.features.shape))
        targets = cohort.targets.expand(k, *cohort.targets.shape)
        same = self.model.metric.per_sample is self.model.loss.per_sample
        scores: list[Score] = [self.model.loss] if same else [self.model.loss, self.model.metric]
        values = torch.stack([one.of_rows(outputs, targets, 2) for one in scores]).double().cpu().numpy()
        return torch.from_numpy(np.add.reduceat(values, cohort.starts, axis=2))

    def outputs(self, parameters: Parameters, cohort: Cohort) -> Tensor:
        """See `Engine.outputs`."""
        index, real = self._all_rows(cohort)
        return self.forward(self._slots(parameters), cohort.features[index])[real]

    def descend(self, start: Parameters, cohort: Cohort, schedule: Schedule, names: frozenset[str]) -> Parameters:
        """See `Engine.descend`."""
        model, update, clients = self.model, schedule.update, len(cohort)
        parameters, lengths = self._slots(start), self._padded(cohort).lengths
        # Of a step's gradient, which is a mean over a client's rows.
        decays = {
            name: decay / _wide(send([lengths], self.device)[0], parameters[name])
            for name, decay in self.decays.items()
            if name in parameters
        }
        steps = None
        if not update.descent.plain:
            own = [{name: value[c] for name, value in parameters.items() if name in names} for c in range(len(lengths))]
            steps = Steps(update.descent, update.step_size, own, model.shapes)
        for batch in self._minibatches(schedule):
            check_time()
            real, counts = batch.real, batch.counts
            share = real / counts.clamp(min=1)[:, None].float()
            parameters = {name: value.detach() for name, value in parameters.items()}
            trained = {name: value.requires_grad_() for name, value in parameters.items() if name in names}
            outputs = self.forward(parameters, cohort.features[batch.rows], training=True)
            if not trained:
                continue  # running statistics have changed in place
            losses = model.loss.of_rows(outputs, cohort.targets[batch.rows], 2)
            # Each client's loss depends on its own parameters alone, so the gradient of the sum
            # holds the gradient of each.
            # Padding is left out, not multiplied by 0: an infinite loss times 0 is no number.
            objective = model.loss.objective((losses * share).masked_fill(~real, 0.0).sum(1))
            found = torch.autograd.grad(objective.sum(), list(trained.values()))
            gradients = dict(zip(trained, found, strict=True))
            with torch.no_grad():
                for name in decays.keys() & gradients.keys():
                    gradients[name] = gradients[name] + decays[name] * trained[name]
                for name in model.summed & gradients.keys():
                    gradients[name] = gradients[name] * _wide(counts, gradients[name])
                if steps:
                    parts = [{name: value[c] for name, value in gradients.items()} for c in range(len(lengths))]
                    known = batch.known.tolist()
                    steps.step([part if count else None for part, count in zip(parts, known, strict=True)])
                    continue
                still = None if batch.known.all() else counts == 0
                for name, value in trained.items():
                    gradient = gradients[name]
                    if still is not None:  # not multiplied by 0, for the same reason
                        gradient = gradient.masked_fill(_wide(still, gradient), 0.0)
                    parameters[name] = self._moved(value, gradient, update.step_size)
        return {name: value.detach()[:clients] for name, value in parameters.items()}

    def forward(self, parameters: Parameters, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the outputs (m, b, ...) of m networks, each with its own parameters and inputs (m, b, ...)."""
        layers = self.layers  # which builds the module if need be: inside vmap its initialisers could not draw
        if layers is None or inputs.ndim != 3 or self.frozen:
            if self.exact:
                raise NotImplementedError("a client's rows are no vectors")
            with unfused_attention():
                outputs: Tensor = vmap(lambda own, rows: self.apply(own, rows, training))(parameters, inputs)
            return outputs
        # A network of dense layers is a chain of products of stacked matrices, several times faster than vmap.
        with self.lowered():
            for name, layer in layers:
                if not isinstance(layer, nn.Linear):
                    inputs = layer(inputs)
                    continue
                inputs = self._product(inputs, parameters[f"{name}weight"])
                if layer.bias is not None:
                    inputs += parameters[f"{name}bias"][:, None]  # baddbmm spreads it out first: that takes far longer
        return inputs.float()

    def _all_rows(self, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """Return each client's rows (clients, b), and which of them are real."""
        batch = next(self._minibatches(Schedule.draw(cohort.lengths, ALL_ROWS, ())))
        return batch.rows, batch.real

    def _minibatches(self, schedule: Schedule) -> Iterator[Minibatch]:
        """Yield the schedule's minibatches, padded to the slots and the width of an exact chunk."""
        width = self.width(schedule.update.size(int(schedule.lengths.max(initial=0)))) if self.exact else 0
        return self._padded(schedule).minibatches(self.device, width)

    def _padded(self, clients: Counted) -> Counted:
        """Return as many clients as an exact chunk has slots; the added clients have no rows."""
        if not self.exact:
            return clients
        return replace(clients, lengths=np.pad(clients.lengths, (0, SLOTS - len(clients.lengths))))

    def _slots(self, values: Parameters) -> Parameters:
        """Return the values of some clients, followed by zeros for the other slots of an exact chunk."""
        if not self.exact:
            return values
        return {
            name: torch.cat([value, value.new_zeros(SLOTS - len(value), *value.shape[1:])])
            for name, value in values.items()
        }


def is_exact(model: Model) -> bool:
    """Return whether a model has only the operations that the module's docstring lists."""
    known = LOSSES.get(model.loss.name) == model.loss and METRICS.get(model.metric.name) == model.metric
    return known and not model.frozen_values and dense_layers(model.module) is not None


def dense_layers(module: nn.Module, prefix: str = "") -> Chain | None:
    """Return the layers of a plain chain of dense layers and activations, by name; None for other networks."""
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) in (*_ELEMENTWISE, nn.Linear, Linear):
        return [(prefix, module)]
    if type(module) is nn.Flatten and module.start_dim == 1:
        return []  # rows are vectors here, and stay as they are
    if type(module) not in (nn.Sequential, Softmax):
        return None
    chain: Chain = []
    for name, child in module._modules.items():  # with layers that are used twice, unlike named_children
        layers = dense_layers(child, f"{prefix}{name}.") if child else None
        if layers is None:
            return None
        chain += layers
    return chain


def _matrix_products(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the products (m, b, o) of inputs (m, b, i) and weights (m, o, i)."""
    return torch.bmm(inputs, weight.mT)


def _single_products(inputs: Tensor, weight: Tensor) -> Tensor:
    return (inputs[:, :, None] * weight[:, None]).sum(-1)


def _rounded_once(value: Tensor, gradient: Tensor, step_size: float) -> Tensor:
    """Return parameters after a plain step, which rounds once or twice, depending on a number's position."""
    return value.sub(gradient, alpha=step_size)


def _rounded_twice(value: Tensor, gradient: Tensor, step_size: float) -> Tensor:
    return value - gradient * step_size


def _wide(numbers: Tensor, like: Tensor) -> Tensor:
    """Return numbers (clients,) in a shape that broadcasts with a client's values."""
    return numbers.reshape(-1, *[1] * (like.ndim - 1))


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Have PyTorch compute attention in single steps: vmap takes fused ones apart, one client after the other."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
