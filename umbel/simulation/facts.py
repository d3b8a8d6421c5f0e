"""A dataset's public facts: the declared range of each column, and made-up clients of such rows.

Rows are never read, and clients' numbers of rows are unknown: every made-up client has the same few.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from umbel.data import Column, Dataset, Manifest, offsets_of
from umbel.models.fit import traits_of
from umbel.models.losses import SLOPES
from umbel.models.model import Model
from umbel.protocol.errors import ConfigError
from umbel.server.setup import Setup
from umbel.simulation.wanted import Wanted

_CLIENTS, _ROWS = 8, 10  # made-up clients, and rows of each
_NUMBERS = ("number", "integer")
_LEVEL, _SPREAD = 0.65, 0.5  # of numbers without a declared range, which should have units near 1
_FAR = (-3.0, 3.0)  # years and days of a date that counts from the default date: those of 1970 to 2029
_MOST_NAMED = 30  # columns that an error lists


class Draft(NamedTuple):
    """A run before its noise is planned."""

    values: dict[str, Any]  # entries of its run config
    kept: frozenset[str]  # keys that the user gave, whose entries a plan keeps
    wanted: Wanted
    setup: Setup  # of these values
    dataset: Dataset
    nodes: int  # that release sums of their clients' updates, if the strategy has sites release


def filled(values: Mapping[str, Any], entries: Mapping[str, Any], kept: frozenset[str]) -> dict[str, Any]:
    """Return values with further entries, except for those that are kept."""
    return {**values, **{key: value for key, value in entries.items() if key not in kept}}


@dataclass(frozen=True)
class Span:
    """Declared facts about a column's numbers, as a model sees them."""

    name: str
    low: float | None = None  # of their range; None if it is not declared
    high: float | None = None

    @property
    def centre(self) -> float:
        """The middle of the range; 0 if there is none."""
        return 0.0 if self.low is None or self.high is None else (self.low + self.high) / 2

    @property
    def spread(self) -> float:
        """The standard deviation of a number drawn uniformly from the range."""
        whole = None if self.low is None or self.high is None else self.high - self.low
        return whole / math.sqrt(12) if whole else _SPREAD

    def draw(self, rows: int, generator: np.random.Generator) -> NDArray[np.float64]:
        """Return numbers within the range."""
        if self.low is None or self.high is None:
            return generator.normal(0, _SPREAD, rows)
        if (self.low, self.high) == (0.0, 1.0):
            return generator.integers(2, size=rows).astype(np.float64)
        return generator.uniform(self.low, self.high, rows)


def feature_spans(manifest: Manifest, width: int) -> list[Span] | None:
    """Return the declared facts of each of `width` features; None if nothing is known about single features."""
    stored = manifest.units.get("features", [])
    if len(stored) != width:
        return None
    columns = manifest.layout.features if manifest.layout else []
    known = {column.name: column for column in columns if column.type in _NUMBERS}
    far = {f"{column.name}: {part}" for column in columns if column.is_far for part in ("year", "days")}
    return [
        _of_numbers(known[one["name"]])
        if one["name"] in known
        else Span(one["name"], *(_FAR if one["name"] in far else (0.0, 1.0) if one.get("unit") == "0 or 1" else ()))
        for one in stored
    ]


def target_span(manifest: Manifest) -> Span:
    """Return the declared facts about a numeric target."""
    if manifest.layout is not None and manifest.layout.target.type in _NUMBERS:
        return _of_numbers(manifest.layout.target)
    return Span(manifest.target.get("name", "target"))


def _of_numbers(column: Column) -> Span:
    """Return the declared facts about numbers: a scale brings them near 1, and a range describes unscaled numbers."""
    if (column.scale, column.offset) != (1, 0) or column.minimum is None or column.maximum is None:
        return Span(column.name)
    return Span(column.name, column.minimum, column.maximum)


