"""A question about the ranges of columns, as server, sites and people name it: ``ranges columns=age,bmi``.

A run asks it as its model (`umbel.models.ranges`). Later runs that build on the answer count its cost
(`RangesBefore`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote, unquote

from pydantic import Field

from umbel.protocol.errors import ConfigError
from umbel.protocol.options import Options, parse_pairs
from umbel.protocol.release import Kind, Release, ReleaseBy, participation

QUESTION = "ranges"
NONE, ALL = "no", "all"
"""In place of columns in a policy: no question is answered, or any."""
_BEFORE = re.compile(r"whose cost is ranges = \"([^\"]*)\"")


def question_of(columns: Sequence[str]) -> str:
    """Return the model that asks for the ranges of columns; a space in a name becomes %20."""
    return f"{QUESTION} columns={','.join(quote(name, safe='') for name in columns)}"


def columns_in(model: str) -> list[str]:
    """Return the columns that a run's model asks about; none if it is another model.

    Raises
    ------
    ConfigError
        If a question names no column, or one twice.
    """
    kind, _, words = model.partition(" ")
    if kind != QUESTION:
        return []
    pairs = parse_pairs(words, f"model {QUESTION!r}")
    columns = names_in(pairs.pop("columns", ""))
    if pairs or not all(columns) or len(set(columns)) < len(columns):
        text = f"model {QUESTION!r} names columns, each once, as in columns=age,bmi, and nothing else; got {words!r}"
        raise ConfigError(text, code="config.question")
    return columns


def names_in(text: str) -> list[str]:
    """Return the columns in a list with commas, in which %20 stands for a space."""
    return [unquote(name) for name in text.split(",")]


def in_words(model: str) -> str:
    """Return a question as the people of a site read it; empty for another model."""
    columns = columns_in(model)
    told = "for each, how many rows lack it, and how many lie in each cell of a public grid, as shares of a client"
    return f"ranges of {', '.join(columns)}: {told}" if columns else ""


@dataclass(frozen=True)
class RangesBefore(Options):
    """The release that answered a question about ranges, on whose answer a run builds."""

    parameters: Annotated[int, Field(ge=1)]
    noise: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    mechanism: str
    by: ReleaseBy

    @property
    def release(self) -> Release:
        """The release with which each client was charged."""
        own = participation(self.parameters, 1, self.noise, mechanism=self.mechanism)
        return Release(**{**vars(own), "kind": Kind.TRAIN if self.by is ReleaseBy.CLIENT else Kind(self.by.value)})

    @property
    def provenance(self) -> str:
        """A sentence for a schema, from which `before` reads the release."""
        return f'Ranges from a private question, whose cost is ranges = "{self}".'


def before(provenance: str) -> str:
    """Return the release of ranges that a provenance tells of, as text; empty without one."""
    found = _BEFORE.search(provenance)
    return found[1] if found else ""
