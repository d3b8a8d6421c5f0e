"""The reconstruction audit: what the release of a client with one image shows of this image.

A curious server asks each client for one step on its one image, through the app's own ClientApp
and gate, and attacks what comes back (group privacy paper, Sec. 5.3 and Figure 3). It knows the
hypothesis that it sent and the step size that it asked for; a release is then the gradient, times
the step size, with noise.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from umbel import models
from umbel.data import Dataset, find_dataset, open_dataset
from umbel.models.model import Model, Parameters
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientOnNode
from umbel.protocol.errors import ConfigError, DatasetError, ModelError, NotApplicableError
from umbel.protocol.release import NoisePer
from umbel.protocol.tasks import TrainingSpec
from umbel.research.attacks.averaging import averaged
from umbel.research.attacks.behind_the_gate import Victims, write_victims
from umbel.research.attacks.dlg import deep_leakage
from umbel.research.attacks.gradients import STEP, gradients
from umbel.research.attacks.label import bias_label, label_given_image
from umbel.research.attacks.modes import Mode
from umbel.research.attacks.rank_one import invert_first_layer

SHAPE = (28, 28)
NOISE_MULTIPLIERS = (0.0, 0.001, 0.01, 0.1, 1.0, 3.0, 5.0, 10.0, 15.0)
"""The grid of the paper's Table 2 and Figure 3."""

DLG, RANK_ONE, LAST_BIAS = "DLG", "rank one", "last bias"
LOSS = "cross-entropy"

Images = NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """What is audited.

    Attributes
    ----------
    dataset : str
        Name or path.
    model : str
        A key of `models.MODELS` or ``package.module:factory``; trained under cross entropy.
    noise_multipliers : tuple of float
        nu, one after the other; the noise of a client has the same direction in all.
    per_layer : bool
        Noise each layer by itself, as in the paper, instead of the whole vector.
    images : int
        Clients that are attacked, each with one image of its own.
    restarts : int
        Starts of DLG, by turns with either misfit (`umbel.research.attacks.dlg`).
    seed : int
        Of every draw: clients, images, hypothesis, noise, starts.
    releases : int
        How often each client is asked at each noise multiplier; the mean of what it releases is attacked.
    """

    dataset: str
    model: str
    noise_multipliers: tuple[float, ...] = NOISE_MULTIPLIERS
    per_layer: bool = True
    images: int = 8
    restarts: int = 2
    seed: int = 0
    releases: int = 1


@dataclass(frozen=True)
class Secret:
    """What the attacker is after.

    Attributes
    ----------
    images : ndarray, shape (images, 28, 28)
        Pixels in [0, 1].
    labels : ndarray of int64, shape (images,)
    average : ndarray, shape (28, 28)
        The mean of the images of all other clients, the guess of who has seen no release.
    """

    images: Images
    labels: NDArray[np.int64]
    average: Images


@dataclass(frozen=True)
class Attempt:
    """What one attack made of all releases at one noise multiplier.

    Attributes
    ----------
    noise_multiplier : float
    attack : str
        `DLG`, `RANK_ONE` or `LAST_BIAS`.
    images : ndarray, shape (images, 28, 28), or None
        Pixels in [0, 1]; None for an attack on the label alone.
    labels : tuple of int
    seconds : float
        An image.
    obstacle : str
        Why the attack cannot be made here; empty if it can.
    """

    noise_multiplier: float
    attack: str
    images: Images | None = None
    labels: tuple[int, ...] = ()
    seconds: float = 0.0
    obstacle: str = ""


@dataclass(frozen=True)
class Audit:
    """A setting, the images, and every attempt, by noise multiplier and then by attack."""

    setting: Setting
    secret: Secret
    attempts: tuple[Attempt, ...]


def audit(setting: Setting) -> Audit:
    """Probe the clients at each noise multiplier and attack what they release.

    One thread computes, so that the digits do not depend on the number of cores.

    Raises
    ------
    UmbelError
        Before any work, when something about the setting cannot be; `FleetError` when the gate
        refuses, as it does where the environment holds a stricter policy.
    """
    _check_numbers(setting)
    path = Path(setting.dataset)
    path = find_dataset(str(path.absolute()) if path.exists() else setting.dataset)
    dataset = open_dataset(path)
    model = models.load(setting.model, LOSS)
    check_images(path, dataset, model)
    if setting.images > dataset.manifest.train:
        raise DatasetError(
            f"{path}: {setting.images} images asked for, one a client, but there are {dataset.manifest.train} "
            "training clients; ask for fewer"
        )
    torch.set_num_threads(1)
    rows, secret = _choose(setting, dataset)
    hypothesis = model.initial(setting.seed)
    attempts: list[Attempt] = []
    with tempfile.TemporaryDirectory(prefix="umbel-audit-") as scratch:
        derived = Path(scratch) / "one-image-each"
        write_victims(derived, dataset, list(rows[:, None]))
        noise_per = NoisePer.LAYER if setting.per_layer else NoisePer.VECTOR
        for nu in track(setting.noise_multipliers, "noise multipliers", console=Console(stderr=True), transient=True):
            # The noise of a client has the same direction at all noise multipliers.
            victims = Victims(derived, {}, setting.seed, {"model": setting.model, "loss": LOSS})
            mode = Mode("", nu, noise_per=noise_per)
            shown, _ = averaged(partial(_probe, victims, mode, hypothesis, setting.images), setting.releases)
            attempts += _attack(setting, model, hypothesis, shown, nu)
    return Audit(setting, secret, tuple(attempts))


