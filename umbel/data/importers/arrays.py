"""From arrays, or a folder of images, to a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, UnidentifiedImageError

from umbel.data.importers.client_data import ClientData, split_into_clients
from umbel.data.importers.partition import Partitioner
from umbel.protocol.errors import DatasetError


def from_arrays(
    features: ArrayLike,
    targets: ArrayLike | None,
    *,
    client: ArrayLike | Partitioner,
    tokens: int | bool | None = None,
    classes: Sequence[str] = (),
    model: str = "",
    loss: str = "",
    **options: Any,
) -> ClientData:
    """Split arrays into clients.

    Parameters
    ----------
    features : array, shape (rows, \\*feature shape)
        Numbers, booleans or tokens. Bytes of three dimensions or more are images: a model sees them
        divided by 255.
    targets : array, shape (rows,) or (rows, outputs)
        Numbers; or classes, as whole numbers from 0 on or as texts; or booleans, which become labels of
        -1 and 1. None for sequences of tokens: the target is then the next token, for each but the last.
    client : array, shape (rows,), or Partitioner
        The client of each row, or a partitioner that assigns rows to clients.
    tokens : int or bool, optional
        For features that are whole numbers: the size of the vocabulary, or True to take the largest
        token that there is, if they are tokens, which stay integers; False if they are numbers.
    classes : sequence of str
        Names of the classes, for targets that are whole numbers.
    model, loss : str
        As in a manifest; by default, what suits the target.
    **options
        ``validation`` and ``test``, each a share of the clients or a list of names; ``seed`` of that
        split; ``name`` and other entries of the manifest.

    Raises
    ------
    DatasetError
        When the arrays do not fit each other, or it is not clear what whole numbers are.
    """
    x = _numbers(np.asarray(features), tokens)
    entries: dict[str, Any] = {}
    notes = []
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
        notes.append("The target is the next token of each but the last.")
        own_loss = "cross-entropy"
    else:
        y, own_loss, classes = labels(np.asarray(targets), classes)
    owners = numbered(client.deal(len(x), y)) if isinstance(client, Partitioner) else np.asarray(client)
    if owners.ndim != 1:
        raise DatasetError(f"client must name each row's, got shape {owners.shape}", code="data.client-column")
    if not model and "tokens" not in entries:
        model = suggested_model(x.shape[1:], y, own_loss, len(classes))
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
    """Read images as bytes, a class a folder.

    Parameters
    ----------
    folder : Path or str
        ``CLIENT/CLASS/IMAGE``, or ``CLASS/IMAGE`` with a partitioner.
    client : Partitioner, optional
        Assigns images to clients.
    size : (int, int), optional
        Height and width to bring images to; without it they must have one size.
    colour : bool, optional
        Whether images are read as (3, height, width) of red, green and blue, or as (height, width) of
        grey; by default as the first one is.
    **options
        See `umbel.from_arrays`.

    Raises
    ------
    DatasetError
        When there are no images, one cannot be read, or they differ in size.
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
                colour = image.mode not in ("1", "L", "I;16") if colour is None else colour
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
    return from_arrays(features, targets, client=owners, **options)


def labels(targets: NDArray[Any], classes: Sequence[str] = ()) -> tuple[NDArray[Any], str, list[str]]:
    """Return targets as a dataset keeps them, the loss that suits them, and the names of classes."""
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
    """Return the smallest model that fits: what a client releases costs privacy by the parameter."""
    if loss == "cross-entropy" and targets.ndim == 1:
        outputs = max(classes, int(targets.max(initial=0)) + 1, 2)
        if shape in ((28, 28), (1, 28, 28)) and outputs in (10, 62):
            return {10: "cnn10", 62: "cnn"}[outputs]
    else:
        outputs = 1 if targets.ndim == 1 else int(np.prod(targets.shape[1:]))
    return f"linear inputs={int(np.prod(shape))} outputs={outputs}" if targets.ndim <= 2 else ""


def numbered(owners: NDArray[np.int64]) -> NDArray[Any]:
    """Return names of dealt clients that sort as their numbers do."""
    width = len(str(int(owners.max(initial=0))))
    return np.array([f"client-{one:0{width}d}" for one in owners], dtype=object)


def _numbers(features: NDArray[Any], tokens: int | bool | None) -> NDArray[Any]:
    """Return features as a dataset keeps them: bytes of images and tokens as they are, others as float32."""
    kind, shape = features.dtype.kind, features.shape
    if kind not in "biuf":
        wrong = f"features must be numbers, got {features.dtype}"
        raise DatasetError(f"{wrong}; for texts see umbel.from_dataframe", code="data.not-numbers")
    if features.ndim < 2:
        raise DatasetError(f"features must be rows of numbers, got shape {shape}; reshape it", code="data.shape")
    if features.dtype == np.uint8 and features.ndim >= 3 and not tokens:
        return features
    if kind in "iu" and tokens is None:
        fix = "say tokens=SIZE OF THE VOCABULARY (or True) if they are tokens, or tokens=False if they are numbers"
        raise DatasetError(f"features are whole numbers: {fix}", code="data.tokens")
    if kind in "iu" and tokens is not False:
        return features
    if tokens and kind not in "iu":
        raise DatasetError(f"tokens must be whole numbers, got features of {features.dtype}", code="data.tokens")
    return features.astype(np.float32)


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in Image.registered_extensions() and not file.name.startswith(".")
