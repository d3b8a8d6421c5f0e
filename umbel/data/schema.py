"""The columns of a table, and their encoding as numbers: a TOML or JSON file, or part of a manifest.

Two sites with the same schema encode alike: everything in it is public.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from umbel.protocol.errors import DatasetError
from umbel.protocol.rules import Settings

Finite = Annotated[float, Field(allow_inf_nan=False)]

# TOML has dates; JSON has none.
_AS_TEXT = BeforeValidator(lambda value: value.isoformat() if isinstance(value, date) else value)
Day = Annotated[str, _AS_TEXT]

OTHER = "other"
"""The category of all unlisted texts, where a column has ``other = "category"``."""

TRUE, FALSE = ("true", "yes", "t", "y", "1", "on"), ("false", "no", "f", "n", "0", "off", "-1")
"""Texts of a boolean, in any case. -1 is a label of margin losses."""

_NUMBERS = ("number", "integer")

_YEAR = 365.25  # days
Part = Literal["year", "month", "weekday", "days"]
_PARTS: dict[str, dict[str, Any]] = {
    "month": {"unit": "1 to 12", "scale": 5.5, "offset": 6.5},
    "weekday": {"unit": "0 for Monday to 6", "scale": 3.0, "offset": 3.0},
}
"""Numbers of a date with constant units; for years and days, a column gives the first day and the span."""


def repeated(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once."""
    return sorted(name for name, count in Counter(names).items() if name and count > 1)


class Entries(Settings):
    """Base of a file's entries, under the names that the file uses."""

    model_config = ConfigDict(alias_generator=None)
    error = DatasetError


