"""The engines that compute a cohort, and the choice among them for a model on a device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from umbel.client.batched import BatchedLearner
from umbel.client.learner import Learner
from umbel.client.loop import LoopLearner
from umbel.models.model import Model
from umbel.protocol.errors import ConfigError

ENGINES: Mapping[str, type[Learner]] = {"loop": LoopLearner, "batched": BatchedLearner}


def learner_for(model: Model, device: str = "auto", engine: str = "auto") -> Learner:
    """Return the learner of a model on ``cpu``, ``cuda`` or ``auto`` (the GPU if there is one).

    The engine is ``loop``, ``batched`` or ``auto``. A batched convolution becomes a grouped one, which the CPU computes
    more slowly than one client after the other. In every other case the batched form is faster.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device = "cuda" but PyTorch sees no GPU here; set device = "auto"', code="config.no-device")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if engine == "auto":
        engine = "loop" if device == "cpu" and model.convolves else "batched"
    return _make(model, device, engine)


@lru_cache(maxsize=16)
def _make(model: Model, device: str, engine: str) -> Learner:
    return ENGINES[engine](model, torch.device(device))
