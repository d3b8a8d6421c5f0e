"""Whom the attacks on images attack: clients in sites of ten, and what the attacker has besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from umbel import models
from umbel.data import Dataset
from umbel.models.model import Model
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import DatasetError
from umbel.research.attacks.behind_the_gate import Victims, write_victims
from umbel.research.attacks.modes import SITE, Mode
from umbel.research.attacks.reconstruct import LOSS, Images

_KNOWN = 64  # rows of others that the attacker has


@dataclass(frozen=True)
class Setting:
    """What is attacked.

    Attributes
    ----------
    dataset : str
        Name or path of one of 28x28 images.
    model, smooth_model : str
        Of all attacks, and of DLG, for which it should be twice differentiable.
    images : int
        Clients that are attacked for an image.
    seed : int
        Of every draw.
    attacks : tuple of str
        Keys of `ATTACKS`. Each finds the same whatever the others are.
    """

    dataset: str
    model: str = "cnn"
    smooth_model: str = "lenet"
    images: int = 8
    seed: int = 0
    attacks: tuple[str, ...] = ()


class Scene:
    """Victims in sites of ten, and what the attacker has besides."""

    def __init__(self, setting: Setting, dataset: Dataset, scratch: Path) -> None:
        self.setting, self.dataset, self._scratch = setting, dataset, scratch
        # Rows of victims are drawn from one half of the training clients, those of the attacker from the others.
        train = dataset.manifest.train
        self._half, end = int(dataset.offsets[train // 2]), int(dataset.offsets[train])
        if min(self._half, end - self._half) < _KNOWN:
            raise DatasetError(f"the attacks take {2 * _KNOWN} training rows at least, {_KNOWN} in each half")
        own = self.generator("known").permutation(np.arange(self._half, end))[:_KNOWN]
        self.known, self.known_labels = self.images(own), self.labels(own)
        self._written: dict[int, tuple[Path, NDArray[np.int64]]] = {}
        self.model, self.smooth = (models.load(name, LOSS) for name in (setting.model, setting.smooth_model))

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the stream of draws for a purpose, which does not depend on what else is drawn."""
        return np.random.default_rng([self.setting.seed, *purpose.encode()])

    def images(self, rows: NDArray[np.int64]) -> torch.Tensor:
        scale = self.dataset.manifest.feature_scale
        return torch.from_numpy(np.asarray(self.dataset.features[rows], np.float32) * np.float32(scale))

    def labels(self, rows: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.dataset.targets[rows], np.int64))

    def draw(self, purpose: str, clients: int, rows: int) -> NDArray[np.int64]:
        """Return rows (clients, rows), different ones as long as there are some."""
        order = self.generator(purpose).permutation(self._half)
        return np.resize(order, clients * rows).reshape(clients, rows)

    def folder(self, name: str, rows: Sequence[NDArray[np.int64]]) -> Path:
        """Write clients with these rows."""
        folder = self._scratch / name
        write_victims(folder, self.dataset, rows)
        return folder

    def victims(self, folder: Path, mode: Mode, model: Model) -> Victims:
        """Return clients of a site that lets this mode through."""
        return Victims(folder, mode.policy, self.setting.seed, {"model": model.name, "loss": LOSS})

    @cached_property
    def average(self) -> Images:
        """The mean of the images that the attacker knows, his guess without a release."""
        return self.known.double().mean(dim=0).numpy()

    def start(self, model: Model) -> Arrays:
        """Return an honest hypothesis."""
        return model.initial(self.setting.seed)

    def single_images(self, share: int = 1) -> tuple[list[range], NDArray[np.int64], Path]:
        """Return sites, the rows of their first clients, and a folder of clients of one image each.

        Of one in `share` sites, for a dear attack.
        """
        rows, folder = self._singles
        count = -(-self.setting.images // share)
        return [range(i * SITE, (i + 1) * SITE) for i in range(count)], rows[: count * SITE : SITE, 0], folder

    def batches(self, sites: int, size: int) -> tuple[Path, NDArray[np.int64]]:
        """Return a folder of clients of so many images each, and their rows."""
        if size not in self._written:
            rows = self.draw(f"batches of {size}", sites * SITE, size)
            self._written[size] = self.folder(f"batches-{size}", list(rows)), rows
        return self._written[size]

    @property
    def single_rows(self) -> NDArray[np.int64]:
        """The rows of the clients of one image each, site after site."""
        return self._singles[0][:, 0]

    @cached_property
    def _singles(self) -> tuple[NDArray[np.int64], Path]:
        rows = self.draw("singles", self.setting.images * SITE, 1)
        return rows, self.folder("singles", list(rows))
