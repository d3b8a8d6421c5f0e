"""Malicious hypotheses of the network 3 -> 2 -> 1, whose training reveals one number of a client's rows.

The server knows the code that clients run. `train` is the same training, without noise, of many artificial clients. A
hypothesis is a vector of 11: the weights of the first layer by unit, its biases, the weights of the second, its bias. A
unit of the first layer with weights 0 and a negative bias is dead: training moves neither it nor its weight in the
second layer, which can hold a number that distinguishes hypotheses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.models.losses import TINY
from umbel.protocol.arrays import Arrays
from umbel_lab.attacks.rows.hospitals import FEATURES, PAYMENT, PLACE, SERVICE, Hospitals

Matrix = NDArray[np.float64]

N = 11
"""Parameters."""
OPEN = 10
"""Number of hypotheses, if the choice among them is open."""
_UNITS = 2
_BIAS1, _WEIGHT2, _BIAS2 = _UNITS * FEATURES, _UNITS * FEATURES + _UNITS, N - 1
_DEAD = -1.0
_GAIN = 30.0  # of a feature over the payment, squared: less than about 1/1000 of the payment remains
_LIFT = 2.0  # keeps the unit of a feature above 0
_APART = 200.0  # between hypotheses, in standard deviations of the noise of a component
_MANY_EPOCHS = 99  # of a client with a single row; with an odd number no client ends where it began
_FITS = 30  # iterations that fit rows to an update


@dataclass(frozen=True)
class Probe:
    """Hypotheses (k, 11), and their part of a task."""

    hypotheses: Matrix
    epochs: int
    step_size: float

    def asked(self, clip_norm: float) -> dict[str, Any]:
        """Return their part of a task: steps on all rows, clipped updates."""
        return {"local_epochs": self.epochs, "step_size": self.step_size, "batch_size": 0, "clip_norm": clip_norm}

    def marked(self, length: float) -> Probe:
        """Return the same, with the last unit's weight in the second layer so large that such noise cannot hide j."""
        hypotheses = self.hypotheses.copy()
        # In powers of two, so that 32-bit numbers hold them.
        step = 2.0 ** np.ceil(np.log2(max(_APART * length, 1.0)))
        hypotheses[:, _WEIGHT2 + 1] = step * np.arange(len(hypotheses))
        return Probe(hypotheses.astype(np.float32).astype(np.float64), self.epochs, self.step_size)


def payment_probe(centres: Matrix, epochs: int, reach: float) -> Probe:
    """Return constants: training moves them towards the mean payment, by at most `reach`.

    The client chooses the constant nearest to its mean payment.
    """
    hypotheses = _blank(len(centres))
    hypotheses[:, _BIAS2] = centres
    return Probe(hypotheses, epochs, reach / epochs)


def feature_probe(column: int, centres: Matrix, epochs: int, reach: float) -> Probe:
    """Return functions so steep in one feature that the payment is negligible beside it, each zero at its centre.

    The client chooses the one whose centre is nearest to its feature; training moves it there, by at most `reach` of
    the feature.
    """
    hypotheses = _blank(len(centres))
    hypotheses[:, column] = _GAIN
    hypotheses[:, _BIAS1] = _GAIN * _LIFT
    hypotheses[:, _WEIGHT2] = _GAIN
    hypotheses[:, _BIAS2] = -(_GAIN**2) * (_LIFT + centres)
    # A step moves the output by the step size times the squared length of its gradient: about gain^2 (2 lift^2 + 1).
    slope = _GAIN**2 * (_LIFT**2 + 1)
    return Probe(hypotheses, epochs, _GAIN**2 * reach / (epochs * slope))


def tail_probe(least: float, base: float, centres: Matrix, width: float) -> Probe:
    """Return steps from `base` to each centre (k,) at the service `least`: the choice reveals payments from there on.

    Services are at least `width` apart.
    """
    hypotheses = np.zeros((len(centres), N))
    steep, start = 2.0 / width, least - 0.75 * width
    # relu(z) - relu(z - 1) rises from 0 to 1. The scale, which the second layer undoes, distinguishes hypotheses.
    scale = 2.0 ** np.arange(len(centres))
    for unit in range(_UNITS):
        hypotheses[:, unit * FEATURES] = scale * steep
        hypotheses[:, _BIAS1 + unit] = -scale * (steep * start + unit)
        hypotheses[:, _WEIGHT2 + unit] = (1 - 2 * unit) * (centres - base) / scale
    hypotheses[:, _BIAS2] = base
    return Probe(hypotheses, 1, 1e-6)


