"""The mechanism applied to models: from clients' training results, and their reports, to releases.

`umbel.privacy.mechanisms.sanitise` clips updates and adds the noise, for vectors of numbers. Here are the rules of a
site around it: its floors, its hypotheses, and models too large to be sanitised at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from umbel.privacy import mechanisms
from umbel.privacy.accounting.guarantee import site_release
from umbel.privacy.gate.randomness import noise
from umbel.privacy.gate.site import Site
from umbel.privacy.mechanisms.base import Matrix, Mechanism, NoiseSource
from umbel.privacy.mechanisms.choice import keep_probability
from umbel.privacy.mechanisms.laplace import Laplace
from umbel.privacy.mechanisms.sanitise import (
    LARGEST,
    NOISE_STEPS,
    check_noise,
    columns_of,
    grid_step,
    min_radius,
    noise_of,
    release_in_place,
    resolution,
    round_to_grid,
    sanitise,
    within,
)
from umbel.protocol.arrays import Arrays, Labels, Packed, all_finite, flatten, unflatten
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.cores import cores
from umbel.protocol.errors import Refused
from umbel.protocol.records import MOST_STEPS
from umbel.protocol.release import Clipping, Release, ReleaseBy, report_release
from umbel.protocol.tasks import TrainingSpec

Ids = Sequence[ClientInDataset]
_BLOCK = 1 << 17  # numbers that are sanitised together
_AT_ONCE = 1 << 24  # numbers that threads sanitise at the same time, which bounds the memory
_FAR = 40.0  # in standard deviations; a number is farther away with a probability below 10^-20


@dataclass(frozen=True)
class Released:
    r"""The releases of the charged clients of a task.

    Attributes
    ----------
    arrays : dict of ndarray
        The models of the charged clients, each (m, \*shape), in the order asked; or where the site releases, the sums
        of their updates by hypothesis, each (k, \*shape).
    choices : list of int, optional
        Those of the charged clients, if the task asks for them (`TrainingSpec.disclose_choice`).
    step : float
        See `Sanitiser.step`; 0 within a simulation.
    counts : list of float, optional
        Where the site releases: the number of clients that trained each hypothesis.
    """

    arrays: Arrays
    choices: list[int] | None = None
    step: float = 0.0
    counts: list[float] | None = None


@dataclass(frozen=True)
class Sanitiser:
    """A site's sanitisation of the updates for one task.

    Attributes
    ----------
    site : Site
    task : TrainingSpec
    hypotheses : ndarray, shape (k, n)
    mechanism : Mechanism or None
        None if the task asks for no noise.
    radius : float
        The task's clip norm, raised to the site's floor and, outside simulation, to the minimum for 32-bit numbers.
    finest : float
        See `resolution`.
    parts : sequence of slice, optional
        The columns that get separate noise; None for the whole vector.
    """

    site: Site
    task: TrainingSpec
    hypotheses: Matrix
    mechanism: Mechanism | None
    radius: float
    finest: float
    parts: Sequence[slice] | None

    @classmethod
    def of(cls, site: Site, hypotheses: Arrays, task: TrainingSpec) -> Sanitiser:
        """Return a site's sanitiser for a task; raise `Refused` if the task permits no release."""
        check_hidden(site, task)
        everything = flatten(hypotheses)
        finest, n = resolution(everything), everything.shape[1]
        parts = columns_of(task.noise_per, {name: value.shape[1:] for name, value in hypotheses.items()})
        radius, mechanism = max(task.clip_norm, site.policy.clipping.floor), None
        if task.noise_multiplier > 0:
            mechanism = mechanisms.load(task.mechanism)(task.noise_multiplier)
            if not site.simulated:
                radius = max(radius, min_radius(mechanism.deviation(n), finest))
            check_noise(mechanism, n, radius)
            if mechanism.public_only and task.clipping is not Clipping.PUBLIC:
                raise Refused(
                    f"mechanism {mechanism.name!r} works only with clipping = 'public'", code="refused.private-radius"
                )
        return cls(site, task, everything, mechanism, radius, finest, parts)

    @property
    def step(self) -> float:
        """The step of the public grid if a release's numbers, in steps, fit 16 bits; 0 if they may not.

        Only public values decide this, so that the length of a message reveals nothing about the data.
        """
        if self.mechanism is None or self.task.clipping is not Clipping.PUBLIC:
            return 0.0
        noise = self.mechanism.deviation(self.hypotheses.shape[1]) * self.radius
        step = grid_step(noise, self.finest)
        largest = float(np.abs(self.hypotheses).max()) + self.radius + _FAR * noise
        return step if largest <= min(MOST_STEPS * step, LARGEST) else 0.0

    @property
    def release(self) -> Release:
        """The release with which clients are charged."""
        k, n = self.hypotheses.shape
        return self.task.release(n, k, self.radius)

    @property
    def explore(self) -> float:
        """Share of clients that train a hypothesis drawn at random: randomised response hides each choice."""
        epsilon = self.release.choice_epsilon
        return 1 - keep_probability(epsilon, len(self.hypotheses)) if epsilon > 0 else 0.0

    def leave(self, seed: int | None, clients: Ids, trained: Arrays, chosen: Labels) -> Released:
        """Return what leaves of charged clients; without a seed the operating system draws the noise."""
        # A seed's sources share one generator, so only one client at a time can draw.
        threads, sources = cores() if seed is None else 1, noise(seed, self.task.round, clients)
        releases = self.sanitised(trained, chosen, sources, threads)
        choices = chosen.tolist() if self.task.disclose_choice else None
        # Quantise only when the release crosses a network.
        return Released(releases, choices, 0.0 if self.site.simulated else self.step)

    def sanitised(self, trained: Arrays, chosen: Labels, sources: Iterator[NoiseSource], threads: int = 1) -> Packed:
        r"""Return the releases of charged clients, from what each trained, (clients, \*shape), and chose.

        `sources` has one for each client. With several threads, each must stay valid when the next is taken.
        """
        if self.mechanism is None and not (self.site.simulated or all(map(all_finite, trained.values()))):
            # The noise of training is all that hides it, and it would leave as the bare hypothesis.
            raise Refused("what was trained to hide rows is not finite, so it has no noise", code="refused.result")
        n = self.hypotheses.shape[1]
        shapes = {name: value.shape[1:] for name, value in trained.items()}
        releases = Packed(np.empty((len(chosen), n), np.float32), shapes)

        def fill(block: slice, own: Iterator[NoiseSource]) -> None:
            releases.matrix[block] = self._noisy(trained, block, chosen[block], own)

        parts, most = list(blocks(len(chosen), n)), _AT_ONCE // n
        own = (islice(sources, len(chosen[block])) for block in parts)
        if min(threads, len(parts), most) <= 1 or self.task.mechanism not in mechanisms.MECHANISMS:
            for block, some in zip(parts, own, strict=True):
                fill(block, some)
            return releases
        with ThreadPoolExecutor(min(threads, most)) as pool:
            # An iterator of sources may be advanced by one thread only.
            list(pool.map(fill, parts, [iter(list(some)) for some in own]))
        return releases

    def _noisy(self, trained: Arrays, block: slice, chosen: Labels, sources: Iterator[NoiseSource]) -> Matrix:
        """Return the releases (m, n) of a block of clients."""
        # For large models a block is one client, and its hypothesis need not be copied.
        start = self.hypotheses[chosen[0] : chosen[0] + 1] if len(chosen) == 1 else self.hypotheses[chosen]
        noisy = updates_in(trained, block, start)
        clipping = self.task.clipping
        release_in_place(self.mechanism, noisy, start, self.radius, clipping, sources, self.parts, self.finest)
        return noisy


