"""Canary clients behind the app's own gate, and the auditor who scores what leaves.

Each canary has a coin, and one of two data sets by how it fell, as far from each other as a client's can be:
updates that point in opposite directions, other hypotheses that fit best, reports from opposite corners. An update
is longer than the radius and a report beyond its square, so that a gate that does not clip is found as well. The
auditor sees the messages that leave the node, knows the mechanism, the two data sets and the hypotheses, and
scores each canary by the logarithm of how much likelier one coin is than the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from scipy import special

import mechanisms
from mechanisms.choice import OWN
from mechanisms.guarantee import gap
from privacy.gate import Gate, local_report, local_result
from privacy.memory_ledger import MemoryLedger
from protocol.arrays import Arrays, flatten
from protocol.demands import Evaluation, Training
from protocol.errors import ConfigError, FleetError
from protocol.messages import (
    assigned_in,
    evaluation_in,
    hypotheses_in,
    released_in,
    round_request,
    scores_in,
    training_in,
)
from protocol.records import pack
from protocol.release import LAPLACE, Kind, RadiusMode, Release
from simulation.grid import InProcessGrid

Matrix = NDArray[np.float64]
Coins = NDArray[np.int64]

_NAME = "canary"
_BEYOND = 10.0  # radii that an update is long before it is clipped
_APART = 100.0  # between hypotheses, in deviations of a component of the noise: which one was trained can be told
_NUMBERS = 1 << 22  # that the canaries of one message release
_REPORTED = 2  # loss and metric
_BOUND = 1.0  # of reports
# What draws are for, so that none has the stream of another, nor of the noise.
_COINS, _DIRECTIONS = 101, 102


@dataclass(frozen=True)
class Setting:
    """What is audited: what each canary gives away.

    Attributes
    ----------
    name : str
    release : Release or None
        Of a trained model, each time; None where canaries do not train.
    report_noise_multiplier : float
        Above 0, canaries also report with noise each time.
    times : int
        How often each takes part; all of it is scored together.
    random : bool
        Whether the updates of each canary point in a direction of its own, which the auditor knows, and not along
        the last parameter.
    moves : bool
        Whether the two data sets lead to different updates; otherwise at most to different choices.
    """

    name: str
    release: Release | None = None
    report_noise_multiplier: float = 0.0
    times: int = 1
    random: bool = False
    moves: bool = True

    def __post_init__(self) -> None:
        if self.release is not None and (why := gap(self.release)):
            raise ConfigError(f"nothing is claimed, since {why}; there is nothing to audit")
        if self.release is None and not self.report_noise_multiplier > 0:
            raise ConfigError("canaries that neither train nor report give nothing away")
        if self.times < 1:
            raise ConfigError(f"canaries take part at least once, not {self.times} times")

    @property
    def numbers(self) -> int:
        """How many numbers a canary releases each time."""
        return (self.release.n if self.release else 0) + (_REPORTED if self.report_noise_multiplier else 0)


@dataclass(frozen=True)
class Seen:
    """What became of the canaries.

    Attributes
    ----------
    coins : ndarray of -1 or 1, shape (m,)
    scores : ndarray, shape (m,)
        The auditor's: log likelihood of a coin of 1 less that of -1, by what left.
    account : mapping from Release to int
        What the node's ledger has of each canary.
    """

    coins: Coins
    scores: Matrix
    account: Mapping[Release, int]


def watch(setting: Setting, canaries: int, seed: int) -> Seen:
    """Send so many canaries through the gate and score them.

    Raises
    ------
    FleetError
        When the gate refuses, as it does where the environment holds a stricter policy.
    """
    herd = _Herd(setting, canaries, seed)
    scores = np.zeros(canaries)
    for some in _blocks(canaries, setting.numbers):
        for number in range(1, setting.times + 1):
            scores[some.start : some.stop] += herd.take_part(number, some)
    return Seen(herd.coins, scores, herd.account())


class _Herd:
    """Canaries on one node, and the auditor at the other end."""

    def __init__(self, setting: Setting, canaries: int, seed: int) -> None:
        self._setting, self._seed = setting, seed
        self.coins: Coins = 2 * np.random.default_rng([seed, _COINS]).integers(2, size=canaries) - 1
        self._training = _TrainingPair(setting.release, setting.moves) if setting.release else None
        config: dict[str, Any] = {"partition-id": 0, "num-partitions": 1}
        if setting.report_noise_multiplier > 0:
            nu = setting.report_noise_multiplier
            config |= {"role": "train", "report-noise-multiplier": nu, "report-bound": _BOUND}
        app = ClientApp()
        app.train(mods=[Gate(_whatever)])(self._answer)
        self._grid = InProcessGrid(app, {"seed": seed}, node_configs=[config])
        (self._node,) = self._grid.get_node_ids()

    def take_part(self, number: int, some: range) -> Matrix:
        """Have some canaries take part in round `number`; return their scores."""
        setting, pair, clients = self._setting, self._training, tuple(some)
        hypotheses = pair.hypotheses if pair else np.zeros((1, 1), np.float32)
        evaluation = Evaluation(number, clients) if setting.report_noise_multiplier else None
        content = round_request(pack({_NAME: hypotheses}), pair.demand(number, clients) if pair else None, evaluation)
        message = self._grid.create_message(content, "train", self._node, "1")
        (reply,) = self._grid.send_and_receive([message])
        if reply.has_error():
            raise FleetError("the gate refused; its reason is in the log above")
        scores = np.zeros(len(some))
        if pair:
            arrays, released, _ = released_in(reply.content, len(some))
            if not released.all():
                raise FleetError("some canaries could not pay: the environment holds a limit")
            scores += pair.score(flatten(arrays), self._directions(clients))
        if evaluation:
            reported = scores_in(reply.content, len(some))
            if reported is None or not np.isfinite(reported).all():
                raise FleetError("the gate let no reports of canaries out; its reason is in the log above")
            scores += _score_reports(reported.T, setting.report_noise_multiplier)
        return _way(number) * scores

    def account(self) -> Mapping[Release, int]:
        """Return what the node's ledger has of each canary."""
        ledger = MemoryLedger(self._grid.contexts[self._node].state)
        first = ledger.account(0)
        if ledger.account(len(self.coins) - 1) != first:
            raise FleetError("the ledger charges canaries differently")
        return first

    def _directions(self, clients: tuple[int, ...]) -> Matrix:
        """Return the unit vectors (clients, n), or (1, n) for all, along which updates point."""
        assert self._training is not None
        n = self._training.release.n
        if not self._setting.random:
            return np.eye(1, n, n - 1)
        drawn = np.random.default_rng([self._seed, _DIRECTIONS, clients[0]]).standard_normal((len(clients), n))
        unit: Matrix = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
        return unit

    def _answer(self, msg: Message, context: Context) -> Message:
        """Hand to the gate what the canaries' data lead to."""
        training, evaluation = training_in(msg.content), evaluation_in(msg.content)
        if training is not None and self._training is not None:
            coins = _way(training.round) * self.coins[list(training.clients)]
            content = self._training.trained(msg.content, coins, self._directions(training.clients))
        else:
            assert evaluation is not None
            coins = _way(evaluation.round) * self.coins[list(evaluation.clients)]
            corner = (1 + _BEYOND * coins) * _BOUND / 2
            content = local_report(corner, corner, evaluation.clients, True)
        return Message(content, reply_to=msg)


