"""Local training that suits a dataset: its units and steps, by the clients' rows or by declared ranges alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.data import Dataset
from umbel.models.model import Model
from umbel.protocol.run_config import AUTO
from umbel.server.setup import Setup
from umbel.simulation.facts import Span, feature_spans, made_up

_PASSES = 10
_ROOMY = 3.0  # standard deviations within which a feature's mean should lie, and its scale within as many times 1
_MOST_UNITS = 200  # features that a model's name may scale
_SAMPLE = 500  # clients, and rows of each, that determine the maximum step


def local_training(setup: Setup, dataset: Dataset, exact: bool) -> dict[str, Any]:
    """Return the entries of local training that suit the data: their rows if `exact`, or their declared ranges."""
    run, model = setup.config, setup.model
    found: dict[str, Any] = {}
    several = setup.strategy.hypotheses > 1 and run.hypotheses != AUTO
    if several and run.strategy_name == "group-privacy" and "respawn" not in run.strategy:
        found["strategy"] = f"{run.strategy} respawn=3"
    shape = dataset.features.shape[1:]
    kind, _, words = model.name.partition(" ")
    if kind not in ("linear", "mlp") or not words or len(shape) != 1 or dataset.manifest.feature_scale != 1:
        return found
    offset, scale = _of_rows(dataset) if exact else _declared(dataset)
    if "offset=" not in words and "scale=" not in words and _far(offset, scale) and len(offset) <= _MOST_UNITS:
        lists = {"offset": map(_written, offset, scale), "scale": (f"{one:.3g}" for one in scale)}
        found["model"] = " ".join([model.name, *(f"{key}={','.join(texts)}" for key, texts in lists.items())])
    else:
        offset, scale = np.zeros_like(offset), np.ones_like(scale)
    if model.linear:
        rows = _sample(dataset if exact else made_up(model, dataset))
        rows = rows if exact else [np.concatenate(rows)]
        # A step for declared ranges is short: with many features, it takes as many passes to get anywhere.
        passes = _PASSES if exact else max(_PASSES, len(offset))
        step = step_size(model, [(one - offset) / scale for one in rows], exact)
        found |= {"step-size": step, "batch-size": 0, "local-epochs": passes}
    return found


def _far(offset: NDArray[np.float64], scale: NDArray[np.float64]) -> bool:
    """Return whether features have unsuitable units: large, small, or far from 0."""
    return bool(((scale > _ROOMY) | (scale < 1 / _ROOMY**3) | (np.abs(offset) > _ROOMY * np.maximum(scale, 1))).any())


def _written(offset: float, scale: float) -> str:
    """Return an offset with as many digits as a hundredth of its scale needs, and at least three."""
    return f"{offset:.{max(3, 2 + math.ceil(math.log10(max(abs(offset) / scale, 1))))}g}"


def _of_rows(dataset: Dataset) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rows = np.concatenate(_sample(dataset))
    deviation, binary = rows.std(axis=0), ((rows == 0) | (rows == 1)).all(axis=0)
    # In units of its deviation a rare 1 would be large, and a client with many of them would keep all steps short.
    unit = np.where(binary, np.maximum(deviation, 1 / _ROOMY), deviation)
    return rows.mean(axis=0), np.where(unit > 1e-9 * np.abs(rows).max(axis=0, initial=1e-30), unit, 1.0)


def _declared(dataset: Dataset) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    spans = feature_spans(dataset.manifest, dataset.features.shape[1]) or [Span("")] * dataset.features.shape[1]
    known = [span if span.low is not None and (span.low, span.high) != (0.0, 1.0) else None for span in spans]
    offset = np.array([span.centre if span else 0.0 for span in known])
    return offset, np.array([(span.spread or 1.0) if span else 1.0 for span in known])


def _sample(dataset: Dataset) -> list[NDArray[np.float64]]:
    """Return the features of some rows of some training clients."""
    train = dataset.manifest.train
    rows = (dataset.client(client)[0] for client in range(0, train, -(-train // _SAMPLE)))
    return [np.asarray(own[:: -(-len(own) // _SAMPLE)], np.float64) for own in rows]


def step_size(model: Model, clients: list[NDArray[np.float64]], exact: bool) -> float:
    """Return a step size at which gradient descent on a linear model is stable at each client.

    The curvature of a loss is at most that of its link times the largest eigenvalue of the second moments of a client's
    features and 1. For declared ranges only the mean of their trace is known, which bounds that of most.
    """
    largest = 0.0
    for rows in clients:
        wide = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
        moments = wide.T @ wide / len(rows)
        largest = max(largest, float(np.linalg.eigvalsh(moments)[-1] if exact else np.trace(moments)))
    return float(f"{1 / (_curvature(model) * largest):.2g}")


def typical_norm(model: Model, step: float) -> float:
    """Return the norm of a typical row's features and 1, to which `step_size` fitted a step for declared ranges."""
    return 1 / math.sqrt(_curvature(model) * step)


def _curvature(model: Model) -> float:
    """Return the largest second derivative of a linear model's loss by its output."""
    return {"mse": 2.0, "cross-entropy": 0.5, "log": 0.25}.get(model.loss.name, 1.0)
