"""The base class of all strategies of umbel.

To write your own, subclass `HypothesisStrategy` or one of its children. Override `assign` (chooses the hypothesis of
each release), `combine` (makes the next hypothesis from a group of releases) or `reshape` (changes the number of
hypotheses). Then name it in the run config: ``strategy = "package.module:Class"``. The fields of a dataclass,
`Options`, are its options. Its memory from round to round is `state`, which a resumed run restores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from logging import INFO, WARNING
from typing import Any, ClassVar, Protocol, final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from umbel.models.model import Model
from umbel.protocol.arrays import (
    Arrays,
    Labels,
    Matrix,
    Vectors,
    all_finite,
    as_matrix,
    distances,
    flatten,
    mean_of,
    unflatten,
)
from umbel.protocol.errors import ConfigError
from umbel.protocol.flower import log
from umbel.protocol.plugins import NoOptions
from umbel.protocol.records import to_array_record
from umbel.protocol.release import ClipSchedule, ReleaseBy
from umbel.protocol.releases import Releases, Scores, Sums, Total
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec
from umbel.strategies.differences import look
from umbel.strategies.how_many import HowMany

_KEPT = {np.dtype(code) for code in "?bBhHiIlLqQefd"}  # those of arrays that a run's folder keeps
_DRAWN = 2  # releases with this many parameters can be drawn in the plane


class Clients(Protocol):
    """A strategy's view of a run's clients: it asks them, and reads their releases."""

    clients_per_round: int
    participations: Labels
    """Number of releases of each training client."""

    @property
    def sent(self) -> Arrays:
        """The hypotheses that the last `ask_training` sent."""

    @property
    def task(self) -> TrainingSpec:
        """The task of the last `ask_training`, the same for all clients."""

    def ask_training(self, round: int, hypotheses: ArrayRecord, task: TrainingSpec, grid: Grid) -> list[Message]:
        """Return messages that ask a sample of the training clients to train, one for each node."""

    def ask_evaluation(self, round: int, hypotheses: ArrayRecord, task: EvaluationSpec, grid: Grid) -> list[Message]:
        """Return messages that ask a sample of the validation clients to score hypotheses, one for each node."""

    def releases(self, replies: Iterable[Message]) -> Releases:
        """Return the releases in the replies to the last `ask_training`."""

    def sums(self, replies: Iterable[Message]) -> Sums:
        """Return the sums in the replies, if sites were asked for sums."""

    def together(
        self, round: int, messages: list[Message], colluding: int, least: int, reports: EvaluationSpec
    ) -> list[Message]:
        """Return those of a round's messages whose nodes can add their sums securely."""

    def secure_sum(self, round: int, replies: Iterable[Message], reports: EvaluationSpec) -> Total:
        """Return the sum over all sites that replied, which the server cannot read singly."""

    def scores(self, replies: Iterable[Message]) -> Scores | None:
        """Return the scores in the replies to the last `ask_evaluation`; None without valid replies."""

    @property
    def count_deviation(self) -> float:
        """The standard deviation of the noise on each count of a site's sums."""


@dataclass(frozen=True)
class Outcome:
    """The result of a training round for the server, which learns nothing else from it.

    Attributes
    ----------
    clients : ndarray of int, shape (m,)
        The training clients that released.
    groups : ndarray of int, shape (m,)
        The hypothesis that each release was assigned to; -1 if there were too few releases, and if sites released
        sums, which hide who trained which hypothesis.
    counts : ndarray of int, shape (k,)
        Number of releases for each hypothesis; if sites released sums, about how many clients trained it.
    releases : ndarray, shape (m, 2), or None
        The releases themselves if they have two parameters.
    asked, lost_nodes : int
        Number of clients that were asked, and of nodes without a valid reply.
    following : dict of ndarray, each (k, \\*shape), or None
        The next hypotheses; None if the round leaves them unchanged.
    longest : ndarray, shape (k,), or None
        The distance of each hypothesis to the furthest release assigned to it, 0 without any; None if releases were
        not assigned.
    """

    round: int
    clients: Labels
    groups: Labels
    counts: Labels
    releases: Matrix | None
    asked: int
    lost_nodes: int
    following: Arrays | None
    longest: Matrix | None = None


