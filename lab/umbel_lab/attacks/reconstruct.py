"""The reconstruction audit: how much the release of a client with one image reveals of this image.

A curious server asks each client for one step on its one image, through the app's own ClientApp and gate, and attacks
the release (group privacy paper, Sec. 5.3 and Figure 3). It knows the hypothesis and the step size that it sent; a
release is then the gradient, times the step size, with noise.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from umbel import models
from umbel.data import Dataset, find_typed, open_dataset
from umbel.models.model import Model, Parameters
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientOnNode
from umbel.protocol.errors import ConfigError, DatasetError, ModelError, NotApplicableError
from umbel.protocol.release import NoisePer
from umbel.protocol.tasks import TrainingSpec
from umbel_lab.attacks import quality
from umbel_lab.attacks.dlg import deep_leakage
from umbel_lab.attacks.layers import bias_label, label_given_image
from umbel_lab.attacks.rank_one import invert_first_layer
from umbel_lab.attacks.victims import STEP, Mode, Victims, averaged, gradients, write_victims
from umbel_lab.output import Page, Row, Section, figure

SHAPE = (28, 28)
NOISE_MULTIPLIERS = (0.0, 0.001, 0.01, 0.1, 1.0, 3.0, 5.0, 10.0, 15.0)
"""The grid of the paper's Table 2 and Figure 3."""

DLG, RANK_ONE, LAST_BIAS = "DLG", "rank one", "last bias"
LOSS = "cross-entropy"

