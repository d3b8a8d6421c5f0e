"""A federation in parts, for machines none of which holds all of it.

A part has the manifest of the whole, and its clients have the numbers that they have there: what is
learnt from the parts together is what is learnt from the whole.
"""

from __future__ import annotations

import numpy as np

from umbel.data.data import Federation, offsets_of
from umbel.protocol.errors import FederationError


def shard(federation: Federation, first: int, step: int) -> Federation:
    """Return the part of a federation with the rows of clients ``first, first + step, ...``.

    Raises
    ------
    FederationError
        When there are not as many clients, training or in all, as there are parts.
    """
    manifest, offsets = federation.manifest, federation.offsets
    if manifest.part:
        raise FederationError(f"{manifest.name} is part {manifest.part} of a federation; shard the whole")
    if not 1 <= step <= max(1, manifest.train):
        raise FederationError(f"{manifest.train} training clients make up to {manifest.train} parts, not {step}")
    if not 0 <= first < step:
        raise FederationError(f"there is no part {first} of {step}: they are numbered 0 to {step - 1}")
    here = np.arange(manifest.clients) % step == first
    lengths = np.diff(offsets)
    rows = np.repeat(here, lengths)
    names = [name if here[client] else "" for client, name in enumerate(federation.names)]
    return Federation(
        manifest.model_copy(update={"part": f"{first}/{step}", "whole": federation.digest} if step > 1 else {}),
        federation.features[rows],
        federation.targets[rows],
        offsets_of(np.where(here, lengths, 0)),
        names,
    )
