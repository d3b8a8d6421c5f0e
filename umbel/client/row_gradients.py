r"""Sums of rows' gradients, each clipped: the part of DP-SGD that takes time.

A network of dense layers computes all clients of a chunk at once. Other networks compute one client after the other. If
all trained parameters belong to dense layers and convolutions of images, no row's gradient is computed. Its norm
follows from the layers' inputs and the gradients of their outputs (Goodfellow 2015; Li et al., ICLR 2022), and so does
the sum of all rows' clipped gradients (Bu et al., ICML 2023). That takes one backward pass, 1.8 to 9 times as fast as
each row's gradient by `torch.func`, which serves all other layers, and networks for which the result for made-up rows
differs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from umbel.client.batched import Chain, unfused_attention
from umbel.client.cohort import seeded
from umbel.client.loop import arrangement
from umbel.models.fit import traits_of
from umbel.models.model import Model, Parameters
from umbel.protocol.errors import ModelError

SLACK = 2.0**-9
"""Share of the clip norm that is reserved for the rounding of sums. The worst known rows take three quarters of it."""
_AT_ONCE = 1 << 28
"""Bytes of rows' gradients that are computed together."""
_ROWS, _DRAWS, _MOVED = 3, 4, 0.1
_CLOSE = 1e-3
_ROUNDING = 2.0**-16
"""If products cancel, rounding may reduce a squared norm by this share of its largest possible value."""
_LARGEST, _LEAST_FACTOR = 2.0**80, 2.0**-100
"""Beyond these a row does not count: 32 bits would hold its clipped gradient with too few digits."""
_USUAL = 1e9
"""Between its inverse and this number, lengths have squares and products that fit 32 bits."""

Loss = Callable[..., Tensor]
"""Takes outputs and targets (rows, ...) and returns a loss for each row (rows,), as `Score.of_rows` does."""
Summed = Callable[[Tensor], Tensor]
Part = tuple[str, Tensor, Summed]
"""A parameter, the squared norm of each row's gradient, and the sum of these gradients, given a factor for each."""


@dataclass(frozen=True)
class RowGradients(ABC):
    """Computes clipped sums for a model's trained parameters, one client after the other.

    Attributes
    ----------
    model : Model
    frozen : dict of Tensor
        The frozen parameters, on the device.
    names : frozenset of str
        The trained parameters.
    loss : Loss
        That of the model, or another in a trial.
    training : bool
        Whether the network computes as in training.
    together : bool
        Whether several clients are computed at once.
    """

    model: Model
    frozen: Parameters
    names: frozenset[str]
    loss: Loss
    training: bool = True

    together: ClassVar[bool] = False

    @abstractmethod
    def parts(self, parameters: Parameters, inputs: Tensor, targets: Tensor) -> Iterator[Part]:
        r"""Yield the part of each trained parameter (\*shape), from rows (rows, ...); if `together`, of each client."""

    @property
    def rows_at_once(self) -> int:
        """The rows of a client whose parts fit into memory."""
        return 1 << 62

    def clipped(
        self,
        parameters: Parameters,
        inputs: Tensor,
        targets: Tensor,
        drawn: Tensor,
        clip_norm: float,
        dtype: torch.dtype = torch.float32,
    ) -> Parameters:
        r"""Return the sums of the drawn rows' gradients, each clipped, (clients, \*shape).

        Parameters
        ----------
        parameters : dict of Tensor, each (clients, \*shape)
            Of a single client, unless several are computed `together`.
        inputs, targets : Tensor, shape (clients, rows, ...)
        drawn : Tensor of bool, shape (clients, rows)
            The rows that count.
        clip_norm : float
        dtype : torch.dtype
            Of the sums.
        """
        if not self.together:
            parameters, inputs, targets, drawn = (
                {name: value[0] for name, value in parameters.items()}, inputs[0], targets[0], drawn[0],
            )  # fmt: skip
        parts = [part for part in self.parts(parameters, inputs, targets) if part[0] in self.names]
        with torch.no_grad():
            squares = torch.zeros(drawn.shape, dtype=torch.float64, device=drawn.device)
            for _, square, _ in parts:
                squares += square
            kept = factors(squares, drawn, clip_norm, dtype)
            sums = {name: summed(kept) for name, _, summed in parts}
        return sums if self.together else {name: value[None] for name, value in sums.items()}