class _TrainingPair:
    """The two data sets of a canary that trains, and what the auditor makes of its release."""

    def __init__(self, release: Release, moves: bool) -> None:
        self.release, self._moves = release, moves
        self._radius = 1.0 if release.radius is None else release.radius
        self._mechanism = mechanisms.load(release.mechanism)(release.noise_multiplier)
        k, n = release.hypotheses, release.n
        self.hypotheses = np.zeros((k, n), np.float32)
        self.hypotheses[:, 0] = _APART * self._mechanism.deviation(n) * self._radius * np.arange(k)

    def demand(self, number: int, clients: tuple[int, ...]) -> Training:
        """Return what the server asks for in round `number`."""
        release = self.release
        return Training(
            round=number,
            clients=clients,
            local_epochs=1,
            step_size=1.0,
            batch_size=0,
            noise_multiplier=release.noise_multiplier,
            radius_mode=RadiusMode.PUBLIC,
            radius=self._radius,
            mechanism=release.mechanism,
            choice_epsilon=release.choice_epsilon,
        )

    def trained(self, content: RecordDict, coins: Coins, directions: Matrix) -> RecordDict:
        """Return what canaries with these coins hand over; they train what the gate assigned to them."""
        assigned, hypotheses = assigned_in(content), hypotheses_in(content)[_NAME]
        chosen = np.where(assigned == OWN, self._best(coins), assigned)
        updates = _BEYOND * self._radius * coins[:, None] * directions if self._moves else 0.0
        trained: Arrays = {_NAME: (hypotheses[chosen] + updates).astype(np.float32)}
        return local_result(trained, chosen)

    def score(self, releases: Matrix, directions: Matrix) -> Matrix:
        """Return the log likelihood ratio of the coins, by releases (m, n)."""
        one, other = (self._likelihood(releases, coin, directions) for coin in (1, -1))
        return one - other

    def _best(self, coins: Coins) -> NDArray[np.int64]:
        """Return the hypothesis that fits best: the first or the second, where there is a second."""
        return np.where(coins > 0, 0, 1) if self.release.chooses else np.zeros(len(coins), np.int64)

    def _likelihood(self, releases: Matrix, coin: int, directions: Matrix) -> Matrix:
        """Return the log density (m,) of releases of canaries with such a coin, up to a constant."""
        k, (best,) = len(self.hypotheses), self._best(np.array([coin]))
        update = coin * self._radius * directions if self._moves else 0.0
        logs = np.empty((k, len(releases)))
        for j, hypothesis in enumerate(self.hypotheses.astype(np.float64)):
            away = np.linalg.norm(releases - hypothesis - update, axis=1)
            # Randomised response: the best has e^eps times the probability of any other.
            logs[j] = self._log_density(away) + (self.release.choice_epsilon if j == best else 0.0)
        total: Matrix = special.logsumexp(logs, axis=0)
        return total

    def _log_density(self, distances: Matrix) -> Matrix:
        return log_density(
            self.release.mechanism, self.release.noise_multiplier, self.release.n, self._radius, distances
        )