def whole_probe(centres: Matrix, epochs: int, step_size: float, threshold: float | None) -> Probe:
    """Return constants whose first unit is on for all rows, and the second for services above a threshold, if any."""
    hypotheses = _blank(len(centres))
    hypotheses[:, _BIAS1] = hypotheses[:, _WEIGHT2] = 1.0
    hypotheses[:, _BIAS2] = centres - 1.0
    if threshold is not None:
        hypotheses[:, FEATURES] = hypotheses[:, _WEIGHT2 + 1] = 1.0
        hypotheses[:, _BIAS1 + 1] = -threshold
    return Probe(hypotheses, epochs, step_size)


def single_row_probe(known: Hospitals) -> Probe:
    """Return constants over the range of payments, which end near the payment of a client's only row."""
    edges = np.linspace(0.9 * known.payments.min(), 1.1 * known.payments.max(), OPEN + 1)
    centres, half = (edges[1:] + edges[:-1]) / 2, float(edges[1] - edges[0]) / 2
    # A step moves a constant by the step size times about 3, the squared length of its gradient.
    return whole_probe(centres, _MANY_EPOCHS, half / (2.5 * _MANY_EPOCHS), None).marked(1.0)


def read_row(probe: Probe, releases: Matrix) -> Hospitals:
    """Return the only row of clients that released (m, 11) without noise from `single_row_probe`.

    The weights of a unit move by multiples of the row's features, its bias by the same multiples of 1. Training
    oscillates around the payment, which lies within a step of the end.
    """
    apart = np.linalg.norm(releases[:, None] - probe.hypotheses, axis=2)
    start = probe.hypotheses[apart.argmin(axis=1)]
    moved = releases - start
    features = moved[:, :FEATURES] / moved[:, 6:7]
    hidden = (releases[:, :FEATURES] * features).sum(axis=1) + releases[:, 6]
    output = releases[:, 8] * hidden + releases[:, 10]
    return Hospitals(features[:, None], output[:, None])


