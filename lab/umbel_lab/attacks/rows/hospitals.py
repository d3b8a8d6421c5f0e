"""Hospitals: the attacked ones, and those that the attacker already knows.

A row is a service, a place (longitude, latitude) and a payment, as in the recipe ``hospital``. All rows of a hospital
share its place.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.data import Dataset, Manifest, offsets_of, write_dataset
from umbel.protocol.errors import DatasetError

Matrix = NDArray[np.float64]

SERVICE, PLACE, PAYMENT = "service", "place", "payment"
QUANTITIES = (SERVICE, PLACE, PAYMENT)
FEATURES = 3

HOW = "take the dataset hospital, which comes with umbel, or another of the same columns"

_FEWEST = 20  # minimum number of hospitals that the attacker knows
_NEIGHBOURS = (1, 3, 10, 30, 100)
# Distances of artificial hospitals from their originals: shares of the deviation of places, and of a payment.
_BLUR_PLACE, _BLUR_PAYMENT = 0.1, 0.05


@dataclass(frozen=True)
class Hospitals:
    """Hospitals with equal numbers of rows, in stored units.

    The features (m, rows, 3) are service, longitude and latitude; payments are (m, rows).
    """

    features: Matrix
    payments: Matrix

    def __len__(self) -> int:
        return len(self.payments)

    @property
    def rows(self) -> int:
        """Number of rows of each."""
        return int(self.payments.shape[1])

    def some(self, which: Any) -> Hospitals:
        """Return the hospitals with these numbers."""
        return Hospitals(self.features[which], self.payments[which])

    def secret(self, quantity: str) -> Matrix:
        """Return the values to find (m, numbers): the service of the only row, the place, or all payments."""
        if quantity == PAYMENT:
            return self.payments
        return self.features[:, 0, :1] if quantity == SERVICE else self.features[:, 0, 1:]

    def blurred(self, size: int, generator: np.random.Generator) -> Hospitals:
        """Return artificial hospitals: each is one of these with its place and payments moved a little."""
        # Each is used about equally often, so that the artificial ones have nearly the same mean.
        rounds = [generator.permutation(len(self)) for _ in range(-(-size // len(self)))]
        drawn = self.some(np.concatenate(rounds)[:size])
        features, scale = drawn.features.copy(), self.features[:, 0, 1:].std(axis=0)
        features[:, :, 1:] += _BLUR_PLACE * scale * generator.standard_normal((size, 1, 2))
        # Payments of a hospital are high or low together.
        moved = generator.standard_normal((size, 1)) + generator.standard_normal((size, self.rows))
        return Hospitals(features, drawn.payments * np.exp(_BLUR_PAYMENT * moved - _BLUR_PAYMENT**2))


@dataclass(frozen=True)
class Data:
    """A dataset in the audit: victims, and the validation clients, which the attacker knows.

    Both are grouped by the number of rows: 1, where every hospital keeps only one, and as many as there are services,
    for the hospitals that have all.
    """

    manifest: Manifest
    victims: dict[int, Hospitals]
    known: dict[int, Hospitals]

    @classmethod
    def of(cls, dataset: Dataset, seed: int) -> Data:
        """Sort the clients of a dataset; raise `DatasetError` if it has no such rows."""
        manifest, name = dataset.manifest, dataset.manifest.name
        if dataset.features.shape[1:] != (FEATURES,) or dataset.targets.ndim != 1 or manifest.model != "mlp":
            text = f"{name}: no rows of service, longitude, latitude and payment; {HOW}"
            raise DatasetError(text, code="data.not-hospitals")
        services = np.unique(dataset.features[:, 0])
        if not 2 <= len(services) <= 50:
            text = f"{name}: its first column has {len(services)} values and is no service; {HOW}"
            raise DatasetError(text, code="data.not-hospitals")
        generator = np.random.default_rng(seed)
        train, everybody = manifest.train, manifest.clients
        victims = _by_rows(dataset, generator.permutation(train), services, generator)
        known = _by_rows(dataset, range(train, everybody), services, None)
        for rows, hospitals in known.items():
            if len(hospitals) < _FEWEST or not len(victims[rows]):
                raise DatasetError(
                    f"{name}: {len(victims[rows])} training and {len(hospitals)} validation hospitals of {rows} rows; "
                    f"the audit takes 1 and {_FEWEST} at least. Or {HOW}",
                    code="data.too-few-clients",
                )
        return cls(manifest, victims, known)

    def unit(self, quantity: str) -> tuple[float, str]:
        """Return the factor for stored numbers, and the resulting unit."""
        features: Any = self.manifest.units.get("features") or ()
        service, place = [*tuple(features), {}, {}][:2]
        about = {SERVICE: service, PLACE: place, PAYMENT: self.manifest.target}[quantity]
        return float(about.get("scale", 1.0)), "index" if quantity == SERVICE else str(about.get("unit", ""))


def _by_rows(
    dataset: Dataset, clients: Sequence[int] | NDArray[np.int64], services: Matrix, one: Any
) -> dict[int, Hospitals]:
    """Return clients with one row and with all services; `one` draws a client's row, or all count if it is None."""
    kinds: dict[int, list[tuple[Matrix, Matrix]]] = {1: [], len(services): []}
    for client in clients:
        features, payments = (np.asarray(part, np.float64) for part in dataset.client(int(client)))
        single = range(len(payments)) if one is None else [int(one.integers(len(payments)))]
        kinds[1] += [(features[i : i + 1], payments[i : i + 1]) for i in single]
        if len(payments) == len(services) and np.array_equal(np.sort(features[:, 0]), services):
            order = np.argsort(features[:, 0])
            kinds[len(services)].append((features[order], payments[order]))
    found = {}
    for rows, some in kinds.items():
        shape = (len(some), rows)
        found[rows] = Hospitals(
            np.array([features for features, _ in some]).reshape(*shape, FEATURES),
            np.array([payments for _, payments in some]).reshape(shape),
        )
    return found


