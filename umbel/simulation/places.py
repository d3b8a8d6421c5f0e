"""Where on a cluster simulated nodes may live: what each machine has of the dataset, and who goes where."""

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
    """What a machine has of a dataset."""

    path: str = ""  # empty where it has nothing
    part: tuple[int, int] = (0, 1)  # i and m where it has the rows of part i of m alone
    # Digests: of what the manifest says of the whole, of the data here, and of the rows of the whole.
    manifest: str = ""
    data: str = ""
    whole: str = ""
    missing: str = ""  # why it has nothing


@dataclass(frozen=True)
class Place:
    """Where a process may host simulated nodes: a machine, or one of its GPUs."""

    machine: Machine
    index: int  # counts the places of a machine from 0
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
    """Return what this machine has of a dataset.

    First what its own ``UMBEL_HOME`` has by that name; then what lies at `path`, where whoever asks has it,
    on a file system that machines share; then what came with the code.
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
    """Return the places on machines that have a dataset, or a part of it.

    Raises `ClusterError` when one has other data by that name than this machine, which has `own`, or than another, or
    when none has any.
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
                f"machine {machine.name} has another dataset {dataset!r}, in {holding.path}, than {who}, in "
                f"{at}; copy the one that you mean to all machines, or its parts (umbel data shard)",
                code="cluster.other-data",
            )
        there += [Place(machine, index, holding) for index in range(max(1, machine.gpus))]
    if not there:
        raise ClusterError(
            f"no machine of the Ray cluster has dataset {dataset!r}; copy it, or parts of it (umbel data shard), "
            "to data/ in each one's UMBEL_HOME, or name it by a path on a file system that all share",
            code="cluster.no-data",
        )
    return there


def deal(there: Sequence[Place], nodes: int = 0) -> list[Place]:
    """Return for each simulated node i of n, which hosts clients i, i + n, i + 2n, ..., the place where it lives.

    Where some of those that have the same part have GPUs, those without have no simulated node, and stand by. 0 nodes
    stand for one a place. Raises `ClusterError` when no machine has some part, or the nodes cannot share the parts.
    """
    splits = sorted({place.holding.part[1] for place in there} - {1})
    if len(splits) > 1:
        raise ClusterError(
            f"the machines of the Ray cluster have parts of {splits[0]} and of {splits[1]}; shard the dataset once, "
            "into as many parts as there are machines (umbel data shard)",
            code="cluster.parts",
        )
    parts = splits[0] if splits else 1
    by_part: list[list[Place]] = [[] for _ in range(parts)]
    for place in sorted(there, key=lambda place: -place.holding.part[1]):
        own, of = place.holding.part
        # Who has all goes where fewest are.
        (by_part[own] if of == parts else min(by_part, key=len)).append(place)
    if empty := [str(part) for part, own in enumerate(by_part) if not own]:
        held = ", ".join(
            f"{place.machine.name} has {f'part {place.holding.part[0]}' if place.holding.part[1] > 1 else 'all'}"
            for place in there
        )
        raise ClusterError(
            f"no machine of the Ray cluster is left for part {', '.join(empty)} of the dataset's {parts} ({held}); "
            "copy it to one's UMBEL_HOME, and see that its Ray is started with that",
            code="cluster.parts",
        )
    if nodes % parts:
        text = f"{nodes} nodes cannot share {parts} parts evenly; set --nodes to a multiple of {parts}"
        raise ClusterError(text, code="cluster.parts")
    chosen = [[place for place in own if place.machine.gpus] or own for own in by_part]
    count = nodes or parts * max(len(own) for own in chosen)
    return [chosen[i % parts][i // parts % len(chosen[i % parts])] for i in range(count)]


def known(found: Sequence[tuple[Machine, Holding]], before: Sequence[Place]) -> list[tuple[Machine, Holding]]:
    """Return those that have the same data as some place had: for a run that goes on, others are of no use."""
    same = {replace(place.holding, path="") for place in before}
    return [(machine, holding) for machine, holding in found if replace(holding, path="") in same]
