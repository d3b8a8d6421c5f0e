"""A federation: a data set already split into clients.

A federation is either a LEAF JSON file (``users``, ``num_samples``, ``user_data``), for small
data, or a folder::

    manifest.json   what the data are: see `Manifest`
    features.npy    (rows, *feature shape), the rows of a client together
    targets.npy     (rows,) or (rows, outputs)
    offsets.npy     (clients + 1,): client i owns rows offsets[i] to offsets[i + 1]
    clients.json    what each client is called, where that is known; no message holds it
    test/           clients that take part in no run, as a federation of its own, if there are any

Folders are memory-mapped, so that cost grows with the clients that are read, not with the
clients that there are. Training clients come first, validation clients after them.
"""

from federation.data import Federation, check, held_out, offsets_of
from federation.find import (
    BUNDLED,
    digest_of,
    digest_of_rows,
    find_federation,
    find_typed,
    open_federation,
    read_manifest,
)
from federation.folder import check_out, write_federation
from federation.leaf import write_leaf
from federation.manifest import Manifest
from federation.schema import Column, Schema
from federation.shards import shard

__all__ = [
    "BUNDLED",
    "Column",
    "Federation",
    "Manifest",
    "Schema",
    "check",
    "check_out",
    "digest_of",
    "digest_of_rows",
    "find_federation",
    "find_typed",
    "held_out",
    "offsets_of",
    "open_federation",
    "read_manifest",
    "shard",
    "write_federation",
    "write_leaf",
]