@contextmanager
def victims(hospitals: Hospitals, manifest: Manifest) -> Iterator[Path]:
    """Write a dataset with these hospitals as training clients, and delete it afterwards; yield its folder."""
    count, rows = hospitals.payments.shape
    split = {"train": count, "validation": 0}
    own = Manifest(name="victims", clients=count, split=split, model=manifest.model, loss=manifest.loss)
    features, payments = hospitals.features.reshape(-1, FEATURES), hospitals.payments.reshape(-1)
    with tempfile.TemporaryDirectory(prefix="umbel-rows-") as scratch:
        folder = Path(scratch) / "victims"
        write_dataset(folder, own, features.astype(np.float32), payments.astype(np.float32), offsets_of([rows] * count))
        yield folder


def public_guess(known: Hospitals, asked: Hospitals) -> Matrix:
    """Return a public model's prediction from services and places: the payments (m, rows) of the nearest known
    hospitals.

    The number of neighbours is chosen on the known hospitals, each predicted from the others.
    """
    found = np.empty_like(asked.payments)
    for row in range(asked.rows):
        errors = [_nearest(known, known, row, count, 1)[1] for count in _NEIGHBOURS]
        found[:, row] = _nearest(known, asked, row, _NEIGHBOURS[int(np.argmin(errors))], 0)[0]
    return found


def _nearest(known: Hospitals, asked: Hospitals, row: int, count: int, skip: int) -> tuple[Matrix, float]:
    """Return the mean payment (m,) of the nearest ones after `skip`, and its mean squared error."""
    theirs, ours = known.features[:, row], asked.features[:, row]
    # Another service is further away than any place.
    weights = np.array([100.0, 1.0, 1.0])
    apart = np.square((ours[:, None] - theirs[None]) * weights).sum(axis=2)
    near = np.argsort(apart, axis=1, kind="stable")[:, skip : skip + count]
    guess: Matrix = known.payments[:, row][near].mean(axis=1)
    return guess, float(np.square(guess - asked.payments[:, row]).mean())
