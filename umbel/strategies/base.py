"""The base class of all strategies of umbel, each of which is one of Flower's.

To write your own, subclass `HypothesisStrategy` or one of its children. Override `assign` (chooses the hypothesis of
each release), `combine` (makes the next hypothesis from a group of releases) or `reshape` (changes the number of
hypotheses); or any method of Flower's. Then use it in a ServerApp, as any strategy of Flower's, or name it in umbel's
run config: ``strategy = "package.module:Class"``. The fields of a dataclass, `Options`, are its options. Its memory
from round to round is `state`, which a resumed run restores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from umbel.nodes.plain import Aggregate, PlainNodes, mean_metrics
from umbel.protocol.arrays import (
    Arrays,
    Labels,
    Matrix,
    Vectors,
    all_finite,
    distances,
    flatten,
    mean_of,
    unflatten,
)
from umbel.protocol.asked import Asked
from umbel.protocol.errors import ConfigError
from umbel.protocol.flower import filled
from umbel.protocol.hypotheses import Hypotheses, number_in
from umbel.protocol.log import log
from umbel.protocol.release import ReleaseBy
from umbel.protocol.releases import Releases
from umbel.strategies.rounds import Callback, Rounds

if TYPE_CHECKING:
    from umbel.models.model import Model
    from umbel.nodes.fleet import Fleet
    from umbel.protocol.run_config import RunConfig
    from umbel.strategies.how_many import HowMany

_KEPT = {np.dtype(code) for code in "?bBhHiIlLqQefd"}  # those of arrays that a run's folder keeps
_DRAWN = 2  # releases with this many parameters can be drawn in the plane


@dataclass(frozen=True)
class NoOptions:
    """The options of a strategy that has none."""


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

    Averages are unweighted, as in the paper. The parameters that Flower's `FedAvg` has too mean what they mean there,
    but no client is asked to evaluate unless `fraction_evaluate` says so, and a run of one node does not wait for more.

    Parameters
    ----------
    hypotheses : int, optional
        k, or the maximum if the strategy changes their number; by default that of the first hypotheses.
    min_releases : int
        A round with fewer releases leaves the hypotheses unchanged.
    fraction_train, fraction_evaluate : float
        Share of the connected nodes that a round asks.
    min_train_nodes, min_evaluate_nodes, min_available_nodes : int
    arrayrecord_key, configrecord_key : str
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable
        By default the unweighted mean of each metric.
    seed : int
        Of the samples of nodes.
    foreign_loop : bool
        Whether another loop than `start` may run k > 1 hypotheses: Flower's own, within a wrapper, evaluates and trains
        in separate exchanges.
    **options
        Fields of `Options`.
    """

    Options: ClassVar[type] = NoOptions
    """A dataclass; its fields are set behind the strategy's name."""
    fixed_hypotheses: ClassVar[int | None] = None
    """The only number of hypotheses that the strategy can train, if there is one."""
    discloses_choice: ClassVar[bool] = False
    """Whether clients are asked for the hypothesis they chose."""
    resizes: ClassVar[bool] = False
    """Whether `reshape` may change the number of hypotheses. Unless it says no, a class that overrides it may."""
    merge: ClassVar[bool] = True
    """Whether `start` may evaluate and train in one exchange. Unless it says so, a class that overrides
    `configure_train` or `aggregate_evaluate` gets two exchanges, as from Flower's own loop."""
    release_by: ClassVar[ReleaseBy] = ReleaseBy.CLIENT
    """The party that adds the noise: each client, or a site to its clients' sums (`umbel.strategies.site_average`)."""
    nodes: PlainNodes | Fleet
    """The nodes of the run; those of any Flower app unless `start` is given others."""

    def __init__(
        self,
        *,
        hypotheses: int | None = None,
        min_releases: int = 1,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 0.0,
        min_train_nodes: int = 1,
        min_evaluate_nodes: int = 1,
        min_available_nodes: int = 1,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Aggregate = mean_metrics,
        evaluate_metrics_aggr_fn: Aggregate = mean_metrics,
        seed: int = 0,
        foreign_loop: bool = False,
        **options: Any,
    ) -> None:
        if "weighted_by_key" in options:
            text = "umbel's strategies average without weights, as Algorithm 1 does; leave weighted_by_key out"
            raise ConfigError(text, code="config.weighted")
        self.nodes = PlainNodes(
            fraction_train, fraction_evaluate, min_train_nodes, min_evaluate_nodes, min_available_nodes,
            arrayrecord_key, configrecord_key, train_metrics_aggr_fn, evaluate_metrics_aggr_fn, seed,
        )  # fmt: skip
        self.hypotheses = self.fixed_hypotheses or hypotheses or 0
        self._any_number = not self.hypotheses
        self.min_releases = min_releases
        self.options = self.Options(**options)
        self.state: dict[str, NDArray[Any]] = {}
        """Arrays that the strategy keeps from round to round, by name; a run's folder keeps them too."""
        self._first_state: dict[str, NDArray[Any]] | None = None
        self.asked: dict[str, Asked] = {}
        """The clients that the last exchange asked, by type of message: ``train`` and ``evaluate``."""
        self._opened: tuple[dict[str, Any], Hypotheses] | None = None
        self.history: list[Outcome] = []
        """The outcome of each round of training, without the hypotheses; Flower's `Result` cannot hold it."""
        self.how_many: HowMany | None = None
        """Chooses k, if the run leaves that to it."""
        self.allows_several = foreign_loop
        """Whether `configure_train` may be called with more than one hypothesis: within `start`, or a foreign loop."""

    @property
    def first_hypotheses(self) -> int:
        """Number of hypotheses at the start of a run."""
        return self.hypotheses

    @property
    def fewest_hypotheses(self) -> int:
        """The fewest hypotheses among which clients may have to choose: a random choice among fewer reveals more."""
        return min(2, self.hypotheses) if self.may_resize else self.hypotheses

    @property
    def may_resize(self) -> bool:
        """Whether a round may change the number of hypotheses."""
        return self.how_many is not None or bool(_declared(type(self), "resizes", {"reshape"}, True))

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
        vectors, sent, k = releases.vectors, self.sent, self.sent.k
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
                if type(self).combine is HypothesisStrategy.combine:  # the mean alone needs no copy of the releases
                    moved[j] = self._from_mean(mean_of(vectors, rows), len(rows), hypotheses[j], j)
                else:
                    group = vectors[rows].astype(np.float64)
                    combined = np.asarray(self.combine(group, hypotheses[j].copy(), j))
                    if combined.shape != hypotheses[j].shape or combined.dtype.kind not in "biuf":
                        text = f"{type(self).__name__}.combine must return {hypotheses.shape[1]} parameters"
                        got = f"an array of {combined.dtype} of shape {combined.shape}"
                        raise ConfigError(f"{text}, not {got}", code="config.combine")
                    moved[j] = combined
                longest[j] = distances(vectors, hypotheses[j], rows).max()
            if (task := self.asked[MessageType.TRAIN].task) is not None:
                from umbel.strategies.differences import add_releases  # only runs at umbel's nodes need it

                add_releases(self.state, vectors, labels, hypotheses, task)
            moved = np.asarray(self.reshape(round, moved, hypotheses, vectors, labels))
            n, least, most = hypotheses.shape[1], 1 if self.may_resize else k, max(k, self.hypotheses)
            if moved.ndim != 2 or moved.shape[1] != n or not least <= len(moved) <= most:
                text = f"{type(self).__name__}.reshape must return {least} to {most} hypotheses of {n} parameters"
                raise ConfigError(f"{text}, not an array of shape {moved.shape}", code="config.reshape")
            following = moved_to(moved, sent, round)
        drawn = vectors.astype(np.float64) if vectors.shape[1] == _DRAWN else None
        asked, lost = releases.asked, releases.lost_nodes
        return Outcome(round, releases.clients, labels, counts, drawn, asked, lost, following, longest)

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
        return moved if self.how_many is None else self.how_many.choose(self.state, round, moved, hypotheses, labels)

    # --- what was sent

    def read_hypotheses(self, arrays: ArrayRecord) -> Hypotheses:
        """Return the hypotheses of a record, which is read once, however many methods get it."""
        # Compared by arrays: a strategy may put others into the same record.
        now = dict(arrays.items())
        if self._opened is None or [*map(id, now.values())] != [*map(id, self._opened[0].values())]:
            self._opened = now, self.nodes.read_hypotheses(arrays)
        return self._opened[1]

    def starts_from(self, arrays: ArrayRecord) -> None:
        """Take the hypotheses of the next exchange, however its messages are made."""
        nobody = Asked(self.read_hypotheses(arrays), np.zeros(0, np.int64), {})
        self.asked = {kind: nobody for kind in (MessageType.TRAIN, MessageType.EVALUATE)}

    @property
    def sent(self) -> Hypotheses:
        """The hypotheses from which the clients of the last round trained."""
        return self.asked[MessageType.TRAIN].hypotheses

    # --- Flower's methods

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        first_round: int = 1,
        evaluate_every: int = 1,
        callbacks: Sequence[Callback] = (),
        nodes: PlainNodes | Fleet | None = None,
    ) -> Result:
        r"""Run the strategy, as Flower's `Strategy.start` does, and return its result.

        One exchange evaluates the hypotheses after r rounds and trains round r + 1, unless evaluation may end the run.
        Metrics at r describe the hypotheses after r rounds.

        Parameters
        ----------
        initial_arrays : ArrayRecord
            The hypotheses, each array of shape (k, \*shape) (`umbel.hypotheses`).
        timeout : float
            Seconds for each exchange.
        first_round : int
            Above 1, to continue a run.
        evaluate_every : int
            Rounds from one evaluation to the next.
        callbacks : sequence of Callback
            They watch the run, and may stop it.
        nodes : PlainNodes or Fleet, optional
            The nodes, if they host more than one client each.

        Raises
        ------
        ConfigError
            If the first hypotheses are not stacked, or not as many as the strategy's.
        """
        if first_round < 1 or evaluate_every < 1:
            raise ConfigError("first_round and evaluate_every are at least 1", code="config.rounds")
        self.nodes, self._opened = nodes or self.nodes, None
        if first_round == 1:
            self.history.clear()
            self._first_state = dict(self.state) if self._first_state is None else self._first_state
            self.state = dict(self._first_state)
            k = number_in(initial_arrays)
            if self._any_number:
                self.hypotheses = k
            if k > self.hypotheses or (k != self.first_hypotheses and not self.may_resize):
                text = f"{type(self).__name__} trains {self.first_hypotheses} hypotheses, but the first arrays hold {k}"
                raise ConfigError(f"{text}; make as many, or leave hypotheses out", code="config.hypotheses")
        known, self.allows_several = self.allows_several, True
        try:
            configs = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
            rounds = Rounds(self, grid, Result(arrays=initial_arrays), timeout, *configs, evaluate_fn, callbacks)
            return rounds.run(first_round, num_rounds, evaluate_every)
        finally:
            self.allows_several = known

    @property
    def merges(self) -> bool:
        """Whether an exchange may both evaluate and train."""
        return bool(_declared(type(self), "merge", {"configure_train", "aggregate_evaluate"}, False))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask a sample of the training clients to train.

        Raises
        ------
        ConfigError
            If a foreign loop asks for k > 1 hypotheses without `foreign_loop`: it would run other rounds than `start`.
        """
        if not self.allows_several and number_in(arrays) > 1:
            text = "several hypotheses need umbel's own loop: call start of the strategy itself, not of a wrapper"
            raise ConfigError(f"{text}, or set foreign_loop=True", code="config.foreign-loop")
        sent, decisions = self.read_hypotheses(arrays), self.decisions(server_round)
        asked = self.nodes.ask_training(server_round, sent, config, grid, decisions, options=self.channel_options)
        self.asked[MessageType.TRAIN] = asked
        return asked.messages

    def decisions(self, round: int) -> dict[str, Any]:
        """Return the fields of a round's task (`umbel.protocol.tasks.TrainingSpec`) that the strategy decides.

        Only umbel's clients know such fields; where there are none, a strategy works with any Flower app.
        """
        return {"disclose_choice": True} if self.discloses_choice else {}

    @property
    def report_decisions(self) -> dict[str, Any]:
        """The fields of `umbel.protocol.tasks.EvaluationSpec` that the strategy decides."""
        return {}

    @property
    def channel_options(self) -> dict[str, Any]:
        """Options of the channel by which clients release (`umbel.privacy.channels.Channel.invite`)."""
        return {}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next hypotheses, None if there were too few releases, and the round's counts.

        The counts are ``asked``, ``releases``, ``lost-nodes``, and ``groups``: releases for each hypothesis. Metrics
        that clients sent along are beside them.
        """
        releases = self.nodes.read(self.asked[MessageType.TRAIN], replies)
        return self.conclude(self.learn(server_round, releases), releases.metrics)

    def conclude(
        self, outcome: Outcome, metrics: Mapping[str, Any] | None = None
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Keep the outcome of a round, and return it as `aggregate_train` does."""
        for name, value in self.state.items():
            kind = value.dtype if isinstance(value, np.ndarray | np.generic) else type(value).__name__
            if kind not in _KEPT or not isinstance(name, str):
                text = f"{type(self).__name__}.state must hold arrays of numbers by name, so that a run can resume"
                raise ConfigError(f"{text}; {name!r} is of type {kind}", code="config.state")
        self.history.append(replace(outcome, following=None))  # models may be large
        counts = {"asked": outcome.asked, "releases": len(outcome.clients), "lost-nodes": outcome.lost_nodes}
        record = filled(MetricRecord(dict(metrics or {})), {**counts, "groups": outcome.counts.tolist()})
        if outcome.following is None:
            return None, record
        return self.nodes.record(outcome.following), record

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask a sample of the validation clients to score the hypotheses after so many rounds."""
        sent, decisions = self.read_hypotheses(arrays), self.report_decisions
        asked = self.nodes.ask_evaluation(server_round + 1, sent, config, grid, decisions, options=self.channel_options)
        self.asked[MessageType.EVALUATE] = asked
        return asked.messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the metrics over the validation clients that replied; None without valid replies."""
        return self.nodes.evaluation(self.asked[MessageType.EVALUATE], replies)

    def summary(self) -> None:
        """Log a description of the strategy."""
        log(INFO, "%s: k = %d hypotheses", type(self).__name__, self.hypotheses)


def _declared(kind: type, name: str, methods: set[str], implied: bool) -> Any:
    """Return a class's declaration, or what a nearer class implies that overrides one of the methods."""
    for parent in kind.__mro__:
        if name in vars(parent):
            return vars(parent)[name]
        if methods & vars(parent).keys():
            return implied
    raise AttributeError(name)


def moved_to(moved: Matrix, sent: Arrays, round: int) -> Arrays | None:
    """Return hypotheses (k, n) as arrays like those sent; None, with a warning, if they are not finite."""
    following = unflatten(moved, sent)
    if all(all_finite(value) for value in following.values()):
        return following
    log(WARNING, "round %d: the strategy's combine makes hypotheses that are not finite; they stay unchanged", round)
    return None
