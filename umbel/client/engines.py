"""The engines that compute a cohort, and the choice among them for a model on a device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache

import torch

from umbel.client.batched import BatchedLearner
from umbel.client.invariant import InvariantLearner
from umbel.client.learner import Learner
from umbel.client.loop import LoopLearner
from umbel.models.model import Model
from umbel.protocol.errors import ConfigError
from umbel.protocol.project import ENGINE

SITE = "site"
"""The engine of a site: a client's numbers depend on no other client, bit for bit."""
_ENGINES: Mapping[str, type[Learner]] = {
    "loop": LoopLearner, "batched": BatchedLearner, "invariant": InvariantLearner
}  # fmt: skip


def engine_asked() -> str:
    """Return the engine that the environment variable `ENGINE` names, to look for a fault; by default ``auto``.

    Raises
    ------
    ConfigError
        If there is none of that name.
    """
    engine = os.environ.get(ENGINE, "auto")
    if engine not in ("auto", "loop", "batched"):
        text = f"{ENGINE} = {engine!r} names no engine; set it to auto, loop or batched"
        raise ConfigError(text, code="config.unknown-name")
    return engine


def learner_for(model: Model, device: str = "auto", engine: str = "auto") -> Learner:
    """Return the learner of a model on ``cpu``, ``cuda`` or ``auto`` (the GPU if there is one).

    The engine is ``loop``, ``batched`` or ``auto``. A batched convolution becomes a grouped one, which the CPU computes
    more slowly than one client after the other. In every other case the batched form is faster. At a site it is
    `SITE`.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device = "cuda" but PyTorch sees no GPU here; set device = "auto"', code="config.no-device")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if engine == "auto":
        engine = "loop" if device == "cpu" and model.convolves else "batched"
    if engine == SITE:
        engine = "invariant" if device == "cpu" and InvariantLearner.takes(model) else "loop"
    return _make(model, device, engine)


@lru_cache(maxsize=16)
def _make(model: Model, device: str, engine: str) -> Learner:
    return _ENGINES[engine](model, torch.device(device))