def all_rows_probe(known: Hospitals) -> Probe:
    """Return a function with few large steps, in which features and payments of all rows leave their mark."""
    services = np.unique(known.features[0, :, 0])
    threshold = float((services[len(services) // 2 - 1] + services[len(services) // 2]) / 2)
    return whole_probe(np.array([0.5 * float(known.payments.min())]), 5, 0.05, threshold)


def fit_rows(probe: Probe, updates: Matrix, candidates: Hospitals) -> Hospitals:
    """Return the hospitals whose training gives these updates (m, 11), by Levenberg and Marquardt's method.

    It starts from the candidate with the nearest update; services are those of the candidates.
    """
    theirs, _ = train(probe, candidates)
    near = np.linalg.norm(updates[:, None] - theirs[None, :, 0], axis=2).argmin(axis=1)
    at, rows = candidates.some(near), candidates.rows
    point = np.concatenate([at.features[:, 0, 1:], at.payments], axis=1)
    scale = np.full(2 + rows, 1e-5)

    def hospitals(values: Matrix) -> Hospitals:
        features = at.features.copy()
        features[:, :, 1:] = values[:, None, :2]
        return Hospitals(features, values[:, 2:])

    def off(values: Matrix) -> Matrix:
        return train(probe, hospitals(values))[0][:, 0] - updates

    damping, rest = np.full(len(point), 1e-3), off(point)
    for _ in range(_FITS):
        slopes = np.stack([(off(point + step) - rest) / scale[0] for step in np.diag(scale)], axis=2)
        square = np.einsum("mni,mnj->mij", slopes, slopes)
        diagonal = np.einsum("mii->mi", square)[:, :, None] * np.eye(2 + rows)
        lhs = square + damping[:, None, None] * diagonal + 1e-14 * np.eye(2 + rows)
        step = np.linalg.solve(lhs, np.einsum("mni,mn->mi", slopes, rest)[..., None])[..., 0]
        moved = off(point - step)
        better = np.square(moved).sum(axis=1) < np.square(rest).sum(axis=1)
        point[better], rest[better] = (point - step)[better], moved[better]
        damping = np.where(better, damping / 5, damping * 5)
    return hospitals(point)


AIMS = {SERVICE: (0,), PLACE: (1, 2), PAYMENT: (FEATURES,)}
"""The columns that a probe for a quantity can target; after those of features, the mean payment."""


def probe_for(column: int, centres: Matrix, epochs: int, reach: float) -> Probe:
    """Return the probe for a column."""
    if column == FEATURES:
        return payment_probe(centres, epochs, reach)
    return feature_probe(column, centres, epochs, reach)


def aimed_at(hospitals: Hospitals, column: int) -> Matrix:
    """Return the number (m,) that a probe targets: a feature of the first row, or the mean payment."""
    return hospitals.payments.mean(axis=1) if column == FEATURES else hospitals.features[:, 0, column]


def train(probe: Probe, hospitals: Hospitals) -> tuple[Matrix, NDArray[np.int64]]:
    """Return the updates (m, k, 11) of hospitals from each hypothesis, and the best hypothesis (m,) of each.

    The training is the app's under the loss ``rmse`` with all rows in a batch, in 64 bits.
    """
    start, (m, rows) = probe.hypotheses, hospitals.payments.shape
    k = len(start)
    x, y = hospitals.features[:, None], hospitals.payments[:, None]
    now = np.tile(start, (m, 1, 1))
    dead = [not start[:, u * FEATURES : (u + 1) * FEATURES].any() and (start[:, _BIAS1 + u] < 0).all() for u in (0, 1)]
    live = [u for u in range(_UNITS) if not dead[u]]
    best = np.zeros(m, np.int64)
    for epoch in range(probe.epochs):
        residual, hidden = np.broadcast_to(now[:, :, None, _BIAS2] - y, (m, k, rows)).copy(), {}
        for u in live:
            at = u * FEATURES
            before = sum(now[:, :, None, at + i] * x[..., i] for i in range(FEATURES)) + now[:, :, None, _BIAS1 + u]
            hidden[u] = np.maximum(before, 0.0)
            residual += now[:, :, None, _WEIGHT2 + u] * hidden[u]
        loss = np.sqrt(np.square(residual).mean(axis=2) + TINY)
        if not epoch:
            best = loss.argmin(axis=1)
        share = residual / (rows * loss[..., None])
        gradient = np.zeros_like(now)
        gradient[..., _BIAS2] = share.sum(axis=2)
        for u in live:
            gradient[..., _WEIGHT2 + u] = (share * hidden[u]).sum(axis=2)
            back = share * (hidden[u] > 0) * now[:, :, None, _WEIGHT2 + u]
            gradient[..., _BIAS1 + u] = back.sum(axis=2)
            for i in range(FEATURES):
                gradient[..., u * FEATURES + i] = (back * x[..., i]).sum(axis=2)
        now -= probe.step_size * gradient
    return now - start, best


def as_arrays(hypotheses: Matrix) -> Arrays:
    """Return hypotheses (k, 11) as the app's arrays."""
    k = len(hypotheses)
    return {
        "0.weight": hypotheses[:, :_BIAS1].reshape(k, _UNITS, FEATURES).astype(np.float32),
        "0.bias": hypotheses[:, _BIAS1:_WEIGHT2].astype(np.float32),
        "2.weight": hypotheses[:, _WEIGHT2:_BIAS2].reshape(k, 1, _UNITS).astype(np.float32),
        "2.bias": hypotheses[:, _BIAS2:].astype(np.float32),
    }


def _blank(k: int) -> Matrix:
    hypotheses = np.zeros((k, N))
    hypotheses[:, _BIAS1:_WEIGHT2] = _DEAD
    return hypotheses


def feature_shift(payments: Matrix) -> Matrix:
    """Return by how much a feature exceeds the value from `feature_probe`, given the mean payments (m,)."""
    shift: Matrix = payments / _GAIN**2
    return shift