class HypothesisStrategy(Strategy):
    """Federated training of k hypotheses (group privacy paper, Algorithm 1).

    Parameters
    ----------
    fleet : Clients
        The run's nodes and their clients (`umbel.nodes.fleet.Fleet`).
    hypotheses : int
        k, or the maximum if the strategy changes their number.
    min_releases : int
        A round with fewer releases leaves the hypotheses unchanged.
    radius : ClipSchedule
        The clip norm of each round.
    options : Options
    """

    Options: ClassVar[type] = NoOptions
    """A dataclass; its fields are set behind the strategy's name."""
    fixed_hypotheses: ClassVar[int | None] = None
    """The only number of hypotheses that the strategy can train, if there is one."""
    discloses_choice: ClassVar[bool] = False
    """Whether clients are asked for the hypothesis they chose."""
    resizes: ClassVar[bool] = False
    """Whether `reshape` may change the number of hypotheses; true if a subclass overrides it and does not set this."""
    averages: ClassVar[bool] = True
    """Whether `combine` needs only the mean, and so no copy of the releases; false if a subclass overrides it."""
    release_by: ClassVar[ReleaseBy] = ReleaseBy.CLIENT
    """The party that adds the noise: each client, or a site to its clients' sums (`umbel.strategies.site_average`)."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.averages = cls.combine is HypothesisStrategy.combine
        if "reshape" in vars(cls) and "resizes" not in vars(cls):
            cls.resizes = True

    def __init__(
        self,
        fleet: Clients,
        *,
        hypotheses: int = 2,
        min_releases: int = 1,
        radius: ClipSchedule | None = None,
        options: Any = None,
    ) -> None:
        self.fleet = fleet
        self.hypotheses = self.fixed_hypotheses or hypotheses
        self.min_releases = min_releases
        self.radius = radius or ClipSchedule()
        self.options = options if options is not None else self.Options()
        self.state: dict[str, NDArray[Any]] = {}
        """Arrays that the strategy keeps from round to round, by name; a run's folder keeps them too."""
        self.how_many: HowMany | None = None
        """Chooses k, if the run leaves that to it."""

    @property
    def first_hypotheses(self) -> int:
        """Number of hypotheses at the start of a run."""
        return self.hypotheses

    @property
    def fewest_hypotheses(self) -> int:
        """The fewest hypotheses among which clients may have to choose: a random choice among fewer reveals more."""
        return min(2, self.hypotheses) if self.resizes or self.how_many else self.hypotheses

    @property
    def validates_alone(self) -> bool:
        """Whether a round may validate before it trains; otherwise one exchange does both."""
        return True

    def check(self, run: RunConfig, model: Model) -> None:
        """Raise `ConfigError` if the strategy cannot carry out the run; called once, before any work."""

    def assign(self, releases: Vectors, hypotheses: Matrix, choices: Labels | None) -> Labels:
        """Return the hypothesis (m,) that each release belongs to.

        Parameters
        ----------
        releases : ndarray of float32, shape (m, n)
            Sanitised parameter vectors, in client order, as they travelled; read-only. Together with a
            hypothesis they give float64; a sum of them alone needs ``dtype=np.float64``.
        hypotheses : ndarray, shape (k, n)
            The hypotheses as broadcast; read-only.
        choices : ndarray of int, shape (m,), or None
            The clients' choices, if the strategy `discloses_choice`.
        """
        raise NotImplementedError

    def combine(self, group: Matrix, hypothesis: Matrix, index: int) -> Matrix:
        """Return the next hypothesis (n,): the mean of the releases assigned to it.

        Parameters
        ----------
        group : ndarray of float64, shape (g, n)
            The releases, in client order.
        hypothesis : ndarray, shape (n,)
            The hypothesis as broadcast.
        index : int
            Its number, from 0 to k - 1.
        """
        return self._from_mean(mean_of(group), len(group), hypothesis, index)

    def _from_mean(self, mean: Matrix, count: int, hypothesis: Matrix, index: int) -> Matrix:
        """Return the next hypothesis (n,), as `combine` does, from the mean (n,) of so many releases."""
        return mean

    def learn(self, round: int, releases: Releases) -> Outcome:
        """Assign the releases to hypotheses and combine each group; a hypothesis without releases stays unchanged."""
        vectors, sent = releases.vectors, self.fleet.sent
        k = len(next(iter(sent.values())))
        labels, counts = np.full(len(vectors), -1, np.int64), np.zeros(k, np.int64)
        following = longest = None
        if len(vectors) >= max(1, self.min_releases):
            hypotheses = flatten(sent)
            hypotheses.flags.writeable = False  # updates are measured from them
            labels = np.asarray(self.assign(vectors, hypotheses, releases.choices))
            if (
                labels.shape != (len(vectors),)
                or labels.dtype.kind not in "iu"
                or not ((labels >= 0) & (labels < k)).all()
            ):
                text = f"{type(self).__name__}.assign must name a hypothesis from 0 to {k - 1} for each release"
                raise ConfigError(f"{text}; to leave releases out, override combine", code="config.assign")
            counts = np.bincount(labels, minlength=k)
            moved, longest = hypotheses.copy(), np.zeros(k)
            for j in np.flatnonzero(counts).tolist():
                rows = np.flatnonzero(labels == j)
                if self.averages:
                    moved[j] = self._from_mean(mean_of(vectors, rows), len(rows), hypotheses[j], j)
                else:
                    group = vectors[rows].astype(np.float64)
                    found = np.asarray(self.combine(group, hypotheses[j].copy(), j))
                    if found.shape != hypotheses[j].shape or found.dtype.kind not in "biuf":
                        text = f"{type(self).__name__}.combine must return {hypotheses.shape[1]} parameters"
                        got = f"an array of {found.dtype} of shape {found.shape}"
                        raise ConfigError(f"{text}, not {got}", code="config.combine")
                    moved[j] = found
                longest[j] = distances(vectors, hypotheses[j], rows).max()
            look(self.state, vectors, labels, hypotheses, self.fleet.task)
            moved = np.asarray(self.reshape(round, moved, hypotheses, vectors, labels))
            self._check_shape(moved, hypotheses)
            following = moved_to(moved, sent, round)
        drawn = vectors.astype(np.float64) if vectors.shape[1] == _DRAWN else None
        asked, lost = releases.asked, releases.lost_nodes
        return Outcome(round, releases.clients, labels, counts, drawn, asked, lost, following, longest)

    def _check_shape(self, moved: Matrix, hypotheses: Matrix) -> None:
        """Raise unless there are as many hypotheses as before, or as many as the strategy says that there may be."""
        k, n = hypotheses.shape
        least, most = 1 if self.resizes or self.how_many else k, max(k, self.hypotheses)
        if moved.ndim != 2 or moved.shape[1] != n or not least <= len(moved) <= most:
            text = f"{type(self).__name__}.reshape must return {least} to {most} hypotheses of {n} parameters"
            raise ConfigError(f"{text}, not an array of shape {moved.shape}", code="config.reshape")

    def reshape(self, round: int, moved: Matrix, hypotheses: Matrix, releases: Vectors, labels: Labels) -> Matrix:
        """Return the next hypotheses (l, n); l may differ from k, up to the `hypotheses` of the run.

        Parameters
        ----------
        round : int
        moved, hypotheses : ndarray, shape (k, n)
            From `combine`, and as broadcast.
        releases : ndarray, shape (m, n)
        labels : ndarray of int, shape (m,)
            From `assign`.
        """
        return moved if self.how_many is None else self.how_many.look(self.state, round, moved, hypotheses, labels)

    def train(self, round: int, replies: Iterable[Message]) -> Outcome:
        """Return the outcome of a round from the replies to its training messages."""
        outcome = self.learn(round, self.fleet.releases(replies))
        self._check_state()
        return outcome

    def _check_state(self) -> None:
        """Raise unless the run's folder can keep the state."""
        for name, value in self.state.items():
            kind = value.dtype if isinstance(value, np.ndarray | np.generic) else type(value).__name__
            if kind not in _KEPT or not isinstance(name, str):
                text = f"{type(self).__name__}.state must hold arrays of numbers by name, so that a run can resume"
                raise ConfigError(f"{text}; {name!r} is of type {kind}", code="config.state")

    def validate(self, round: int, replies: Iterable[Message]) -> Scores | None:
        """Return the validation clients' scores of the hypotheses; None without valid replies."""
        return self.fleet.scores(replies)

    # --- Flower's hooks; a run of umbel never calls the last two, only Flower's own loop does

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask a sample of the training clients to train.

        `config` holds fields of `umbel.protocol.tasks.TrainingSpec`; the strategy sets others, or they have their
        default.
        """
        task = self.task(server_round, TrainingSpec.of_config(config))
        return self.fleet.ask_training(server_round, arrays, task, grid)

    def task(self, round: int, template: TrainingSpec) -> TrainingSpec:
        """Return the task for all clients of a round: the run's template, with the fields that the strategy decides."""
        clip: dict[str, Any] = {"clipping": self.radius.mode, "clip_norm": self.radius.at(round)}
        return _decided(template, **clip, disclose_choice=self.discloses_choice, release_by=self.release_by)

    @final
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next hypotheses, None if there were too few releases, and the round's counts.

        The counts are ``asked``, ``releases``, ``lost-nodes``, and ``groups``: releases for each hypothesis.
        """
        outcome = self.train(server_round, replies)
        counts = {"asked": outcome.asked, "releases": len(outcome.clients), "lost-nodes": outcome.lost_nodes}
        told = MetricRecord({**counts, "groups": outcome.counts.tolist()})
        return None if outcome.following is None else to_array_record(outcome.following), told

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask a sample of the validation clients to score the hypotheses."""
        return self.fleet.ask_evaluation(server_round, arrays, EvaluationSpec.of_config(config), grid)

    @final
    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the fields of `Scores` over the validation clients that replied; None without valid replies."""
        scores = self.validate(server_round, replies)
        return None if scores is None else MetricRecord(asdict(scores))

    def summary(self) -> None:
        """Log a description of the strategy."""
        name, clients, mode = type(self).__name__, self.fleet.clients_per_round, self.radius.mode
        log(INFO, "%s: k = %d hypotheses, %d clients a round, clipping %s", name, self.hypotheses, clients, mode)


@lru_cache(maxsize=4)
def _decided(template: TrainingSpec, **decisions: Any) -> TrainingSpec:
    return replace(template, **decisions)


def moved_to(moved: Matrix, sent: Arrays, round: int) -> Arrays | None:
    """Return hypotheses (k, n) as arrays like those sent; None, with a warning, if they are not finite."""
    following = unflatten(moved, sent)
    if all_finite(as_matrix(following)):
        return following
    log(WARNING, "round %d: the strategy's combine makes hypotheses that are not finite; they stay unchanged", round)
    return None
