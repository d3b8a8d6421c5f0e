"""A dataset's description of itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from umbel.data.schema import Entries, Finite, Schema
from umbel.protocol.errors import DatasetError
from umbel.protocol.plugins import distrust

_ESTIMATED = re.compile(r"estimated from the training clients' rows with epsilon (\S+) a client")
_SMALLEST, _LARGEST = 1e-38, 3e38  # range of 32-bit numbers
# Entries that a file omits where they are empty.
_IF_ANY = ("metric", "pretrained", "tokens")


def check_printable(found: Any, source: Any) -> None:
    """Raise `DatasetError` if a text in the content of a source has characters that a terminal acts on or hides."""
    for one in [found] if isinstance(found, str) else found.items() if isinstance(found, dict) else found:
        if isinstance(one, str) and not one.isprintable():
            text = f"{source} holds {one!r}, with a line break, a special space or another character that is not plain"
            raise DatasetError(f"{text}; replace it", code="data.unprintable")
        if isinstance(one, dict | list | tuple):
            check_printable(one, source)


class Manifest(Entries):
    """A dataset's description of itself.

    Attributes
    ----------
    name : str
    model, loss, metric : str
        The model, loss and metric that the data are made for (see `models.load`); empty if there is none.
    frozen, local : str
        Patterns on the names of the model's frozen parameters, and of those that stay on the nodes
        (see `models.load`); a run may not ask for others.
    pretrained : str
        File of the model's initial weights (see `models.load`); a site opens no other.
    clients : int
    split : dict
        ``{"train": a, "validation": b}`` with ``a + b == clients``: the first ``a`` clients
        train, the others validate.
    units : dict
        Public constants that convert stored numbers to real units. ``units["target"]`` may hold
        ``name``, ``unit`` and ``scale``: a stored target times ``scale`` is in ``unit``. For classes,
        ``categories`` may hold their names.
    feature_scale : float
        A model sees the stored features times this constant (1/255 for images stored as bytes).
    tokens : int
        Size of the vocabulary if features are tokens: integers from 0, which a model gets as 64-bit
        integers. 0 if features are numbers, which a model gets in 32 bits.
    layout : Schema, optional
        For data from a table: its columns, so that other tables are encoded in the same way.
    truth : list of list of float
        For synthetic data only: the parameter vectors that generated them.
    groups : list of int
        For generated data: the distribution of each client's rows; empty if unknown. Training does not
        use it: compare it with the groups that a run finds.
    provenance, licence : str
        Origin of the data, and terms of their use.
    """

    source: ClassVar[str] = "the manifest"

    name: str
    clients: int = Field(ge=1)
    split: dict[str, int]
    model: str = ""
    loss: str = ""
    metric: str = ""
    pretrained: str = ""
    frozen: str = ""
    local: str = ""
    units: dict[str, Any] = Field(default_factory=dict)
    feature_scale: float = Field(1.0, allow_inf_nan=False)
    tokens: int = Field(0, ge=0)
    layout: Schema | None = None
    truth: list[list[Finite]] = Field(default_factory=list)
    groups: list[int] = Field(default_factory=list)
    provenance: str = ""
    licence: str = ""

    @property
    def train(self) -> int:
        """Number of training clients."""
        return self.split["train"]

    @property
    def target(self) -> dict[str, Any]:
        """The target's entry in ``units``; empty if there is none."""
        found: dict[str, Any] = self.units.get("target", {})
        return found

    @property
    def error_scale(self) -> float:
        """The factor from an error in stored numbers to one in the target's unit, above 0."""
        return abs(float(self.target.get("scale", 1.0)))

    @property
    def epsilon_of_scales(self) -> str:
        """The epsilon that estimating scales from rows cost each client; empty without such scales."""
        found = _ESTIMATED.search(self.provenance)
        return found[1] if found else ""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        split, groups = self.split, self.groups
        if set(split) != {"train", "validation"} or min(split.values()) < 0:
            raise ValueError(f'"split" must be {{"train": a, "validation": b}}, got {split!r}')
        if split["train"] + split["validation"] != self.clients:
            raise ValueError(f"split {split} does not add up to {self.clients} clients")
        if len(groups) not in (0, self.clients):
            raise ValueError(f'"groups" must list a group for each of {self.clients} clients, got {len(groups)}')
        if groups and min(groups) < 0:
            raise ValueError(f'"groups" must hold integers from 0, got {min(groups)}')
        if not _SMALLEST <= abs(self.feature_scale) <= _LARGEST:
            raise ValueError(f"feature_scale must be a 32-bit number other than 0, got {self.feature_scale}")
        if self.tokens and self.feature_scale != 1:
            raise ValueError(f"tokens are not scaled: leave out feature_scale, got {self.feature_scale}")
        target = self.target
        if not isinstance(target, dict):
            raise ValueError(f'"units" must hold an object as "target", got {target!r}')
        for what in ("name", "unit"):
            if not isinstance(target.get(what, ""), str):
                raise ValueError(f"units.target.{what} must be text, got {target[what]!r}")
        scale = target.get("scale", 1.0)
        if type(scale) not in (int, float) or not 0 < abs(scale) <= _LARGEST:
            raise ValueError(f"units.target.scale must be a finite number other than 0, got {scale!r}")
        categories = target.get("categories", [])
        if not isinstance(categories, list) or not all(isinstance(one, str) for one in categories):
            raise ValueError(f"units.target.categories must be a list of texts, got {categories!r}")
        try:
            json.dumps(self.model_dump(exclude={"truth", "groups"}), ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:  # NaN, or text that cannot be written
            raise ValueError(f"the manifest cannot be written as JSON: {error}") from None
        return self

    def entries(self) -> dict[str, Any]:
        """Return the manifest's entries as in a file."""
        entries = self.model_dump(exclude={"layout"})
        own = {key: value for key, value in entries.items() if value or key not in _IF_ANY}
        return own if self.layout is None else {**own, "layout": self.layout.entries()}

    @classmethod
    def read(cls, raw: Any, file: Path) -> Self:
        """Check and return the content of a file; the file is named in errors."""
        if not isinstance(raw, dict):
            raise DatasetError(f"{file}: the manifest must be a JSON object", code="data.manifest")
        manifest = cls.parse(raw, str(file))
        check_printable(raw, file)
        distrust(manifest.model, manifest.loss, manifest.metric)
        return manifest


def encoded_alike(one: Manifest, other: Manifest) -> bool:
    """Return whether targets and a table's columns become the same numbers in two datasets, as far as both tell."""
    scales = {float(described.target["scale"]) for described in (one, other) if "scale" in described.target}
    if len(scales) > 1:
        return False
    return one.layout is None or other.layout is None or one.layout.encoding == other.layout.encoding
