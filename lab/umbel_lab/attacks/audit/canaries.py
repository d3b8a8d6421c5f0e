"""Canary clients behind the app's own gate, and the auditor who scores the messages that leave.

Each canary has a coin, which selects one of two data sets, as far from each other as a client's can be: its updates
point in opposite directions, or another hypothesis fits it best. An update is longer than the clip norm, so that a gate
that does not clip is detected as well. The auditor sees the messages that leave the node and knows the mechanism, the
two data sets and the hypotheses; it scores each canary by the logarithm of the likelihood ratio of its coin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from scipy import special

from umbel.privacy import mechanisms
from umbel.privacy.accounting.guarantee import gap
from umbel.privacy.mechanisms.choice import OWN
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.totals import Totals
from umbel.privacy.site.umbel_app import answer_round
from umbel.privacy.site.work import Results, Work
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.clients import ClientInDataset, ClientOnNode
from umbel.protocol.errors import ConfigError, FleetError
from umbel.protocol.messages import round_request
from umbel.protocol.records import pack
from umbel.protocol.release import LAPLACE, Clipping, Kind, Release, ReleaseBy
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec
from umbel.simulation.grid import InProcessGrid
from umbel_lab.attacks.victims import answer, what_left

Matrix = NDArray[np.float64]
Coins = NDArray[np.int64]

BEYOND = 10.0
"""Length of an update before clipping, in clip norms."""

_NAME = "canary"  # of the hypotheses' only array
_SEVERAL = 20  # models of a message, enough for their mean to show a shared noise
_APART = 100.0  # between hypotheses, in deviations of a component of the noise: it reveals which one was trained
_NUMBERS = 1 << 22  # values that the canaries of one message release
# Purposes of draws, each with a stream that differs from the others and from the noise.
_COINS, _DIRECTIONS = 101, 102


@dataclass(frozen=True)
class Setting:
    """The subject of an audit: the releases of each canary.

    It is the `release` of a trained model, or of a site's sums, each time. A canary takes part `times` times, which are
    scored together. With `random` the updates of each point in a separate direction, which the auditor knows, otherwise
    along the last parameter. With `moves` the two data sets lead to different updates, otherwise at most to different
    choices.
    """

    name: str
    release: Release
    times: int = 1
    random: bool = False
    moves: bool = True

    def __post_init__(self) -> None:
        if why := gap(self.release):
            raise ConfigError(f"there is no claim to audit, since {why}", code="config.nothing-claimed")
        if self.times < 1:
            raise ConfigError(f"canaries take part at least once, not {self.times} times", code="config.out-of-range")

    @property
    def by_site(self) -> bool:
        """Whether each canary is in a separate site, whose noise is drawn once."""
        return self.release.kind is Kind.SITE

    @property
    def numbers(self) -> int:
        """Number of values that leave for a canary each time."""
        return self.release.n * (self.release.hypotheses if self.by_site else 1)


@dataclass(frozen=True)
class Seen:
    """The results of the canaries.

    Their `coins` (m,) are -1 or 1. The auditor's `scores` (m,) are the log likelihood of a coin of 1 minus that of -1,
    given the messages that left. `account` is each canary's account in the node's ledger.
    """

    coins: Coins
    scores: Matrix
    account: Mapping[Release, int]


def watch(setting: Setting, canaries: int, seed: int, kind: type[Herd] | None = None) -> Seen:
    """Send so many canaries through the gate and score them, on a simulated node unless `kind` says otherwise.

    Raises
    ------
    FleetError
        If the gate refuses, as it does if the environment sets a stricter policy.
    """
    herd = (kind or Herd)(setting, canaries, seed)
    scores = np.zeros(canaries)
    # Each site needs a separate message.
    size = 1 if setting.by_site else max(1, _NUMBERS // setting.numbers)
    for begin in range(0, canaries, size):
        asked = range(begin, min(begin + size, canaries))
        for number in range(setting.times):
            scores[asked.start : asked.stop] += herd.take_part(number, asked)
    return Seen(herd.coins, scores, herd.account())


class TrainingPair:
    """The two data sets of canaries that train; with `moves` they lead to different updates.

    Canaries that release their own models reveal which hypothesis they started from with high probability. In a site's
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
        return TrainingSpec(
            round=round,
            clients=clients,
            local_epochs=1,
            step_size=1.0,
            batch_size=0,
            noise_multiplier=self.release.noise_multiplier,
            clipping=Clipping.PUBLIC,
            clip_norm=self.clip_norm,
            mechanism=self.release.mechanism,
            choice_epsilon=self.release.choice_epsilon,
            release_by=ReleaseBy.SITE if self._by_site else ReleaseBy.CLIENT,
        )

    def trained(self, hypotheses: Matrix, assigned: NDArray[np.int64], coins: Coins, directions: Matrix) -> Results:
        """Return the clients' results for the gate; they train the hypotheses that it assigned.

        In `coins` (clients,), -1 or 1, a client that is not a canary has 0: it has no update, and the first hypothesis
        fits it best. Directions are unit vectors (clients, n) or (1, n).
        """
        chosen = np.where(assigned == OWN, self.best(coins), assigned)
        updates = BEYOND * self.updates(coins[:, None], directions)
        return [chosen, (hypotheses[chosen] + updates).astype(np.float32)]

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
        up, down = (likelihood(releases, counts, coin, directions) for coin in (1, -1))
        return up - down

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


