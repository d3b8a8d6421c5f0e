"""A dataset in which other clients train and validate, for each seed of an experiment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from umbel.data import Dataset, find_dataset, offsets_of, open_dataset, write_dataset


def split_by_seed(name: str, folder: Path, seeds: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Write the dataset called `name` once a seed, its clients in the seed's order, and yield seeds and paths.

    Parameters
    ----------
    name : str
        As in a run config.
    folder : Path
        Of the experiment; what is written lies in its folder ``data``.
    seeds : iterable of int
    """
    source = open_dataset(find_dataset(name))
    for seed in seeds:
        split = shuffled(source, seed)
        path = folder / "data" / f"{source.manifest.name}-{seed}"
        write_dataset(path, split.manifest, split.features, split.targets, split.offsets, split.names)
        yield seed, str(path)


def shuffled(dataset: Dataset, seed: int) -> Dataset:
    """Return a dataset whose clients are in random order, as many of which train as before."""
    manifest = dataset.manifest
    order = np.random.default_rng(seed).permutation(manifest.clients)
    lengths = np.diff(dataset.offsets)[order]
    offsets = offsets_of(lengths)
    rows = np.arange(offsets[-1]) + np.repeat(dataset.offsets[order] - offsets[:-1], lengths)
    changes = {
        "groups": [manifest.groups[client] for client in order] if manifest.groups else [],
        "provenance": f"{manifest.provenance} Clients put in random order with seed {seed}.".strip(),
    }
    names = [dataset.names[client] for client in order] if len(dataset.names) else ()
    return Dataset(manifest.model_copy(update=changes), dataset.features[rows], dataset.targets[rows], offsets, names)
