"""The mechanism applied to a site as a whole: from clients' training results to sums with noise once.

If the clients of a site trust it, the site sums their clipped updates by the hypothesis that each chose, and counts
them. Noise hides a change of any one client's whole data, its choice included (`umbel.privacy.accounting.guarantee`).
With one hypothesis the count needs no noise: it is public who took part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umbel.privacy import mechanisms
from umbel.privacy.accounting.guarantee import site_release
from umbel.privacy.gate import releases
from umbel.privacy.gate.releases import check_hidden
from umbel.privacy.gate.site import Site
from umbel.privacy.mechanisms.base import Matrix, Mechanism, NoiseSource
from umbel.privacy.mechanisms.sanitise import (
    LARGEST,
    NOISE_STEPS,
    check_noise,
    noise_of,
    resolution,
    round_to_grid,
    within,
)
from umbel.protocol.arrays import Arrays, flatten, unflatten
from umbel.protocol.errors import Refused
from umbel.protocol.release import Release
from umbel.protocol.tasks import TrainingSpec


@dataclass(frozen=True)
class SiteSanitiser:
    """A site's sanitisation of its clients' updates together, for a task that asks for sums.

    It works like `umbel.privacy.gate.releases.Sanitiser`, but the radius is raised only to the site's floor.
    `count_radius` is the radius of each count, in clients; 0 if counts get no noise.
    """

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
        (k, n), radius = everything.shape, max(task.clip_norm, site.policy.clip_norm_floor)
        mechanism, count_radius = None, 0.0
        if task.noise_multiplier > 0:
            mechanism = mechanisms.load(task.mechanism)(task.noise_multiplier)
            check_noise(mechanism, n, radius)
            if k > 1:
                count_radius = mechanism.count_radius(task.choice_epsilon)
                check_noise(mechanism, 1, count_radius)
        sanitiser = cls(task, everything, mechanism, radius, count_radius)
        if mechanism is not None and not site.simulated:
            sanitiser._check_spans(mechanism)
        return sanitiser

    @property
    def release(self) -> Release:
        """The release with which each participating client is charged."""
        k, n = self.hypotheses.shape
        return site_release(self.task.release(n, k, self.radius))

    def sanitised(
        self, trained: Arrays, chosen: NDArray[np.int64], sources: Iterator[NoiseSource]
    ) -> tuple[Arrays, list[float]]:
        r"""Return sums (k, \*shape) of the updates of charged clients, and their counts (k,), by hypothesis.

        `sources` has one element, for all noise of the release.
        """
        k, n = self.hypotheses.shape
        sums, counts = self.summed(trained, chosen)
        if self.mechanism is not None:
            counted = k if self.count_radius else 0
            radii = np.array([[self.radius] * k + [self.count_radius] * counted])
            noise = noise_of(self.mechanism, [n] * k + [1] * counted, radii, sources)[0]
            if next(sources, None) is not None:
                raise ValueError("a site's release has one source of noise")
            (of_sums, finest), (of_counts, finest_count) = self._deviations(self.mechanism)
            sums += noise[: k * n].reshape(k, n)
            sums = round_to_grid(sums, of_sums, finest)
            if counted:
                counts = round_to_grid(counts + noise[k * n :], of_counts, finest_count)
        np.clip(sums, -LARGEST, LARGEST, out=sums)
        return unflatten(sums, trained), counts.tolist()

    def summed(self, trained: Arrays, chosen: NDArray[np.int64]) -> tuple[Matrix, NDArray[np.float64]]:
        """Return the sums (k, n) of updates within the radius and the counts (k,), both without noise."""
        k, n = self.hypotheses.shape
        sums = np.zeros((k, n))
        for block in releases.blocks(len(chosen), n):
            mine = chosen[block]
            updates = releases.updates_in(trained, block, self.hypotheses[mine])
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