class Herd:
    """Canaries on one simulated node, and the auditor at the other end."""

    less_shared = False
    """Whether the auditor subtracts the part that all releases of a message share (`TrainingPair.score`)."""

    def __init__(self, setting: Setting, canaries: int, seed: int) -> None:
        self._setting, self._seed = setting, seed
        self.coins: Coins = 2 * np.random.default_rng([seed, _COINS]).integers(2, size=canaries) - 1
        self._training = TrainingPair(setting.release, setting.moves)
        self._step = self._training.per_canary
        self._asked, self._side = range(0), 1
        self._grid = self._node()

    def take_part(self, number: int, asked: range) -> Matrix:
        """Let some canaries take part for the time `number`, from 0; return their scores."""
        # Canaries change sides each time: draws that are used twice reveal them.
        self._asked, self._side = asked, 1 if number % 2 == 0 else -1
        clients = self._step * len(asked)
        return self._side * self._training.score(self._ask(number), clients, self._directions, self.less_shared)

    def account(self) -> Mapping[Release, int]:
        """Return each canary's account in the node's ledger."""
        ledger = self._ledger()
        first = ledger.account(ClientInDataset(0))
        if ledger.account(ClientInDataset(self._step * (len(self.coins) - 1))) != first:
            raise FleetError("the ledger charges canaries differently", code="nodes.uneven-charges")
        return first

    def _ask(self, number: int) -> RecordDict:
        """Return the messages that leave for the canaries whose turn it is."""
        round = 1 + number
        if self._setting.by_site:
            # The node plays another site in each round, with other clients and other noise.
            round += self._asked.start * self._setting.times
        everybody = tuple(map(ClientOnNode, range(self._step * self._asked.start, self._step * self._asked.stop)))
        return answer(self._grid, self._request(self._training.task(round, everybody)))

    def _node(self) -> InProcessGrid:
        """Return a grid whose only node is the canaries'."""
        app = ClientApp()
        app.train()(lambda msg, context: answer_round(msg, context, lambda *_: self))
        config = {"partition-id": 0, "num-partitions": 1}
        return InProcessGrid(app, {"seed": self._seed}, node_configs=[config])

    def _ledger(self) -> Journal | Totals:
        return Totals(next(iter(self._grid.contexts.values())).state)

    def _request(self, task: TrainingSpec) -> RecordDict:
        """Return the request to the node."""
        return round_request(pack({_NAME: self._training.hypotheses}), task)

    # --- as the gate calls the canaries

    def check(self, task: TrainingSpec | EvaluationSpec, hypotheses: Arrays) -> Sequence[ClientOnNode]:
        """Find nothing wrong: canaries train anything."""
        return task.clients

    def train(self, task: TrainingSpec, hypotheses: Arrays, assigned: NDArray[np.int64]) -> Work:
        """Return how the canaries' data change the hypotheses."""
        canary, place = np.divmod(np.array(task.clients), self._step)
        # 0 for clients that are not canaries.
        coins = np.where(place == 0, self._side * self.coins[canary], 0)
        trained = self._training.trained(hypotheses[_NAME], assigned, coins, self._directions)
        return Work(lambda places: [values[places] for values in trained])

    def score(self, task: EvaluationSpec, hypotheses: Arrays) -> Work:
        """Raise `NotImplementedError`: canaries do not report."""
        raise NotImplementedError

    @property
    def _directions(self) -> Matrix:
        """The unit vectors (canaries, n), or (1, n) for all, along which the updates of the asked canaries point."""
        n = self._setting.release.n
        if not self._setting.random:
            return np.eye(1, n, n - 1)
        generator = np.random.default_rng([self._seed, _DIRECTIONS, self._asked.start])
        drawn = generator.standard_normal((len(self._asked), n))
        unit: Matrix = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
        return unit
