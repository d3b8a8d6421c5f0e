"""A dataset: data that are already split into clients.

A dataset is either a LEAF JSON file (``users``, ``num_samples``, ``user_data``), for small
data, or a folder::

    manifest.json   description of the data: see `Manifest`
    features.npy    (rows, *feature shape), the rows of a client together
    targets.npy     (rows,) or (rows, outputs)
    offsets.npy     (clients + 1,): client i owns rows offsets[i] to offsets[i + 1]
    clients.json    the clients' names, where they are known; no message holds them
    test/           clients outside all runs, as a separate dataset, if there are any

Folders are memory-mapped, so that the cost depends on the clients that are read, not on how many there are. Training
clients come first, validation clients after them.
"""

from umbel.data.data import Dataset, Manifest, check, held_out, offsets_of
from umbel.data.files import check_out, write_dataset, write_leaf
from umbel.data.find import BUNDLED, digest_of, find_dataset, find_typed, open_dataset, read_manifest
from umbel.data.schema import Column, Schema
from umbel.protocol.errors import DatasetError

__all__ = [
    "BUNDLED",
    "Column",
    "Dataset",
    "DatasetError",
    "Manifest",
    "Schema",
    "check",
    "check_out",
    "digest_of",
    "find_dataset",
    "find_typed",
    "held_out",
    "offsets_of",
    "open_dataset",
    "read_manifest",
    "write_dataset",
    "write_leaf",
]
