"""From arrays to a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
            span = f"from 0 to {len(classes) - 1}" if classes else "from 0"
            raise DatasetError(
                f"{odd} is not a class. Classes are integers {span}; give numbers as floats, and labels of -1 and 1 "
                "as booleans",
                code="data.classes",
            )
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
        raise DatasetError(
            f"features must be numbers, got {features.dtype}; for texts see umbel.from_dataframe",
            code="data.not-numbers",
        )
    if features.ndim < 2:
        raise DatasetError(f"features must be rows of numbers, got shape {shape}; reshape it", code="data.shape")
    if features.dtype == np.uint8 and features.ndim >= 3 and not tokens:
        return features
    if kind in "iu" and tokens is None:
        raise DatasetError(
            "features are whole numbers: say tokens=SIZE OF THE VOCABULARY (or True) if they are tokens, which stay "
            "integers, or tokens=False if they are numbers",
            code="data.tokens",
        )
    if kind in "iu" and tokens is not False:
        return features
    if tokens and kind not in "iu":
        raise DatasetError(f"tokens must be whole numbers, got features of {features.dtype}", code="data.tokens")
    return features.astype(np.float32)
