"""The attacks on images, each in all modes of release, beside what guessing finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize, stats

from umbel.models.model import Model, Parameters
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import NotApplicableError
from umbel.research.attacks import choice, membership
from umbel.research.attacks.audit.bounds import lower_bound
from umbel.research.attacks.averaging import averaged
from umbel.research.attacks.collusion import last_of_cluster, last_of_sums
from umbel.research.attacks.dlg import deep_leakage
from umbel.research.attacks.gradients import RADIUS, asked, gradients
from umbel.research.attacks.label import label_given_image
from umbel.research.attacks.modes import SITE, compared, open_
from umbel.research.attacks.quality import FULL_PSNR, psnr
from umbel.research.attacks.rank_one import image_of_input, invert_first_layer
from umbel.research.attacks.reconstruct import SHAPE, Images
from umbel.research.attacks.scene import Scene
from umbel.research.attacks.small_batch import SURE, poised, rows_in

GUESSING = "guessing"
BATCH, LARGER = 4, 8
"""Images of a client whose batch is taken apart."""
ROWS = 10
"""Rows of a client of whom it is asked whether one is its own."""
TIMES = 64
"""Releases of one client that are averaged."""
FURTHER = 6.0
"""In dB: how much closer than the mean image an image must come to count as shown."""

_COINS = 10  # membership and choice: so many times as many clients as images
_CONFIDENCE = 0.95
_DLG_ITERATIONS, _DEAR = 100, 2


@dataclass(frozen=True)
class Finding:
    """What one attack finds in one mode of release.

    Attributes
    ----------
    attack : str
    mode : str
        Of release, or `GUESSING`.
    right, of : int
        How often it is right, or shows an image; of 0 where it cannot be made, as the note says.
    low, high : float
        A 95 % interval (Clopper and Pearson) on that share, over victims.
    psnr : float or None
        Mean over images.
    note : str
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
        """Add up findings of one attack in one mode, of several seeds; each note is said once."""
        first, of = parts[0], sum(one.of for one in parts)
        if not of:
            return first
        note = "; ".join(dict.fromkeys(one.note for one in parts if one.note))
        values = [one.psnr * one.of for one in parts if one.psnr is not None]
        psnr = sum(values) / of if values else None
        return cls.count(first.attack, first.mode, sum(one.right for one in parts), of, psnr, note)

    def cell(self) -> str:
        """Return what the table says."""
        if not self.of:
            return self.note
        decibels = "" if self.psnr is None else f", {self.psnr:.0f} dB"
        return f"{self.right} of {self.of}{decibels}" + (f" ({self.note})" if self.note else "")


def _as_tensors(hypothesis: Arrays) -> Parameters:
    return {name: torch.from_numpy(value) for name, value in hypothesis.items()}


def _as_arrays(parameters: Parameters) -> Arrays:
    return {name: value.numpy().astype(np.float32) for name, value in parameters.items()}


def _pictures(
    scene: Scene, attack: str, mode: str, images: Sequence[Images], originals: Images, note: str = ""
) -> Finding:
    """Count the images that are shown: in full, and much closer than the mean image."""
    pairs = list(zip(images, originals, strict=True))
    values = [psnr(*pair) for pair in pairs]
    shown = sum(
        value >= max(FULL_PSNR, psnr(scene.average, original) + FURTHER)
        for value, original in zip(values, originals, strict=True)
    )
    return Finding.count(attack, mode, shown, len(pairs), float(np.mean(values)), note)


def _baseline(scene: Scene, attack: str, originals: Images) -> Finding:
    return _pictures(scene, attack, GUESSING, [scene.average] * len(originals), originals)


def _inverted(model: Model, start: Parameters, shown: Sequence[Parameters]) -> list[Images]:
    return [invert_first_layer(model, start, gradient, SHAPE).double().numpy() for gradient in shown]


def _single(scene: Scene) -> Iterator[Finding]:
    """One image, by the first layer's gradient, and its label by the last's."""
    sites, rows, folder = scene.single_images()
    originals, labels = scene.images(rows).double().numpy(), scene.labels(rows).numpy()
    hypothesis = scene.start(scene.model)
    start = _as_tensors(hypothesis)
    usual = int(torch.mode(scene.known_labels).values)
    read = [Finding.count("label", GUESSING, int((labels == usual).sum()), len(labels))]
    yield _baseline(scene, "rank one", originals)
    for mode in compared():
        shown = gradients(scene.victims(folder, mode, scene.model), mode, hypothesis, sites)
        images = _inverted(scene.model, start, shown)
        yield _pictures(scene, "rank one", mode.name, images, originals)
        guesses = [
            label_given_image(scene.model, start, gradient, torch.from_numpy(image))
            for gradient, image in zip(shown, images, strict=True)
        ]
        read.append(Finding.count("label", mode.name, int((labels == guesses).sum()), len(labels)))
    yield from read


