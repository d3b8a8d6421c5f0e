"""What a federation says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from protocol.errors import FederationError


@dataclass(frozen=True)
class Manifest:
    """What a federation says of itself.

    Attributes
    ----------
    name : str
        Name of the data.
    model, loss : str
        The model and the loss it was made for (see `models.load`); empty when it has none.
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

    name: str
    clients: int
    split: dict[str, int]
    model: str = ""
    loss: str = ""
    units: dict[str, Any] = field(default_factory=dict)
    feature_scale: float = 1.0
    truth: list[list[float]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    provenance: str = ""
    licence: str = ""

    @property
    def train(self) -> int:
        """Number of training clients."""
        return self.split["train"]

    @classmethod
    def parse(cls, raw: Any, source: Path) -> Manifest:
        """Check a decoded manifest and return it; `source` is named in errors."""
        if not isinstance(raw, dict):
            raise FederationError(f"{source}: the manifest must be a JSON object")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(raw) - known):
            raise FederationError(f"{source}: unknown manifest entries {unknown}; allowed: {sorted(known)}")
        if missing := sorted({"name", "clients", "split"} - set(raw)):
            raise FederationError(f"{source}: the manifest lacks {missing}; write it again with the recipe")
        manifest = cls(**raw)
        split = manifest.split
        if not isinstance(split, dict) or set(split) != {"train", "validation"}:
            raise FederationError(f'{source}: "split" must be {{"train": a, "validation": b}}, got {split!r}')
        counts = (manifest.clients, split["train"], split["validation"])
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise FederationError(f"{source}: client counts must be whole numbers, got {counts}")
        if manifest.clients < 1:
            raise FederationError(f"{source}: the federation has no clients; build it from a file that has rows")
        if split["train"] + split["validation"] != manifest.clients:
            raise FederationError(f"{source}: split {split} does not add up to {manifest.clients} clients")
        groups = manifest.groups
        if not isinstance(groups, list) or len(groups) not in (0, manifest.clients):
            count = len(groups) if isinstance(groups, list) else repr(groups)
            raise FederationError(
                f'{source}: "groups" must list a group for each of the {manifest.clients} clients, or none, got {count}'
            )
        # Not isinstance: JSON's true would pass for 1.
        if odd := [group for group in groups if type(group) is not int or group < 0]:
            raise FederationError(f'{source}: "groups" must hold whole numbers from 0 on, got {odd[0]!r}')
        return manifest
