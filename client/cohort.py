"""The cohort engine: score hypotheses and train them for many clients at once.

`score` and `train` each have two forms that give the same numbers to rounding: a plain loop over
clients, which is the reference, and a batched one, in which the clients of a cohort are computed
together. `choose_engine` says which runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap

from federation import Federation
from models.base import Model, Parameters
from models.networks import Linear
from protocol.arrays import Arrays
from protocol.messages import DEVICES, ENGINES

# Memory that one chunk of a cohort may take. Fixed as long as so much is free, because the size of a
# chunk may change results in the last digit and a seed must give the same result every time.
CPU_CHUNK_BYTES = 1 << 30
GPU_CHUNK_SHARE = 0.25
_ELEMENTWISE = (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.Identity)


@dataclass(frozen=True)
class Cohort:
    """The rows of some clients, those of a client together.

    Attributes
    ----------
    features : Tensor, shape (rows, \\*feature shape), float32
    targets : Tensor, shape (rows,) or (rows, outputs), float32, or int64 for classes
    lengths : ndarray of int64, shape (clients,)
        Number of rows of each client.
    """

    features: Tensor
    targets: Tensor
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> NDArray[np.int64]:
        """First row of each client."""
        return np.cumsum(self.lengths) - self.lengths

    @classmethod
    def gather(cls, federation: Federation, clients: Sequence[int], device: torch.device) -> Cohort:
        """Read the rows of `clients`, and no others, in one copy."""
        chosen = np.asarray(clients, dtype=np.int64)
        first = federation.offsets[chosen]
        lengths = federation.offsets[chosen + 1] - first
        rows = np.arange(lengths.sum()) + np.repeat(first - (np.cumsum(lengths) - lengths), lengths)
        features = np.asarray(federation.features[rows], dtype=np.float32)
        if federation.manifest.feature_scale != 1.0:
            features = features * np.float32(federation.manifest.feature_scale)
        targets = np.asarray(federation.targets[rows])
        targets = targets.astype(np.float32 if targets.dtype.kind == "f" else np.int64, copy=False)
        return cls(_send(features, device), _send(targets, device), lengths)

    def part(self, clients: slice) -> Cohort:
        """Return a run of clients as a cohort of its own, without a copy."""
        starts, lengths = self.starts[clients], self.lengths[clients]
        rows = slice(int(starts[0]), int(starts[-1] + lengths[-1]))
        return Cohort(self.features[rows], self.targets[rows], lengths)


@dataclass(frozen=True)
class LocalUpdate:
    """How a client trains: E epochs, or R steps, of minibatch SGD with step size s and batch size B.

    A batch size of 0 takes all rows at once. The last minibatch of an epoch may be smaller. With
    steps, each minibatch is drawn afresh from all rows (PAC paper, Protocol 1).
    """

    local_epochs: int
    step_size: float
    batch_size: int
    local_steps: int = 0

    @property
    def passes(self) -> int:
        """How often the rows are put in a new order: once an epoch, or once a step."""
        return self.local_steps or self.local_epochs

    def batches(self, rows: int) -> range:
        """Return where, in a pass over so many rows, each minibatch begins."""
        size = self.size(rows)
        return range(0, size if self.local_steps else rows, size)

    def size(self, rows: int) -> int:
        """Return the number of rows of a full minibatch."""
        return min(self.batch_size or rows, rows)


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; ``auto`` takes the GPU if there is one."""
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}; choose from {', '.join(DEVICES)}")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name == "cuda" and not torch.cuda.is_available():
        raise ValueError('device = "cuda" but PyTorch sees no GPU here; set device = "auto"')
    return torch.device(name)


def choose_engine(name: str, model: Model, device: torch.device) -> str:
    """Return ``loop`` or ``batched`` for a model on a device.

    A batched convolution becomes a grouped one, which the CPU computes more slowly than one
    client after the other; in every other case the batched form is faster.
    """
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; choose from {', '.join(ENGINES)}")
    if name != "auto":
        return name
    return "loop" if device.type == "cpu" and _convolves(model) else "batched"


@lru_cache(maxsize=16)
def _convolves(model: Model) -> bool:
    return any(isinstance(layer, nn.modules.conv._ConvNd) for layer in model.module.modules())


