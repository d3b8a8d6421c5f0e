"""The reconstruction audit: how much the release of a client with one image reveals of this image.

A curious server asks each client for one step on its one image, through the app's own ClientApp and gate, and attacks
the release (group privacy paper, Sec. 5.3 and Figure 3). It knows the hypothesis and the step size that it sent; a
release is then the gradient, times the step size, with noise.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

import umbel.client.app
from umbel import models
from umbel.data import Dataset, Manifest, find_typed, offsets_of, open_dataset, write_dataset
from umbel.models.model import Model, Parameters
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientOnNode
from umbel.protocol.errors import ConfigError, DatasetError, ModelError, NotApplicableError
from umbel.protocol.messages import round_request
from umbel.protocol.records import pack
from umbel.protocol.release import Clipping, NoisePer
from umbel.protocol.tasks import TrainingSpec
from umbel.simulation.grid import InProcessGrid
from umbel_lab.attacks import quality
from umbel_lab.attacks.dlg import deep_leakage
from umbel_lab.attacks.rank_one import bias_label, invert_first_layer, label_given_image
from umbel_lab.attacks.victims import answer, what_left
from umbel_lab.output import Columns, Page, Row, Section, figure

SHAPE = (28, 28)
NOISE_MULTIPLIERS = (0.0, 0.001, 0.01, 0.1, 1.0, 3.0, 5.0, 10.0, 15.0)
"""The grid of the paper's Table 2 and Figure 3."""

DLG, RANK_ONE, LAST_BIAS = "DLG", "rank one", "last bias"
LOSS = "cross-entropy"
AVERAGE = "mean image"
"""The baseline: the score of the mean of other clients' images, without any release."""

_STEP = 1.0  # a long step loses little of the gradient to the rounding of 32-bit numbers
_FLOOR = 1e-6  # of clip norms: so small that it never applies, as in the paper
_NOISE = "noise multiplier"
_FORMATS = {"PSNR": ".1f", "SSIM": ".2f", "correlation": ".2f", "label": ".2f", **dict.fromkeys(quality.VERDICTS, "d")}

Images = NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """The subject of an audit: a dataset, and a model that is trained under cross entropy.

    The noise of a client has the same direction at all noise multipliers, and is drawn for each layer by itself, as in
    the paper. `images` is the number of attacked images, each of another client; DLG has `restarts` starts.
    """

    dataset: str
    model: str
    noise_multipliers: tuple[float, ...] = NOISE_MULTIPLIERS
    images: int = 8
    restarts: int = 2
    seed: int = 0

    def task(self, noise_multiplier: float) -> TrainingSpec:
        """Return the server's task for all attacked clients: one step on all rows."""
        return TrainingSpec(
            round=1,
            clients=tuple(map(ClientOnNode, range(self.images))),
            local_epochs=1,
            step_size=_STEP,
            batch_size=0,
            noise_multiplier=noise_multiplier,
            clipping=Clipping.UPDATE,
            clip_norm=_FLOOR,
            noise_per=NoisePer.LAYER,
        )


@dataclass(frozen=True)
class Secret:
    """The target of the attacker: images (images, 28, 28), pixels in [0, 1], and their labels (images,).

    `average` (28, 28) is the mean of the images of all other clients, the guess without a release.
    """

    images: Images
    labels: NDArray[np.int64]
    average: Images


@dataclass
class Audit:
    """A setting, the images, and the results of all attacks, by noise multiplier and then by attack.

    There is a row for the baseline, then one for each attack: means over images of PSNR, SSIM and correlation, the
    share of labels that were read correctly, and the number of images by verdict (`quality.verdict`); None if an attack
    has no such number. `shown` has the images (images, 28, 28) that it found, if it looks for any. `obstacles` say why
    an attack is impossible here.
    """

    setting: Setting
    secret: Secret
    rows: list[dict[str, Any]] = field(default_factory=list)
    shown: dict[tuple[str, float], Images] = field(default_factory=dict)
    obstacles: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        baseline = np.broadcast_to(self.secret.average, self.secret.images.shape)
        self.rows.append({_NOISE: None, "attack": AVERAGE, **_scores(baseline, self.secret.images)})

    def add(self, attack: str, nu: float, images: Sequence[Images | None], labels: Sequence[int]) -> None:
        """Add the result of an attack on all releases at one noise multiplier; without labels it was impossible."""
        found = [image for image in images if image is not None]
        if found:
            self.shown[attack, nu] = np.stack(found)
        label = float(np.mean(self.secret.labels == np.array(labels))) if labels else None
        scores = _scores(self.shown.get((attack, nu)), self.secret.images)
        self.rows.append({_NOISE: nu, "attack": attack, **scores, "label": label})


