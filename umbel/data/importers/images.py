"""From a folder of images to a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from umbel.data.importers.arrays import from_arrays
from umbel.data.importers.client_data import ClientData
from umbel.data.importers.partition import Partitioner
from umbel.protocol.errors import DatasetError


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
        raise DatasetError(
            f"{root} has no images as {levels}{'' if client else '; or give a partitioner'}", code="data.no-rows"
        )
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
            raise DatasetError(
                f"{file} and {files[0]} differ in size, {pixels.height} x {pixels.width} and "
                f"{images[0].shape[0]} x {images[0].shape[1]} pixels; give size=(height, width)",
                code="data.shape",
            )
        images.append(np.asarray(pixels))
    stacked = np.stack(images)
    features = np.ascontiguousarray(stacked.transpose(0, 3, 1, 2)) if colour else stacked
    targets = np.array([file.parent.name for file in files], dtype=object)
    owners = client or np.array([file.parent.parent.name for file in files], dtype=object)
    return from_arrays(features, targets, client=owners, **options)


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in Image.registered_extensions() and not file.name.startswith(".")