class Column(Entries):
    """One column of a table.

    Attributes
    ----------
    name : str
        Its name in the table's header; spaces, underscores and case are ignored when it is looked up.
    type : str
        ``number``; ``integer``; ``boolean``; ``category``, one of a list of texts; ``date``;
        ``text``, for the column that names the client.
    unit : str
        For readers; a number in text may have it before or after.
    minimum, maximum : float, optional
        Range of the accepted numbers.
    outside : str
        Treatment of a number out of that range: ``refuse`` the table, or ``clip`` it to the bound.
    decimal : str
        Of numbers in text: the decimal sign, ``.`` or ``,``, or ``either``, if no comma of the column is followed by
        exactly three digits; empty for a point, where a file's separators leave no doubt.
    scale, offset : float
        Public constants: a model sees ``(number - offset) / scale``.
    categories : list of str
        The accepted texts, in order; of a boolean, how a prediction calls false and true, as ``["No", "Yes"]``.
    other : str
        Treatment of other texts: ``refuse`` the table, count them as one more ``category``, or ``drop``
        the row.
    encode : str
        ``one-hot``, a column of 0 and 1 for each category, or ``index``, the position in the list.
    pattern : str
        Regular expression whose first group is the category in a longer text.
    format : str
        Format of a date, as in ``strptime``; empty for ``2024-01-31``, with or without a time of day.
    parts : list of str
        For a date: the numbers that a model sees, among ``year``, ``month``, ``weekday`` and ``days``.
    since, span : str, float
        For a date: the public date from which days and years count, and the number of days that makes 1; a year
        makes at most 1.
    fill : str, int, float or bool
        Replacement for a missing value; empty to follow `missing`.
    na : list of str
        Texts that stand for a missing value in this column, besides the usual ones.
    missing : str
        Treatment of a missing value: ``refuse`` the table, ``drop`` the row, or ``indicate``; empty to follow the
        schema. An indicated feature has an extra number, 1 where the value is missing. Without a `fill`
        its other numbers are then 0, so that a model sees the offset.
    """

    source: ClassVar[str] = "a column of the schema"

    name: str = Field(min_length=1)
    type: Literal["number", "integer", "boolean", "category", "date", "text"]
    unit: str = ""
    minimum: Finite | None = None
    maximum: Finite | None = None
    outside: Literal["refuse", "clip"] = "refuse"
    decimal: Literal["", ".", ",", "either"] = ""
    scale: float = Field(1.0, allow_inf_nan=False)
    offset: float = Field(0.0, allow_inf_nan=False)
    categories: list[str] = Field(default_factory=list)
    other: Literal["refuse", "category", "drop"] = "refuse"
    encode: Literal["one-hot", "index"] = "one-hot"
    pattern: str = ""
    format: str = ""
    parts: list[Part] = Field(default_factory=lambda: list(get_args(Part)), min_length=1)
    since: Day = "2000-01-01"
    span: float = Field(3652.5, gt=0, allow_inf_nan=False)
    fill: Annotated[str | bool | int | float, _AS_TEXT] = ""
    na: list[str] = Field(default_factory=list)
    missing: Literal["", "refuse", "drop", "indicate"] = ""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        where = f"column {self.name!r}"
        if self.type not in _NUMBERS and (self.minimum, self.maximum) != (None, None):
            raise ValueError(f"{where}: only numbers have a minimum and a maximum, not the type {self.type}")
        if self.type not in _NUMBERS and (self.outside, self.decimal) != ("refuse", ""):
            raise ValueError(f"{where}: only numbers have outside and decimal, not the type {self.type}")
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise ValueError(f"{where}: minimum {self.minimum:g} is above maximum {self.maximum:g}")
        if self.scale == 0:
            raise ValueError(f"{where}: scale must not be 0")
        scaled = self.type in _NUMBERS or (self.type == "category" and self.encode == "index")
        if not scaled and (self.scale, self.offset) != (1, 0):
            raise ValueError(f"{where}: only numbers have a scale and an offset, not the type {self.type}")
        words = [[one.lower() in of for of in (FALSE, TRUE)] for one in self.categories] == [
            [True, False],
            [False, True],
        ]
        if self.type == "category":
            if not self.categories:
                raise ValueError(f"{where} is of type category and lists none; set categories")
            if twice := repeated(self.classes):
                raise ValueError(f"{where} lists the category {twice[0]!r} twice")
        elif (self.categories and not (words and self.type == "boolean")) or self.other != "refuse" or self.pattern:
            raise ValueError(
                f"{where}: categories, other and pattern are for the type category, not {self.type}; but a boolean "
                "may have two categories, a word for false and then one for true"
            )
        try:
            date.fromisoformat(self.since)
        except ValueError:
            raise ValueError(f"{where}: since must be a date such as 2000-01-31, got {self.since!r}") from None
        if twice := repeated(list(self.parts)):
            raise ValueError(f"{where} has the part {twice[0]!r} twice; each has one number")
        own = {key for key in ("format", "parts", "since", "span") if key in self.model_dump(exclude_defaults=True)}
        if self.type != "date" and own:
            raise ValueError(f"{where}: {', '.join(sorted(own))} are for the type date, not {self.type}")
        if "%z" in self.format.lower():
            raise ValueError(f"{where}: dates have no time zone here; leave time zones out of the format")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"{where}: pattern {self.pattern!r} is not a regular expression: {error}") from None
        if self.pattern and not groups:
            raise ValueError(f"{where}: pattern {self.pattern!r} needs a group in parentheses: the category")
        return self

    @property
    def is_far(self) -> bool:
        """Whether it is a date whose years or days count from the default date, from which its dates may be far."""
        default = (self.since, self.span) == (
            type(self).model_fields["since"].default,
            type(self).model_fields["span"].default,
        )
        return self.type == "date" and default and bool({"year", "days"} & {*self.parts})

    @property
    def classes(self) -> list[str]:
        """The categories, with that of all others if there is one; for a boolean, its two texts."""
        if self.type == "boolean":
            return self.categories or ["false", "true"]
        return [*self.categories, *([OTHER] if self.other == "category" else [])]

    @property
    def stored(self) -> list[dict[str, Any]]:
        """Name, unit, scale and offset of each number that a feature becomes.

        A model sees ``(number - offset) / scale``. The indicator of `missing`, if any, comes last.
        """
        same = {"unit": "0 or 1", "scale": 1.0, "offset": 0.0}
        indicator = [{"name": f"{self.name} is missing"} | same] if self.missing == "indicate" else []
        if self.type == "category" and self.encode == "one-hot":
            return [*({"name": f"{self.name} = {one}"} | same for one in self.classes), *indicator]
        if self.type == "date":
            days: dict[str, Any] = {"unit": f"days since {self.since}", "scale": self.span, "offset": 0.0}
            first, years = date.fromisoformat(self.since).year, max(1.0, self.span / _YEAR)
            numbers = {**_PARTS, "year": {"unit": "year", "scale": years, "offset": float(first)}, "days": days}
            return [*({"name": f"{self.name}: {part}"} | numbers[part] for part in self.parts), *indicator]
        unit = {"boolean": "0 or 1", "category": f"index in {', '.join(self.classes)}"}.get(self.type, self.unit)
        own = {"name": self.name, "unit": self.unit or unit, "scale": self.scale, "offset": self.offset}
        return [own, *indicator]


def bounded(column: Column) -> bool:
    """Return whether a column has a public range."""
    return column.minimum is not None and column.maximum is not None and column.minimum < column.maximum


def scaling(low: float, high: float, target: bool) -> dict[str, float]:
    """Return the entries of a column that take a range to -1 to 1; a target has no offset."""
    if target:
        return {"scale": max(abs(low), abs(high))}
    return {"offset": (low + high) / 2, "scale": (high - low) / 2}