def factors(squares: Tensor, drawn: Tensor, clip_norm: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the factor of each row's gradient, given its squared norm in 64 bits; sums have the same kind of numbers.

    A row without a finite norm does not count, and nothing of its gradient gets into the sum. Nor does one with an
    extremely large norm.
    """
    norms, most = squares.sqrt(), clip_norm * (1 - SLACK)
    kept = most / norms.clamp_min(most)
    return torch.where(drawn & (kept >= _LEAST_FACTOR), kept, 0.0).to(dtype)


@dataclass(frozen=True)
class Chained(RowGradients):
    """A chain of dense layers and activations, for all clients at once: parameters (clients, \\*shape)."""

    chain: Chain = field(default_factory=list)

    together = True

    def parts(self, parameters: Parameters, inputs: Tensor, targets: Tensor) -> Iterator[Part]:
        """See `RowGradients.parts`; rows are (clients, rows, ...)."""
        taps: list[tuple[str, Tensor, Tensor]] = []
        hidden = inputs
        for name, layer in self.chain:
            if not isinstance(layer, nn.Linear):
                hidden = layer(hidden)
                continue
            before = hidden.detach()
            hidden = torch.bmm(hidden, parameters[f"{name}weight"].mT)
            if layer.bias is not None:
                hidden = hidden + parameters[f"{name}bias"][:, None]
            hidden = hidden.detach().requires_grad_() if not hidden.requires_grad else hidden
            taps.append((name, before, hidden))
        losses = self.loss(hidden, targets, 2)
        slopes = torch.autograd.grad(losses.sum(), [after for _, _, after in taps])
        for (name, before, _), slope in zip(taps, slopes, strict=True):
            yield from _stacked(name, before, slope)


def _stacked(name: str, before: Tensor, slope: Tensor) -> Iterator[Part]:
    """Yield the parts of a dense layer of each client, given its inputs and the gradients of its outputs."""
    length = _lengths(slope).square()
    weighted = length * _lengths(before).square()
    yield f"{name}weight", weighted, lambda kept: torch.bmm(_masked(slope, kept).mT, _finite(before, kept))
    yield f"{name}bias", length, lambda kept: _masked(slope, kept).sum(1)


class Layered(RowGradients):
    """Dense layers and convolutions, by their inputs and the gradients of their outputs."""

    @cached_property
    def _layers(self) -> dict[nn.Module, str]:
        return {layer: name for name, layer in owners_of(self.model, self.names) or []}

    def parts(self, parameters: Parameters, inputs: Tensor, targets: Tensor) -> Iterator[Part]:
        """See `RowGradients.parts`."""
        arrange, layers = arrangement(self.model, tuple(inputs.shape[1:]), inputs.device), self._layers
        values = {
            name: arrange(value.detach()).requires_grad_(name in self.names) for name, value in parameters.items()
        }
        with _tapped(layers) as taps:
            losses = self.loss(self.model.apply(self.frozen | values, inputs, self.training), targets)
        slopes = torch.autograd.grad(losses.sum(), [after for _, _, after in taps])
        with torch.no_grad():
            for (layer, before, _), slope in zip(taps, slopes, strict=True):
                for kind, square, summed in (_dense if isinstance(layer, nn.Linear) else _convolution)(
                    layer, before, slope
                ):
                    yield f"{layers[layer]}{kind}", square, summed


class RowByRow(RowGradients):
    """Any network: the gradient of each row."""

    @property
    def rows_at_once(self) -> int:
        """See `RowGradients.rows_at_once`."""
        shapes = self.model.shapes | self.model.local_shapes
        return max(1, _AT_ONCE // max(1, 4 * sum(math.prod(shapes[name]) for name in self.names)))

    def parts(self, parameters: Parameters, inputs: Tensor, targets: Tensor) -> Iterator[Part]:
        """See `RowGradients.parts`."""
        trained = {name: value for name, value in parameters.items() if name in self.names}
        rest = self.frozen | {name: value for name, value in parameters.items() if name not in self.names}

        def of_row(values: Parameters, row: Tensor, target: Tensor) -> Tensor:
            return self.loss(self.model.apply(rest | values, row[None], self.training), target[None]).sum()

        try:
            with unfused_attention():
                found = vmap(grad(of_row), in_dims=(None, 0, 0), randomness="different")(trained, inputs, targets)
        except RuntimeError:  # a network may do what vmap cannot
            rows = [grad(of_row)(trained, row, target) for row, target in zip(inputs, targets, strict=True)]
            found = {name: torch.stack([row[name] for row in rows]) for name in trained}
        for name, value in found.items():
            yield name, _lengths(value.flatten(1)).square(), partial(_weighted, value)


def _weighted(values: Tensor, kept: Tensor) -> Tensor:
    return torch.einsum("b,b...->...", kept, _finite(values, kept))


def gradients_of(
    model: Model,
    frozen: Parameters,
    names: frozenset[str],
    shape: tuple[int, ...],
    chain: Chain | None = None,
) -> RowGradients:
    """Return the fastest correct way to the clipped sums of a model's trained parameters.

    `shape` is the shape of a row. To compute clients at once, `chain` has the layers of a chain of dense layers.

    Raises
    ------
    ModelError
        See `check_rows`.
    """
    check_rows(model, shape)
    if chain is not None and len(shape) == 1 and not frozen:
        return Chained(model, frozen, names, model.loss.of_rows, chain=chain)
    return (Layered if _is_layered(model, names, shape) else RowByRow)(model, frozen, names, model.loss.of_rows)


@lru_cache(maxsize=16)
def check_rows(model: Model, shape: tuple[int, ...]) -> None:
    """Raise `ModelError` if noise in training cannot hide each row of a model's client, given the shape of a row."""
    why = ""
    if model.batch_dependent or model.buffers & {*model.shapes, *model.local_shapes}:
        why = "mixes the rows of a batch, as in batch normalisation; use GroupNorm or LayerNorm, or freeze the layer"
    elif model.summed or model.decays or model.hooks.fit_local is not None:
        why = "trains some parameters by other rules; choose a model without summed_parameters, decays and fit_local"
    elif any(getattr(layer, "max_norm", None) is not None for layer in model.module.modules()):
        why = "rescales its own parameters where a row names them; leave out max_norm"
    elif _mixes(model, shape):
        why = "computes a row's outputs from other rows of its batch; compute each row by itself"
    if why:
        raise ModelError(f'protect = "rows" hides no row of model {model.name!r}: it {why}', code="model.rows")


def _mixes(model: Model, shape: tuple[int, ...]) -> bool:
    """Return whether a row's outputs in training change with the other rows, beyond rounding.

    Initial parameters may be 0 in the layers that mix rows, and a server can send others. So these are tried too.
    """
    rows, generator = _made_up(model, shape), torch.Generator().manual_seed(0)
    start = _initial(model)
    moved = {name: value + _MOVED * torch.randn(value.shape, generator=generator) for name, value in start.items()}

    def mixes(parameters: Parameters) -> bool:
        together = model.apply(parameters, rows, True)
        alone = torch.cat([model.apply(parameters, row[None], True) for row in rows])
        return not _close(together, alone)

    def mixes_while_drawing(parameters: Parameters, seed: int) -> bool:
        """With the same seed and number of rows, the draws are the same: only the other rows differ."""
        others, first = torch.cat([rows[:1], 1 - rows[1:]]), list[Tensor]()
        for some in (rows, others):
            with seeded(seed, torch.device("cpu")):
                first.append(model.apply(parameters, some, True)[0])
        return not _close(*first)

    with torch.no_grad():
        if not traits_of(model, shape).draws:
            return mixes(start) or mixes(moved)
        # Dropout may drop all that would show it, but hardly each time.
        return any(mixes_while_drawing(one, seed) for one in (start, moved) for seed in range(_DRAWS))


def _close(one: Tensor, other: Tensor) -> bool:
    largest = float(one.abs().nan_to_num(0.0, 0.0).max())
    return torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE * max(1.0, largest), equal_nan=True)


