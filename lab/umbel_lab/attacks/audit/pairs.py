"""The two data sets of a canary, as far from each other as a client's can be, and the likelihood of their results.

The coin of a canary decides: its updates point in opposite directions, another hypothesis fits it best, or it reports
from the opposite corner. An update is longer than the clip norm and a report lies outside its square, so that a gate
that does not clip is detected as well.
"""

from __future__ import annotations

import math

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray
from scipy import special

from umbel.privacy import mechanisms
from umbel.privacy.gate.own_app import local_report, local_result
from umbel.privacy.mechanisms.choice import OWN
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.clients import ClientOnNode
from umbel.protocol.errors import FleetError
from umbel.protocol.messages import assigned_in, hypotheses_in, scores_in
from umbel.protocol.release import LAPLACE, Clipping, Kind, Release, ReleaseBy
from umbel.protocol.tasks import TrainingSpec
from umbel_lab.attacks.victims import what_left

Matrix = NDArray[np.float64]
Coins = NDArray[np.int64]

NAME = "canary"
"""Name of the hypotheses' only array."""

BOUND = 1.0
"""Of reports."""

REPORTED = 2
"""Length of a report: loss and metric."""

BEYOND = 10.0
"""Length of an update before clipping, in clip norms."""

_SEVERAL = 20  # models of a message, enough for their mean to show a shared noise
_APART = 100.0  # between hypotheses, in deviations of a component of the noise: it reveals which one was trained


