"""Models by name, each with its loss and metric.

Options follow the name: ``mlp inputs=5 hidden=16 outputs=1``. Your own model is a function that returns a
``torch.nn.Module`` (or a `Model`), given as ``package.module:factory``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import astuple, make_dataclass, replace
from dataclasses import field as dataclass_field
from functools import lru_cache, partial
from itertools import pairwise
from types import FunctionType
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field
from torch import nn

from umbel.data import Manifest
from umbel.models import ranges
from umbel.models.factors import BiasedFactors, Factors
from umbel.models.losses import LOSSES, METRICS, SLOPES, Loss, Score, load_loss, load_metric
from umbel.models.model import Model, check, stamp_of
from umbel.models.networks import CNN, LeNet, Linear, Softmax, TanhCNN, Units, mlp
from umbel.protocol import builds
from umbel.protocol.errors import ConfigError, ModelError, UmbelError
from umbel.protocol.options import parse_options, parse_pairs
from umbel.protocol.plugins import import_by_name
from umbel.protocol.ranges import columns_in
from umbel.protocol.run_config import RunConfig

__all__ = ["LOSSES", "METRICS", "MODELS", "Loss", "Model", "Score", "load", "load_for", "load_loss", "load_metric"]

UNITS = ("offset", "scale")
"""Options of a model that scale features, one number for each feature."""
_NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "cnn": CNN,
    "cnn10": partial(CNN, 10),
    "cnn-dropout": partial(CNN, dropout=True),
    "cnn-sigmoid": partial(CNN, smooth=True),
    "cnn10-sigmoid": partial(CNN, 10, smooth=True),
    "lenet": LeNet,
    "lenet10": partial(LeNet, 10),
}
MODELS = {
    "linear": Model("linear", Linear, LOSSES["mse"], METRICS["rmse"]),
    "mlp": Model("mlp", mlp, LOSSES["rmse"], METRICS["rmse"]),
    **{name: Model(name, own, LOSSES["cross-entropy"], METRICS["accuracy"]) for name, own in _NETWORKS.items()},
}


Size = Annotated[int, Field(ge=1, le=10_000_000)]
Sizes = Annotated[tuple[Size, ...], BeforeValidator(lambda text: tuple(text.split(",")))]
Two = Annotated[tuple[Size, Size], BeforeValidator(lambda text: tuple(text.split(",")))]


Constant = Annotated[float, Field(allow_inf_nan=False)]
Constants = Annotated[tuple[Constant, ...], BeforeValidator(lambda text: tuple(text.split(",")))]


def _options(units: bool = False, **fields: Any) -> type[Any]:
    constants = [(name, Constants, dataclass_field(default=())) for name in UNITS] if units else []
    return make_dataclass("Options", [*fields.items(), *constants], frozen=True)


def dense(*sizes: Any) -> nn.Module:
    """Return layers of these widths with ReLU between them; each row is flattened first.

    After the widths come the constants that scale features (`umbel.models.networks.Units`).
    """
    *sizes, offset, scale = sizes  # type: ignore[assignment]
    widths = [width for size in sizes for width in (size if isinstance(size, tuple) else (size,))]
    layers: list[nn.Module] = [nn.Flatten()]
    if offset or scale:
        if wrong := {len(one) for one in (offset, scale) if one} - {widths[0]}:
            text = f"a model of {widths[0]} inputs needs as many offsets and scales, not {wrong.pop()}"
            raise ModelError(text, code="model.units")
        if 0 in scale:
            raise ModelError("a scale of 0 is not a unit; leave scale out, or give 1", code="model.units")
        layers.append(Units(offset, scale))
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


_FACTORS = _options(items=Size, size=Size)
SIZED: Mapping[str, tuple[type[Any], Callable[..., nn.Module]]] = {
    "linear": (_options(inputs=Size, outputs=Size, units=True), dense),
    "mlp": (_options(inputs=Size, hidden=Sizes, outputs=Size, units=True), dense),
    "softmax": (_options(features=Size, classes=Size), Softmax),
    "tanh-cnn": (_options(filters=Two, hidden=Size, outputs=Size), TanhCNN),
    "factors": (_FACTORS, Factors),
    "biased-factors": (_FACTORS, BiasedFactors),
}
"""The options of each model, and the function that builds its network from them."""


def load(
    name: str,
    loss: str = "",
    frozen: str = "",
    local: str = "",
    metric: str = "",
    pretrained: str = "",
    usual_loss: str = "",
) -> Model:
    """Return the model `name`, checked.

    Parameters
    ----------
    name : str
        A key of `MODELS`; or, with ``name=value`` after it, a key of `SIZED`,
        ``package.module:factory``.
    loss, metric : str
        Names, or ``package.module:function``; empty for the model's defaults.
    frozen, local : str
        Patterns on names of parameters, separated by spaces (`Model`).
    pretrained : str
        File of initial weights (`umbel.models.model.find_weights`); empty to draw them.
    usual_loss : str
        The loss of a ``torch.nn.Module`` if `loss` is empty.

    Raises
    ------
    ModelError
        If the model or the loss is unknown or unusable; the text lists the choices.
    """
    meant = tuple(map(_meant, (name, loss, metric, usual_loss)))
    stamp = stamp_of(pretrained) if pretrained else ()
    return _load(name, loss, frozen, local, metric, pretrained, usual_loss, meant, stamp)


def _meant(name: str) -> Hashable:
    """Return the object that an import path stands for, if its module is there: a notebook may define it again."""
    module, _, attribute = name.partition(" ")[0].partition(":")
    found = getattr(sys.modules.get(module), "__dict__", {}).get(attribute)
    return found if isinstance(found, Hashable) else id(found)


@lru_cache(maxsize=16)
def _load(
    name: str,
    loss: str,
    frozen: str,
    local: str,
    metric: str,
    pretrained: str,
    usual_loss: str,
    meant: tuple[Hashable, ...],
    stamp: tuple[int, ...],
) -> Model:
    """Return the model of `load`, once for what its names mean and for a version of its file."""
    own = load_loss(loss) if loss else None
    kind, _, words = name.partition(" ")
    if ":" in kind:
        usual = own or (load_loss(usual_loss) if usual_loss else None)
        model = _from_factory(name, usual)
    elif name in MODELS:
        model = MODELS[name]
    elif kind in SIZED:
        model = _sized(kind, words, own)
    else:
        raise ModelError(
            f"unknown model {name!r}; choose from {', '.join(MODELS)}, with sizes from {', '.join(SIZED)}, or give "
            "package.module:factory",
            code="model.unknown",
        )
    if own:
        model = replace(model, loss=own)
    if metric:
        model = replace(model, metric=load_metric(metric))
    if frozen or local:
        model = replace(model, frozen=(*model.frozen, *frozen.split()), local=(*model.local, *local.split()))
    if pretrained:
        model = replace(model, pretrained=pretrained, stamp=stamp)
    check(model)
    return model


def load_for(run: RunConfig, manifest: Manifest | None = None) -> Model:
    """Return a run's model, or the model of its dataset if the run names none.

    A model that the run names brings its loss, or takes the manifest's loss if it has none. The manifest's frozen and
    local parameters concern only the manifest's model. ``biased-factors`` without a size takes the size of the
    dataset's factors. A question about ranges is a separate model, which nothing else in the config or the manifest
    changes. If every node serves its own data, there is no manifest.

    Raises
    ------
    ModelError
        See `load`; also when neither names a model.
    """
    if columns_in(run.model):
        return ranges.model_of(run.model, manifest)
    default = manifest.model if manifest else ""
    if not (run.model or default):
        raise ModelError(f"no model is named; set model to one of {', '.join(MODELS)}", code="model.none")
    name = run.model or default
    if name in SIZED and name not in MODELS:
        kind, _, words = default.partition(" ")
        if kind not in SIZED or SIZED[kind][0] is not SIZED[name][0]:
            raise ModelError(
                f"model {name!r} needs its size as options, or a dataset of preferences", code="model.size"
            )
        name = f"{name} {words}"
    loss, frozen, local, metric, pretrained = run.loss, run.frozen, run.local, run.metric, run.pretrained
    if manifest is not None and (not default or not run.model or _without_units(run.model) == default):
        loss, metric = loss or manifest.loss, metric or manifest.metric
        frozen, local = frozen or manifest.frozen, local or manifest.local
        pretrained = pretrained or manifest.pretrained
    return load(name, loss, frozen, local, metric, pretrained, manifest.loss if manifest else "")


def _without_units(name: str) -> str:
    return " ".join(word for word in name.split(" ") if word.partition("=")[0] not in UNITS)


def _sized(kind: str, words: str, loss: Loss | None) -> Model:
    """Return the model of a key of `SIZED`, with `words` as its options ``name=value name=value``."""
    options, network = SIZED[kind]
    parsed = parse_options(options, words, f"model {kind!r}")
    name, size = f"{kind} {words}", astuple(parsed)
    if options is _FACTORS and loss and loss.name not in SLOPES:
        raise ModelError(
            f"model {name!r} needs a margin loss, not {loss.name!r}; choose from {', '.join(SLOPES)}",
            code="model.loss",
        )
    usual = "log" if options is _FACTORS else "mse" if getattr(parsed, "outputs", size[-1]) == 1 else "cross-entropy"
    loss = loss or LOSSES[usual]
    metric = "accuracy" if loss.name in ("cross-entropy", *SLOPES) else "rmse"
    return Model(name, partial(network, *size), loss, loss if loss.by_row else METRICS[metric])


def _from_factory(name: str, loss: Loss | None) -> Model:
    path, _, words = name.partition(" ")
    options = {key: _value(value) for key, value in parse_pairs(words, f"model {path!r}: options").items()}
    factory = _factory(path)
    factory = partial(factory, **options) if options else factory
    try:
        made = factory()
    except UmbelError:
        raise
    except Exception as error:
        if mend := builds.hint(error):
            raise ConfigError(f"model {name!r}: {mend}", code="config.mixed-builds") from error
        raise ModelError(f"model {name!r} cannot be made: {error!r}", code="model.not-built") from error
    if isinstance(made, Model):
        return replace(made, name=name)
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"model {name!r} returned a {type(made).__name__}; return a torch.nn.Module or a models.Model",
            code="model.not-a-module",
        )
    if loss is None:
        raise ModelError(f"model {name!r} needs a loss; set it to one of {', '.join(LOSSES)}", code="model.no-loss")
    metric = loss if loss.by_row else METRICS["accuracy" if loss.name == "cross-entropy" else "rmse"]
    return Model(name, factory, loss, metric)


def _factory(path: str) -> Callable[..., Any]:
    """Return the factory ``package.module:factory``: a module class, or a function that this very package defines."""
    found: Any = import_by_name(path)
    makes = found.func if isinstance(found, partial) else found
    package = path.partition(":")[0].partition(".")[0]
    is_module = isinstance(makes, type) and issubclass(makes, nn.Module | Model)
    if is_module or (isinstance(makes, FunctionType) and makes.__module__.partition(".")[0] == package):
        return cast(Callable[..., Any], found)
    raise ModelError(
        f"model {path!r} is neither a class of torch.nn.Module nor a function that {package!r} defines; name one",
        code="model.factory",
    )


def _value(text: str) -> Any:
    """Return the number, truth value, None or tuple of these that a text denotes; otherwise the text."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
