"""Models by name, each with its loss and metric.

A model of your own is a function that returns a ``torch.nn.Module`` (or a `Model`), given as
``package.module:factory``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache, partial

from torch import nn

from models.factors import Factors
from models.losses import LOSSES, METRICS, SLOPES, Loss, Score
from models.model import Model, check
from models.networks import CNN, LeNet, Linear, cnn10, lenet10, mlp
from protocol.errors import ModelError
from protocol.plugins import import_by_name

__all__ = ["LOSSES", "METRICS", "MODELS", "Loss", "Model", "Score", "load", "load_for"]

MODELS = {
    "linear": Model("linear", Linear, LOSSES["mse"], METRICS["rmse"]),
    "mlp": Model("mlp", mlp, LOSSES["rmse"], METRICS["rmse"]),
    "cnn": Model("cnn", CNN, LOSSES["cross-entropy"], METRICS["accuracy"]),
    "cnn10": Model("cnn10", cnn10, LOSSES["cross-entropy"], METRICS["accuracy"]),
    "lenet": Model("lenet", LeNet, LOSSES["cross-entropy"], METRICS["accuracy"]),
    "lenet10": Model("lenet10", lenet10, LOSSES["cross-entropy"], METRICS["accuracy"]),
}


@lru_cache(maxsize=16)
def load(name: str, loss: str = "", frozen: str = "", local: str = "") -> Model:
    """Return the model called `name`, checked.

    Parameters
    ----------
    name : str
        A key of `MODELS`, ``factors-IxD`` for I items with vectors of length D, or
        ``package.module:factory``.
    loss : str
        A key of `LOSSES`; empty for the model's own.
    frozen, local : str
        Patterns on the names of parameters, separated by spaces, of those that are frozen and of
        those that stay on the nodes.

    Raises
    ------
    ModelError
        When the model or the loss is unknown or unusable; the text lists what there is.
    """
    if loss and loss not in LOSSES:
        raise ModelError(f"unknown loss {loss!r}; choose from {', '.join(LOSSES)}")
    if ":" in name:
        model = _from_factory(name, loss)
    elif name in MODELS:
        model = MODELS[name]
    elif size := re.fullmatch(r"factors-([1-9]\d{0,6})x([1-9]\d{0,3})", name):
        items, factors = map(int, size.groups())
        model = Model(name, partial(Factors, items, factors), LOSSES["log"], METRICS["right-sign"])
        if loss and loss not in SLOPES:
            raise ModelError(
                f"model {name!r} needs a loss of the margin, not {loss!r}; choose from {', '.join(SLOPES)}"
            )
    else:
        raise ModelError(
            f"unknown model {name!r}; choose from {', '.join(MODELS)}, factors-IxD or give package.module:factory"
        )
    if loss:
        model = replace(model, loss=LOSSES[loss])
    if frozen or local:
        model = replace(model, frozen=(*model.frozen, *frozen.split()), local=(*model.local, *local.split()))
    check(model)
    return model


def load_for(model: str, loss: str, default_model: str, default_loss: str, frozen: str = "", local: str = "") -> Model:
    """Return the model that a run asks for, or else the one its federation was made for.

    Parameters
    ----------
    model, loss : str
        From the run config; empty when it leaves the choice to the federation.
    default_model, default_loss : str
        From the federation's manifest. A model of the run's own brings its own loss.
    frozen, local : str
        See `load`.
    """
    if not (model or default_model):
        raise ModelError(f"neither run config nor federation name a model; set model to one of {', '.join(MODELS)}")
    return load(model or default_model, loss or ("" if model else default_loss), frozen, local)


def _from_factory(name: str, loss: str) -> Model:
    factory = import_by_name(name)
    made = factory()
    if isinstance(made, Model):
        return replace(made, name=name)
    if not isinstance(made, nn.Module):
        raise ModelError(f"model {name!r} gave a {type(made).__name__}; return a torch.nn.Module or a models.Model")
    if not loss:
        raise ModelError(f"model {name!r} has no loss of its own; set loss to one of {', '.join(LOSSES)}")
    return Model(name, factory, LOSSES[loss], METRICS["accuracy" if loss == "cross-entropy" else "rmse"])