@lru_cache(maxsize=16)
def _is_layered(model: Model, names: frozenset[str], shape: tuple[int, ...]) -> bool:
    """Return whether `Layered` gives the sums of made-up rows that `RowByRow` gives.

    Dropout is off, since it draws differently for each of them.
    """
    if owners_of(model, names) is None:
        return False
    rows, values = _made_up(model, shape), {name: value[None] for name, value in _initial(model).items()}
    every = torch.ones(1, len(rows), dtype=torch.bool)

    def loss(outputs: Tensor, _: Tensor) -> Tensor:
        return outputs.flatten(1).square().sum(1) + outputs.flatten(1).sum(1)

    training = not traits_of(model, shape).draws
    ways = [kind(model, model.frozen_values, names, loss, training) for kind in (Layered, RowByRow)]
    try:
        for clip_norm in (1e-3, 1e6):
            found, right = (way.clipped(values, rows[None], rows[None], every, clip_norm) for way in ways)
            for name, summed in right.items():
                scale = float(summed.abs().max()) + clip_norm * 1e-9
                if not torch.allclose(found[name], summed, rtol=_CLOSE, atol=_CLOSE * scale):
                    return False
    except (RuntimeError, KeyError, ValueError):
        return False
    return True


def _initial(model: Model) -> Parameters:
    state = dict(model.module.named_parameters())
    return {name: state[name].detach().clone() for name in (*model.shapes, *model.local_shapes)}


