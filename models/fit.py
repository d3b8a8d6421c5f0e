"""Whether a model takes a federation's features and its loss the targets."""

from __future__ import annotations

import numpy as np
import torch

from federation import Federation
from models.losses import SLOPES
from models.model import Model


def misfit(model: Model, federation: Federation) -> str:
    """Return what keeps the model from the data, for the end of a sentence; empty if nothing does.

    All clients' rows are looked at: training that failed at some clients and not at others would tell
    about their data. A network may look for itself, by a method ``misfit(federation)``.
    """
    own = getattr(model.module, "misfit", None)
    if own is not None:
        return str(own(federation))
    targets, shape = federation.targets, federation.features.shape[1:]
    try:
        with torch.inference_mode():
            outputs = tuple(model.module(torch.zeros(2, *shape)).shape)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"does not take features of shape {shape}: {error}"
    if len(outputs) != 2 or outputs[0] != 2:
        return f"gives two rows outputs of shape {outputs}, not (2, outputs of a row)"
    width = outputs[1]
    if model.loss.name in SLOPES:
        fits = width == 1 and targets.ndim == 1 and bool(np.isin(targets, (-1, 1)).all())
        return "" if fits else f"with loss {model.loss.name!r} needs one output, and labels of -1 and 1"
    if targets.dtype.kind in "iu" and targets.ndim == 1 and width > 1:
        fits = bool(0 <= targets.min() <= targets.max() < width)
        return "" if fits else f"knows the classes 0 to {width - 1} alone"
    if model.loss.name == "cross-entropy" or model.metric.name == "accuracy":
        return "needs classes, whole numbers, as targets"
    fits = targets.shape[1:] == (width,) or (targets.ndim, width) == (1, 1)
    return "" if fits else f"has {width} outputs, a target is of shape {targets.shape[1:]}"