def check_hidden(site: Site, task: TrainingSpec) -> None:
    """Raise `Refused` if a task's releases would leave a site with noise neither of the release nor of training."""
    hidden = task.noise_multiplier > 0 or (task.row_privacy is not None and task.release_by is ReleaseBy.CLIENT)
    if not (hidden or site.simulated):
        raise Refused("nothing leaves without noise", code="refused.unsanitised")


def updates_in(trained: Arrays, block: slice, start: Matrix) -> Matrix:
    r"""Return the updates (m, n) of a block of the clients that trained `trained`, each (clients, \*shape).

    They began at `start` (m, n).

    Diverged training counts as no update. Whether training diverges depends on the data and on the server's task, so a
    missing release would reveal something about the data.
    """
    updates = flatten({name: value[block] for name, value in trained.items()})
    updates -= start
    updates[~all_finite(updates, axis=1)] = 0.0
    return updates


def blocks(clients: int, n: int) -> Iterator[slice]:
    """Yield blocks of clients: as many large models as fit into a cache, but at least one."""
    size = max(1, _BLOCK // n)
    for begin in range(0, clients, size):
        yield slice(begin, begin + size)


@dataclass(frozen=True)
class SiteSanitiser:
    """A site's sanitisation of its clients' updates together, for a task that asks for sums.

    If the clients of a site trust it, the site sums their clipped updates by the hypothesis that each chose, and counts
    them. Noise hides a change of any one client's whole data, its choice included
    (`umbel.privacy.accounting.guarantee`). With one hypothesis the count needs no noise: it is public who took part.

    It works like `Sanitiser`, but the radius is raised only to the site's floor.
    `count_radius` is the radius of each count, in clients; 0 if counts get no noise.
    """

    site: Site
    task: TrainingSpec
    hypotheses: Matrix
    mechanism: Mechanism | None
    radius: float
    count_radius: float

    @classmethod
    def of(cls, site: Site, hypotheses: Arrays, task: TrainingSpec) -> SiteSanitiser:
        """Return a site's sanitiser for a task; raise `Refused` if the task permits no release."""
        check_hidden(site, task)
        everything = flatten(hypotheses)
        (k, n), radius = everything.shape, max(task.clip_norm, site.policy.clipping.floor)
        mechanism, count_radius = None, 0.0
        if task.noise_multiplier > 0:
            mechanism = mechanisms.load(task.mechanism)(task.noise_multiplier)
            check_noise(mechanism, n, radius)
            if k > 1:
                count_radius = mechanism.count_radius(task.choice_epsilon)
                check_noise(mechanism, 1, count_radius)
        sanitiser = cls(site, task, everything, mechanism, radius, count_radius)
        if mechanism is not None and not site.simulated:
            sanitiser._check_spans(mechanism)
        return sanitiser

    @property
    def release(self) -> Release:
        """The release with which each participating client is charged."""
        k, n = self.hypotheses.shape
        return site_release(self.task.release(n, k, self.radius))

    @property
    def explore(self) -> float:
        """As the task says: the noise on the counts hides each choice, and exploring only helps learning."""
        return self.task.explore

    def leave(self, seed: int | None, clients: Ids, trained: Arrays, chosen: Labels) -> Released:
        """Return what leaves of charged clients together."""
        sums, counts = self.sanitised(trained, chosen, noise(seed, self.task.round, [self.site.first], "site"))
        return Released(sums, counts=counts)

    def sanitised(self, trained: Arrays, chosen: Labels, sources: Iterator[NoiseSource]) -> tuple[Arrays, list[float]]:
        r"""Return sums (k, \*shape) of the updates of charged clients, and their counts (k,), by hypothesis.

        `sources` has one element, for all noise of the release.
        """
        k, n = self.hypotheses.shape
        sums, counts = self.summed(trained, chosen)
        if self.mechanism is not None:
            counted = k if self.count_radius else 0
            radii = np.array([[self.radius] * k + [self.count_radius] * counted])
            drawn = noise_of(self.mechanism, [n] * k + [1] * counted, radii, sources)[0]
            if next(sources, None) is not None:
                raise ValueError("a site's release has one source of noise")
            (of_sums, finest), (of_counts, finest_count) = self._deviations(self.mechanism)
            sums += drawn[: k * n].reshape(k, n)
            sums = round_to_grid(sums, of_sums, finest)
            if counted:
                counts = round_to_grid(counts + drawn[k * n :], of_counts, finest_count)
        np.clip(sums, -LARGEST, LARGEST, out=sums)
        return unflatten(sums, trained), counts.tolist()

    def summed(self, trained: Arrays, chosen: Labels) -> tuple[Matrix, NDArray[np.float64]]:
        """Return the sums (k, n) of updates within the radius and the counts (k,), both without noise."""
        k, n = self.hypotheses.shape
        sums = np.zeros((k, n))
        for block in blocks(len(chosen), n):
            mine = chosen[block]
            updates = updates_in(trained, block, self.hypotheses[mine])
            inside = within(self.mechanism, updates, self.radius)
            if len(mine) == 1:  # a large model
                sums[mine[0]] += inside[0]
            else:
                sums += (mine == np.arange(k)[:, None]) @ inside
        return sums, np.bincount(chosen, minlength=k).astype(np.float64)

    def _deviations(self, mechanism: Mechanism) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return for sums and for counts the deviation of the noise, and the spacing of the numbers that travel.

        That is the spacing at the largest possible number, by public values only; counts travel in 64 bits.
        """
        n, clients = self.hypotheses.shape[1], len(self.task.clients)
        return (
            (mechanism.deviation(n) * self.radius, resolution(np.array([clients * self.radius]))),
            (mechanism.deviation(1) * self.count_radius, float(np.spacing(float(clients)))),
        )

    def _check_spans(self, mechanism: Mechanism) -> None:
        """Raise if the noise spans too few steps of the numbers that travel: a larger radius would not help."""
        if any(0 < noise < NOISE_STEPS * finest for noise, finest in self._deviations(mechanism)):
            raise Refused(
                f"noise multiplier {mechanism.noise_multiplier:g} is too small for sums of {len(self.task.clients)} "
                "clients, whose largest possible values are rounded too coarsely for it; ask for more noise or fewer "
                "clients",
                code="refused.noise-out-of-range",
            )


@dataclass(frozen=True)
class ReportSanitiser:
    """A site's sanitisation of loss and metric, which lie in a square whose diagonal is the `radius`.

    Training clients report separately. For others the site reports their mean, so that noise is drawn once. Either way
    the guarantee holds between any two reports of one client.
    """

    site: Site
    mechanism: Laplace
    radius: float

    @classmethod
    def of(cls, site: Site) -> ReportSanitiser:
        """Return a site's sanitiser; raise `Refused` if its noise cannot be computed."""
        mechanism, radius = Laplace(site.policy.report_noise), math.sqrt(2) * site.policy.reports.bound
        check_noise(mechanism, 2, radius)
        return cls(site, mechanism, radius)

    @property
    def release(self) -> Release:
        """The release with which each reporting client is charged."""
        return report_release(self.mechanism.noise_multiplier, self.site.policy.reports.bound)

    def leave(self, seed: int | None, round: int, clients: Ids, scores: Matrix) -> Matrix:
        """Return the loss and metric (m, 2) of charged clients, clipped and with noise."""
        bound, many = self.site.policy.reports.bound, 1
        clipped = np.clip(np.nan_to_num(scores, nan=bound), 0, bound)
        if self.site.policy.trainers_report:
            sources = noise(seed, round, clients, "report")
            # Centred, because the mechanism clips to the radius around 0.
            noisy = sanitise(self.mechanism, clipped - bound / 2, self.radius, Clipping.PUBLIC, sources) + bound / 2
        else:
            sources, many = noise(seed, round, [self.site.first], "mean report"), len(clipped)
            noisy = clipped.sum(axis=0) + self.mechanism.noise([2], np.array([[self.radius]]), sources)
        finest = float(np.spacing(np.float32(bound * many)))
        rounded = round_to_grid(noisy, self.mechanism.deviation(2) * self.radius, finest) / many
        return np.broadcast_to(rounded, clipped.shape)