Images = NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """The subject of an audit: a dataset, and a model that is trained under cross entropy.

    The noise of a client has the same direction at all noise multipliers; `per_layer` means separate noise on each
    layer, as in the paper, instead of on the whole vector. `images` is the number of attacked images, each of another
    client; DLG has `restarts` starts, and the mean of `releases` releases of each client is attacked.
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
    """The target of the attacker: images (images, 28, 28), pixels in [0, 1], and their labels (images,).

    `average` (28, 28) is the mean of the images of all other clients, the guess without a release.
    """

    images: Images
    labels: NDArray[np.int64]
    average: Images


@dataclass(frozen=True)
class Attempt:
    """The result of one attack, `DLG`, `RANK_ONE` or `LAST_BIAS`, on all releases at one noise multiplier.

    The `images` (images, 28, 28) have pixels in [0, 1]; None for an attack only on the label. `seconds` are for one
    image. The `obstacle` says why the attack is impossible here; empty if it is possible.
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
    """Ask the clients at each noise multiplier and attack their releases.

    One thread computes, so that the digits do not depend on the number of cores. Raises `UmbelError` before any work if
    the setting is invalid, and `FleetError` if the gate refuses, as it does if the environment sets a stricter policy.
    """
    for nu in setting.noise_multipliers:
        TrainingSpec(1, tuple(map(ClientOnNode, range(setting.images))), 1, STEP, 1, nu)
    for name in ("images", "restarts", "releases"):
        if getattr(setting, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(setting, name)}", code="config.out-of-range")
    path = find_typed(setting.dataset)
    dataset = open_dataset(path)
    model = models.load(setting.model, LOSS)
    check_images(path, dataset, model)
    if setting.images > dataset.manifest.train:
        raise DatasetError(
            f"{path}: ask for fewer images than {setting.images}; there are {dataset.manifest.train} training clients "
            "of one image each",
            code="data.too-few-clients",
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
            mode, clients = Mode("", nu, noise_per=noise_per), [[client] for client in range(setting.images)]
            shown, _ = averaged(partial(gradients, victims, mode, hypothesis, clients), setting.releases)
            attempts += _attack(setting, model, hypothesis, shown, nu)
    return Audit(setting, secret, tuple(attempts))


def check_images(path: Path, dataset: Dataset, model: Model) -> None:
    """Raise before any work if images, classes and model do not fit together."""
    features, targets = dataset.features, dataset.targets
    if features.shape[1:] != SHAPE:
        raise DatasetError(
            f"{path}: features of shape {features.shape[1:]}, not {SHAPE} images", code="data.not-images"
        )
    if targets.dtype.kind not in "iu" or targets.ndim != 1:
        text = f"{path}: targets are {targets.dtype} of shape {targets.shape[1:]}, not classes"
        raise DatasetError(text, code="data.not-classes")
    try:
        with torch.inference_mode():
            classes = model.module(torch.zeros(1, *SHAPE)).shape[-1]
    except (RuntimeError, TypeError, ValueError) as error:
        text = f"model {model.name!r} does not take {SHAPE} images: {error}"
        raise ModelError(text, code="model.input-shape") from None
    if targets.min() < 0 or targets.max() >= classes:
        raise ModelError(
            f"model {model.name!r} knows the classes 0 to {classes - 1}, {path} has {targets.min()} to "
            f"{targets.max()}; name a model with as many outputs",
            code="model.too-few-classes",
        )


def _choose(setting: Setting, dataset: Dataset) -> tuple[NDArray[np.int64], Secret]:
    """Draw clients and one row of each."""
    generator = np.random.default_rng(setting.seed)
    chosen = generator.permutation(dataset.manifest.train)[: setting.images]
    rows: NDArray[np.int64] = generator.integers(dataset.offsets[chosen], dataset.offsets[chosen + 1])
    scale = dataset.manifest.feature_scale
    images = np.asarray(dataset.features[rows], np.float64) * scale
    if images.min() < 0 or images.max() > 1:
        raise DatasetError(
            f"{dataset.manifest.name}: pixels lie between {images.min():.4g} and {images.max():.4g}; "
            "set feature_scale in its manifest so that they lie in [0, 1]",
            code="data.pixel-range",
        )
    others = np.ones(len(dataset.features), bool)
    for client in chosen:
        others[dataset.offsets[client] : dataset.offsets[client + 1]] = False
    average = dataset.features[others].mean(0, dtype=np.float64) * scale if others.any() else np.zeros(SHAPE)
    return rows, Secret(images, np.asarray(dataset.targets[rows], np.int64), average)


def _attack(
    setting: Setting, model: Model, hypothesis: Arrays, shown: list[Parameters], noise_multiplier: float
) -> Iterator[Attempt]:
    """Yield the result of each attack on the clients' releases."""
    start = {name: torch.from_numpy(value) for name, value in hypothesis.items()}

    def leak(gradient: Parameters) -> tuple[Images, int]:
        # The same starts everywhere, so that noise multipliers and images are the only differences.
        generator = torch.Generator().manual_seed(setting.seed)
        match = deep_leakage(model, start, gradient, SHAPE, generator, setting.restarts)
        return match.image.clamp(0, 1).numpy(), int(match.label.argmax())

    def invert(gradient: Parameters) -> tuple[Images, int]:
        image = invert_first_layer(model, start, gradient, SHAPE)
        return image.double().numpy(), label_given_image(model, start, gradient, image)

    def read(gradient: Parameters) -> tuple[None, int]:
        return None, bias_label(model, start, gradient, SHAPE)

    attacks: dict[str, Callable[[Parameters], tuple[Images | None, int]]]
    attacks = {DLG: leak, RANK_ONE: invert, LAST_BIAS: read}
    for name, attack in attacks.items():
        began = time.perf_counter()
        try:
            made = [attack(gradient) for gradient in shown]
        except NotApplicableError as error:
            yield Attempt(noise_multiplier, name, obstacle=error.text)
            continue
        images = [image for image, _ in made if image is not None]
        labels, seconds = tuple(label for _, label in made), (time.perf_counter() - began) / len(made)
        yield Attempt(noise_multiplier, name, np.stack(images) if images else None, labels, seconds)


AVERAGE = "mean image"
"""The baseline: the score of the mean of other clients' images, without any release."""

_NOISE = "noise multiplier"
_FORMATS = {"PSNR": ".1f", "SSIM": ".2f", "correlation": ".2f", "label": ".2f", **dict.fromkeys(quality.VERDICTS, "d")}


def rows_of(audit: Audit) -> list[dict[str, Any]]:
    """Return a row for the baseline, then one for each attempt.

    Means over images of PSNR, SSIM and correlation, the share of labels that were read correctly, and the number of
    images by verdict (`quality.verdict`); None if an attack has no such number.
    """
    secret = audit.secret
    mean_images = np.broadcast_to(secret.average, secret.images.shape)
    rows = [{_NOISE: None, "attack": AVERAGE, **_scores(mean_images, secret.images)}]
    for one in audit.attempts:
        label = None if one.obstacle else float(np.mean(secret.labels == np.array(one.labels)))
        scores = _scores(one.images, secret.images)
        rows.append({_NOISE: one.noise_multiplier, "attack": one.attack, **scores, "label": label})
    return rows


def _scores(images: Images | None, originals: Images) -> dict[str, Any]:
    """Compare images with their originals, both (images, 28, 28)."""
    if images is None:
        return dict.fromkeys(_FORMATS)
    verdicts = [*map(quality.verdict, images, originals)]
    measures = (quality.psnr, quality.ssim, quality.correlation)
    means = [float(np.mean([*map(measure, images, originals)])) for measure in measures]
    return dict(zip(_FORMATS, [*means, None, *map(verdicts.count, quality.VERDICTS)], strict=True))


def _decibels(row: Row) -> str:
    if row["PSNR"] is None:
        return "not applicable" if row["label"] is None else ""
    return f"{row['PSNR']:.1f}"


def page(audit: Audit) -> Page:
    """Return the table, and the words under it."""
    setting, rows = audit.setting, rows_of(audit)
    columns: dict[str, str | Callable[[Row], str]] = {"ν": f"{_NOISE}:g", "attack": "attack", "PSNR": _decibels}
    columns |= {name: f"{name}:{how}" for name, how in _FORMATS.items() if name != "PSNR"}
    table = Section.of("", "", columns, rows)
    noise = "each layer by itself" if setting.per_layer else "the whole vector"
    title = (
        f"Reconstruction from one step on one image: {setting.dataset}, {setting.model}, {setting.images} images, "
        f"noise on {noise}, seed {setting.seed}"
        + (f", means of {setting.releases} releases" if setting.releases > 1 else "")
    )
    said = notes(rows) + sorted({f"{one.attack}: {one.obstacle}." for one in audit.attempts if one.obstacle})
    seconds: dict[str, list[float]] = {}
    for one in audit.attempts:
        seconds.setdefault(one.attack, []).append(one.seconds)
    took = "Seconds an image: " + ", ".join(f"{name} {np.mean(own):.2g}" for name, own in seconds.items()) + "."
    return Page(title, [table, Section("", "\n\n".join(said))], rows, draw=partial(draw, audit), aside=took)


def notes(rows: Sequence[Row]) -> list[str]:
    """Return the sentences below the table; `rows` are those of `rows_of`."""
    baseline = rows[0]
    images = sum(baseline[verdict] for verdict in quality.VERDICTS)
    return [
        f"full: PSNR of at least {quality.FULL_PSNR:g} dB; partial: correlation of at least "
        f"{quality.PARTIAL_CORRELATION:g}. The mean image of other clients, which needs no release, is partial for "
        f"{baseline['partial']} of {images}: only what scores above it is read off a release. DLG needs a network that "
        "is twice differentiable, so on others (ReLU, max pooling) it fails without any noise as well.",
        "An attack that fails proves nothing: not that a release hides its image, only that this attack, made like "
        "this, did not find it.",
    ]


def draw(audit: Audit, folder: Path, image: int = 0, name: str = "reconstructions") -> None:
    """Draw a picture like the paper's Figure 3: originals above, one row for each attack, one column for each
    multiplier."""
    nus = audit.setting.noise_multipliers
    attacks = [name for name in (DLG, RANK_ONE) if any(one.attack == name for one in audit.attempts)]
    columns = max(len(nus), 2)
    size = (1.2 * columns + 0.4, 1.3 * (len(attacks) + 1) + 0.2)
    with figure(folder, name, len(attacks) + 1, columns, size) as axes:
        for place in axes.flat:
            place.set(xticks=[], yticks=[])
            place.set_frame_on(False)
        _show(axes[0, 0], audit.secret.images[image], "original")
        _show(axes[0, 1], audit.secret.average, AVERAGE)
        for row, attack in zip(axes[1:], attacks, strict=True):
            row[0].set_ylabel(attack)
            for place, nu in zip(row, nus, strict=False):
                (attempt,) = [one for one in audit.attempts if (one.attack, one.noise_multiplier) == (attack, nu)]
                if attempt.images is None:
                    place.set_title(f"ν = {nu:g}")
                    place.text(0.5, 0.5, "n/a", ha="center", va="center", transform=place.transAxes)
                else:
                    _show(place, attempt.images[image], f"ν = {nu:g}")


def _show(place: Any, image: Images, name: str) -> None:
    place.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    place.set_title(name)
