"""Scales of a table's numbers, from their public ranges."""

from __future__ import annotations

from umbel.data.schema import Column


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