def _check_numbers(setting: Setting) -> None:
    """Raise where a number cannot be."""
    for nu in setting.noise_multipliers:
        TrainingSpec(1, tuple(map(ClientOnNode, range(setting.images))), 1, STEP, 1, nu)
    for name in ("restarts", "releases"):
        if getattr(setting, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(setting, name)}")


def _probe(victims: Victims, mode: Mode, hypothesis: Arrays, images: int) -> list[Parameters]:
    """Return the gradient that each client's release shows."""
    return gradients(victims, mode, hypothesis, [[client] for client in range(images)])


def check_images(path: Path, dataset: Dataset, model: Model) -> None:
    """Raise before any work where images, classes and model do not fit together."""
    features, targets = dataset.features, dataset.targets
    if features.shape[1:] != SHAPE:
        raise DatasetError(f"{path}: its features are of shape {features.shape[1:]}; give one of {SHAPE} images")
    if targets.dtype.kind not in "iu" or targets.ndim != 1:
        raise DatasetError(
            f"{path}: its targets are {targets.dtype} of shape {targets.shape[1:]}, no classes; "
            "give a dataset for classification"
        )
    try:
        with torch.inference_mode():
            classes = model.module(torch.zeros(1, *SHAPE)).shape[-1]
    except (RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"model {model.name!r} does not take {SHAPE} images: {error}") from None
    if targets.min() < 0 or targets.max() >= classes:
        raise ModelError(
            f"model {model.name!r} knows the classes 0 to {classes - 1}, {path} has {targets.min()} to "
            f"{targets.max()}; name a model with as many outputs"
        )


def _choose(setting: Setting, dataset: Dataset) -> tuple[NDArray[np.int64], Secret]:
    """Draw clients and one row of each."""
    generator = np.random.default_rng(setting.seed)
    chosen = generator.permutation(dataset.manifest.train)[: setting.images]
    first = dataset.offsets[chosen]
    rows: NDArray[np.int64] = generator.integers(first, dataset.offsets[chosen + 1])
    scale = dataset.manifest.feature_scale
    images = np.asarray(dataset.features[rows], np.float64) * scale
    if images.min() < 0 or images.max() > 1:
        raise DatasetError(
            f"{dataset.manifest.name}: pixels lie between {images.min():.4g} and {images.max():.4g}; "
            "set feature_scale in its manifest so that they lie in [0, 1]"
        )
    others = np.ones(len(dataset.features), bool)
    for client_ in chosen:
        others[dataset.offsets[client_] : dataset.offsets[client_ + 1]] = False
    average = dataset.features[others].mean(0, dtype=np.float64) * scale if others.any() else np.zeros(SHAPE)
    return rows, Secret(images, np.asarray(dataset.targets[rows], np.int64), average)


def _attack(
    setting: Setting, model: Model, hypothesis: Arrays, shown: list[Parameters], noise_multiplier: float
) -> Iterator[Attempt]:
    """Yield the attempt of each attack on what the clients' releases show."""
    start = {name: torch.from_numpy(value) for name, value in hypothesis.items()}

    def leak(gradient: Parameters) -> tuple[Images, int]:
        # The same starts everywhere, so that noise multipliers and images differ in nothing else.
        generator = torch.Generator().manual_seed(setting.seed)
        match = deep_leakage(model, start, gradient, SHAPE, generator, setting.restarts)
        return match.image.clamp(0, 1).numpy(), int(match.label.argmax())

    def invert(gradient: Parameters) -> tuple[Images, int]:
        image = invert_first_layer(model, start, gradient, SHAPE)
        return image.double().numpy(), label_given_image(model, start, gradient, image)

    def read(gradient: Parameters) -> tuple[None, int]:
        return None, bias_label(model, start, gradient, SHAPE)

    attacks: dict[str, Callable[[Parameters], tuple[Images | None, int]]] = {
        DLG: leak,
        RANK_ONE: invert,
        LAST_BIAS: read,
    }
    for name, attack in attacks.items():
        began = time.perf_counter()
        try:
            made = [attack(gradient) for gradient in shown]
        except NotApplicableError as error:
            yield Attempt(noise_multiplier, name, obstacle=str(error))
            continue
        images = [image for image, _ in made if image is not None]
        yield Attempt(
            noise_multiplier,
            name,
            np.stack(images) if images else None,
            tuple(label for _, label in made),
            (time.perf_counter() - began) / len(made),
        )
