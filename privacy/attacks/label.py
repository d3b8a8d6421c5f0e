"""Reading the class of a single sample off the last layer's gradient.

Under cross entropy the gradient of the last layer's output is softmax(outputs) less the one-hot
class: its one negative entry is the class (Zhao, Mopuri and Bilen, *iDLG*, 2020). With noise the most
negative one is the best guess.
"""

from __future__ import annotations

from torch import Tensor

from models.base import Model, Parameters
from privacy.attacks.layers import NotApplicableError, dense_layers, parameter
from privacy.attacks.rank_one import leading_factors


def bias_label(model: Model, parameters: Parameters, gradient: Parameters, shape: tuple[int, ...]) -> int:
    """Return the class that the gradient of the last bias shows, which is that of the output itself.

    Raises
    ------
    NotApplicableError
        When no fully connected layer puts out the classes, or the one that does has no bias.
    """
    _, bias = _last_layer(model, parameters, gradient, shape)
    if bias is None:
        raise NotApplicableError(f"the last fully connected layer of model {model.name!r} has no bias")
    return int(bias.argmin())


def rank_one_label(model: Model, parameters: Parameters, gradient: Parameters, shape: tuple[int, ...]) -> int:
    """Return the class that the last layer's whole gradient shows.

    Its weight's columns are as many more copies of the output's gradient, each with noise of its own:
    the leading left singular vector takes their average (`leading_factors`).

    Raises
    ------
    NotApplicableError
        When no fully connected layer puts out the classes.
    """
    return int(leading_factors(*_last_layer(model, parameters, gradient, shape)).delta.argmin())


def _last_layer(
    model: Model, parameters: Parameters, gradient: Parameters, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of weight and bias of the layer that puts out the classes."""
    last = dense_layers(model, parameters, shape)[-1]
    weight = gradient[parameter(last, "weight")]
    classes = model.apply(parameters, next(iter(parameters.values())).new_zeros(1, *shape)).shape[-1]
    if len(weight) != classes:
        raise NotApplicableError(f"the last fully connected layer of model {model.name!r} does not put out the classes")
    return weight, gradient.get(parameter(last, "bias"))