def score(
    model: Model, hypotheses: Arrays, cohort: Cohort, engine: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the loss and the metric of every hypothesis on every client's rows.

    Returns
    -------
    losses, metrics : ndarray, shape (k, clients)
        As reported (`Score.report`), not as descended.
    """
    device = cohort.features.device
    stacked = _to_tensors(hypotheses, device)
    k = len(next(iter(stacked.values())))
    sums = np.empty((2, k, len(cohort)))
    with torch.inference_mode():
        if engine == "loop":
            arrange = _arrangement(model, tuple(cohort.features.shape[1:]))
            networks = [{name: arrange(value[j]) for name, value in stacked.items()} for j in range(k)]
            for c in range(len(cohort)):
                one = cohort.part(slice(c, c + 1))
                for j, parameters in enumerate(networks):
                    outputs = model.apply(parameters, one.features)
                    sums[0, j, c] = model.loss.per_sample(outputs, one.targets).double().sum().item()
                    sums[1, j, c] = model.metric.per_sample(outputs, one.targets).double().sum().item()
        else:
            for part, rows in _row_chunks(model, cohort, k):
                sums[:, :, part] = _score_rows(model, stacked, rows)
    means = torch.from_numpy(sums / cohort.lengths)
    return model.loss.report(means[0]).numpy(), model.metric.report(means[1]).numpy()


def choose(model: Model, hypotheses: Arrays, cohort: Cohort, engine: str) -> NDArray[np.int64]:
    """Return the hypothesis that fits each client's rows best; of a single one there is nothing to choose."""
    if len(next(iter(hypotheses.values()))) == 1:
        return np.zeros(len(cohort), np.int64)
    return best_hypothesis(score(model, hypotheses, cohort, engine)[0])


def best_hypothesis(losses: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return each client's hypothesis of lowest loss (Algorithm 1, line 5), ties to the lowest index.

    A loss that is not a number never wins.
    """
    best: NDArray[np.int64] = np.where(np.isnan(losses), np.inf, losses).argmin(axis=0)
    return best


def train(
    model: Model,
    hypotheses: Arrays,
    chosen: NDArray[np.int64],
    cohort: Cohort,
    update: LocalUpdate,
    generators: Sequence[np.random.Generator],
    engine: str,
) -> Arrays:
    """Train each client from its chosen hypothesis (Algorithm 1, line 6).

    Parameters
    ----------
    model : Model
    hypotheses : dict of ndarray, each (k, \\*shape)
    chosen : ndarray of int, shape (clients,)
    cohort : Cohort
    update : LocalUpdate
    generators : sequence of Generator, one a client
        Each shuffles its own client's rows, so that a client's result does not depend on who
        else is in the cohort.
    engine : str
        ``loop`` or ``batched``.

    Returns
    -------
    dict of ndarray, each (clients, \\*shape), float32
    """
    form = _train_loop if engine == "loop" else _train_batched
    stacked = _to_tensors(hypotheses, cohort.features.device)
    trained: Arrays = {name: np.empty((len(cohort), *value.shape[1:]), np.float32) for name, value in stacked.items()}
    for part in _client_chunks(model, cohort, update):
        index = torch.from_numpy(chosen[part]).to(cohort.features.device)
        start = {name: value[index] for name, value in stacked.items()}
        rows = cohort.part(part)
        order = shuffle(rows.lengths, update, generators[part])
        for name, value in form(model, start, rows, update, order).items():
            trained[name][part] = value.cpu().numpy()
    return trained


def _train_loop(
    model: Model, start: Parameters, cohort: Cohort, update: LocalUpdate, order: NDArray[np.int64]
) -> Parameters:
    """Train in the memory of `start`, and return it."""
    arrange = _arrangement(model, tuple(cohort.features.shape[1:]))
    for c in range(len(cohort)):
        # Steps are made in place: a copy of a large model takes as long as a step.
        own = {name: value[c] for name, value in start.items()}
        parameters = {name: arrange(value).detach().requires_grad_() for name, value in own.items()}
        first, length = int(cohort.starts[c]), int(cohort.lengths[c])
        for pass_ in range(update.passes):
            rows = torch.from_numpy(order[pass_, first : first + length]).to(cohort.features.device)
            for begin in update.batches(length):
                batch = rows[begin : begin + update.size(length)]
                outputs = model.apply(parameters, cohort.features[batch])
                loss = model.loss.objective(model.loss.per_sample(outputs, cohort.targets[batch]).mean())
                gradients = torch.autograd.grad(loss, list(parameters.values()))
                with torch.no_grad():
                    for value, gradient in zip(parameters.values(), gradients, strict=True):
                        value.sub_(gradient, alpha=update.step_size)
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


def _train_batched(
    model: Model, start: Parameters, cohort: Cohort, update: LocalUpdate, order: NDArray[np.int64]
) -> Parameters:
    device = cohort.features.device
    parameters = start
    for rows, weights, active in minibatches(cohort.lengths, update, order):
        index = torch.from_numpy(rows).to(device)
        share = torch.from_numpy(weights).to(device)
        parameters = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        outputs = _forward(model, parameters, cohort.features[index])
        losses = model.loss.per_sample(outputs, cohort.targets[index])
        # Each client's loss depends on its own parameters alone, so the gradient of the sum
        # holds the gradient of each.
        # Padding is left out, not multiplied by 0: an infinite loss times 0 is no number.
        objective = model.loss.objective(torch.where(share > 0, losses * share, 0.0).sum(1))
        if not active.all():
            objective = objective * torch.from_numpy(active).to(device)
        gradients = torch.autograd.grad(objective.sum(), list(parameters.values()))
        with torch.no_grad():
            parameters = {
                name: value.sub(gradient, alpha=update.step_size)
                for (name, value), gradient in zip(parameters.items(), gradients, strict=True)
            }
    return {name: value.detach() for name, value in parameters.items()}


def _forward(model: Model, parameters: Parameters, inputs: Tensor) -> Tensor:
    """Return the outputs (m, b, o) of m networks, each with parameters and inputs (m, b, ...) of its own."""
    module = model.module  # built here if need be: inside vmap its initialisers could not draw
    layers = _dense_layers(module) if inputs.ndim == 3 else None
    if layers is None:
        outputs: Tensor = vmap(lambda own, rows: functional_call(module, own, (rows,)))(parameters, inputs)
        return outputs
    # A network of dense layers is a chain of products of stacked matrices, several times faster than vmap.
    for name, layer in layers:
        if not isinstance(layer, nn.Linear):
            inputs = layer(inputs)
        elif layer.bias is None:
            inputs = torch.bmm(inputs, parameters[f"{name}weight"].mT)
        else:
            inputs = torch.baddbmm(parameters[f"{name}bias"][:, None], inputs, parameters[f"{name}weight"].mT)
    return inputs


def _dense_layers(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]] | None:
    """Return the layers of a plain chain of dense layers and activations, by name; None for other networks."""
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) in (*_ELEMENTWISE, nn.Linear, Linear):
        return [(prefix, module)]
    if type(module) is not nn.Sequential:
        return None
    chain: list[tuple[str, nn.Module]] = []
    for name, child in module._modules.items():  # with layers that are used twice, unlike named_children
        layers = _dense_layers(child, f"{prefix}{name}.") if child else None
        if layers is None:
            return None
        chain += layers
    return chain


def minibatches(
    lengths: NDArray[np.int64], update: LocalUpdate, order: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]]:
    """Yield, a step, the rows (clients, b), their shares of the mean, and which clients have any.

    Clients have `lengths` rows each, one client's after the other's in each pass of `order`.

    A client that has fewer rows than others is padded with its first row at share 0; one that
    has none left in this step is inactive.
    """
    longest = int(lengths.max())
    if not longest:
        return
    starts, lengths = (np.cumsum(lengths) - lengths)[:, None], lengths[:, None]
    for pass_ in range(update.passes):
        for begin in update.batches(longest):
            position = np.arange(begin, min(begin + update.size(longest), longest))[None, :]
            real = position < lengths
            # A client without rows in this pass has no first one to be padded with.
            rows = order[pass_][np.minimum(starts + np.where(real, position, 0), order.shape[1] - 1)]
            count = real.sum(1, keepdims=True)
            weights = real / np.maximum(count, 1)
            yield rows, weights.astype(np.float32), (count[:, 0] > 0).astype(np.float32)


def shuffle(
    lengths: NDArray[np.int64], update: LocalUpdate, generators: Sequence[np.random.Generator]
) -> NDArray[np.int64]:
    """Return the order (passes, rows) in which each client goes through its rows.

    The order of a client that takes all its rows at once is of no consequence, and no draw is
    spent on it.
    """
    order = np.tile(np.arange(int(lengths.sum())), (update.passes, 1))
    if update.batch_size:
        starts = np.cumsum(lengths) - lengths
        for c in np.flatnonzero(lengths > update.batch_size).tolist():
            rows = slice(starts[c], starts[c] + lengths[c])
            generator = generators[c]  # once: what is asked for again begins again
            for pass_ in range(update.passes):
                order[pass_, rows] = generator.permutation(order[pass_, rows])
    return order


def _score_rows(model: Model, stacked: Parameters, cohort: Cohort) -> NDArray[np.float64]:
    """Return the summed loss and metric (2, k, clients) of every hypothesis; (1, k, clients) if they are the same."""
    k = len(next(iter(stacked.values())))
    outputs = _forward(model, stacked, cohort.features.expand(k, *cohort.features.shape))
    targets = cohort.targets.expand(len(outputs), *cohort.targets.shape)
    scores = [model.loss.per_sample(outputs, targets)]
    if model.metric.per_sample is not model.loss.per_sample:
        scores.append(model.metric.per_sample(outputs, targets))
    values = torch.stack(scores).double().cpu().numpy()
    sums: NDArray[np.float64] = np.add.reduceat(values, cohort.starts, axis=2)
    return sums


def _row_chunks(model: Model, cohort: Cohort, k: int) -> Iterator[tuple[slice, Cohort]]:
    """Yield runs of whole clients whose rows can be scored together under k hypotheses."""
    most = max(1, _chunk_bytes(cohort.features.device) // (4 * k * _activations(model, cohort)))
    begin = 0
    while begin < len(cohort):
        fits = int(np.searchsorted(np.cumsum(cohort.lengths[begin:]), most, side="right"))
        part = slice(begin, begin + max(1, fits))
        yield part, cohort.part(part)
        begin = part.stop


def _client_chunks(model: Model, cohort: Cohort, update: LocalUpdate) -> Iterator[slice]:
    """Yield runs of clients that can be trained together."""
    rows = update.size(int(cohort.lengths.max()))
    # Parameters, their gradient and the next parameters; activations, forward and backward.
    client_bytes = 4 * (3 * model.num_parameters + 2 * rows * _activations(model, cohort))
    most = max(1, _chunk_bytes(cohort.features.device) // client_bytes)
    for begin in range(0, len(cohort), most):
        yield slice(begin, min(begin + most, len(cohort)))


def _chunk_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        most = torch.cuda.get_device_properties(device).total_memory * GPU_CHUNK_SHARE
        # What PyTorch holds and does not use is free as well.
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        while most > free > 0:
            most /= 2
        return int(most)
    return CPU_CHUNK_BYTES


def _activations(model: Model, cohort: Cohort) -> int:
    return _count_activations(model, tuple(cohort.features.shape[1:]))


@lru_cache(maxsize=16)
def _count_activations(model: Model, shape: tuple[int, ...]) -> int:
    """Return how many numbers the layers put out for one row."""
    total = int(np.prod(shape))

    def count(_layer: nn.Module, _inputs: Any, outputs: Any) -> None:
        nonlocal total
        total += outputs.numel() if isinstance(outputs, Tensor) else 0

    network = model.network()
    for layer in network.modules():
        layer.register_forward_hook(count)
    with torch.inference_mode():
        network(torch.zeros(1, *shape))
    return total


def _send(rows: NDArray[Any], device: torch.device) -> Tensor:
    """Return rows on a device; to a GPU by way of pinned memory, which it reads itself."""
    tensor = torch.from_numpy(rows)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _to_tensors(arrays: Arrays, device: torch.device) -> Parameters:
    # A copy, because what came in a message cannot be written to, and PyTorch has no such tensors.
    return {name: torch.from_numpy(np.array(value)).to(device) for name, value in arrays.items()}
