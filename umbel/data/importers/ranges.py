"""Scales of a table's numbers: from declared ranges, or estimated from the rows with a separate epsilon.

An estimate is a private median over clients: the exponential mechanism with the score of Smith (*Privacy-preserving
statistical estimation with optimal convergence rates*, STOC 2011), on a logarithmic scale, so that no range needs to
be known. Neighbouring tables differ in all rows of one client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from umbel.data.schema import Column, Schema
from umbel.data.table import as_dates, as_numbers, days_since, named
from umbel.protocol.errors import DatasetError

_SMALLEST, _LARGEST = 1e-6, 1e12  # range of distinguishable numbers
_END = float(np.log1p(_LARGEST / _SMALLEST))
# A client's number counts as evenly spread 1 % around itself: the mechanism draws from intervals, and an integer that
# many clients share would have an interval of length 0.
_WIDTH, _STEPS = 0.01, 8
_WRONG = 0.05  # maximum probability that fewer than an eighth of the clients lie on one side of a median


@dataclass(frozen=True)
class Scales:
    """The estimated scales, and their cost.

    Attributes
    ----------
    schema : Schema
        With a scale for each number, and an offset for each feature.
    estimated : list of str
        The columns without a declared range.
    epsilon : float
        Epsilon of all estimates together for a client; 0 if there are none.
    """

    schema: Schema
    estimated: Sequence[str] = ()
    epsilon: float = 0.0


@dataclass(frozen=True)
class _Estimates:
    """Offsets and scales of columns as private medians, with an equal part of an epsilon for each."""

    owners: NDArray[np.int64]
    epsilon: float
    generator: np.random.Generator
    found: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, column: Column, values: NDArray[np.float64], centred: bool) -> None:
        numbers = pd.Series(np.where(np.isfinite(values), values, np.nan))
        offset = 0.0
        if centred:
            # A client without numbers counts as 0, so that the number of clients stays public.
            own = numbers.groupby(self.owners).median().fillna(0.0)
            offset = float(f"{private_median(np.asarray(own, np.float64), self.epsilon, self.generator):.3g}")
        far = (numbers - offset).abs().groupby(self.owners).max()
        # A client whose numbers all equal the offset, within its precision, counts as 1 or as that precision.
        lost = 2 * _WIDTH * abs(offset)
        away = np.asarray(far.where(far > lost, max(1.0, lost)), np.float64)
        scale = float(f"{abs(private_median(away, self.epsilon, self.generator)):.2g}")
        self.found[column.name] = offset, scale or 1.0


def scaled(
    schema: Schema, frame: pd.DataFrame, owners: NDArray[np.int64], epsilon: float, generator: np.random.Generator
) -> Scales:
    """Return the schema with scales for the numbers that have none, and with `since` and `span` for such dates.

    Parameters
    ----------
    schema : Schema
        A number with a minimum and a maximum is scaled to -1 to 1; a target has no offset.
    frame : DataFrame
        Rows of the table; they give the ranges that are not declared.
    owners : ndarray, shape (rows,)
        The number of each row's client.
    epsilon : float
        Maximum total epsilon of the estimates for a client; 0 for the smallest that suffices.
    generator : Generator
        Draws the estimates.

    Raises
    ------
    DatasetError
        If this epsilon is too small to estimate the ranges from so few clients.
    """
    numbers = [column for column in (*schema.features, schema.target) if _unscaled(column)]
    declared = {column.name: scale_of(column, column is schema.target) for column in numbers if bounded(column)}
    unknown = [column for column in numbers if column.name not in declared]
    if not unknown:
        return Scales(_with(schema, declared))
    medians = sum(1 if column is schema.target else 2 for column in unknown)
    clients = len(np.unique(owners))
    needed = float(f"{1.005 * medians * enough(clients):.3g}")
    names = [column.name for column in unknown]
    if 0 < epsilon < needed:
        wrong = (
            f"{clients} training clients need epsilon {needed:g} to estimate {medians} medians, more than {epsilon:g}"
        )
        fix = f"allow that epsilon, or give the range of {', '.join(names)}"
        raise DatasetError(f"{wrong}; {fix}", code="data.too-few-clients")
    spent = epsilon or needed
    frame = named(frame, schema.columns)
    estimates = _Estimates(owners, spent / medians, generator)
    for column in unknown:
        estimates.add(column, _values(frame, column), column is not schema.target)
    return Scales(_with(schema, declared | estimates.found), names, spent)


def private_median(points: NDArray[np.float64], epsilon: float, generator: np.random.Generator) -> float:
    """Return a median of one number for each client, with pure `epsilon` if a client's number is replaced.

    The density at x is proportional to ``exp(-epsilon |below(x) - clients / 2| / 2)``: replacing a number changes
    ``below``, the number of clients below x, by at most 1.
    """
    edges, logs = log_density(points, epsilon)
    with np.errstate(divide="ignore"):
        chances = logs + np.log(np.diff(edges))
    place = int(np.argmax(chances + generator.gumbel(size=len(chances))))
    return _number(float(generator.uniform(edges[place], edges[place + 1])))


def log_density(points: NDArray[np.float64], epsilon: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the edges (m + 1,) of intervals of logarithms, and the log density in each (m,) up to a constant."""
    logs = np.sign(points) * np.log1p(np.abs(points) / _SMALLEST)
    spread = logs[:, None] + _WIDTH * np.linspace(-1, 1, _STEPS)
    edges = np.concatenate([[-_END], np.sort(spread.ravel()).clip(-_END, _END), [_END]])
    below = np.arange(len(edges) - 1) / _STEPS
    return edges, -epsilon / 2 * np.abs(below - len(points) / 2)