class Schema(Entries):
    """The columns of a table, and their roles.

    Attributes
    ----------
    name : str
    target : Column
        The column to predict. A number is divided by its scale and has no offset; a category becomes the
        number of its class; a boolean becomes -1 or 1, the labels of margin losses.
    features : list of Column
        The columns to predict it from.
    client : Column, optional
        The client of each row, of type ``text`` or ``integer``; without it, all rows belong to one client.
    missing : str
        Treatment of a missing value in a column without its own setting: ``refuse`` the table, ``drop`` the row, or
        ``indicate`` it, which then becomes a setting of each feature.
    model, loss, metric, frozen, local, pretrained, provenance, licence : str
        As in a manifest.
    """

    source: ClassVar[str] = "the schema"

    name: str = ""
    model: str = ""
    loss: str = ""
    metric: str = ""
    frozen: str = ""
    local: str = ""
    pretrained: str = ""
    missing: Literal["refuse", "drop", "indicate"] = "refuse"
    provenance: str = ""
    licence: str = ""
    client: Column | None = None
    target: Column
    features: list[Column] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _features_indicate(cls, raw: Any) -> Any:
        """Copy "indicate" to each feature, so that a column alone determines how many numbers it becomes."""
        if not isinstance(raw, dict) or raw.get("missing") != "indicate" or not isinstance(raw.get("features"), list):
            return raw
        entries = [one.model_dump(exclude_defaults=True) if isinstance(one, Column) else one for one in raw["features"]]
        features = [{"missing": "indicate"} | one if isinstance(one, dict) else one for one in entries]
        return {**raw, "missing": "refuse", "features": features}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if twice := repeated([column.name for column in self.columns]):
            raise ValueError(f"the schema has the column {twice[0]!r} twice; each has one place")
        if self.client and self.client.type not in ("text", "integer"):
            raise ValueError(f"client: column {self.client.name!r} must be of type text or integer")
        for column in (self.target, *([self.client] if self.client else [])):
            if column.missing == "indicate":
                raise ValueError(f"column {column.name!r}: only a feature indicates missing values; drop the row")
        if self.target.type == "date":
            raise ValueError(
                f"target: column {self.target.name!r} is a date; make it a number, such as days since a date"
            )
        for column in (self.target, *self.features):
            if column.type == "text":
                raise ValueError(f"column {column.name!r}: the type text is for the client's column; list categories")
        if self.target.offset != 0:
            raise ValueError(f"target: column {self.target.name!r} may have a scale but no offset")
        if self.target.type == "category" and len(self.target.classes) < 2:
            raise ValueError(f"target: column {self.target.name!r} has only one category: there is nothing to predict")
        return self

    @property
    def columns(self) -> list[Column]:
        """All columns: the features, the target and, if there is one, the client's."""
        return [*self.features, self.target, *([self.client] if self.client else [])]

    @property
    def unranged(self) -> list[str]:
        """The columns of numbers that have neither a range nor a scale."""
        numbers = [column for column in (*self.features, self.target) if column.type in _NUMBERS]
        bare = [column for column in numbers if (column.scale, column.offset) == (1, 0)]
        return [column.name for column in bare if column.minimum is None or column.maximum is None]

    @property
    def encoding(self) -> list[dict[str, Any]]:
        """The entries that decide which numbers the features and the target become."""
        accepted = {"unit", "minimum", "maximum", "missing", "outside", "decimal", "na"}
        return [
            {
                **column.model_dump(exclude=accepted),
                "categories": column.categories if column.type == "category" else [],  # a boolean's change no number
                "numbers": len(column.stored),
            }
            for column in (*self.features, self.target)
        ]

    @property
    def said(self) -> dict[str, Any]:
        """The manifest entries that come from the schema, including the schema itself."""
        same = ("model", "loss", "metric", "frozen", "local", "pretrained", "provenance", "licence")
        return {key: getattr(self, key) for key in same} | {"units": self.units, "layout": self}

    @property
    def units(self) -> dict[str, Any]:
        """Units of stored numbers, for a manifest (`umbel.data.data.Manifest.units`)."""
        what = {"categories": self.target.classes} if self.target.classes else {"scale": self.target.scale}
        target: dict[str, Any] = {"name": self.target.name, "unit": self.target.unit, **what}
        return {"target": target, "features": [one for column in self.features for one in column.stored]}

    def entries(self) -> dict[str, Any]:
        """Return the schema's entries as in a file, without defaults."""
        return self.model_dump(exclude_defaults=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a schema from a TOML or JSON file, or from a dataset's ``manifest.json``, or raise `DatasetError`."""
        try:
            text = path.read_text(encoding="utf-8")
            entries = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except FileNotFoundError:
            raise DatasetError(f"{path} is missing; give the file of a schema", code="data.no-file") from None
        except (OSError, ValueError, RecursionError) as error:
            raise DatasetError(f"{path} cannot be read as a schema: {error}", code="data.unreadable") from None
        if isinstance(entries, dict) and "clients" in entries:
            entries = entries.get("layout")
        if not isinstance(entries, dict):
            raise DatasetError(f"{path} holds no schema: it needs target and features", code="data.schema")
        return cls.parse(entries, str(path))