def audit(setting: Setting) -> Audit:
    """Ask the clients at each noise multiplier and attack their releases.

    One thread computes, so that the digits do not depend on the number of cores. Raises `UmbelError` before any work if
    the setting is invalid, and `FleetError` if the gate refuses, as it does if the environment sets a stricter policy.
    """
    for nu in setting.noise_multipliers:
        setting.task(nu)
    for name in ("images", "restarts"):
        if getattr(setting, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(setting, name)}", code="config.out-of-range")
    path = find_typed(setting.dataset)
    dataset = open_dataset(path)
    model = models.load(setting.model, LOSS)
    _check_images(path, dataset, model)
    if setting.images > dataset.manifest.train:
        raise DatasetError(
            f"{path}: ask for fewer images than {setting.images}; there are {dataset.manifest.train} training clients "
            "of one image each",
            code="data.too-few-clients",
        )
    torch.set_num_threads(1)
    rows, secret = _choose(setting, dataset)
    hypothesis = model.initial(setting.seed)
    results = Audit(setting, secret)
    with tempfile.TemporaryDirectory(prefix="umbel-audit-") as scratch:
        victims = Path(scratch) / "one-image-each"
        _write_victims(victims, dataset, rows)
        for nu in track(setting.noise_multipliers, "noise multipliers", console=Console(stderr=True), transient=True):
            gradients = _gradients(setting, victims, hypothesis, nu)
            _attack(results, model, hypothesis, gradients, nu)
    return results


def _check_images(path: Path, dataset: Dataset, model: Model) -> None:
    """Raise before any work if images, classes and model do not fit together."""
    features, targets = dataset.features, dataset.targets
    if features.shape[1:] != SHAPE:
        text = f"{path}: features of shape {features.shape[1:]}, not {SHAPE} images"
        raise DatasetError(text, code="data.not-images")
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


def _write_victims(folder: Path, dataset: Dataset, rows: NDArray[np.int64]) -> None:
    """Write a dataset of training clients with one of these rows each."""
    scale, split = dataset.manifest.feature_scale, {"train": len(rows), "validation": 0}
    manifest = Manifest(name="victims", clients=len(rows), split=split, feature_scale=scale)
    write_dataset(folder, manifest, dataset.features[rows], dataset.targets[rows], offsets_of([1] * len(rows)))


def _gradients(setting: Setting, victims: Path, hypothesis: Arrays, noise_multiplier: float) -> list[Parameters]:
    """Return the server's estimates of each client's gradient: a release is the hypothesis minus it, with noise."""
    run = {"dataset": str(victims), "seed": setting.seed, "device": "cpu", "model": setting.model, "loss": LOSS}
    # For each noise multiplier a new node, whose noise has the same direction.
    grid = InProcessGrid(umbel.client.app.app, run, node_configs=[{"partition-id": 0, "num-partitions": 1}])
    sent = pack({name: value[None] for name, value in hypothesis.items()})
    left, _ = what_left(answer(grid, round_request(sent, setting.task(noise_multiplier))), setting.images)
    moved = {
        name: torch.from_numpy((value - left[name].astype(np.float64)) / _STEP) for name, value in hypothesis.items()
    }
    return [{name: value[client] for name, value in moved.items()} for client in range(setting.images)]


def _attack(results: Audit, model: Model, hypothesis: Arrays, gradients: list[Parameters], nu: float) -> None:
    """Make each attack on the clients' gradients."""
    setting, start = results.setting, {name: torch.from_numpy(value) for name, value in hypothesis.items()}

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
        try:
            images, labels = zip(*map(attack, gradients), strict=True)
        except NotApplicableError as error:
            results.obstacles.add(f"{name}: {error.text}.")
            images, labels = (), ()
        results.add(name, nu, images, labels)


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
    setting, rows = audit.setting, audit.rows
    columns: Columns = {
        "ν": f"{_NOISE}:g",
        "attack": "attack",
        **{name: f"{name}:{how}" for name, how in _FORMATS.items()},
    }
    table = Section.of("", "", {**columns, "PSNR": _decibels}, rows)
    title = (
        f"Reconstruction from one step on one image: {setting.dataset}, {setting.model}, {setting.images} images, "
        f"noise on each layer by itself, seed {setting.seed}"
    )
    words = Section("", "\n\n".join([*notes(rows), *sorted(audit.obstacles)]))
    return Page(title, [table, words], rows, draw=partial(draw, audit))


def notes(rows: Sequence[Row]) -> list[str]:
    """Return the sentences below the table; `rows` are those of an audit."""
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
    attacks = (DLG, RANK_ONE)
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
                if (attack, nu) in audit.shown:
                    _show(place, audit.shown[attack, nu][image], f"ν = {nu:g}")
                else:
                    place.set_title(f"ν = {nu:g}")
                    place.text(0.5, 0.5, "n/a", ha="center", va="center", transform=place.transAxes)


def _show(place: Any, image: Images, name: str) -> None:
    place.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    place.set_title(name)
