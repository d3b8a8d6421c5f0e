"""Scales of a table's numbers, from declared ranges."""

from __future__ import annotations

from umbel.data.schema import Column, Schema


def scaled(schema: Schema) -> Schema:
    """Return the schema with scales for the numbers that have a range and none: -1 to 1, and no offset of a target."""

    def own(column: Column) -> Column:
        low, high = column.minimum, column.maximum
        if column.type not in ("number", "integer") or (column.scale, column.offset) != (1, 0):
            return column
        if low is None or high is None or low == high:
            return column
        if column is schema.target:
            return column.model_copy(update={"scale": max(abs(low), abs(high))})
        return column.model_copy(update={"offset": (low + high) / 2, "scale": (high - low) / 2})

    return schema.model_copy(update={"features": [own(one) for one in schema.features], "target": own(schema.target)})
