"""Attacks on secure sums: local vectors and images, read from sums over several clients.

A secure sum shows its server what one site's sum over the same clients shows, with discrete Gaussian noise: the sum of
their clipped updates, with noise once. So a site's sums stand for it here, behind the app's own gate. The server
chooses the hypotheses, and which clients are in a sum:

- with the same clients in every sum, it takes the sum apart (`umbel_lab.attacks.mixture`,
  `umbel_lab.attacks.bins`);
- with other clients in every sum, it subtracts sums from each other.

A sum of one client is also what remains for a server that works with all other sites, or that sends them a task whose
update it knows, as a step of size 0.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from umbel import models
from umbel.data import find_typed, open_dataset
from umbel.models.model import Parameters
from umbel.privacy.accounting.guarantee import DELTA, guarantee, secure_release
from umbel.privacy.mechanisms.discrete_gaussian import DiscreteGaussian
from umbel.protocol.clients import ClientOnNode
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Clipping, Kind, Release, ReleaseBy
from umbel_lab.attacks import images as on_images
from umbel_lab.attacks.bins import binning, bins_of, inputs_by_bin
from umbel_lab.attacks.identify import preferences
from umbel_lab.attacks.images import Scene
from umbel_lab.attacks.mixture import Matrix, lines, parts
from umbel_lab.attacks.pac_attack import direction_error, factors_of, kept_by
from umbel_lab.attacks.quality import FULL_PSNR
from umbel_lab.attacks.rank_one import image_of_input
from umbel_lab.attacks.reconstruct import LOSS, SHAPE, Images, check_images
from umbel_lab.attacks.victims import CLIP_NORM, Mode, Victims, gradients, open_
from umbel_lab.output import Page, Section

SIZES = (1, 2, 3, 10, 30, 100)
MULTIPLIERS = (0.0, 0.1, 1.0, 3.0, 10.0)
INTERACTIONS = 64
"""Sums from which local vectors are read."""
VICTIMS = 10
ERROR = 0.05
"""A vector is found from which at most this share of the client's predictions comes out wrong, up to the sign."""

SAME, HONEST, OTHERS = "the same", "the same, honest items", "others each time"

_AFTER = 30  # honest rounds, in which clients' vectors are learnt
_STEP, _BATCH = 0.1, 10  # of these rounds
_LONG = 1e3  # a step from items of zeros
_MOVES = 0.02  # how far a client's vector moves along honest steps, relative to its length
_PREFERENCE_LOSS = "log"


