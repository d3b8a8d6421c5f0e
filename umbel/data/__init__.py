"""A dataset: a data set already split into clients.

A dataset is either a LEAF JSON file (``users``, ``num_samples``, ``user_data``), for small
data, or a folder::

    manifest.json   what the data are: see `Manifest`
    features.npy    (rows, *feature shape), the rows of a client together
    targets.npy     (rows,) or (rows, outputs)
    offsets.npy     (clients + 1,): client i owns rows offsets[i] to offsets[i + 1]
    clients.json    what each client is called, where that is known; no message holds it
    test/           clients that take part in no run, as a separate dataset, if there are any

Folders are memory-mapped, so that cost grows with the clients that are read, not with the
clients that there are. Training clients come first, validation clients after them.
"""

from umbel.data.data import Dataset, check, held_out, offsets_of, shard
from umbel.data.files import check_out, write_dataset, write_leaf
from umbel.data.find import BUNDLED, digest_of, digest_of_rows, find_dataset, find_typed, open_dataset, read_manifest
from umbel.data.manifest import Manifest
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
    "digest_of_rows",
    "find_dataset",
    "find_typed",
    "held_out",
    "offsets_of",
    "open_dataset",
    "read_manifest",
    "shard",
    "write_dataset",
    "write_leaf",
]
