"""The rows of a dataset, and checks against the format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from umbel.data.schema import Entries, Finite, Schema, repeated
from umbel.protocol.errors import DatasetError
from umbel.protocol.plugins import distrust

_SMALLEST_SCALE, _LARGEST_SCALE = 1e-38, 3e38  # range of 32-bit numbers
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
        if not _SMALLEST_SCALE <= abs(self.feature_scale) <= _LARGEST_SCALE:
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
        if type(scale) not in (int, float) or not 0 < abs(scale) <= _LARGEST_SCALE:
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


HELD_OUT = 5
"""Every fifth row of a newcomer is held out to score it."""
_SCAN_ROWS = 1 << 16
_LARGEST, _LARGEST_WHOLE = float(np.finfo(np.float32).max), np.iinfo(np.int64).max


@dataclass(frozen=True)
class Dataset:
    """An opened dataset.

    Attributes
    ----------
    manifest : Manifest
    features : ndarray, shape (rows, \\*feature shape)
        Inputs, the rows of a client together; memory-mapped for a folder.
    targets : ndarray, shape (rows,) or (rows, outputs)
        Outputs, integers for classes.
    offsets : ndarray of int64, shape (clients + 1,)
        Client ``i`` owns rows ``offsets[i]`` to ``offsets[i + 1]``.
    names : sequence of str
        The name of each client at its data; empty if unknown. No message holds it.

    Booleans are stored as 0 and 1.
    """

    manifest: Manifest
    features: NDArray[Any]
    targets: NDArray[Any]
    offsets: NDArray[np.int64]
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        for what in ("features", "targets"):
            array = getattr(self, what)
            if isinstance(array, np.ndarray) and array.dtype == bool:
                object.__setattr__(self, what, array.view(np.uint8))
        if isinstance(self.offsets, np.ndarray) and self.offsets.dtype.kind == "u":  # NumPy adds no signed integers
            object.__setattr__(self, "offsets", self.offsets.astype(np.int64))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of rows of each client."""
        return np.diff(self.offsets)

    def client(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the stored features and targets of one client, without a copy."""
        rows = slice(self.offsets[index], self.offsets[index + 1])
        return self.features[rows], self.targets[rows]


def check(dataset: Dataset, source: Path) -> None:
    """Raise unless shapes, offsets and values follow the format; `source` is named in errors."""
    manifest, offsets = dataset.manifest, dataset.offsets
    features, targets = dataset.features, dataset.targets
    if not isinstance(manifest, Manifest):
        wrong = f"the manifest is of type {type(manifest).__name__}"
        raise DatasetError(f"{source}: {wrong}; make it by umbel.data.Manifest", code="data.manifest")
    for name, array in (("features", features), ("targets", targets), ("offsets", offsets)):
        if not isinstance(array, np.ndarray):
            wrong = f"{name} must be a NumPy array, got {type(array).__name__}"
            raise DatasetError(f"{source}: {wrong}; convert it by numpy.asarray", code="data.not-numbers")
        _refuse_masked(array, f"{source}: {name}")
    if offsets.dtype.kind not in "iu" or offsets.shape != (manifest.clients + 1,):
        wanted, found = f"{manifest.clients + 1} integers (clients + 1)", f"{offsets.dtype} of shape {offsets.shape}"
        raise DatasetError(f"{source}: offsets must be {wanted}, got {found}", code="data.offsets")
    shapes = f"features {features.shape} and targets {targets.shape}"
    if features.ndim < 1 or targets.ndim < 1 or len(features) != len(targets):
        raise DatasetError(f"{source}: {shapes} differ in their number of rows", code="data.lengths")
    if offsets[0] != 0 or offsets[-1] != len(features):
        found = f"{offsets[0]} to {offsets[-1]}"
        raise DatasetError(f"{source}: offsets run from {found}, not 0 to {len(features)} rows", code="data.offsets")
    if len(bad := np.flatnonzero(offsets[1:] <= offsets[:-1])):
        span = f"offsets {offsets[bad[0]]} to {offsets[bad[0] + 1]}"
        raise DatasetError(f"{source}: client {bad[0]} has no rows ({span})", code="data.empty-client")
    if 0 in (*features.shape[1:], *targets.shape[1:]):
        raise DatasetError(f"{source}: rows are empty in {shapes}", code="data.empty-rows")
    if len(dataset.names) not in (0, manifest.clients):
        found = f"{len(dataset.names)} names for {manifest.clients} clients"
        raise DatasetError(f"{source}: {found}; name each or none", code="data.names")
    if no_texts := [name for name in dataset.names if not isinstance(name, str)]:
        wrong = f"the name {no_texts[0]!r} of a client is no text"
        raise DatasetError(f"{source}: {wrong}; convert names by str", code="data.names")
    if twice := repeated(dataset.names):
        raise DatasetError(f"{source}: two clients are called {twice[0]!r}; rename one", code="data.twice")
    for name, array, scale in (("features", features, manifest.feature_scale), ("targets", targets, 1.0)):
        if array.dtype.kind not in "iuf":
            fix = "umbel.from_dataframe numbers categories"
            raise DatasetError(f"{source}: {name} must be numbers, got {array.dtype}; {fix}", code="data.not-numbers")
        if (row := _first_bad_row(array, scale)) is not None:
            place = f"{name} of client {int(np.searchsorted(offsets, row, side='right')) - 1}, row {row}"
            raise DatasetError(f"{source}: {place}, are not finite or too large; repair them", code="data.not-finite")
    if manifest.tokens:
        if features.dtype.kind not in "iu":
            raise DatasetError(f"{source}: tokens must be integers, got {features.dtype}", code="data.tokens")
        for start, part in _parts(features):
            strange = ((part < 0) | (part >= manifest.tokens)).reshape(len(part), -1).any(axis=1)
            if strange.any():
                wrong = f"row {start + int(strange.argmax())} has a token outside 0 to {manifest.tokens - 1}"
                raise DatasetError(f"{source}: {wrong}; set tokens to the vocabulary's size", code="data.tokens")


def as_array(values: ArrayLike, name: str) -> NDArray[Any]:
    """Return values as an array; `DatasetError` for values that are none, or that are masked."""
    _refuse_masked(values, name)
    try:
        return np.asarray(values)
    except Exception as error:  # lists of unequal lengths, or tensors with gradients
        told = " ".join(str(error).split())
        raise DatasetError(f"{name} are no array: {told}", code="data.not-numbers") from None


def _refuse_masked(values: ArrayLike, name: str) -> None:
    if np.ma.is_masked(values):
        text = f"{name} have masked values, which are missing; fill them in, or leave out their rows"
        raise DatasetError(text, code="data.missing-value")


def offsets_of(lengths: Iterable[int]) -> NDArray[np.int64]:
    """Return the offsets of clients with the given numbers of rows."""
    return np.concatenate([[0], np.cumsum(list(lengths), dtype=np.int64)]).astype(np.int64)


def held_out(lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of the rows that score a newcomer and that it does not train on, for clients of given lengths.

    These are every fifth row; of a client with fewer than five rows the last.
    """
    position = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    last = np.repeat(np.where(lengths < HELD_OUT, lengths - 1, -1), lengths)
    kept: NDArray[np.bool_] = (position % HELD_OUT == HELD_OUT - 1) | (position == last)
    return kept


def _parts(array: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield a bounded number of rows at a time, with the number of their first row."""
    for start in range(0, len(array), _SCAN_ROWS):
        yield start, array[start : start + _SCAN_ROWS]


def _first_bad_row(array: NDArray[Any], scale: float) -> int | None:
    """Return the first row with a value that a model cannot take: scaled 32-bit numbers, or signed 64-bit classes."""
    if array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        if limits.max <= _LARGEST_WHOLE and max(-limits.min, limits.max) * abs(scale) <= _LARGEST:
            return None
    for start, part in _parts(array):
        with np.errstate(over="ignore"):
            sound: NDArray[np.bool_] = np.isfinite(part.astype(np.float32, copy=False) * np.float32(scale))
        if array.dtype.kind == "u":
            sound &= part <= _LARGEST_WHOLE
        if not sound.all():
            rows = sound.reshape(len(sound), -1).all(axis=1)
            return start + int(rows.argmin())
    return None
