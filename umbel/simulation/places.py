"""Places for simulated nodes on a cluster: each machine's part of the dataset, and the assignment of nodes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from logging import WARNING
from pathlib import Path

from umbel.data import digest_of, digest_of_rows, find_dataset, read_manifest
from umbel.protocol.errors import ClusterError, DatasetError
from umbel.protocol.flower import log
from umbel.protocol.home import umbel_home
from umbel.simulation.cluster import Machine


@dataclass(frozen=True)
class Holding:
    """A machine's part of a dataset."""

    path: str = ""  # empty if it has nothing
    part: tuple[int, int] = (0, 1)  # i and m if it has only the rows of part i of m
    # Digests: of the whole's manifest, of the local data, and of the whole's rows.
    manifest: str = ""
    data: str = ""
    whole: str = ""
    missing: str = ""  # why it has nothing


@dataclass(frozen=True)
class Place:
    """A place for a process with simulated nodes: a machine, or one of its GPUs."""

    machine: Machine
    index: int  # number of the place on its machine, from 0
    holding: Holding

    def holds(self, first: int, step: int) -> bool:
        """Return whether the machine has the clients ``first, first + step, ...``."""
        own, parts = self.holding.part
        return step % parts == 0 and first % parts == own

    @property
    def cpus(self) -> float:
        """The place's share of the machine's CPUs."""
        share = self.machine.cpus / max(1, self.machine.gpus)
        return float(int(share)) if share >= 1 else share


def look(dataset: str, path: str) -> Holding:
    """Return this machine's part of a dataset.

    The order is: the dataset of that name in this machine's ``UMBEL_HOME``; then the data at `path`, the caller's path,
    on a file system that machines share; then the data in the code.
    """
    own = umbel_home() / "data" / dataset
    try:
        found = next((one for one in (own, Path(path)) if one.exists()), None) or find_dataset(dataset)
        manifest = read_manifest(found)
        entries = json.dumps(manifest.entries() | {"part": "", "whole": ""}, sort_keys=True)
        said = hashlib.sha256(entries.encode()).hexdigest()[:16]
        data = digest_of(found) if manifest.part else digest_of_rows(found)
        return Holding(str(found), manifest.shard, said, data, manifest.whole if manifest.part else data)
    except (DatasetError, OSError) as error:
        return Holding(missing=str(error))


def places(found: Sequence[tuple[Machine, Holding]], own: Holding, dataset: str) -> list[Place]:
    """Return the places on machines with a dataset, or a part of it.

    Raises `ClusterError` if a machine's data under that name differ from `own`, those of this machine, or from another
    machine's, or if no machine has any.
    """
    first = {own.part: ("this machine", own)}
    there: list[Place] = []
    for machine, holding in found:
        if not holding.path:
            log(WARNING, "machine %s of the Ray cluster hosts nothing: %s", machine.name, holding.missing)
            continue
        name, other = first.setdefault(holding.part, (f"machine {machine.name}", holding))
        same = (holding.manifest, holding.whole) == (own.manifest, own.whole)
        if not same or holding.data != other.data:
            who, at = (name, other.path) if same else ("this machine", own.path)
            raise ClusterError(
                f"dataset {dataset!r} differs between machine {machine.name}, in {holding.path}, and {who}, in {at}; "
                "copy one of them, or its parts (python -m umbel.data.split --shards), to all machines",
                code="cluster.other-data",
            )
        there += [Place(machine, index, holding) for index in range(max(1, machine.gpus))]
    if not there:
        raise ClusterError(
            f"no machine of the Ray cluster has dataset {dataset!r}; copy it, or parts of it "
            "(python -m umbel.data.split --shards), "
            "to data/ in each machine's UMBEL_HOME, or give its path on a shared file system",
            code="cluster.no-data",
        )
    return there


def deal(there: Sequence[Place], nodes: int = 0) -> list[Place]:
    """Return for each simulated node i of n, which hosts clients i, i + n, i + 2n, ..., its place.

    If some machines with the same part have GPUs, the others get no simulated node, and stand by. 0 nodes mean one for
    each place. Raises `ClusterError` if no machine has some part, or the nodes cannot share the parts.
    """
    splits = sorted({place.holding.part[1] for place in there} - {1})
    if len(splits) > 1:
        raise ClusterError(
            f"the machines of the Ray cluster have parts of {splits[0]} and of {splits[1]}; shard the dataset once, "
            "into as many parts as there are machines (python -m umbel.data.split --shards)",
            code="cluster.parts",
        )
    parts = splits[0] if splits else 1
    by_part: list[list[Place]] = [[] for _ in range(parts)]
    for place in sorted(there, key=lambda place: -place.holding.part[1]):
        own, of = place.holding.part
        # A machine with the whole dataset joins the part with the fewest machines.
        (by_part[own] if of == parts else min(by_part, key=len)).append(place)
    if empty := [str(part) for part, own in enumerate(by_part) if not own]:
        held = ", ".join(
            f"{place.machine.name} has {f'part {place.holding.part[0]}' if place.holding.part[1] > 1 else 'all'}"
            for place in there
        )
        raise ClusterError(
            f"no machine of the Ray cluster is left for part {', '.join(empty)} of the dataset's {parts} ({held}); "
            "copy it to UMBEL_HOME on a machine whose Ray was started with that UMBEL_HOME",
            code="cluster.parts",
        )
    if nodes % parts:
        text = f"{nodes} nodes cannot share {parts} parts evenly; set --nodes to a multiple of {parts}"
        raise ClusterError(text, code="cluster.parts")
    chosen = [[place for place in own if place.machine.gpus] or own for own in by_part]
    count = nodes or parts * max(len(own) for own in chosen)
    return [chosen[i % parts][i // parts % len(chosen[i % parts])] for i in range(count)]


def known(found: Sequence[tuple[Machine, Holding]], before: Sequence[Place]) -> list[tuple[Machine, Holding]]:
    """Return the machines with the same data as an earlier place; a resumed run cannot use others."""
    same = {replace(place.holding, path="") for place in before}
    return [(machine, holding) for machine, holding in found if replace(holding, path="") in same]
