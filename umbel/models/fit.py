"""Checks whether a model takes a dataset's features and its loss the targets, by a first trial of the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from umbel.data import Dataset
from umbel.models.losses import SLOPES
from umbel.models.model import Model
from umbel.protocol.errors import ModelError, UmbelError

# Memory that one chunk of a cohort may take. Fixed as long as so much is free, because the size of a
# chunk may change results in the last digit and a seed must give the same result every time.
CPU_CHUNK_BYTES = 1 << 30
MOST_TOKENS = 1 << 24  # a cohort holds its rows as 32-bit floats, which are exact only up to here


@dataclass(frozen=True)
class Traits:
    """Properties that a model shows when it is applied to rows of zeros."""

    tokens: bool  # it takes only integers, as an embedding does
    draws: bool  # it draws at random in training, as dropout does
    alone: bool  # it scores a single row; batch normalisation without running statistics does not
    activations: int  # how many numbers its layers output for one row
    outputs: tuple[int, ...]  # shape of the outputs of one row
    repeats: bool  # a layer that keeps statistics is used more than once


@lru_cache(maxsize=16)
def traits_of(model: Model, shape: tuple[int, ...]) -> Traits:
    """Apply a model to rows of a shape, and return its properties; raise if it does not take them.

    The error's text completes a sentence.
    """
    rows = torch.zeros(2, *shape)
    activations, used = int(np.prod(shape)), Counter[nn.Module]()

    def count(layer: nn.Module, _inputs: Any, outputs: Any) -> None:
        nonlocal activations
        used[layer] += isinstance(layer, nn.modules.batchnorm._NormBase)
        activations += outputs.numel() // len(rows) if isinstance(outputs, Tensor) else 0

    # Not in inference mode: tensors that a network caches there cannot be used in training.
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        hooks = [layer.register_forward_hook(count) for layer in model.module.modules()]
        try:
            outputs, rows = _apply(model, rows)
        except Exception as error:
            told = f"{shape}: {one_line(error)}"
            raise ModelError(f"does not take features of shape {told}", code="model.misfit") from error
        finally:
            for hook in hooks:
                hook.remove()
        if not isinstance(outputs, Tensor):
            raise ModelError(f"gives a {type(outputs).__name__}; return one tensor of outputs", code="model.misfit")
        if outputs.ndim < 2 or len(outputs) != 2:
            found = f"{tuple(outputs.shape)}, not (2, outputs of a row)"
            flat = "; let it return (rows, 1), without a squeeze" if tuple(outputs.shape) == (2,) else ""
            raise ModelError(f"gives two rows outputs of shape {found}{flat}", code="model.misfit")
        if outputs.dtype != torch.float32:
            raise ModelError(f"gives outputs of type {outputs.dtype}, not float32", code="model.misfit")
        alone = _scores_one(model, rows[:1], tuple(outputs.shape[1:]))
        # Buffers change in training; those of the model must not.
        buffers = {name: value.clone() for name, value in model.module.named_buffers()}
        before = torch.get_rng_state()
        try:
            model.apply(buffers, rows, training=True)
        except Exception as error:
            told = f"{shape} in evaluation only, not in training: {one_line(error)}"
            raise ModelError(f"takes features of shape {told}", code="model.misfit") from error
        draws = not torch.equal(before, torch.get_rng_state())
    repeats = max(used.values()) > 1
    return Traits(rows.dtype == torch.int64, draws, alone, activations, tuple(outputs.shape[1:]), repeats)


def training_bytes(model: Model, shape: tuple[int, ...], rows: int) -> int:
    """Return the memory of a client while it is trained on minibatches of so many rows of a shape."""
    n = model.num_parameters + sum(int(np.prod(local)) for local in model.local_shapes.values())
    # Parameters, their gradient and the next parameters; activations, forward and backward.
    return 4 * (3 * n + 2 * rows * traits_of(model, shape).activations)


def _apply(model: Model, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs, and the rows: as numbers, or as tokens if the model does not take numbers."""
    try:
        return model.apply({}, rows), rows
    except Exception as error:
        try:
            return model.apply({}, rows.long()), rows.long()
        except Exception:
            raise error from None


def _scores_one(model: Model, row: Tensor, outputs: tuple[int, ...]) -> bool:
    """Return whether a model scores a single row."""
    try:
        found = tuple(model.apply({}, row).shape)
    except Exception:
        return False
    if found != (1, *outputs):
        told = f"{found}, not {(1, *outputs)}; keep the rows' axis"
        raise ModelError(f"gives one row outputs of shape {told}", code="model.misfit")
    return True


