"""Import arrays, or a folder of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from PIL import Image, UnidentifiedImageError

from umbel.data.data import as_array
from umbel.data.importers.client_data import ClientData, Partitioner, names_dealt, split_into_clients
from umbel.protocol.errors import DatasetError
from umbel.protocol.plugins import trust

_CHANNELS = (1, 3, 4)
"""Channels of images: grey, colour, colour with transparency."""


def from_arrays(
    features: ArrayLike,
    targets: ArrayLike | None,
    *,
    client: ArrayLike | Partitioner,
    tokens: int | bool | None = None,
    classes: Sequence[str] = (),
    channels: Literal["", "first", "last", "none"] = "",
    model: str = "",
    loss: str = "",
    **options: Any,
) -> ClientData:
    """Split arrays into clients.

    Parameters
    ----------
    features : array, shape (rows, \\*feature shape)
        Numbers, booleans or tokens. Bytes of three dimensions or more are images: a model sees them
        divided by 255. Images are stored as (rows, channels, height, width); the shapes (rows, height, width)
        and (rows, height, width, channels) are converted.
    targets : array, shape (rows,) or (rows, outputs)
        Numbers, classes or booleans. Classes are integers from 0, or texts. A single boolean becomes a label
        of -1 or 1; booleans in vectors become the numbers 0 and 1. None for sequences of tokens: each token's
        target is then the next token.
    client : array, shape (rows,), or Partitioner
        The client of each row, or a partitioner that assigns rows to clients.
    tokens : int or bool, optional
        For integer features: the size of the vocabulary, or True to use the largest token found. Tokens
        stay integers. False if the features are numbers.
    classes : sequence of str
        Names of the classes, for integer targets.
    channels : str
        For images: whether channels come ``first`` or ``last``, if the shape leaves that open, or ``none``
        if numbers of shape (rows, height, width) are images.
    model, loss : str
        As in a manifest; by default a model and a loss that suit the target.
    **options
        ``validation`` and ``test``, each a share of the clients or a list of names; ``seed`` of that
        split; ``name`` and other entries of the manifest.

    Raises
    ------
    DatasetError
        If the arrays do not fit each other, or the meaning of integers is unclear.
    """
    trust(model, loss, options.get("metric"))
    x = _numbers(as_array(features, "features"), tokens)
    entries: dict[str, Any] = {}
    notes: list[str] = []
    if not tokens:
        x, notes = _channels_first(x, channels)
    if x.dtype == np.uint8 and x.ndim >= 3:
        entries["feature_scale"] = 1 / 255
    elif x.dtype.kind in "iu" and tokens is not None and tokens is not False:
        entries["tokens"] = int(x.max()) + 1 if tokens is True else int(tokens)
        if tokens is True:
            notes.append(f"The vocabulary of {entries['tokens']} tokens was measured over all clients' rows.")
    if targets is None:
        if "tokens" not in entries or x.ndim != 2 or x.shape[1] < 2:
            raise DatasetError("without targets, features must be sequences of two tokens or more", code="data.tokens")
        x, y = x[:, :-1], x[:, 1:].astype(np.int64)
        notes.append("Each token's target is the next token; the last has none.")
        own_loss = "cross-entropy"
    else:
        raw = as_array(targets, "targets")
        if raw.dtype.kind == "U":
            raw = np.asarray(targets, object)  # an array of texts turns NaN into one
        if raw.ndim > 1 and raw.dtype.kind in "iuSUOT" and "tokens" not in entries and not model:
            of = "whole numbers" if raw.dtype.kind in "iu" else "texts"
            wrong = f"targets of shape {raw.shape} are vectors of {of}"
            fix = "give floats if they are numbers, one class a row if they are classes, or name a model"
            raise DatasetError(f"{wrong}; {fix}", code="data.vectors")
        y, own_loss, classes = labels(raw, classes)
        if raw.dtype == bool:
            kept = "-1 and 1" if raw.ndim == 1 else "the numbers 0 and 1, a vector a row"
            notes.append(f"The target's false and true are stored as {kept}, for the loss {own_loss}.")
    if isinstance(client, np.ma.MaskedArray):
        client = np.where(np.ma.getmaskarray(client), np.array(None), client.data)
    owners = names_dealt(client, y) if isinstance(client, Partitioner) else np.asarray(client, object)
    if owners.ndim != 1:
        raise DatasetError(
            f"client must name the client of each row, got shape {owners.shape}", code="data.client-column"
        )
    if not model and "tokens" not in entries:
        model = suggested_model(x.shape[1:], y, own_loss, len(classes))
        notes += _idle_classes(y, own_loss, classes)
    options = {"units": {"target": {"categories": list(classes)} if classes else {}}} | options
    return split_into_clients(x, y, owners, notes=notes, **entries, **options, model=model, loss=loss or own_loss)


def from_image_folder(
    folder: Path | str,
    *,
    client: Partitioner | None = None,
    size: tuple[int, int] | None = None,
    colour: bool | None = None,
    **options: Any,
) -> ClientData:
    """Read images as bytes, with a folder for each class.

    Parameters
    ----------
    folder : Path or str
        ``CLIENT/CLASS/IMAGE``, or ``CLASS/IMAGE`` with a partitioner.
    client : Partitioner, optional
        Assigns images to clients.
    size : (int, int), optional
        Height and width of the result; without it all images must have the same size.
    colour : bool, optional
        Whether to read images as (3, height, width) in red, green and blue, or as (1, height, width) in grey;
        by default like the first image.
    **options
        See `umbel.from_arrays`.

    Raises
    ------
    DatasetError
        If there are no images, one cannot be read or has more than 8 bits a pixel, or they differ in size.
    """
    root = Path(folder).expanduser()
    levels = "CLASS/IMAGE" if client else "CLIENT/CLASS/IMAGE"
    files = sorted(file for file in root.glob("/".join("*" * (levels.count("/") + 1))) if _is_image(file))
    if not files:
        fix = "" if client else "; or give a partitioner"
        raise DatasetError(f"{root} has no images as {levels}{fix}", code="data.no-rows")
    images: list[np.ndarray[Any, Any]] = []
    for file in files:
        try:
            with Image.open(file) as image:
                if image.mode.startswith(("I", "F")):  # a conversion would clip all above 255
                    wrong = f"{file} has more than 8 bits a pixel, and images are stored as bytes"
                    raise DatasetError(f"{wrong}; save it with 8 bits, or give arrays", code="data.bit-depth")
                colour = image.mode not in ("1", "L") if colour is None else colour
                pixels = image.convert("RGB" if colour else "L")
        except (OSError, UnidentifiedImageError) as error:
            raise DatasetError(f"{file} cannot be read as an image: {error}", code="data.unreadable") from None
        pixels = pixels if size is None else pixels.resize((size[1], size[0]))
        if images and (pixels.height, pixels.width) != images[0].shape[:2]:
            found = f"{pixels.height} x {pixels.width} and {images[0].shape[0]} x {images[0].shape[1]} pixels"
            wrong = f"{file} and {files[0]} differ in size, {found}"
            raise DatasetError(f"{wrong}; give size=(height, width)", code="data.shape")
        images.append(np.asarray(pixels))
    stacked = np.stack(images)
    features = np.ascontiguousarray(stacked.transpose(0, 3, 1, 2)) if colour else stacked
    targets = np.array([file.parent.name for file in files], dtype=object)
    owners = client or np.array([file.parent.parent.name for file in files], dtype=object)
    return from_arrays(features, targets, client=owners, **{"channels": "first"} | options)


def labels(targets: NDArray[Any], classes: Sequence[str] = ()) -> tuple[NDArray[Any], str, list[str]]:
    """Return targets as a dataset stores them, a loss that suits them, and the names of classes."""
    if targets.dtype.kind == "O":
        if len(lacking := np.flatnonzero(pd.isna(targets.ravel()))):
            text = f"target {lacking[0]}, counted from 0, is missing; fill it in, or leave out that row"
            raise DatasetError(text, code="data.missing-value")
        plain = np.array(targets.tolist())
        targets = plain if plain.dtype.kind in "biuf" else targets
    if targets.dtype.kind not in "biufUSOT":
        text = f"targets must be numbers, booleans or texts, got {targets.dtype}; convert them"
        raise DatasetError(text, code="data.not-numbers")
    if targets.dtype == bool and targets.ndim > 1:
        return targets.astype(np.float32), "mse", []
    if targets.dtype == bool:
        return (2 * targets.astype(np.int8) - 1), "log", ["false", "true"]
    if targets.dtype.kind in "USOT":
        texts = np.array([str(one) for one in targets.ravel()], dtype=object).reshape(targets.shape)
        names = list(classes) or sorted(set(texts.ravel()))
        place = {name: index for index, name in enumerate(names)}
        if strange := sorted(set(texts.ravel()) - set(place)):
            raise DatasetError(f"{strange[0]!r} is none of the classes {', '.join(names)}", code="data.classes")
        return np.vectorize(place.__getitem__, otypes=[np.int64])(texts), "cross-entropy", names
    if targets.dtype.kind in "iu":
        targets = targets.astype(np.int64)
        if targets.size and (targets.min() < 0 or (classes and targets.max() >= len(classes))):
            odd = targets.min() if targets.min() < 0 else targets.max()
            wrong = f"{odd} is not a class. Classes are integers from 0{f' to {len(classes) - 1}' if classes else ''}"
            fix = "give numbers as floats, and labels of -1 and 1 as booleans"
            raise DatasetError(f"{wrong}; {fix}", code="data.classes")
        return targets, "cross-entropy", list(classes)
    return targets.astype(np.float32), "mse", []


def suggested_model(shape: tuple[int, ...], targets: NDArray[Any], loss: str, classes: int = 0) -> str:
    """Return the smallest model that fits: a release costs privacy for each parameter."""
    if loss == "cross-entropy" and targets.ndim == 1:
        outputs = max(classes, int(targets.max(initial=0)) + 1, 2)
        if shape in ((28, 28), (1, 28, 28)) and outputs in (10, 62):
            return {10: "cnn10", 62: "cnn"}[outputs]
    else:
        outputs = 1 if targets.ndim == 1 else int(np.prod(targets.shape[1:]))
    return f"linear inputs={int(np.prod(shape))} outputs={outputs}" if targets.ndim <= 2 else ""


def _idle_classes(targets: NDArray[Any], loss: str, classes: Sequence[str]) -> list[str]:
    """Return a note about classes without rows, whose parameters need noise all the same."""
    if loss != "cross-entropy" or classes or targets.ndim > 1 or not targets.size:
        return []
    outputs, found = max(int(targets.max()) + 1, 2), len(np.unique(targets))
    if found == outputs:
        return []
    told = f"Classes with rows: {found} of the {outputs:,} from 0 to {outputs - 1}, though the model has parameters for"
    return [f"{told} each; number the classes from 0 without gaps, or give them as texts."]


def _numbers(features: NDArray[Any], tokens: int | bool | None) -> NDArray[Any]:
    """Return features as a dataset stores them: bytes of images and tokens unchanged, others as float32."""
    kind, shape = features.dtype.kind, features.shape
    if kind not in "biuf":
        wrong = f"features must be numbers, got {features.dtype}"
        raise DatasetError(f"{wrong}; for texts see umbel.from_dataframe", code="data.not-numbers")
    if features.ndim < 2:
        raise DatasetError(f"features must be rows of numbers, got shape {shape}; reshape it", code="data.shape")
    if features.dtype == np.uint8 and features.ndim >= 3 and not tokens:
        return features
    if kind in "iu" and tokens is None:
        fix = "give tokens=VOCABULARY_SIZE (or True) if they are tokens, or tokens=False if they are numbers"
        raise DatasetError(f"features are whole numbers: {fix}", code="data.tokens")
    if kind in "iu" and tokens is not False:
        return features
    if tokens and kind not in "iu":
        raise DatasetError(f"tokens must be whole numbers, got features of {features.dtype}", code="data.tokens")
    return features.astype(np.float32)


def _channels_first(features: NDArray[Any], channels: str) -> tuple[NDArray[Any], list[str]]:
    """Return images as (rows, channels, height, width), with notes; other features unchanged."""
    shape = features.shape[1:]
    if len(shape) == 2 and (features.dtype == np.uint8 or channels == "none"):
        note = f"Images of shape {shape} have no channel axis; they are stored as {(1, *shape)}."
        return features[:, None], [note]
    if len(shape) != 3:
        return features, []
    first, last = (channels == one if channels else shape[at] in _CHANNELS for one, at in (("first", 0), ("last", 2)))
    if first == last:
        wrong = f"images of shape {shape} may have their channels first or last"
        raise DatasetError(f'{wrong}; give channels="first" or channels="last"', code="data.channels")
    if first:
        return features, []
    turned = np.ascontiguousarray(np.moveaxis(features, -1, 1))
    return turned, [f"Images of shape {shape} have their channels last; they are stored as {turned.shape[1:]}."]


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in Image.registered_extensions() and not file.name.startswith(".")
