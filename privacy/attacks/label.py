"""Reading the class of a single sample off the last layer's gradient."""

from __future__ import annotations

from models.base import Model, Parameters
from privacy.attacks.layers import NotApplicableError, dense_layers, parameter


def last_layer_label(model: Model, parameters: Parameters, gradient: Parameters, shape: tuple[int, ...]) -> int:
    """Return the class that the last fully connected layer's gradient shows.

    Under cross entropy the gradient of the last bias is softmax(outputs) less the one-hot class: its
    one negative entry is the class (Zhao, Mopuri and Bilen, *iDLG*, 2020). With noise the most
    negative one is the best guess. Without a bias the rows of the weight's gradient, each the same
    multiple of inputs that are not negative, are summed up instead.

    Raises
    ------
    NotApplicableError
        When no fully connected layer puts out the classes.
    """
    last = dense_layers(model, parameters, shape)[-1]
    bias = gradient.get(parameter(last, "bias"))
    scores = gradient[parameter(last, "weight")].sum(1) if bias is None else bias
    classes = model.apply(parameters, next(iter(parameters.values())).new_zeros(1, *shape)).shape[-1]
    if len(scores) != classes:
        raise NotApplicableError(f"the last fully connected layer of model {model.name!r} does not put out the classes")
    return int(scores.argmin())
