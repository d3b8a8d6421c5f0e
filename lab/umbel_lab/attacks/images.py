"""All attacks on images in all modes of release, beside the results of guessing, in one table.

Victims are clients of the real app behind its own gate, in sites of ten whose rows are drawn from a dataset's training
clients; the attacker knows rows of other clients. Each attack is as strong as elsewhere in this package, by a server
that may ask nothing else of these clients.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from scipy import optimize, stats

from umbel import models
from umbel.data import Dataset, find_typed, open_dataset
from umbel.models.model import Model, Parameters
from umbel.privacy.accounting.guarantee import DELTA
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError, DatasetError, NotApplicableError
from umbel_lab.attacks import membership
from umbel_lab.attacks.audit.bounds import lower_bound
from umbel_lab.attacks.dlg import deep_leakage
from umbel_lab.attacks.layers import label_given_image
from umbel_lab.attacks.quality import FULL_PSNR, psnr
from umbel_lab.attacks.rank_one import image_of_input, invert_first_layer
from umbel_lab.attacks.reconstruct import LOSS, SHAPE, Images, check_images
from umbel_lab.attacks.small_batch import SURE, poised, rows_in
from umbel_lab.attacks.victims import (
    CLIP_NORM,
    NO_NOISE,
    NU,
    SITE,
    Mode,
    Victims,
    asked,
    averaged,
    compared,
    gradients,
    last_of_cluster,
    last_of_sums,
    open_,
    write_victims,
)
from umbel_lab.output import Page, Section

_KNOWN = 64  # rows of other clients that the attacker has


@dataclass(frozen=True)
class Setting:
    """The target of an attack: a dataset of 28x28 images, and so many `images`, each of another client.

    `smooth_model` is the model for DLG, which should be twice differentiable. `attacks` are keys of `ATTACKS`; empty
    means all. The selection does not change the findings of each.
    """

    dataset: str
    model: str = "cnn"
    smooth_model: str = "lenet"
    images: int = 8
    seed: int = 0
    attacks: tuple[str, ...] = ()


GUESSING = "guessing"
BATCH, LARGER = 4, 8
"""Images in a client's batch that is taken apart."""
ROWS = 10
"""Rows of a client in the membership attack."""
TIMES = 64
"""Releases of one client that are averaged."""
FURTHER = 6.0
"""In dB: how much closer than the mean image a shown image must come."""

_COINS = 10  # membership and choice use this many times as many clients as images
_CONFIDENCE = 0.95
_DLG_ITERATIONS = 100


@dataclass(frozen=True)
class Finding:
    """The findings of one attack in one mode of release, or by `GUESSING`.

    It is `right`, or shows an image, in so many cases `of` all; `of` is 0 if the attack is impossible, as the note
    says. `low` and `high` are a 95 % interval (Clopper and Pearson) on that share, over victims; `psnr` is in dB, a
    mean over images.
    """

    attack: str
    mode: str
    right: int
    of: int
    low: float
    high: float
    psnr: float | None = None
    note: str = ""

    @classmethod
    def count(cls, attack: str, mode: str, right: int, of: int, psnr: float | None = None, note: str = "") -> Finding:
        """Return a finding with its interval."""
        interval = stats.binomtest(right, of).proportion_ci(_CONFIDENCE)
        return cls(attack, mode, right, of, float(interval.low), float(interval.high), psnr, note)

    @classmethod
    def sum(cls, parts: Sequence[Finding]) -> Finding:
        """Sum findings of one attack in one mode over several seeds; each note appears once."""
        first, of = parts[0], sum(one.of for one in parts)
        if not of:
            return first
        note = "; ".join(dict.fromkeys(one.note for one in parts if one.note))
        values = [one.psnr * one.of for one in parts if one.psnr is not None]
        psnr = sum(values) / of if values else None
        return cls.count(first.attack, first.mode, sum(one.right for one in parts), of, psnr, note)

    def cell(self) -> str:
        """Return the text of the table's cell."""
        if not self.of:
            return self.note
        decibels = "" if self.psnr is None else f", {self.psnr:.0f} dB"
        return f"{self.right} of {self.of}{decibels}" + (f" ({self.note})" if self.note else "")


Shown = tuple[Sequence[Images], str]


