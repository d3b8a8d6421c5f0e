"""The victims: clients of the real app behind its own gate, on one node of a site with a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

import umbel.client.app
from umbel.data import Dataset, Manifest, offsets_of, write_dataset
from umbel.privacy.accounting.guarantee import DELTA, Guarantee, guarantee
from umbel.privacy.gate.memory_ledger import MemoryLedger
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientOnNode
from umbel.protocol.errors import FleetError
from umbel.protocol.messages import released_in, round_request, site_sums_in
from umbel.protocol.records import pack
from umbel.protocol.tasks import TrainingSpec
from umbel.research.attacks.modes import Mode
from umbel.simulation.grid import InProcessGrid


class Victims:
    """Clients that answer one task after the other.

    Parameters
    ----------
    folder : Path
        Their dataset.
    policy : mapping
        The site's.
    seed : int
        Of the gate's draws.
    config : mapping
        Further entries of the run config.
    """

    def __init__(self, folder: Path, policy: Mapping[str, Any], seed: int, config: Mapping[str, Any] | None = None):
        run = {"dataset": str(folder), "seed": seed, "device": "cpu", "engine": "auto", **(config or {})}
        node = {"partition-id": 0, "num-partitions": 1, **policy}
        self._grid = InProcessGrid(umbel.client.app.app, run, node_configs=[node])
        (self._node,) = self._grid.get_node_ids()
        self._round = 0

    def releases(self, mode: Mode, hypotheses: Arrays, clients: Sequence[int], **asked: Any) -> Arrays:
        r"""Return what clients release, each array (m, \*shape).

        Parameters
        ----------
        mode : Mode
        hypotheses : dict of ndarray, each (k, \*shape)
        clients : sequence of int
        asked
            Further entries of the task (`umbel.protocol.tasks.TrainingSpec`).

        Raises
        ------
        FleetError
            When the gate refuses.
        """
        arrays, released, _ = released_in(self._ask(mode, hypotheses, clients, asked), len(clients))
        _check(released)
        return arrays

    def site_sums(
        self, mode: Mode, hypotheses: Arrays, clients: Sequence[int], **asked: Any
    ) -> tuple[Arrays, NDArray[np.float64]]:
        r"""Return the sums, each (k, \*shape), and counts (k,) that the site releases of clients; see `releases`."""
        arrays, counts, released = site_sums_in(self._ask(mode, hypotheses, clients, asked), len(clients))
        _check(released)
        return arrays, counts

    def claimed(self, client: int) -> Guarantee | None:
        """Return what is guaranteed to a client by the node's own ledger; None for nothing."""
        return guarantee(MemoryLedger(self._grid.contexts[self._node].state).account(client), DELTA)

    def _ask(self, mode: Mode, hypotheses: Arrays, clients: Sequence[int], asked: Mapping[str, Any]) -> RecordDict:
        self._round += 1
        task = TrainingSpec(
            round=self._round,
            clients=tuple(ClientOnNode(int(client)) for client in clients),
            noise_multiplier=mode.noise_multiplier,
            clipping=mode.clipping,
            noise_per=mode.noise_per,
            mechanism=mode.mechanism,
            choice_epsilon=mode.choice_epsilon if len(next(iter(hypotheses.values()))) > 1 else 0.0,
            release_by=mode.release_by,
            **asked,
        )
        content = round_request(pack(hypotheses), task)
        (reply,) = self._grid.send_and_receive([self._grid.create_message(content, "train", self._node, "1")])
        if reply.has_error():
            raise FleetError("the gate refused; its reason is in the log above")
        return reply.content


def write_victims(folder: Path, dataset: Dataset, rows: Sequence[NDArray[np.int64]]) -> None:
    """Write a dataset of training clients that hold these rows of another's."""
    every = np.concatenate(rows)
    manifest = Manifest(
        name="victims",
        clients=len(rows),
        split={"train": len(rows), "validation": 0},
        feature_scale=dataset.manifest.feature_scale,
    )
    features, targets = dataset.features[every], dataset.targets[every]
    write_dataset(folder, manifest, features, targets, offsets_of([len(own) for own in rows]))


def _check(released: NDArray[np.bool_]) -> None:
    if not released.all():
        raise FleetError("some clients could not pay: the environment holds a limit")
