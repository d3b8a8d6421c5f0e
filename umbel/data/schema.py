"""What the columns of a table are, and how a row becomes numbers: a TOML or JSON file, or part of a manifest.

Two sites with the same schema encode alike: all that it takes is public.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from umbel.protocol.errors import DatasetError
from umbel.protocol.rules import Settings

Finite = Annotated[float, Field(allow_inf_nan=False)]

OTHER = "other"
"""The category of all that is in no list, where a column says ``other = "category"``."""

_NUMBERS = ("number", "integer")


def repeated(names: list[str]) -> list[str]:
    """Return the names that stand in a list more than once."""
    return sorted(name for name, count in Counter(names).items() if name and count > 1)


class Entries(Settings):
    """Base of what a file says, in the file's own words."""

    model_config = ConfigDict(alias_generator=None)
    error = DatasetError


class Column(Entries):
    """One column of a table.

    Attributes
    ----------
    name : str
        As it stands at the head of the table; spaces, underscores and case play no part in finding it.
    type : str
        ``number``; ``integer``, a whole number; ``boolean``; ``category``, one of a list of texts;
        ``text``, for the column that names the client.
    unit : str
        For people.
    minimum, maximum : float, optional
        Range of the numbers that are taken.
    scale, offset : float
        Public constants: a model sees ``(number - offset) / scale``.
    categories : list of str
        The texts that are taken, in order.
    other : str
        What becomes of a text that is not among them: ``refuse`` the table, count it as one more
        ``category``, or ``drop`` the row.
    encode : str
        ``one-hot``, a column of 0 and 1 for each category, or ``index``, the place in the list.
    pattern : str
        Regular expression whose first group is the category in a longer text.
    fill : str, int, float or bool
        What stands in for a missing value; empty to do as the schema says.
    """

    source: ClassVar[str] = "a column of the schema"

    name: str = Field(min_length=1)
    type: Literal["number", "integer", "boolean", "category", "text"]
    unit: str = ""
    minimum: Finite | None = None
    maximum: Finite | None = None
    scale: float = Field(1.0, allow_inf_nan=False)
    offset: float = Field(0.0, allow_inf_nan=False)
    categories: list[str] = Field(default_factory=list)
    other: Literal["refuse", "category", "drop"] = "refuse"
    encode: Literal["one-hot", "index"] = "one-hot"
    pattern: str = ""
    fill: str | bool | int | float = ""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        where = f"column {self.name!r}"
        if self.type not in _NUMBERS and (self.minimum, self.maximum) != (None, None):
            raise ValueError(f"{where}: only numbers have a minimum and a maximum, not the type {self.type}")
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise ValueError(f"{where}: minimum {self.minimum:g} is above maximum {self.maximum:g}")
        if self.scale == 0:
            raise ValueError(f"{where}: scale must not be 0")
        scaled = self.type in _NUMBERS or (self.type == "category" and self.encode == "index")
        if not scaled and (self.scale, self.offset) != (1, 0):
            raise ValueError(f"{where}: only numbers have a scale and an offset, not the type {self.type}")
        if self.type == "category":
            if not self.categories:
                raise ValueError(f"{where} is of type category and lists none; set categories")
            if twice := repeated(self.classes):
                raise ValueError(f"{where} lists the category {twice[0]!r} twice")
        elif self.categories or self.other != "refuse" or self.pattern:
            raise ValueError(f"{where}: categories, other and pattern are for the type category, not {self.type}")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"{where}: pattern {self.pattern!r} is no regular expression: {error}") from None
        if self.pattern and not groups:
            raise ValueError(f"{where}: pattern {self.pattern!r} needs a group, in parentheses, that is the category")
        return self

    @property
    def classes(self) -> list[str]:
        """The categories, with that of all others if there is one; of a boolean, its two texts."""
        if self.type == "boolean":
            return ["false", "true"]
        return [*self.categories, *([OTHER] if self.other == "category" else [])]

    @property
    def stored(self) -> list[dict[str, Any]]:
        """What each of the numbers that a feature becomes is: its name, unit, scale and offset."""
        if self.type == "category" and self.encode == "one-hot":
            same = {"unit": "0 or 1", "scale": 1.0, "offset": 0.0}
            return [{"name": f"{self.name} = {one}"} | same for one in self.classes]
        unit = {"boolean": "0 or 1", "category": f"index in {', '.join(self.classes)}"}.get(self.type, self.unit)
        return [{"name": self.name, "unit": self.unit or unit, "scale": self.scale, "offset": self.offset}]


class Schema(Entries):
    """The columns of a table, and what is learnt from them.

    Attributes
    ----------
    name : str
    target : Column
        What is predicted. A number is divided by its scale and has no offset; a category becomes the
        number of its class; a boolean becomes -1 or 1, the labels of the losses of a margin.
    features : list of Column
        What it is predicted from.
    client : Column, optional
        Whose row it is, of type ``text`` or ``integer``; without it, the whole table is one client's.
    missing : str
        What becomes of a row without a value: ``refuse`` the table, or ``drop`` the row.
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
    missing: Literal["refuse", "drop"] = "refuse"
    provenance: str = ""
    licence: str = ""
    client: Column | None = None
    target: Column
    features: list[Column] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [column.name for column in (*self.features, self.target, *([self.client] if self.client else []))]
        if twice := repeated(names):
            raise ValueError(f"the schema has the column {twice[0]!r} twice; each has one place")
        if self.client and self.client.type not in ("text", "integer"):
            raise ValueError(f"client: column {self.client.name!r} must be of type text or integer")
        for column in (self.target, *self.features):
            if column.type == "text":
                raise ValueError(f"column {column.name!r}: the type text is for the client's column; list categories")
        if self.target.offset != 0:
            raise ValueError(f"target: column {self.target.name!r} can have a scale and no offset")
        if self.target.type == "category" and len(self.target.classes) < 2:
            raise ValueError(f"target: column {self.target.name!r} has one category, and nothing to tell apart")
        return self

    @property
    def said(self) -> dict[str, Any]:
        """What a manifest says in the schema's own words, the schema itself included."""
        same = ("model", "loss", "metric", "frozen", "local", "pretrained", "provenance", "licence")
        return {key: getattr(self, key) for key in same} | {"units": self.units, "layout": self}

    @property
    def units(self) -> dict[str, Any]:
        """What a manifest says of stored numbers (`umbel.data.manifest.Manifest.units`)."""
        what = {"categories": self.target.classes} if self.target.classes else {"scale": self.target.scale}
        target: dict[str, Any] = {"name": self.target.name, "unit": self.target.unit, **what}
        return {"target": target, "features": [one for column in self.features for one in column.stored]}

    def entries(self) -> dict[str, Any]:
        """Return the schema as one writes it in a file, without what is left at its default."""
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