def undeclared(model: Model, dataset: Dataset) -> list[str]:
    """Return the columns without a public range, if a model takes a table's columns as they are."""
    layout = dataset.manifest.layout
    return layout.unranged if layout and model.name.partition(" ")[0] in ("linear", "mlp") else []


def check_declared(model: Model, dataset: Dataset) -> None:
    """Raise `ConfigError` if a model takes the columns of a table as they are, and one has no public range."""
    if bare := undeclared(model, dataset):
        ask = "ask them with a part of it, as umbel run DATASET --epsilon E does, or umbel ranges"
        raise ConfigError(
            "a plan with a guarantee reads no rows. Import the table again with --replace and the public "
            f"{ranges_of(bare)}, or a scale other than 1, as --set {shlex.quote(bare[0])}.scale=100; or, if a "
            f"guarantee for clients is within reach, {ask}",
            code="config.no-range",
        )


def ranges_of(bare: list[str]) -> str:
    """Return which columns need a range, and how one is given."""
    more = f" and {len(bare) - _MOST_NAMED} more columns" if len(bare) > _MOST_NAMED else ""
    first = shlex.quote(bare[0])
    how = f"each given as --set {first}.minimum=NUMBER --set {first}.maximum=NUMBER"
    return f"range of {', '.join(bare[:_MOST_NAMED])}{more}, {how}"


def made_up(model: Model, dataset: Dataset) -> Dataset:
    """Return a dataset of made-up clients, with as many features and targets as a dataset's."""
    generator = np.random.default_rng(0)
    changes = {"clients": _CLIENTS, "split": {"train": _CLIENTS, "validation": 0}, "groups": [], "truth": []}
    features, targets = _features(dataset, generator), _targets(model, dataset, generator)
    manifest = dataset.manifest.model_copy(update=changes)
    return Dataset(manifest, features, targets, offsets_of([_ROWS] * _CLIENTS))


def _features(dataset: Dataset, generator: np.random.Generator) -> NDArray[Any]:
    shape, manifest, rows = dataset.features.shape[1:], dataset.manifest, _CLIENTS * _ROWS
    if manifest.tokens:
        return np.asarray(generator.integers(manifest.tokens, size=(rows, *shape)))
    spans = feature_spans(manifest, shape[0]) if len(shape) == 1 else None
    if spans is None:
        if dataset.features.dtype.kind in "iu" and manifest.feature_scale != 1:
            limits = np.iinfo(dataset.features.dtype)
            drawn = generator.integers(limits.min, limits.max, (rows, *shape), dataset.features.dtype, endpoint=True)
            return np.asarray(drawn)
        return generator.normal(0, _SPREAD / abs(manifest.feature_scale), (rows, *shape)).astype(np.float32)
    parts = []
    for name, columns in groupby(spans, key=lambda span: span.name.rpartition(" = ")[0]):
        if name:  # a category of a column
            many = len(list(columns))
            parts.append(np.eye(many)[generator.integers(many, size=rows)])
        else:
            parts += [span.draw(rows, generator)[:, None] for span in columns]
    return np.concatenate(parts, axis=1).astype(np.float32)


def _targets(model: Model, dataset: Dataset, generator: np.random.Generator) -> NDArray[Any]:
    """Return targets that have nothing to do with features."""
    shape, rows, span = dataset.targets.shape[1:], _CLIENTS * _ROWS, target_span(dataset.manifest)
    if model.loss.name in SLOPES:
        return generator.choice(np.array([-1, 1], np.int8), rows)
    if model.loss.name == "cross-entropy" or (dataset.targets.dtype.kind in "iu" and not shape):
        named = dataset.manifest.target.get("categories", [])
        return generator.integers(
            len(named) or traits_of(model, dataset.features.shape[1:]).outputs[-1], size=(rows, *shape)
        )
    level, spread = (_LEVEL, _SPREAD) if span.low is None else (span.centre, span.spread)
    return generator.normal(level, spread, (rows, *shape)).astype(np.float32)