def _made_up(model: Model, shape: tuple[int, ...]) -> Tensor:
    rows = torch.rand((_ROWS, *shape), generator=torch.Generator().manual_seed(0))
    return rows.round().long() if traits_of(model, shape).tokens else rows


# --- layers whose parameters' gradients follow from their inputs and the gradients of their outputs


def owners_of(model: Model, names: frozenset[str]) -> list[tuple[str, nn.Module]] | None:
    """Return the layers of all trained parameters, with the prefix of their names; None if one is of no known kind."""
    left, found = set(names), []
    for prefix, layer in model.module.named_modules():
        start = f"{prefix}." if prefix else ""
        mine = {f"{start}{name}" for name, _ in layer.named_parameters(recurse=False)} & left
        if not mine:
            continue
        if (
            not _known(layer)
            or layer._forward_hooks
            or layer._forward_pre_hooks
            or any(len(model.names[name]) > 1 for name in mine)
        ):
            return None
        found.append((start, layer))
        left -= mine
    return found if not left else None


def _known(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is nn.Linear


@contextmanager
def _tapped(layers: Collection[nn.Module]) -> Iterator[list[tuple[nn.Module, Tensor, Tensor]]]:
    """Yield a list that gets each layer, its input and its output when the layer is computed.

    Later layers get a copy of the output, which the network may change in place.
    """
    taps: list[tuple[nn.Module, Tensor, Tensor]] = []

    def tap(layer: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
        taps.append((layer, inputs[0].detach(), outputs))
        return outputs.clone()

    hooks = [layer.register_forward_hook(tap) for layer in layers]
    try:
        yield taps
        if len(taps) != len(layers):
            raise ValueError("a layer is used more or less than once")
    finally:
        for hook in hooks:
            hook.remove()


def _dense(layer: nn.Module, before: Tensor, slope: Tensor) -> Iterator[Part]:
    a, g = before.reshape(len(before), -1, before.shape[-1]), slope.reshape(len(slope), -1, slope.shape[-1])
    yield "weight", *_products(a, g)
    yield from _bias(g)


def _bias(g: Tensor) -> Iterator[Part]:
    """Yield the bias that is added to outputs with the gradients (rows, places, outputs)."""
    summed = g.sum(1)
    yield "bias", _lengths(summed).square(), lambda kept: _masked(summed, kept).sum(0)


def _products(a: Tensor, g: Tensor) -> tuple[Tensor, Summed]:
    """Return the squared norms of each row's product of g (places, outputs) and a (places, inputs), and their sum.

    If a row's product is large, its norm is computed from the products of all pairs of places.
    """
    places, inputs, outputs = a.shape[1], a.shape[2], g.shape[2]
    if places == 1 or places * (inputs + outputs) < inputs * outputs:
        lengths, slopes = _lengths(a), _lengths(g)
        squares = largest = (lengths * slopes).sum(1).square()
        if places > 1:
            squares = _safe((torch.bmm(a, a.mT) * torch.bmm(g, g.mT)).sum((1, 2)), largest, lengths, slopes)
        return squares, lambda kept: _masked(g, kept).flatten(0, 1).T @ _finite(a, kept).flatten(0, 1)
    products = torch.bmm(g.mT, a).flatten(1)
    return _lengths(products).square(), lambda kept: (kept @ _finite(products, kept)).reshape(outputs, inputs)


def _lengths(values: Tensor) -> Tensor:
    """Return the lengths of vectors (..., numbers) in 64 bits, where no square is lost; infinite beyond `_LARGEST`."""
    found: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
    return torch.where(found < _LARGEST, found, torch.inf)


def _safe(squares: Tensor, largest: Tensor, *lengths: Tensor) -> Tensor:
    """Return squared norms that rounding has not made too small.

    `squares` come from pairs of places. If places cancel, they are differences of large numbers, and inexact. `largest`
    are upper bounds: the squares if no places cancel. They are taken if the `lengths` (rows, places) are too extreme
    for products of pairs.
    """
    peaks = [one.amax(1) for one in lengths]
    usual = torch.stack([(peak <= _USUAL) & (peak >= 1 / _USUAL) for peak in peaks]).all(0)
    return torch.where(usual, squares.double().clamp_min(0.0) + _ROUNDING * largest, largest)


def _convolution(layer: Any, before: Tensor, slope: Tensor) -> Iterator[Part]:
    down, right = layer.padding
    rows, outputs, *places = slope.shape
    # In the order in which a network of convolutions computes, so that a window's rows are copied as a whole.
    inputs = nn.functional.pad(before.permute(0, 2, 3, 1), (0, 0, right, right, down, down)).contiguous()
    row, *steps, channel = inputs.stride()
    over = [step * one for step, one in zip(steps, layer.stride, strict=True)]
    within = [step * one for step, one in zip(steps, layer.dilation, strict=True)]
    shape = (rows, *places, *layer.kernel_size, before.shape[1])
    windows = inputs.as_strided(shape, (row, *over, *within, channel))
    g = slope.flatten(2).mT
    squares, summed = _products(windows.reshape(rows, math.prod(places), -1), g)
    size = layer.kernel_size
    yield "weight", squares, lambda kept: summed(kept).reshape(outputs, *size, -1).permute(0, 3, 1, 2)
    yield from _bias(g)


def _masked(values: Tensor, kept: Tensor) -> Tensor:
    """Return values times their rows' factors; those of rows that do not count may be no numbers, and become 0."""
    return _finite(values, kept) * kept.reshape(*kept.shape, *[1] * (values.ndim - kept.ndim))


def _finite(values: Tensor, kept: Tensor) -> Tensor:
    """Return values as numbers of the factors' kind, with 0 for rows that do not count."""
    values = values.to(kept.dtype)
    if bool((kept > 0).all()):  # a copy of large activations takes long
        return values
    return torch.where(kept.reshape(*kept.shape, *[1] * (values.ndim - kept.ndim)) > 0, values, 0.0)