@dataclass(frozen=True)
class Setting:
    """The target: a dataset of preferences, whose clients' vectors are read, or of 28x28 images.

    `model` is that of images. `sizes` are numbers of clients in a sum; those beyond the dataset's clients are left out.
    For each, at least `victims` clients are attacked, in as many groups as that takes. `interactions` is the number of
    sums for vectors; an image is read from one sum, or from two.
    """

    dataset: str
    model: str = "cnn"
    sizes: tuple[int, ...] = SIZES
    multipliers: tuple[float, ...] = MULTIPLIERS
    interactions: int = INTERACTIONS
    victims: int = VICTIMS
    seed: int = 0

    def groups(self, size: int) -> int:
        """Return the number of sums of a size with other clients."""
        return -(-self.victims // size)

    def generator(self, *purpose: Any) -> np.random.Generator:
        """Return the stream of draws for a purpose."""
        return np.random.default_rng([self.seed, *" ".join(map(str, purpose)).encode()])


@dataclass(frozen=True)
class Found:
    """The number of clients whose vector or image is found, `of` all attacked ones, in sums of so many `clients`.

    `members` says whether these were `SAME` in every sum, or `OTHERS`. `quality` is the median share of wrong
    predictions for vectors, and the mean PSNR in dB for images. `epsilon` is the guarantee at `DELTA` to a client in
    all sums; None without one.
    """

    clients: int
    members: str
    noise_multiplier: float
    found: int
    of: int
    quality: float
    epsilon: float | None

    @classmethod
    def sum(cls, several: Sequence[Found]) -> Found:
        """Add up what several seeds find in one case; the quality is their mean."""
        quality = float(np.mean([one.quality for one in several]))
        found, of = (sum(getattr(one, name) for one in several) for name in ("found", "of"))
        return replace(several[0], found=found, of=of, quality=quality)


def mode(noise_multiplier: float) -> Mode:
    """Return the mode of release whose sums look like secure ones."""
    return Mode("", noise_multiplier, 0.0, Clipping.PUBLIC, ReleaseBy.SITE, DiscreteGaussian.name)


def epsilon(parameters: int, noise_multiplier: float, times: int) -> float | None:
    """Return the epsilon at `DELTA` of a client in so many secure sums; None without noise."""
    release = Release(
        Kind.TRAIN, parameters, noise_multiplier, Clipping.PUBLIC, CLIP_NORM, DiscreteGaussian.name, hypotheses=1
    )
    found = guarantee({secure_release(release): times}, DELTA)
    return None if found is None else found.epsilon


def _tracked(cases: Sequence[Any]) -> Iterator[Any]:
    yield from track(cases, "attacks", console=Console(stderr=True), transient=True)


# --- local vectors


class Users:
    """Clients of a dataset of preferences, whose vectors have been learnt in honest rounds."""

    def __init__(self, setting: Setting) -> None:
        data = preferences(setting.dataset)
        self.setting, self.model = setting, models.load(data.manifest.model, _PREFERENCE_LOSS)
        self.clients = data.manifest.train
        config = {"model": self.model.name, "loss": _PREFERENCE_LOSS}
        self._victims = Victims(find_typed(setting.dataset), {}, setting.seed, config)
        self._honest = {name: value[None] for name, value in self.model.initial(setting.seed).items()}
        task = {"local_epochs": 1, "step_size": _STEP, "batch_size": _BATCH, "clip_norm": CLIP_NORM}
        for _ in range(_AFTER):
            trained, _ = self._victims.ask(open_(), self._honest, range(self.clients), **task)
            self._honest = {name: value.mean(axis=0, keepdims=True) for name, value in trained.items()}
        self.items = self._honest["items"][0].astype(np.float64)

    def vectors(self, clients: Sequence[int]) -> Matrix:
        """Return clients' own vectors (clients, d): the truth by which the attack is judged."""
        kept = kept_by(self._victims.context, [ClientOnNode(client) for client in clients])
        return kept["user"].astype(np.float64)

    def sums(self, nu: float, groups: Sequence[Sequence[int]], batch: int = 0, honest: bool = False) -> Matrix:
        """Return the sums (T, I, d) of one step of groups of clients from items of zeros (Protocol 2), or honest ones.

        A batch of 0 has all rows. From items of zeros, no step changes a client's vector. So it is so long that all
        updates are clipped, which does not change their direction.
        """
        sent = {name: value if honest else np.zeros_like(value) for name, value in self._honest.items()}
        step_size = _STEP if honest else _LONG
        task = {"local_steps": 1, "step_size": step_size, "batch_size": batch, "clip_norm": CLIP_NORM}
        found = [self._victims.ask(mode(nu), sent, group, **task)[0]["items"][0] for group in groups]
        return np.stack(found).astype(np.float64)

    def errors(self, vectors: Matrix, own: Matrix) -> list[float]:
        """Return for each client's own vector the error of the best of several vectors, up to its sign."""
        return [min(direction_error(vector, one, self.items) for vector in vectors) for one in own]


def of_vectors(setting: Setting) -> Iterator[Found]:
    """Attack sums of clients' updates, to find the vectors that never leave their nodes."""
    users = Users(setting)
    attacks: dict[str, Callable[..., list[float]]] = {SAME: _same, HONEST: partial(_same, honest=True), OTHERS: _others}
    cases = [(size, members) for size in setting.sizes for members in attacks if size > 1 or members != OTHERS]
    for size, members in _tracked([case for case in cases if case[0] <= users.clients]):
        for nu in setting.multipliers:
            generator, errors = setting.generator("vectors", size), []
            for _ in range(setting.groups(size)):
                group = np.sort(generator.choice(users.clients, size, replace=False)).tolist()
                errors += attacks[members](users, nu, group, generator)
            price = epsilon(users.model.num_parameters, nu, setting.interactions)
            found = sum(error <= ERROR for error in errors)
            yield Found(size, members, nu, found, len(errors), float(np.median(errors)), price)


def _same(
    users: Users, nu: float, group: Sequence[int], generator: np.random.Generator, honest: bool = False
) -> list[float]:
    """Read the vectors of the clients of one group from sums over all of them; whose each is, remains open.

    With noise the server asks for all rows, and averages; otherwise for minibatches of which few clients move the same
    items.
    """
    times = users.setting.interactions
    sums = users.sums(nu, [group] * times, 0 if nu else max(1, len(users.items) // len(group)), honest)
    rows = sums.mean(axis=0) if nu else sums.reshape(-1, sums.shape[-1])
    near = max(nu / np.sqrt(times) * CLIP_NORM, _MOVES * np.linalg.norm(rows, axis=1).max() if honest else 0.0)
    found = lines(rows, len(group), near, generator)
    return users.errors(found, users.vectors(group))


def _others(users: Users, nu: float, group: Sequence[int], generator: np.random.Generator) -> list[float]:
    """Read the vector of each client of a group from sums over random halves of it."""
    members = np.zeros((users.setting.interactions, len(group)), bool)
    for row in members:
        row[generator.choice(len(group), len(group) // 2, replace=False)] = True
    sums = users.sums(nu, [np.asarray(group)[row].tolist() for row in members])
    apart = parts(members, sums.reshape(len(sums), -1)).reshape(len(group), *sums.shape[1:])
    vectors = np.linalg.svd(apart, full_matrices=False)[2][:, 0]
    own = users.vectors(group)
    return [error for vector, one in zip(vectors, own, strict=True) for error in users.errors(vector[None], one[None])]


# --- images


def of_images(setting: Setting) -> Iterator[Found]:
    """Attack sums over clients with one image each, from one sum or from the difference of two."""
    path = find_typed(setting.dataset)
    dataset, model = open_dataset(path), models.load(setting.model, LOSS)
    check_images(path, dataset, model)
    with tempfile.TemporaryDirectory(prefix="umbel-attacks-") as scratch:
        whole = on_images.Setting(setting.dataset, setting.model, setting.model, setting.victims, setting.seed)
        scene = Scene(whole, dataset, Path(scratch))
        draws = torch.Generator().manual_seed(setting.seed)
        start = binning(model, scene.start, scene.known, draws)
        for size in _tracked([size for size in setting.sizes if size <= _most(setting.dataset)]):
            groups = setting.groups(size)
            rows = scene.draw(f"sums of {size}", groups * size, 1).reshape(groups, size)
            folder = scene.write(f"sums of {size}", rows.reshape(-1, 1))
            # As many victims of each group as are needed, from its first clients.
            count = min(size, -(-setting.victims // groups))
            sites = [range(i * size, (i + 1) * size) for i in range(groups)]
            for members in (SAME, OTHERS)[: 1 if size == 1 else 2]:
                for nu in setting.multipliers:
                    victims = scene.victims(folder, mode(nu), model)
                    if members == SAME and size > 1:
                        images = _of_one(scene, start, victims, nu, sites, rows, count)
                    else:
                        images = _of_two(scene, victims, nu, sites, count)
                    times = 1 if members == SAME else 2
                    yield _judged(scene, images, rows[:, :count].reshape(-1), size, members, nu, times)


def _of_one(
    scene: Scene, start: Parameters, victims: Victims, nu: float, sites: Sequence[range],
    rows: NDArray[np.int64], count: int,
) -> list[Images]:  # fmt: skip
    """Return the image in the bin of each site's first clients, from one sum of each site."""
    hypothesis = {name: value.numpy().astype(np.float32) for name, value in start.items()}
    found: list[Images] = []
    for site, gradient in zip(sites, gradients(victims, mode(nu), hypothesis, sites), strict=True):
        inputs = inputs_by_bin(scene.model, start, gradient, SHAPE)
        lengths, noise = inputs.norm(dim=1), nu * CLIP_NORM * math.sqrt(2 * inputs.shape[1])
        # All bins are read; here only those in which a victim's image is.
        for place in bins_of(scene.model, start, scene.images(rows[site.start // len(site), :count])):
            if place < 0 or not lengths[place] > 0:
                found.append(scene.average)
                continue
            share = min(noise / float(lengths[place]), 1.0) ** 2
            image = image_of_input(scene.model, start, SHAPE, inputs[place] / lengths[place], share)
            found.append(image.double().numpy())
    return found


def _of_two(scene: Scene, victims: Victims, nu: float, sites: Sequence[range], count: int) -> list[Images]:
    """Return the images of each site's first clients, from a sum of the site without and one with the client."""
    found: list[Parameters] = []
    for site in sites:
        (everybody,) = gradients(victims, mode(nu), scene.hypothesis, [site])
        for client in site[:count]:
            others = [other for other in site if other != client]
            without = gradients(victims, mode(nu), scene.hypothesis, [others])[0] if others else {}
            found.append({name: value - without.get(name, 0.0) for name, value in everybody.items()})
    return scene.inverted(found)


def _judged(
    scene: Scene, images: Sequence[Images], rows: NDArray[np.int64], size: int, members: str, nu: float, times: int
) -> Found:
    *_, finding = scene.findings("", rows, lambda _: (images, ""), [mode(nu)])
    assert finding.psnr is not None
    price = epsilon(scene.model.num_parameters, nu, times)
    return Found(size, members, nu, finding.right, finding.of, finding.psnr, price)


# --- the page


def audit(setting: Setting) -> list[Found]:
    """Attack sums over clients of a dataset, on one thread, so that the digits do not depend on the number of cores.

    Raises `UmbelError` before any work if the setting is invalid.
    """
    there = _most(setting.dataset)
    if min(setting.sizes) < 1 or min(setting.sizes) > there:
        raise ConfigError(f"a sum is over 1 to {there} of these clients", code="config.sums")
    if not all(nu >= 0 and math.isfinite(nu) for nu in setting.multipliers):
        raise ConfigError("noise multipliers must be finite, and not below 0", code="config.sums")
    torch.set_num_threads(1)
    return list((of_vectors if holds_preferences(setting.dataset) else of_images)(setting))


def _most(dataset: str) -> int:
    """Return the number of clients there are: those that train, or one for each image that victims may have."""
    data = open_dataset(find_typed(dataset))
    return data.manifest.train if holds_preferences(dataset) else int(data.offsets[data.manifest.train // 2])


def holds_preferences(dataset: str) -> bool:
    """Return whether a dataset is one of preferences, not of images."""
    return bool((name := open_dataset(find_typed(dataset)).manifest.model) and factors_of(models.load(name)))


def page(setting: Setting, found: Sequence[Found]) -> Page:
    """Return the table, and the words under it."""
    title = f"Secure sums under attack ({Path(setting.dataset).name}, seed {setting.seed})"
    sections = [table(found), Section("", notes(setting.interactions, holds_preferences(setting.dataset)))]
    return Page(title, sections, [asdict(one) for one in found])


def table(found: Sequence[Found], title: str = "", text: str = "") -> Section:
    """Return a table with a row for each number of clients and a column for each noise multiplier."""
    prices: dict[float, float | None] = {}
    cells: dict[tuple[int, str], dict[float, str]] = {}
    for one in found:
        prices[one.noise_multiplier] = max(prices.get(one.noise_multiplier) or 0, one.epsilon or 0) or None
        quality = f"{one.quality:.2f}" if one.quality < 1 else f"{one.quality:.0f} dB"
        own = cells.setdefault((one.clients, one.members), {})
        own[one.noise_multiplier] = f"{one.found} of {one.of}, {quality}"
    columns = [f"ν = {nu:g}" + (f", ε = {price:,.3g}" if price else "") for nu, price in prices.items()]
    rows = [[str(size), members, *(own[nu] for nu in prices)] for (size, members), own in cells.items()]
    return Section(title, text, ("clients", "in the sums", *columns), rows)


def notes(interactions: int, vectors: bool) -> str:
    """Return the sentences below the table."""
    if vectors:
        what = (
            f"Vectors that are found up to their sign (at most {ERROR:.0%} of the predictions wrong), and the median "
            f"share of wrong predictions, from {interactions} sums. With the same clients in every sum, it "
            "stays open whose vector each is."
        )
    else:
        what = (
            f"Images that are shown (from {FULL_PSNR:g} dB, and {on_images.FURTHER:g} dB closer than the mean image), "
            "and their mean PSNR: from one sum over the same clients, or from the difference of two sums."
        )
    return (
        f"{what} ε is at δ = {DELTA:g}, for a client in all sums; only the noise guarantees it. A sum over one client "
        "is also what a server gets that isolates a client, or works with all other sites. An attack that fails "
        "proves nothing."
    )
