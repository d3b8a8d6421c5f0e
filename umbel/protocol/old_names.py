"""Names of umbel 0.1. They work until 2.0, with a hint at the new name; docs/reference/names.md lists them."""

from __future__ import annotations

import re
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
    "attacks": "umbel_lab.attacks",
    "client": "umbel.client",
    "deployment": "umbel.deploy",
    "deployment.hospital_table": "umbel.data.hospital_table",
    "experiments": "umbel_lab.experiments",
    "federation": "umbel.data",
    "mechanisms": "umbel.privacy.mechanisms",
    "models": "umbel.models",
    "server": "umbel.server",
    "strategies": "umbel.strategies",
}
"""Packages that run configs name by import path, as in ``strategy = "strategies:GroupPrivacy"``, and a module."""

MODELS: Mapping[str, str] = {
    r"linear-(\d+)x(\d+)": r"linear inputs=\1 outputs=\2",
    r"mlp-(\d+)x(\d+(?:x\d+)*)x(\d+)": r"mlp inputs=\1 hidden=\2 outputs=\3",
    r"(factors|biased-factors)-(\d+)x(\d+)": r"\1 items=\2 size=\3",
    r"(?:umbel\.)?models\.softmax:softmax(\d+)x(\d+)": r"softmax features=\1 classes=\2",
}
"""Models that had their size in their name, as in run configs, manifests and schemas."""


DIGESTS: Mapping[str, str] = {"35b10b9aa49e35ae": "c6a829d1b39a0727"}
"""Datasets that come with umbel and whose rows are unchanged: ``preferences``, whose model has a new name."""


@cache
def model(name: str) -> str:
    """Return the current name of a model, with its size as options."""
    for pattern, now in MODELS.items():
        if found := re.fullmatch(pattern, name):
            new = re.sub(r"(?<=\d)x(?=\d)", ",", found.expand(now))
            hint(name, new)
            return new
    return name


@cache
def hint(old: str, new: str) -> None:
    """Warn once that a name is old."""
    log(WARNING, "%s is now called %s; the old name works until umbel 2.0", old, new)
