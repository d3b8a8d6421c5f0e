"""Canary clients behind the app's own gate, and the auditor who scores the messages that leave.

Each canary has a coin, which selects one of two data sets (`audit.pairs`). The auditor sees the messages that leave the
node and knows the mechanism, the two data sets and the hypotheses; it scores each canary by the logarithm of the
likelihood ratio of its coin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from umbel.privacy.accounting.guarantee import gap
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.memory_ledger import MemoryLedger
from umbel.privacy.gate.own_app import RoundGate
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientInDataset, ClientOnNode
from umbel.protocol.errors import ConfigError, FleetError
from umbel.protocol.messages import evaluation_in, round_request, training_in
from umbel.protocol.records import pack
from umbel.protocol.release import Kind, Release
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec
from umbel.simulation.grid import InProcessGrid
from umbel_lab.attacks.audit.pairs import BOUND, NAME, REPORTED, Coins, Matrix, ReportPair, TrainingPair
from umbel_lab.attacks.victims import answer

_NUMBERS = 1 << 22  # values that the canaries of one message release
# Purposes of draws, each with a stream that differs from the others and from the noise.
_COINS, _DIRECTIONS = 101, 102


@dataclass(frozen=True)
class Setting:
    """The subject of an audit: the releases of each canary.

    It is the `release` of a trained model, or of a site's sums, each time (None if canaries do not train). With a
    `report_noise_multiplier` above 0 it is also a report with noise. A canary takes part `times` times, which are
    scored together. With `random` the updates of each point in a separate direction, which the auditor knows, otherwise
    along the last parameter. With `moves` the two data sets lead to different updates, otherwise at most to different
    choices.
    """

    name: str
    release: Release | None = None
    report_noise_multiplier: float = 0.0
    times: int = 1
    random: bool = False
    moves: bool = True

    def __post_init__(self) -> None:
        if self.release is not None and (why := gap(self.release)):
            raise ConfigError(f"there is no claim to audit, since {why}", code="config.nothing-claimed")
        if self.release is None and not self.report_noise_multiplier > 0:
            raise ConfigError("canaries that neither train nor report reveal nothing", code="config.idle-canaries")
        if self.times < 1:
            raise ConfigError(f"canaries take part at least once, not {self.times} times", code="config.out-of-range")

    @property
    def by_site(self) -> bool:
        """Whether each canary is in a separate site, whose noise is drawn once."""
        return self.release is not None and self.release.kind is Kind.SITE

    @property
    def numbers(self) -> int:
        """Number of values that leave for a canary each time."""
        numbers = REPORTED if self.report_noise_multiplier else 0
        if self.release is not None:
            numbers += self.release.n * (self.release.hypotheses if self.by_site else 1)
        return numbers


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
        some = range(begin, min(begin + size, canaries))
        for number in range(setting.times):
            scores[some.start : some.stop] += herd.take_part(number, some)
    return Seen(herd.coins, scores, herd.account())


class Herd:
    """Canaries on one simulated node, and the auditor at the other end."""

    less_shared = False
    """Whether the auditor subtracts the part that all releases of a message share (`TrainingPair.score`)."""

    def __init__(self, setting: Setting, canaries: int, seed: int) -> None:
        self._setting, self._seed = setting, seed
        self.coins: Coins = 2 * np.random.default_rng([seed, _COINS]).integers(2, size=canaries) - 1
        self._training = TrainingPair(setting.release, setting.moves) if setting.release else None
        self._report = ReportPair(setting.report_noise_multiplier) if setting.report_noise_multiplier else None
        self._step = self._training.per_canary if self._training else 1
        self._some, self._side = range(0), 1
        self._reports: dict[str, Any] = {}
        if self._report:
            nu = setting.report_noise_multiplier
            self._reports = {"role": "train", "report-noise-multiplier": nu, "report-bound": BOUND}
        self._grid = self._node()

    def take_part(self, number: int, some: range) -> Matrix:
        """Let some canaries take part for the time `number`, from 0; return their scores."""
        # Canaries change sides each time: draws that are used twice reveal them.
        self._some, self._side = some, 1 if number % 2 == 0 else -1
        content, training, report = self._ask(number), self._training, self._report
        scores = np.zeros(len(some))
        if training:
            scores += training.score(content, self._step * len(some), self._directions, self.less_shared)
        if report:
            scores += report.score(content, len(some))
        return self._side * scores

    def account(self) -> Mapping[Release, int]:
        """Return each canary's account in the node's ledger."""
        ledger = self._ledger()
        first = ledger.account(ClientInDataset(0))
        if ledger.account(ClientInDataset(self._step * (len(self.coins) - 1))) != first:
            raise FleetError("the ledger charges canaries differently", code="nodes.uneven-charges")
        return first

    def _ask(self, number: int) -> RecordDict:
        """Return the messages that leave for the canaries whose turn it is."""
        setting, some, training = self._setting, self._some, self._training
        round = 1 + number
        if setting.by_site:
            # The node plays another site in each round, with other clients and other noise.
            round += some.start * setting.times
        hypotheses = training.hypotheses if training else np.zeros((1, 1), np.float32)
        everybody = tuple(map(ClientOnNode, range(self._step * some.start, self._step * some.stop)))
        task = training.task(round, everybody) if training else None
        evaluation = EvaluationSpec(round, everybody[:: self._step]) if self._report else None
        return answer(self._grid, self._request(hypotheses, task, evaluation))

    def _node(self) -> InProcessGrid:
        """Return a grid whose only node is the canaries'."""
        app = ClientApp()
        app.train(mods=[RoundGate(lambda _site, _run: _Anything())])(self._answer)
        config = {"partition-id": 0, "num-partitions": 1, **self._reports}
        return InProcessGrid(app, {"seed": self._seed}, node_configs=[config])

    def _ledger(self) -> Ledger | MemoryLedger:
        """Return the ledger of the node."""
        (context,) = self._grid.contexts.values()
        return MemoryLedger(context.state)

    def _request(
        self, hypotheses: NDArray[np.float32], task: TrainingSpec | None, evaluation: EvaluationSpec | None
    ) -> RecordDict:
        """Return the request to the node, with hypotheses (k, n)."""
        return round_request(pack({NAME: hypotheses}), task, evaluation)

    def _answer(self, msg: Message, context: Context) -> Message:
        """Pass the results of the canaries' data to the gate."""
        task, evaluation = training_in(msg.content), evaluation_in(msg.content)
        if task is not None and self._training:
            coins = self._coins(task.clients)
            return Message(self._training.trained(msg.content, coins, self._directions), reply_to=msg)
        assert evaluation is not None
        assert self._report, "nothing else was asked"
        return Message(self._report.reported(evaluation.clients, self._coins(evaluation.clients)), reply_to=msg)

    def _coins(self, clients: tuple[int, ...]) -> Coins:
        """Return clients' coins this time; 0 for those that are not canaries."""
        canary, place = np.divmod(np.array(clients), self._step)
        return np.where(place == 0, self._side * self.coins[canary], 0)

    @property
    def _directions(self) -> Matrix:
        """The unit vectors (canaries, n), or (1, n) for all, along which the updates of the asked canaries point."""
        assert self._setting.release is not None
        n = self._setting.release.n
        if not self._setting.random:
            return np.eye(1, n, n - 1)
        generator = np.random.default_rng([self._seed, _DIRECTIONS, self._some.start])
        drawn = generator.standard_normal((len(self._some), n))
        unit: Matrix = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
        return unit


class _Anything:
    """The clients behind the gate: canaries train anything."""

    def check_training(self, hypotheses: Arrays, task: TrainingSpec) -> None:
        """Find nothing wrong."""