def log_density(mechanism: str, nu: float, n: int, radius: float, distances: Matrix) -> Matrix:
    """Return the log density of noise in R^n at distances from its centre, up to a constant.

    Of a mechanism that is not umbel's own only the deviation is known. Its scores are worse then, and what
    they show holds all the same.
    """
    if mechanism == mechanisms.Gaussian.name:
        return -np.square(distances / (nu * radius)) / 2
    if mechanism == LAPLACE:
        return -distances * n / (nu * radius)
    return -distances / (mechanisms.load(mechanism)(nu).deviation(n) * radius)


def report_release(noise_multiplier: float) -> Release:
    """Return what a noised report is to the account."""
    return Release(Kind.REPORT, _REPORTED, noise_multiplier, RadiusMode.PUBLIC)


def _score_reports(reports: Matrix, nu: float) -> Matrix:
    """Return the log likelihood ratio by loss and metric (m, 2), of the far corner to the origin."""
    far, near = (np.linalg.norm(reports - corner, axis=1) for corner in (0.0, _BOUND))
    radius = math.sqrt(2) * _BOUND
    return log_density(LAPLACE, nu, _REPORTED, radius, near) - log_density(LAPLACE, nu, _REPORTED, radius, far)


def _way(number: int) -> int:
    """Return 1 or -1 by turns: canaries change sides each round, and draws that are used twice give them away."""
    return 1 if number % 2 else -1


def _blocks(canaries: int, numbers: int) -> Iterator[range]:
    """Yield the canaries of each message."""
    size = max(1, _NUMBERS // numbers)
    for begin in range(0, canaries, size):
        yield range(begin, min(begin + size, canaries))


def _whatever(content: RecordDict, context: Context) -> None:
    """Find nothing wrong with what a message asks: canaries train anything."""
