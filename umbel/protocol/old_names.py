"""Names of umbel 0.1, understood until 2.0 with a hint that says the new one. docs/names.md lists them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from logging import WARNING

from umbel.protocol.flower import log

SETTINGS: Mapping[str, str] = {
    "federation": "dataset",
    "radius": "clipping",
    "radius-mode": "clipping",
    "radius-start": "clip-norm",
    "radius-decay": "clip-norm-decay",
    "radius-floor": "clip-norm-floor",
}
"""Entries of the run config and of a site's configuration."""

PACKAGES: Mapping[str, str] = {
    "attacks": "umbel.research.attacks",
    "client": "umbel.client",
    "deployment": "umbel.deploy",
    "experiments": "umbel.research.experiments",
    "federation": "umbel.data",
    "mechanisms": "umbel.privacy.mechanisms",
    "models": "umbel.models",
    "server": "umbel.server",
    "strategies": "umbel.strategies",
}
"""Packages that run configs name by import path, as in ``strategy = "strategies:GroupPrivacy"``."""


@cache
def hint(old: str, new: str) -> None:
    """Say once that a name is old."""
    log(WARNING, "%s is now called %s; the old name works until umbel 2.0", old, new)