def misfit(model: Model, dataset: Dataset) -> str:
    """Return why the model does not take the data, to complete a sentence; empty if it does.

    All clients' rows are checked: a training that failed only at some clients would reveal something about their data.
    A network may check its data itself (`umbel.models.hooks.Hooks`).
    """
    if model.hooks.misfit is not None:
        return model.hooks.misfit(dataset)
    targets, shape = dataset.targets, dataset.features.shape[1:]
    try:
        seen = traits_of(model, shape)
    except ModelError as error:
        return error.text
    if not seen.alone and dataset.lengths.min() < 2:
        return "computes statistics over several rows, but a client has only one row; use running statistics"
    tokens = seen.tokens or dataset.manifest.tokens
    return (
        (_bad_tokens(model, dataset) if tokens else "")
        or _bad_targets(model, seen.outputs, targets)
        or _bad_classes(model, seen.outputs, dataset)
    )


def _bad_classes(model: Model, outputs: tuple[int, ...], dataset: Dataset) -> str:
    """Return why a single output, fitted to the numbers of named classes, would name none of them."""
    named, targets = dataset.manifest.target.get("categories", []), dataset.targets
    if not named or model.loss.by_row or outputs != (1,) or bool(np.isin(targets, (-1, 1)).all()):
        return ""
    return f"needs an output for each of the {len(named)} classes; for their numbers make the target a number"


def _bad_tokens(model: Model, dataset: Dataset) -> str:
    """Return why a model of integers does not take these rows: it is tried on the extremes of each position."""
    features, manifest = dataset.features, dataset.manifest
    lowest, highest = features.min(axis=0), features.max(axis=0)
    if features.dtype.kind not in "iu" and not (np.asarray(features) == np.floor(features)).all():
        return "takes integers, as an embedding does, but the features are not integers; begin with a layer for numbers"
    if manifest.feature_scale != 1 or max(abs(float(lowest.min())), abs(float(highest.max()))) >= MOST_TOKENS:
        return f"takes integers: set feature_scale = 1, and number tokens from 0 to {MOST_TOKENS - 1}"
    if manifest.tokens:
        # Use the vocabulary's last token: a table that is too small for it must not fail only at some clients.
        lowest, highest = np.zeros_like(lowest), np.full_like(highest, manifest.tokens - 1)
    try:
        with torch.no_grad():
            model.apply({}, torch.from_numpy(np.stack([lowest, highest]).astype(np.int64)))
    except Exception as error:
        return f"does not know all of the tokens from {lowest.min()} to {highest.max()}: {one_line(error)}"
    return ""


def _bad_targets(model: Model, outputs: tuple[int, ...], targets: Any) -> str:
    """Return why the loss does not take the targets, given the shape of a row's outputs."""
    width, shape = outputs[-1], targets.shape[1:]
    if model.loss.by_row:
        return _bad_extremes(model, outputs, targets)
    by_sign = model.metric.name == "accuracy" and model.loss.name != "cross-entropy" and outputs == (1,)
    if model.loss.name in SLOPES or by_sign:
        fits = outputs == (1,) and targets.ndim == 1 and bool(np.isin(targets, (-1, 1)).all())
        which = f"metric {model.metric.name!r}" if by_sign else f"loss {model.loss.name!r}"
        return "" if fits else f"with {which} needs one output, and labels of -1 and 1"
    if targets.dtype.kind in "iu" and shape == outputs[:-1] and width > 1:
        fits = bool(0 <= targets.min() <= targets.max() < width)
        return "" if fits else f"knows only the classes 0 to {width - 1}"
    if model.loss.name == "cross-entropy" or model.metric.name == "accuracy":
        if targets.dtype.kind in "iu" and len(outputs) > 1:
            return f"gives outputs of shape {outputs} for a row, whose classes are of shape {shape}; classes come last"
        return "needs classes, which are integers, as targets"
    fits = shape == outputs or (targets.ndim, outputs) == (1, (1,))
    many = f"{width} outputs" if len(outputs) == 1 else f"outputs of shape {outputs}"
    return "" if fits else f"has {many}, a target is of shape {shape}"


def _bad_extremes(model: Model, outputs: tuple[int, ...], targets: Any) -> str:
    """Return why a user's loss does not take the smallest and the largest target; empty if it does."""
    extremes = np.stack([targets.min(axis=0), targets.max(axis=0)])
    extremes = extremes.astype(np.float32 if extremes.dtype.kind == "f" else np.int64)
    try:
        model.loss.of_rows(torch.zeros(2, *outputs), torch.from_numpy(extremes))
    except Exception as error:
        low, high = targets.min(), targets.max()
        taken = f"targets of shape {targets.shape[1:]} from {low} to {high}"
        return f"has outputs of shape {outputs}; loss {model.loss.name!r} does not take {taken}: {one_line(error)}"
    return ""


def one_line(error: BaseException) -> str:
    """Return the text of a foreign error in one line."""
    text = " ".join((error.text if isinstance(error, UmbelError) else str(error)).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} ..."
