"""A dataset in parts, for machines none of which holds all of it.

A part has the manifest of the whole, and its clients have the numbers that they have there: what is
learnt from the parts together is what is learnt from the whole.
"""

from __future__ import annotations

import numpy as np

from umbel.data.data import Dataset, offsets_of
from umbel.protocol.errors import DatasetError


def shard(dataset: Dataset, first: int, step: int) -> Dataset:
    """Return the part of a dataset with the rows of clients ``first, first + step, ...``.

    Raises
    ------
    DatasetError
        When there are not as many clients, training or in all, as there are parts.
    """
    manifest, offsets = dataset.manifest, dataset.offsets
    if manifest.part:
        raise DatasetError(f"{manifest.name} is part {manifest.part} of a dataset; shard the whole", code="data.part")
    if not 1 <= step <= max(1, manifest.train):
        raise DatasetError(f"{manifest.train} training clients do not make {step} parts", code="data.part")
    if not 0 <= first < step:
        raise DatasetError(f"there is no part {first} of {step}: they are numbered 0 to {step - 1}", code="data.part")
    here = np.arange(manifest.clients) % step == first
    lengths = np.diff(offsets)
    rows = np.repeat(here, lengths)
    names = [name if here[client] else "" for client, name in enumerate(dataset.names)]
    return Dataset(
        manifest.model_copy(update={"part": f"{first}/{step}", "whole": dataset.digest} if step > 1 else {}),
        dataset.features[rows],
        dataset.targets[rows],
        offsets_of(np.where(here, lengths, 0)),
        names,
    )