def _deep(scene: Scene) -> Iterator[Finding]:
    """One image, by deep leakage from gradients."""
    sites, rows, folder = scene.single_images(_DEAR)
    originals, hypothesis = scene.images(rows).double().numpy(), scene.start(scene.smooth)
    start = _as_tensors(hypothesis)
    yield _baseline(scene, "DLG", originals)
    for mode in compared():
        shown = gradients(scene.victims(folder, mode, scene.smooth), mode, hypothesis, sites)
        images = []
        for gradient in shown:
            generator = torch.Generator().manual_seed(scene.setting.seed)
            match = deep_leakage(scene.smooth, start, gradient, SHAPE, generator, 2, _DLG_ITERATIONS)
            images.append(match.image.clamp(0, 1).numpy())
        yield _pictures(scene, "DLG", mode.name, images, originals)


def _collusions(scene: Scene) -> Iterator[Finding]:
    """One image, by a site's sums or a cluster's mean of which all others are known."""
    sites, rows, folder = scene.single_images()
    originals, hypothesis = scene.images(rows).double().numpy(), scene.start(scene.model)
    start = _as_tensors(hypothesis)
    yield _baseline(scene, "collusion", originals)
    for mode in compared():
        victims = scene.victims(folder, mode, scene.model)
        if mode.by_site:
            told = scene.victims(folder, open_(), scene.model)
            shown = [last_of_sums(victims, told, mode, hypothesis, site) for site in sites]
        else:
            shown = [last_of_cluster(victims, mode, hypothesis, site) for site in sites]
        yield _pictures(scene, "collusion", mode.name, _inverted(scene.model, start, shown), originals)


def _batches(scene: Scene) -> Iterator[Finding]:
    """Several images of one client, taken apart: few from one release, more from the mean of many."""
    yield from _batch(scene, f"batch of {BATCH}", BATCH, 1)
    yield from _batch(scene, f"batch of {LARGER}", LARGER, 1)
    yield from _batch(scene, f"batch of {LARGER}, averaging", LARGER, TIMES)