class TrainingPair:
    """Canaries that train; each has a release, and with `moves` the two data sets lead to different updates.

    Those that release their own models reveal which hypothesis they started from with high probability. In a site's
    release each is in a site with another client, whose data the auditor knows. With one hypothesis its two updates are
    two clip norms apart in one sum; with several it moves two sums by one clip norm each, and two counts by one client
    each.
    """

    def __init__(self, release: Release, moves: bool) -> None:
        self.release, self.moves = release, moves
        self._by_site = release.kind is Kind.SITE
        self.per_canary = 2 if self._by_site else 1
        """Number of the node's clients for each canary; the first is the canary."""
        self.clip_norm = 1.0 if release.radius is None else release.radius
        self.mechanism = mechanisms.load(release.mechanism)(release.noise_multiplier)
        k, n = release.hypotheses, release.n
        self.hypotheses = np.zeros((k, n), np.float32)
        self.hypotheses[:, 0] = _APART * self.mechanism.deviation(n) * self.clip_norm * np.arange(k)

    def task(self, round: int, clients: tuple[ClientOnNode, ...]) -> TrainingSpec:
        """Return the server's task for clients in a round."""
        release = self.release
        return TrainingSpec(
            round=round,
            clients=clients,
            local_epochs=1,
            step_size=1.0,
            batch_size=0,
            noise_multiplier=release.noise_multiplier,
            clipping=Clipping.PUBLIC,
            clip_norm=self.clip_norm,
            mechanism=release.mechanism,
            choice_epsilon=release.choice_epsilon,
            release_by=ReleaseBy.SITE if self._by_site else ReleaseBy.CLIENT,
        )

    def trained(self, content: RecordDict, coins: Coins, directions: Matrix) -> RecordDict:
        """Return the clients' results for the gate; they train the hypotheses that it assigned.

        In `coins` (clients,), -1 or 1, a client that is not a canary has 0: it has no update, and the first hypothesis
        fits it best. Directions are unit vectors (clients, n) or (1, n).
        """
        assigned, hypotheses = assigned_in(content), hypotheses_in(content)[NAME]
        chosen = np.where(assigned == OWN, self.best(coins), assigned)
        updates = BEYOND * self.updates(coins[:, None], directions)
        trained: Arrays = {NAME: (hypotheses[chosen] + updates).astype(np.float32)}
        return local_result(trained, chosen)

    def best(self, coins: Coins) -> NDArray[np.int64]:
        """Return the hypothesis that fits best: the second for a coin of -1, if there is a second."""
        return np.where((coins < 0) & self.release.chooses, 1, 0)

    def updates(self, coins: Coins | int, directions: Matrix) -> Matrix:
        """Return updates of the length of the clip norm, or of 0."""
        updates: Matrix = self.clip_norm * coins * directions * self.moves
        return updates

    def score(self, content: RecordDict, asked: int, directions: Matrix, less_shared: bool = False) -> Matrix:
        """Return the log likelihood ratio of the canaries' coins, given the releases of so many clients.

        With `less_shared` the mean of the first quarter of the models is subtracted first. This removes noise that
        clients share; with independent noise, the variance grows by 4/m for m models.
        """
        arrays, counts = what_left(content, asked, self._by_site)
        releases, likelihood = flatten(arrays), self._of_sums if self._by_site else self._of_models
        if less_shared and not self._by_site and len(releases) >= _SEVERAL:
            # Hypotheses are far apart in the first parameter, which reveals from which one a model was trained.
            nearest = np.abs(releases[:, :1] - self.hypotheses[:, 0]).argmin(axis=1)
            # Only the first quarter, the pilots, are used: their scores must not depend on canaries that are tested.
            first = max(_SEVERAL, len(releases) // 4)
            releases = releases - (releases - self.hypotheses[nearest])[:first].mean(axis=0)
        one, other = (likelihood(releases, counts, coin, directions) for coin in (1, -1))
        return one - other

    def _of_models(self, releases: Matrix, _counts: Matrix, coin: int, directions: Matrix) -> Matrix:
        """Return the log density (m,) of releases (m, n) of canaries with such a coin, up to a constant."""
        release, (best,) = self.release, self.best(np.array([coin]))
        logs = np.empty((release.hypotheses, len(releases)))
        for j, hypothesis in enumerate(self.hypotheses.astype(np.float64)):
            away = np.linalg.norm(releases - hypothesis - self.updates(coin, directions), axis=1)
            # Randomised response: the best has e^eps times the probability of any other.
            logs[j] = log_density(release.mechanism, release.noise_multiplier, release.n, self.clip_norm, away)
            logs[j] += release.choice_epsilon if j == best else 0.0
        total: Matrix = special.logsumexp(logs, axis=0)
        return total

    def _of_sums(self, sums: Matrix, counts: Matrix, coin: int, directions: Matrix) -> Matrix:
        """Return the log density (1,) of sums (k, n) and counts (k,), up to a constant."""
        release, (best,) = self.release, self.best(np.array([coin]))
        nu, away, others = release.noise_multiplier, sums.copy(), counts.copy()
        away[best] -= self.updates(coin, directions)[0]
        others[best] -= 1
        others[0] -= self.per_canary - 1
        total = log_density(release.mechanism, nu, release.n, self.clip_norm, np.linalg.norm(away, axis=1)).sum()
        if release.chooses:
            clip_norm = self.mechanism.count_radius(release.choice_epsilon)
            total += log_density(release.mechanism, nu, 1, clip_norm, np.abs(others)).sum()
        return np.array([total])


class ReportPair:
    """Canaries that report: from the origin, or from the far corner of the square."""

    def __init__(self, noise_multiplier: float) -> None:
        self._nu = noise_multiplier

    def reported(self, clients: tuple[ClientOnNode, ...], coins: Coins) -> RecordDict:
        """Return the results of canaries with these coins."""
        corner = (1 + BEYOND * coins) * BOUND / 2
        return local_report(corner, corner, clients, True)

    def score(self, content: RecordDict, asked: int) -> Matrix:
        """Return the log likelihood ratio of the coins, by loss and metric."""
        reported = scores_in(content, asked)
        if reported is None or not np.isfinite(reported).all():
            raise FleetError("the gate let no reports out; its reason is in the log above", code="nodes.refused")
        apart = (np.linalg.norm(reported.T - corner, axis=1) for corner in (BOUND, 0.0))
        near, far = (log_density(LAPLACE, self._nu, REPORTED, math.sqrt(2) * BOUND, one) for one in apart)
        return near - far


def log_density(mechanism: str, nu: float, n: int, clip_norm: float, distances: Matrix) -> Matrix:
    """Return the log density of noise in R^n at distances from its centre, up to a constant.

    For a mechanism other than umbel's own only the deviation is known. Its scores are then worse, but their bounds
    still hold.
    """
    if mechanism == mechanisms.Gaussian.name:
        return -np.square(distances / (nu * clip_norm)) / 2
    if mechanism == LAPLACE:
        return -distances * n / (nu * clip_norm)
    return -distances / (mechanisms.load(mechanism)(nu).deviation(n) * clip_norm)