class Scene:
    """Victims in sites of ten, and the attacker's knowledge.

    `known` and `known_labels` are rows of other clients that the attacker has, and `average` is their mean, the guess
    without a release. `model` and `smooth` are the networks, `hypothesis` and `start` an honest start of the first as
    arrays and as tensors.
    """

    def __init__(self, setting: Setting, dataset: Dataset, scratch: Path) -> None:
        self.setting, self.dataset, self._scratch = setting, dataset, scratch
        # Rows of victims come from one half of the training clients, those of the attacker from the other.
        train = dataset.manifest.train
        self._half, end = int(dataset.offsets[train // 2]), int(dataset.offsets[train])
        if min(self._half, end - self._half) < _KNOWN:
            text = f"the attacks need at least {2 * _KNOWN} training rows, {_KNOWN} in each half"
            raise DatasetError(text, code="data.too-few-rows")
        own = self.generator("known").permutation(np.arange(self._half, end))[:_KNOWN]
        self.known, self.known_labels = self.images(own), self.labels(own)
        self.average: Images = self.known.double().mean(dim=0).numpy()
        self.model, self.smooth = (models.load(name, LOSS) for name in (setting.model, setting.smooth_model))
        self.hypothesis = self.model.initial(setting.seed)
        self.start = _as_tensors(self.hypothesis)
        self.clients = cache(self._clients)

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the stream of draws for a purpose, which is independent of other draws."""
        return np.random.default_rng([self.setting.seed, *purpose.encode()])

    def images(self, rows: NDArray[np.int64]) -> torch.Tensor:
        scale = self.dataset.manifest.feature_scale
        return torch.from_numpy(np.asarray(self.dataset.features[rows], np.float32) * np.float32(scale))

    def labels(self, rows: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.dataset.targets[rows], np.int64))

    def draw(self, purpose: str, clients: int, rows: int) -> NDArray[np.int64]:
        """Return rows (clients, rows), all different if there are enough."""
        order = self.generator(purpose).permutation(self._half)
        return np.resize(order, clients * rows).reshape(clients, rows)

    def write(self, name: str, rows: NDArray[np.int64]) -> Path:
        """Write clients with these rows (clients, rows) and return the folder."""
        folder = self._scratch / name
        write_victims(folder, self.dataset, list(rows))
        return folder

    def _clients(self, purpose: str, sites: int, size: int) -> tuple[Path, NDArray[np.int64]]:
        """Draw and write sites of clients; return the folder and the rows."""
        rows = self.draw(purpose, sites * SITE, size)
        return self.write(purpose, rows), rows

    def singles(self) -> tuple[Path, NDArray[np.int64]]:
        """Return a folder of clients with one image each, one site for each attacked image, and their rows."""
        folder, rows = self.clients("singles", self.setting.images, 1)
        return folder, rows[:, 0]

    def victims(self, folder: Path, mode: Mode, model: Model) -> Victims:
        """Return clients of a site that permits this mode."""
        return Victims(folder, mode.policy, self.setting.seed, {"model": model.name, "loss": LOSS})

    def findings(
        self, attack: str, rows: NDArray[np.int64], look: Callable[[Mode], Shown], modes: Sequence[Mode]
    ) -> Iterator[Finding]:
        """Count for each mode, after guessing, the images that are shown: in full, and much closer than the mean image.

        `look` runs the attack in a mode, and returns an image for each original, one of these rows, and a note.
        """
        originals = self.pixels(rows)
        guess = [psnr(self.average, original) for original in originals]
        for mode in (None, *modes):
            images, note = ([self.average] * len(originals), "") if mode is None else look(mode)
            values = [psnr(*pair) for pair in zip(images, originals, strict=True)]
            shown = sum(v >= max(FULL_PSNR, mean + FURTHER) for v, mean in zip(values, guess, strict=True))
            name = GUESSING if mode is None else mode.name
            yield Finding.count(attack, name, shown, len(values), float(np.mean(values)), note)

    def pixels(self, rows: NDArray[np.int64]) -> Images:
        return self.images(rows).double().numpy()

    def inverted(self, shown: Sequence[Parameters]) -> list[Images]:
        """Return the image that each gradient's first layer shows."""
        return [invert_first_layer(self.model, self.start, one, SHAPE).double().numpy() for one in shown]


def _sites(count: int) -> list[range]:
    return [range(i * SITE, (i + 1) * SITE) for i in range(count)]


def _as_tensors(hypothesis: Arrays) -> Parameters:
    return {name: torch.from_numpy(value) for name, value in hypothesis.items()}


def _as_arrays(parameters: Parameters) -> Arrays:
    return {name: value.numpy().astype(np.float32) for name, value in parameters.items()}


def _single(scene: Scene) -> Iterator[Finding]:
    """One image, by the first layer's gradient, and its label by the last's."""
    folder, rows = scene.singles()
    rows, labels = rows[::SITE], scene.labels(rows[::SITE]).numpy()
    usual = int(torch.mode(scene.known_labels).values)
    read = [Finding.count("label", GUESSING, int((labels == usual).sum()), len(labels))]

    def look(mode: Mode) -> Shown:
        shown = gradients(scene.victims(folder, mode, scene.model), mode, scene.hypothesis, _sites(len(rows)))
        images = scene.inverted(shown)
        guesses = [
            label_given_image(scene.model, scene.start, gradient, torch.from_numpy(image))
            for gradient, image in zip(shown, images, strict=True)
        ]
        read.append(Finding.count("label", mode.name, int((labels == guesses).sum()), len(labels)))
        return images, ""

    yield from scene.findings("rank one", rows, look, compared())
    yield from read


def _deep(scene: Scene) -> Iterator[Finding]:
    """One image, by deep leakage from gradients: of every other victim, since it takes long."""
    folder, rows = scene.singles()
    rows = rows[::SITE][: -(-scene.setting.images // 2)]
    hypothesis = scene.smooth.initial(scene.setting.seed)

    def look(mode: Mode) -> Shown:
        images = []
        for gradient in gradients(scene.victims(folder, mode, scene.smooth), mode, hypothesis, _sites(len(rows))):
            generator = torch.Generator().manual_seed(scene.setting.seed)
            match = deep_leakage(scene.smooth, _as_tensors(hypothesis), gradient, SHAPE, generator, 2, _DLG_ITERATIONS)
            images.append(match.image.clamp(0, 1).numpy())
        return images, ""

    yield from scene.findings("DLG", rows, look, compared())


def _collusions(scene: Scene) -> Iterator[Finding]:
    """One image, from a site's sums or a cluster's mean, if all other images in it are known."""
    folder, rows = scene.singles()
    sites = _sites(scene.setting.images)

    def look(mode: Mode) -> Shown:
        victims = scene.victims(folder, mode, scene.model)
        if mode.by_site:
            told = scene.victims(folder, open_(), scene.model)
            shown = [last_of_sums(victims, told, mode, scene.hypothesis, site) for site in sites]
        else:
            shown = [last_of_cluster(victims, mode, scene.hypothesis, site) for site in sites]
        return scene.inverted(shown), ""

    yield from scene.findings("collusion", rows[::SITE], look, compared())


def _batches(scene: Scene) -> Iterator[Finding]:
    """Several images of one client, taken apart: few from one release, more from the mean of many releases."""
    for size, times in ((BATCH, 1), (LARGER, 1), (LARGER, TIMES)):
        yield from _batch(scene, size, times)


def _batch(scene: Scene, size: int, times: int) -> Iterator[Finding]:
    count, start = max(1, scene.setting.images // BATCH), poised(scene.model, scene.start, scene.known)
    folder, rows = scene.clients(f"batches of {size}", count, size)

    def look(mode: Mode) -> Shown:
        ask = partial(gradients, scene.victims(folder, mode, scene.model), mode, _as_arrays(start), _sites(count))
        shown, answered = averaged(ask, times)
        images, told = _apart(scene, start, shown, rows[::SITE], size)
        return images, ", ".join([f"{answered} answered"] * (times > 1) + told)

    name = f"batch of {size}" + (", averaging" if times > 1 else "")
    # Also without noise, to check that rows are exact there.
    modes = (*([open_()] if times == 1 else []), *compared())
    yield from scene.findings(name, rows[::SITE].reshape(-1), look, modes)


def _apart(
    scene: Scene, start: Parameters, shown: Sequence[Parameters], rows: NDArray[np.int64], size: int
) -> tuple[list[Images], list[str]]:
    """Take gradients of so many images each apart; return an image for each original, and the attacker's notes."""
    images: list[Images] = []
    sure = refused = 0
    for own, gradient in zip(rows, shown, strict=True):
        generator = torch.Generator().manual_seed(scene.setting.seed)
        try:
            found = rows_in(scene.model, start, gradient, SHAPE, generator)
        except NotApplicableError:
            refused += 1
            images += [scene.average] * size
            continue
        sure += sum(share >= SURE for share in found.agreement)
        seen = [
            image_of_input(scene.model, start, SHAPE, *one).double().numpy()
            for one in zip(found.inputs, found.noise, strict=True)
        ]
        images += matched(seen, scene.pixels(own), scene.average)
    said = [f"sure of {sure}"] if sure else []
    return images, [*said, f"says no for {refused} of {len(shown)}"] if refused else said


def matched(images: Sequence[Images], originals: Images, otherwise: Images) -> list[Images]:
    """Return the image that belongs to each original, by the smallest total squared error."""
    apart = np.array([[float(np.square(image - original).mean()) for original in originals] for image in images])
    found = [otherwise] * len(originals)
    for image, original in zip(*map(np.ndarray.tolist, optimize.linear_sum_assignment(apart)), strict=True):
        found[original] = images[image]
    return found


def _sums(scene: Scene) -> Iterator[Finding]:
    """The images of ten clients with one image each, from their site's sum; the server knows none of them."""
    folder, rows = scene.singles()
    count = max(1, scene.setting.images // BATCH)
    rows, start = rows[: count * SITE], poised(scene.model, scene.start, scene.known)

    def look(mode: Mode) -> Shown:
        shown = gradients(scene.victims(folder, mode, scene.model), mode, _as_arrays(start), _sites(count))
        images, said = _apart(scene, start, shown, rows.reshape(count, SITE), SITE)
        return images, ", ".join(said)

    yield from scene.findings("sum of 10", rows, look, [mode for mode in compared() if mode.by_site])


def _members(scene: Scene) -> Iterator[Finding]:
    """Whether a row is a client's; a coin decides whether it is."""
    count, model = _COINS * scene.setting.images, scene.model
    coins = scene.generator("coins").integers(2, size=count).astype(bool)
    drawn = scene.draw("members", count, SITE * ROWS + 1)
    candidates, rows = drawn[:, -1], drawn[:, :-1].reshape(count * SITE, ROWS)
    rows[::SITE, 0] = np.where(coins, candidates, rows[::SITE, 0])
    folder = scene.write("members", rows)
    modes = compared()
    nodes = [scene.victims(folder, mode, model) for mode in modes]
    right = np.zeros(len(modes), np.int64)
    for i, candidate in enumerate(candidates):
        own = np.array([candidate])
        image, label = scene.images(own)[0], int(scene.labels(own)[0])
        start = membership.trap(model, scene.start, image, label, scene.known, scene.known_labels)
        known = scene.known, scene.known_labels, ROWS
        made_up = {clip: membership.shadows(model, start, (image, label), *known, clip) for clip in (None, CLIP_NORM)}
        site = range(i * SITE, (i + 1) * SITE)
        for j, (mode, node) in enumerate(zip(modes, nodes, strict=True)):
            (shown,) = gradients(node, mode, _as_arrays(start), [site])
            update = -torch.cat([value.flatten() for value in shown.values()]).numpy()
            without, with_ = made_up[CLIP_NORM if mode.public else None]
            found = membership.score(update, without, with_, SITE - 1 if mode.by_site else 0)
            right[j] += (found > 0) == coins[i]
    yield Finding.count("membership", GUESSING, count // 2, count)
    for mode, number in zip(modes, right.tolist(), strict=True):
        shown_epsilon = lower_bound(count, count, number, confidence=_CONFIDENCE)
        note = f"ε ≥ {shown_epsilon:.2g}" if shown_epsilon else ""
        yield Finding.count("membership", mode.name, number, count, note=note)


def _choices(scene: Scene) -> Iterator[Finding]:
    """Which of two hypotheses a client chooses; `NotApplicableError` if the known images have one class."""
    count, model = _COINS * scene.setting.images, scene.model
    folder, rows = scene.clients("choices", count, 1)
    border = int(scene.known_labels.median()) + 1
    if not bool((scene.known_labels >= border).any()):
        border = int(scene.known_labels.max())
    if not bool((scene.known_labels < border).any()):
        text = "all known images are of one class, but the choice is between lower and upper classes"
        raise NotApplicableError(text, code="attack.one-class")
    hypotheses, name = membership.apart(model, scene.start, SHAPE, border)
    fits = _best(model, hypotheses, scene.images(rows[::SITE, 0]), scene.labels(rows[::SITE, 0]))
    usual = int(_best(model, hypotheses, scene.known, scene.known_labels).mean() > 0.5)
    pair = {key: np.stack([one[key].numpy() for one in hypotheses]) for key in hypotheses[0]}
    yield Finding.count("choice", GUESSING, int((fits == usual).sum()), count)
    for mode in compared(choosing=True):
        node = scene.victims(folder, mode, model)
        found: list[int] = []
        for i in range(count):
            clients = range(i * SITE, (i + 1) * SITE) if mode.by_site else [i * SITE]
            released, counts = node.ask(mode, pair, clients, **asked(mode))
            found += [int(counts[1] > counts[0])] if mode.by_site else membership.started_from(released[name]).tolist()
        yield Finding.count("choice", mode.name, int((fits == np.array(found)).sum()), count)


def _best(
    model: Model, hypotheses: Sequence[Parameters], images: torch.Tensor, labels: torch.Tensor
) -> NDArray[np.int64]:
    loss = partial(torch.nn.functional.cross_entropy, target=labels, reduction="none")
    with torch.no_grad():
        losses = torch.stack([loss(model.apply(one, images)) for one in hypotheses])
    best: NDArray[np.int64] = losses.argmin(dim=0).numpy()
    return best


ATTACKS: Mapping[str, Callable[[Scene], Iterator[Finding]]] = {
    "single": _single,
    "dlg": _deep,
    "batch": _batches,
    "sum": _sums,
    "collusion": _collusions,
    "membership": _members,
    "choice": _choices,
}
"""By name, in the order of the table."""


def overview(setting: Setting) -> list[Finding]:
    """Run every attack in every mode, on one thread, so that the digits do not depend on the number of cores.

    Raises `UmbelError` before any work if the setting is invalid, and `FleetError` if the gate refuses what it should
    allow, as it does if the environment sets a stricter policy.
    """
    path = find_typed(setting.dataset)
    dataset = open_dataset(path)
    for name in (setting.model, setting.smooth_model):
        check_images(path, dataset, models.load(name, LOSS))
    torch.set_num_threads(1)
    if unknown := set(setting.attacks) - ATTACKS.keys():
        text = f"unknown attack {min(unknown)!r}; choose from {', '.join(ATTACKS)}"
        raise ConfigError(text, code="config.unknown-attack")
    steps = {name: step for name, step in ATTACKS.items() if name in (setting.attacks or ATTACKS)}
    found: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="umbel-attacks-") as scratch:
        scene = Scene(setting, dataset, Path(scratch))
        for name in track(steps, "attacks", console=Console(stderr=True), transient=True):
            try:
                found += steps[name](scene)
            except NotApplicableError as error:
                found.append(Finding(name, GUESSING, 0, 0, math.nan, math.nan, note=f"not applicable: {error.text}"))
    return found


def page(setting: Setting, findings: Sequence[Finding]) -> Page:
    """Return the table, and the words under it."""
    title = f"Attacks by mode of release ({Path(setting.dataset).name}, {setting.images} images, seed {setting.seed})"
    return Page(title, [table(findings), Section("", "\n\n".join(notes(setting)))], [asdict(one) for one in findings])


def table(findings: Sequence[Finding], title: str = "", text: str = "") -> Section:
    """Return a table with a row for each attack and a column for each mode."""
    order = [GUESSING, NO_NOISE, *(mode.name for mode in compared())]
    modes = sorted({one.mode for one in findings}, key=order.index)
    cells: dict[str, dict[str, str]] = {}
    for one in findings:
        cells.setdefault(one.attack, {})[one.mode] = one.cell()
    rows = [[attack, *(own.get(mode, "") for mode in modes)] for attack, own in cells.items()]
    return Section(title, text, ("attack", *modes), rows)


def notes(setting: Setting) -> list[str]:
    """Return the sentences below the table."""
    return [
        f"An image is shown from {FULL_PSNR:g} dB, if it comes {FURTHER:g} dB closer than the mean image, which is "
        f"what guessing answers; dB are means over images. DLG is made on {setting.smooth_model}, all others on "
        f"{setting.model}. Averaging takes the mean of {TIMES} releases of a client, or as many as its budget answers.",
        f"ε is for any two data sets of a client, at δ = {DELTA:g}, for one participation; at ν = {NU:g} nothing "
        "useful is guaranteed. Membership: the pure ε below which so many right guesses have a probability under 5 %. "
        "table.csv has 95 % intervals (Clopper and Pearson). An attack that fails proves nothing.",
    ]
