"""The victims: clients of the real app behind its own gate, on one node of a site with a policy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

import client.app
from attacks.rows.modes import Mode
from attacks.rows.probes import Probe, as_arrays
from attacks.rows.tables import Hospitals, write_clients
from federation import Manifest
from mechanisms.guarantee import DELTA, Guarantee, guarantee
from privacy.memory_ledger import MemoryLedger
from protocol.arrays import flatten
from protocol.demands import Training
from protocol.errors import FleetError
from protocol.messages import released_in, round_request, site_sums_in
from protocol.records import pack
from simulation.grid import InProcessGrid

Matrix = NDArray[np.float64]


class Victims:
    """Clients that answer one demand after the other.

    Parameters
    ----------
    folder : Path
        Their federation (`victims`).
    policy : mapping
        The site's.
    seed : int
        Of the gate's draws.
    """

    def __init__(self, folder: Path, policy: Mapping[str, Any], seed: int) -> None:
        config: dict[str, Any] = {"federation": str(folder), "seed": seed, "device": "cpu", "engine": "auto"}
        node = {"partition-id": 0, "num-partitions": 1, **policy}
        self._grid = InProcessGrid(client.app.app, config, node_configs=[node])
        (self._node,) = self._grid.get_node_ids()
        self._round = 0

    def release(self, mode: Mode, probe: Probe, radius: float, clients: Sequence[int]) -> Matrix:
        """Return what clients release (m, n)."""
        content = self._ask(mode, probe, radius, clients)
        arrays, released, _ = released_in(content, len(clients))
        _check(released)
        return flatten(arrays)

    def sums(self, mode: Mode, probe: Probe, radius: float, clients: Sequence[int]) -> tuple[Matrix, Matrix]:
        """Return the sums (k, n) and counts (k,) that the site releases of clients."""
        arrays, counts, released = site_sums_in(self._ask(mode, probe, radius, clients), len(clients))
        _check(released)
        return flatten(arrays), counts

    def claimed(self, client: int) -> Guarantee | None:
        """Return what is guaranteed to a client by the node's own ledger; None for nothing."""
        return guarantee(MemoryLedger(self._grid.contexts[self._node].state).account(client), DELTA)

    def _ask(self, mode: Mode, probe: Probe, radius: float, clients: Sequence[int]) -> RecordDict:
        self._round += 1
        demand = Training(
            round=self._round,
            clients=tuple(map(int, clients)),
            local_epochs=probe.epochs,
            step_size=probe.step_size,
            batch_size=0,
            noise_multiplier=mode.noise_multiplier,
            radius_mode=mode.radius_mode,
            radius=radius,
            choice_epsilon=mode.choice_epsilon if len(probe.hypotheses) > 1 else 0.0,
            release_by=mode.release_by,
        )
        content = round_request(pack(as_arrays(probe.hypotheses)), demand)
        (reply,) = self._grid.send_and_receive([self._grid.create_message(content, "train", self._node, "1")])
        if reply.has_error():
            raise FleetError("the gate refused; its reason is in the log above")
        return reply.content


@contextmanager
def victims(hospitals: Hospitals, manifest: Manifest) -> Iterator[Path]:
    """Write a federation of hospitals for as long as it is needed, and return its folder."""
    with tempfile.TemporaryDirectory(prefix="umbel-rows-") as scratch:
        folder = Path(scratch) / "victims"
        write_clients(folder, hospitals, manifest)
        yield folder


def _check(released: NDArray[np.bool_]) -> None:
    if not released.all():
        raise FleetError("some clients could not pay: the environment holds a limit")
