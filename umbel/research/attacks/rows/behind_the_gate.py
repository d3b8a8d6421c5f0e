"""Hospitals that answer probes, one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.data import Manifest
from umbel.protocol.arrays import flatten
from umbel.research.attacks import behind_the_gate
from umbel.research.attacks.modes import Mode
from umbel.research.attacks.rows.probes import Probe, as_arrays
from umbel.research.attacks.rows.tables import Hospitals, write_clients

Matrix = NDArray[np.float64]


class Victims(behind_the_gate.Victims):
    """Hospitals behind the gate, as vectors of the model's parameters."""

    def release(self, mode: Mode, probe: Probe, radius: float, clients: Sequence[int]) -> Matrix:
        """Return what clients release (m, n)."""
        return flatten(self.releases(mode, as_arrays(probe.hypotheses), clients, **_asked(probe, radius)))

    def sums(self, mode: Mode, probe: Probe, radius: float, clients: Sequence[int]) -> tuple[Matrix, Matrix]:
        """Return the sums (k, n) and counts (k,) that the site releases of clients."""
        arrays, counts = self.site_sums(mode, as_arrays(probe.hypotheses), clients, **_asked(probe, radius))
        return flatten(arrays), counts


@contextmanager
def victims(hospitals: Hospitals, manifest: Manifest) -> Iterator[Path]:
    """Write a dataset of hospitals for as long as it is needed, and return its folder."""
    with tempfile.TemporaryDirectory(prefix="umbel-rows-") as scratch:
        folder = Path(scratch) / "victims"
        write_clients(folder, hospitals, manifest)
        yield folder


def _asked(probe: Probe, radius: float) -> dict[str, Any]:
    return {"local_epochs": probe.epochs, "step_size": probe.step_size, "batch_size": 0, "clip_norm": radius}
