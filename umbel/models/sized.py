"""Models whose size stands in their options: ``linear inputs=5 outputs=1``, ``mlp inputs=5 hidden=16 outputs=1``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from torch import nn

from umbel.models.factors import BiasedFactors, Factors
from umbel.models.losses import LOSSES, METRICS, SLOPES, Loss
from umbel.models.model import Model
from umbel.models.networks import Softmax
from umbel.protocol.errors import ModelError
from umbel.protocol.plugins import parse_options

Size = Annotated[int, Field(ge=1, le=10_000_000)]
Sizes = Annotated[tuple[Size, ...], BeforeValidator(lambda text: tuple(text.split(",")))]


@dataclass(frozen=True)
class Linear:
    """Options of ``linear``: one dense layer."""

    inputs: Size
    outputs: Size


@dataclass(frozen=True)
class MLP:
    """Options of ``mlp``: the widths of its hidden layers are separated by commas."""

    inputs: Size
    hidden: Sizes
    outputs: Size


@dataclass(frozen=True)
class Items:
    """Options of ``factors`` and ``biased-factors``: I items with vectors of length d."""

    items: Size
    size: Size


@dataclass(frozen=True)
class Classes:
    """Options of ``softmax``."""

    features: Size
    classes: Size


def dense(*sizes: Any) -> nn.Module:
    """Return layers of these widths with ReLU between them; the numbers of a row are laid out flat."""
    widths = [width for size in sizes for width in (size if isinstance(size, tuple) else (size,))]
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


SIZED: Mapping[str, tuple[type[Any], Callable[..., nn.Module]]] = {
    "linear": (Linear, dense),
    "mlp": (MLP, dense),
    "softmax": (Classes, Softmax),
    "factors": (Items, Factors),
    "biased-factors": (Items, BiasedFactors),
}
"""The options of each model, and its network, which takes them in order."""


def sized(kind: str, words: str, loss: Loss | None = None) -> Model:
    """Return the model of a kind and a size.

    Parameters
    ----------
    kind : str
        A key of `SIZED`.
    words : str
        Its options, as ``name=value name=value``.
    loss : Loss, optional
        By default ``log`` for factors, else ``mse`` for one output and ``cross-entropy`` for more.

    Raises
    ------
    ConfigError
        When an option is unknown or missing, or is not a size.
    ModelError
        When the loss does not suit the model.
    """
    options, network = SIZED[kind]
    name, size = f"{kind} {words}", astuple(parse_options(options, words, f"model {kind!r}"))
    if options is Items:
        if loss and loss.name not in SLOPES:
            raise ModelError(
                f"model {name!r} needs a loss of the margin, not {loss.name!r}; choose from {', '.join(SLOPES)}",
                code="model.loss",
            )
        usual = "log"
    else:
        usual = "mse" if size[-1] == 1 else "cross-entropy"
    loss = loss or LOSSES[usual]
    metric = "accuracy" if loss.name == "cross-entropy" else "right-sign" if loss.name in SLOPES else "rmse"
    return Model(name, partial(network, *size), loss, loss if loss.by_row else METRICS[metric])
