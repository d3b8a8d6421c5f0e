"""Replies that a node may send, honest or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import RecordDict

from umbel.privacy.channels.client import Released
from umbel.privacy.channels.reports import Reported
from umbel.privacy.channels.site import SiteReleased
from umbel.protocol.arrays import Arrays


def training_reply(
    releases: Arrays, released: Sequence[float], choices: Sequence[int] | None = None, step: float = 0.0
) -> RecordDict:
    """Return clients' releases, with a flag for each asked client."""
    left = Released(np.ones(len(released), bool), releases, choices=choices, step=step)
    return _with(left.records(), released)


def site_reply(sums: Arrays, counts: Sequence[float], released: Sequence[float]) -> RecordDict:
    """Return a site's sums and counts, with a flag for each asked client."""
    return _with(SiteReleased(np.ones(len(released), bool), sums, counts=counts).records(), released)


def evaluation_reply(losses: Any, metrics: Any, noise_multiplier: float = 0.0, bound: float = 0.0) -> RecordDict:
    """Return loss and metric of each asked client, and their noise."""
    scores = np.array([losses, metrics])
    return RecordDict(dict(Reported(np.ones(len(losses), bool), {}, scores, noise_multiplier, bound).records()))


def _with(records: Any, released: Sequence[float]) -> RecordDict:
    records["released"]["clients"] = list(released)
    return RecordDict(dict(records))
