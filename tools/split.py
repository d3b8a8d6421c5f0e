"""Split a dataset over several sites, so that each has a dataset with other clients: python tools/split.py"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from umbel.data.data import Manifest, offsets_of
from umbel.data.files import write_dataset
from umbel.data.find import find_typed, open_dataset
from umbel.protocol.cli import command_line, errors_in_one_line
from umbel.protocol.errors import DatasetError


def main(
    dataset: Annotated[str, typer.Argument(help="A name under $UMBEL_HOME/data or in datasets/, or a path.")],
    out: Annotated[Path, typer.Option(help="The folder for site-1, site-2, ...")],
    sites: Annotated[int, typer.Option(help="Number of sites.")] = 3,
) -> None:
    """Split a dataset over several sites."""
    with errors_in_one_line():
        for folder in split(find_typed(dataset), sites, out):
            typer.echo(folder)


def split(source: Path, sites: int, out: Path) -> list[Path]:
    """Deal the clients of a dataset to `sites` sites; return their folders.

    Site ``i`` of ``s`` gets every ``s``-th training client, beginning with the ``i``-th, and likewise validation
    clients. So its manifest says which of its clients train. Raises `DatasetError` if a site would have no training
    client.
    """
    whole = open_dataset(source)
    manifest, offsets = whole.manifest, whole.offsets
    if not 1 <= sites <= manifest.train:
        text = f"{source}: {manifest.train} training clients make 1 to {manifest.train} sites, not {sites}; set --sites"
        raise DatasetError(text, code="data.split")
    if stale := [one for one in out.glob("site-*") if one.name not in {f"site-{site + 1}" for site in range(sites)}]:
        text = f"{stale[0]} is of a split over more sites, whose clients would then be at two; delete it"
        raise DatasetError(text, code="data.exists")
    folders = []
    for site in range(sites):
        training, validation = range(site, manifest.train, sites), range(manifest.train + site, manifest.clients, sites)
        clients = [*training, *validation]
        rows = np.concatenate([np.arange(offsets[client], offsets[client + 1]) for client in clients])
        changes = {
            "name": f"{manifest.name}-{site + 1}",
            "clients": len(clients),
            "split": {"train": len(training), "validation": len(validation)},
            "groups": [manifest.groups[client] for client in clients] if manifest.groups else [],
            "provenance": f"Part {site + 1} of {sites} of {manifest.name}. {manifest.provenance}".strip(),
        }
        part, folder = Manifest(**manifest.model_dump() | changes), out / f"site-{site + 1}"
        names = [whole.names[client] for client in clients] if len(whole.names) else ()
        lengths = whole.lengths[clients]
        write_dataset(folder, part, whole.features[rows], whole.targets[rows], offsets_of(lengths), names)
        folders.append(folder)
    return folders


if __name__ == "__main__":
    command_line(main)()