def _batch(scene: Scene, name: str, size: int, times: int) -> Iterator[Finding]:
    count = max(1, scene.setting.images // BATCH)
    folder, rows = scene.batches(count, size)
    sites = [range(i * SITE, (i + 1) * SITE) for i in range(count)]
    originals = scene.images(rows[::SITE].reshape(-1)).double().numpy()
    start = poised(scene.model, _as_tensors(scene.start(scene.model)), scene.known)
    yield _baseline(scene, name, originals)
    # Without noise as well, to see that rows are exact there.
    for mode in (*([open_()] if times == 1 else []), *compared()):
        victims = scene.victims(folder, mode, scene.model)
        shown, answered = averaged(partial(gradients, victims, mode, _as_arrays(start), sites), times)
        images, told = _apart(scene, start, shown, originals, size)
        said = [f"{answered} answered"] if times > 1 else []
        yield _pictures(scene, name, mode.name, images, originals, ", ".join([*said, *told]))


def _apart(
    scene: Scene, start: Parameters, shown: Sequence[Parameters], originals: Images, size: int
) -> tuple[list[Images], list[str]]:
    """Take gradients of so many images each apart; return an image for each original, and what the attacker knows."""
    images: list[Images] = []
    sure = refused = 0
    for i, gradient in enumerate(shown):
        generator = torch.Generator().manual_seed(scene.setting.seed)
        try:
            found = rows_in(scene.model, start, gradient, SHAPE, generator)
        except NotApplicableError:
            refused += 1
            images += [scene.average] * size
            continue
        sure += sum(share >= SURE for share in found.agreement)
        seen = [
            image_of_input(scene.model, start, SHAPE, direction, noise).double().numpy()
            for direction, noise in zip(found.inputs, found.noise, strict=True)
        ]
        images += matched(seen, originals[i * size : (i + 1) * size], scene.average)
    said = [f"sure of {sure}"] if sure else []
    return images, [*said, f"says no for {refused} of {len(shown)}"] if refused else said


def matched(images: Sequence[Images], originals: Images, otherwise: Images) -> list[Images]:
    """Return for each original the image that is meant for it, by the least squared error of all together."""
    apart = np.array([[float(np.square(image - original).mean()) for original in originals] for image in images])
    found = [otherwise] * len(originals)
    for image, original in zip(*map(np.ndarray.tolist, optimize.linear_sum_assignment(apart)), strict=True):
        found[original] = images[image]
    return found


def _sums(scene: Scene) -> Iterator[Finding]:
    """The images of ten clients of one image each, taken apart from their site's sum by a server that knows nobody."""
    _, _, folder = scene.single_images()
    count = max(1, scene.setting.images // BATCH)
    sites = [range(i * SITE, (i + 1) * SITE) for i in range(count)]
    originals = scene.images(scene.single_rows[: count * SITE]).double().numpy()
    start = poised(scene.model, _as_tensors(scene.start(scene.model)), scene.known)
    yield _baseline(scene, "sum of 10", originals)
    for mode in compared():
        if mode.by_site:
            victims = scene.victims(folder, mode, scene.model)
            shown = gradients(victims, mode, _as_arrays(start), sites)
            images, said = _apart(scene, start, shown, originals, SITE)
            yield _pictures(scene, "sum of 10", mode.name, images, originals, ", ".join(said))


def _members(scene: Scene) -> Iterator[Finding]:
    """Whether a row is a client's: as often as a coin says, it is."""
    count, model = _COINS * scene.setting.images, scene.model
    coins = scene.generator("coins").integers(2, size=count).astype(bool)
    drawn = scene.draw("members", count, SITE * ROWS + 1)
    candidates, rows = drawn[:, -1], drawn[:, :-1].reshape(count * SITE, ROWS)
    rows[::SITE, 0] = np.where(coins, candidates, rows[::SITE, 0])
    folder = scene.folder("members", list(rows))
    modes = compared()
    nodes = [scene.victims(folder, mode, model) for mode in modes]
    right = np.zeros(len(modes), np.int64)
    honest = _as_tensors(scene.start(model))
    for i, candidate in enumerate(candidates):
        own = np.array([candidate])
        image, label = scene.images(own)[0], int(scene.labels(own)[0])
        start = membership.trap(model, honest, image, label, scene.known, scene.known_labels)
        made_up = {
            radius: membership.shadows(model, start, (image, label), scene.known, scene.known_labels, ROWS, radius)
            for radius in (None, RADIUS)
        }
        site = range(i * SITE, (i + 1) * SITE)
        for j, (mode, node) in enumerate(zip(modes, nodes, strict=True)):
            (shown,) = gradients(node, mode, _as_arrays(start), [site])
            update = -torch.cat([value.flatten() for value in shown.values()]).numpy()
            found = membership.score(
                update, *made_up[RADIUS if mode.public else None], others=SITE - 1 if mode.by_site else 0
            )
            right[j] += (found > 0) == coins[i]
    yield Finding.count("membership", GUESSING, count // 2, count)
    for mode, number in zip(modes, right.tolist(), strict=True):
        shown_epsilon = lower_bound(count, count, number, confidence=_CONFIDENCE)
        note = f"ε ≥ {shown_epsilon:.2g}" if shown_epsilon else ""
        yield Finding.count("membership", mode.name, number, count, note=note)


def _choices(scene: Scene) -> Iterator[Finding]:
    """Which of two hypotheses a client chooses.

    Raises
    ------
    NotApplicableError
        When all images that the attacker knows are of one class.
    """
    count, model = _COINS * scene.setting.images, scene.model
    rows = scene.draw("choices", count * SITE, 1)
    folder = scene.folder("choices", list(rows))
    border = int(scene.known_labels.median()) + 1
    if not bool((scene.known_labels >= border).any()):
        border = int(scene.known_labels.max())
    if not bool((scene.known_labels < border).any()):
        raise NotApplicableError("the images known are of one class, and the choice is between lower and upper classes")
    hypotheses, name = choice.apart(model, _as_tensors(scene.start(model)), SHAPE, border)
    fits = _best(model, hypotheses, scene.images(rows[::SITE, 0]), scene.labels(rows[::SITE, 0]))
    usual = int(_best(model, hypotheses, scene.known, scene.known_labels).mean() > 0.5)
    pair = {key: np.stack([one[key].numpy() for one in hypotheses]) for key in hypotheses[0]}
    yield Finding.count("choice", GUESSING, int((fits == usual).sum()), count)
    for mode in compared(choosing=True):
        node = scene.victims(folder, mode, model)
        found = []
        for i in range(count):
            if mode.by_site:
                _, counts = node.site_sums(mode, pair, range(i * SITE, (i + 1) * SITE), **asked(mode))
                found.append(int(counts[1] > counts[0]))
            else:
                released = node.releases(mode, pair, [i * SITE], **asked(mode))
                found += choice.started_from(released[name]).tolist()
        yield Finding.count("choice", mode.name, int((fits == np.array(found)).sum()), count)


def _best(
    model: Model, hypotheses: Sequence[Parameters], images: torch.Tensor, labels: torch.Tensor
) -> NDArray[np.int64]:
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model.apply(one, images), labels, reduction="none") for one in hypotheses
        ]
    best: NDArray[np.int64] = torch.stack(losses).argmin(dim=0).numpy()
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
