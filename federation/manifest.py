"""What a federation says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, Field, model_validator

from protocol.errors import FederationError
from protocol.rules import Settings


class Manifest(Settings):
    """What a federation says of itself.

    Attributes
    ----------
    name : str
        Name of the data.
    model, loss : str
        The model and the loss it was made for (see `models.load`); empty when it has none.
    frozen, local : str
        Patterns on the names of the model's parameters that are frozen, and of those that stay on
        the nodes (see `models.load`); a run may not ask for others.
    clients : int
        Number of clients, training and validation together.
    split : dict
        ``{"train": a, "validation": b}`` with ``a + b == clients``: the first ``a`` clients
        train, the others validate.
    units : dict
        Public constants that map stored numbers to the world's. ``units["target"]`` may hold
        ``name``, ``unit`` and ``scale``: a stored target times ``scale`` is in ``unit``.
    feature_scale : float
        A model sees the stored features times this constant (1/255 for images kept as bytes).
    truth : list of list of float
        Parameter vectors the data were made from, for synthetic data only.
    groups : list of int
        For made data: the distribution that each client's rows come from, training clients
        first; empty when unknown. Training does not use it: it is there to compare with what
        was found.
    provenance, licence : str
        Where the data come from and what may be done with them.
    """

    # As it stands in manifest.json.
    model_config = ConfigDict(alias_generator=None)
    error = FederationError
    source: ClassVar[str] = "the manifest"

    name: str
    clients: int = Field(ge=1)
    split: dict[str, int]
    model: str = ""
    loss: str = ""
    frozen: str = ""
    local: str = ""
    units: dict[str, Any] = Field(default_factory=dict)
    feature_scale: float = Field(1.0, allow_inf_nan=False)
    truth: list[list[float]] = Field(default_factory=list)
    groups: list[int] = Field(default_factory=list)
    provenance: str = ""
    licence: str = ""

    @property
    def train(self) -> int:
        """Number of training clients."""
        return self.split["train"]

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        split, groups = self.split, self.groups
        if set(split) != {"train", "validation"} or min(split.values()) < 0:
            raise ValueError(f'"split" must be {{"train": a, "validation": b}}, got {split!r}')
        if split["train"] + split["validation"] != self.clients:
            raise ValueError(f"split {split} does not add up to {self.clients} clients")
        if len(groups) not in (0, self.clients):
            raise ValueError(
                f'"groups" must list a group for each of the {self.clients} clients, or none, got {len(groups)}'
            )
        if groups and min(groups) < 0:
            raise ValueError(f'"groups" must hold whole numbers from 0 on, got {min(groups)}')
        return self

    @classmethod
    def read(cls, raw: Any, file: Path) -> Self:
        """Check what a file says and return it; the file is named in errors."""
        if not isinstance(raw, dict):
            raise FederationError(f"{file}: the manifest must be a JSON object")
        return cls.parse(raw, str(file))