def enough(clients: int) -> float:
    """Return the epsilon at which a private median lies among the middle three quarters of so many clients.

    The middle quarter has a length of at least `_WIDTH` / 2, the rest of at most 2 `_END`. Their scores differ by a
    quarter of the clients.
    """
    return float(8 * np.log(2 * _END / (_WIDTH / 2) / _WRONG) / clients)


def _number(log: float) -> float:
    value = float(np.sign(log) * np.expm1(abs(log)) * _SMALLEST)
    return value if abs(value) > _SMALLEST else 0.0


def _unscaled(column: Column) -> bool:
    return column.is_far or (column.type in ("number", "integer") and (column.scale, column.offset) == (1, 0))


def _values(frame: pd.DataFrame, column: Column) -> NDArray[np.float64]:
    series = frame[column.name]
    if column.type == "date":
        return days_since(as_dates(series, column), column).to_numpy(np.float64)
    return as_numbers(series, column)


def bounded(column: Column) -> bool:
    """Return whether a column has a public range."""
    return column.minimum is not None and column.maximum is not None and column.minimum < column.maximum


def scale_of(column: Column, target: bool) -> tuple[float, float]:
    """Return the offset and the scale that take a column's public range to -1 to 1; a target has no offset."""
    assert column.minimum is not None
    assert column.maximum is not None
    if target:
        return 0.0, max(abs(column.minimum), abs(column.maximum))
    return (column.minimum + column.maximum) / 2, (column.maximum - column.minimum) / 2


def _with(schema: Schema, scales: Mapping[str, tuple[float, float]]) -> Schema:
    def own(column: Column) -> Column:
        offset, scale = scales.get(column.name, (column.offset, column.scale))
        if column.type == "date":
            if column.name not in scales:
                return column
            first = pd.Timestamp(column.since) + pd.Timedelta(days=round(offset))
            return column.model_copy(update={"since": first.date().isoformat(), "span": scale})
        return column.model_copy(update={"offset": offset, "scale": scale})

    return schema.model_copy(update={"features": [own(one) for one in schema.features], "target": own(schema.target)})
