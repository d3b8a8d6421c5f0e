"""Sites as their configuration describes them."""

from __future__ import annotations

from typing import Any

from umbel.privacy.site.config import Site
from umbel.privacy.site.policy import Policy
from umbel.protocol.simulated import in_process

PARTITION = {"partition-id": 1, "num-partitions": 4}
OWN = {"data-path": "/data/hospital"}


def simulated(**entries: Any) -> Site:
    """Return a simulated node; an entry's hyphens are written as underscores."""
    with in_process():
        return Site.of(PARTITION | {key.replace("_", "-"): value for key, value in entries.items()})


def own(**entries: Any) -> Site:
    """Return a site with data of its own."""
    return Site.of(OWN | {key.replace("_", "-"): value for key, value in entries.items()})


def field(policy: Policy, key: str) -> Any:
    return getattr(policy, key.replace("-", "_"))
