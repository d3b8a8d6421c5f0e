"""Hostile replies: none ends a run, gets into the hypotheses, or costs an honest client its share.

``REPLIES=10000`` sends so many in place of 1,000.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from tests.helpers.messages import instead, sent
from tests.helpers.paper import paper_task
from tests.helpers.replies import evaluation_reply, training_reply
from tests.helpers.scripted import on
from umbel import models
from umbel.nodes.fleet import Fleet
from umbel.nodes.roster import admitted
from umbel.protocol.arrays import flatten
from umbel.protocol.errors import ProtocolError
from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.messages import evaluation_in, hosting_reply, hypotheses_in, training_in
from umbel.protocol.records import pack, unpack
from umbel.protocol.run_config import MAX_CLIENTS, RunConfig
from umbel.protocol.tasks import Hosting
from umbel.server.history import State
from umbel.server.run import Run
from umbel.server.setup import Setup
from umbel.simulation.grid import InProcessGrid
from umbel.strategies import GroupPrivacy

LINEAR = models.load("linear")
OPTIMUM = np.array([3.0, -2.0])
REPLIES = int(os.environ.get("REPLIES", "1000"))


# --- what hostile nodes say

ODD_NUMBERS: list[Any] = [
    0, 1, -1, 2, 10**8, 10**12, 2**31, 2**63 - 1, -(2**63), 2**70, 0.5, 1e308, -1e308, 3.4e38, float("nan"),
    float("inf"), -float("inf"),
]  # fmt: skip


def odd(rng: np.random.Generator) -> Any:
    """Return a value of any type that a record may hold, and of some that it may not."""
    kind = rng.integers(8)
    if kind < 4:
        return ODD_NUMBERS[rng.integers(len(ODD_NUMBERS))]
    if kind == 4:
        return [ODD_NUMBERS[rng.integers(2 * 5)] for _ in range(rng.integers(5))]
    if kind == 5:
        return [float(rng.integers(2))] * int(rng.integers(1, 3000))
    return [True, False, None, "simulated", "\x1b[2J\n" * 100, b"\x00", [], ["a"]][rng.integers(8)]


def put(record: Any, name: str, value: Any) -> None:
    """Put a value into a record past Flower's checks, which a hostile node does not run."""
    try:
        record[name] = value
    except Exception:
        record._data[name] = value


def odd_array(rng: np.random.Generator, like: NDArray[Any]) -> Array | NDArray[Any]:
    choice = rng.integers(6)
    if choice == 0:
        value = np.full(like.shape, rng.choice([np.nan, np.inf, 3.4e38, -3.4e38, 1e30, 1e9]), np.float32)
    elif choice == 1:
        value = rng.standard_normal(like.shape[1:] or (1,)).astype(np.float32)
    elif choice == 2:
        value = like.astype(rng.choice([np.float64, np.int8, np.complex64, np.bool_, ">f4"]))
    elif choice == 3:
        return Array("float32", (10**9, 10**9), "numpy.ndarray", rng.bytes(int(rng.integers(60))))
    elif choice == 4:
        (whole,) = pack({"weight": like}).values()
        return Array(whole.dtype, whole.shape, str(rng.choice(["numpy.ndarray", "pickle"])), whole.data[:-3])
    else:
        value = np.zeros((0, *like.shape[1:]), np.float32)
    return np.ascontiguousarray(value)


def odd_arrays(rng: np.random.Generator, record: ArrayRecord) -> ArrayRecord:
    """Return arrays of the same names that cannot be, or one of bytes in the place of all."""
    try:
        odd = {name: odd_array(rng, value) for name, value in unpack(record).items()}
    except ProtocolError:
        return record  # changed before
    whole = next((value for value in odd.values() if isinstance(value, Array)), None)
    return sent(odd) if whole is None else instead(whole, record)


def spoilt(content: RecordDict, rng: np.random.Generator) -> RecordDict:
    """Change an honest reply in one to three places."""
    for _ in range(rng.integers(1, 4)):
        names = list(content)
        name = str(rng.choice([*names, "released", "scores", "arrays", "hosting"]))
        record, choice = content.get(name), rng.integers(7)
        if choice == 0:
            content.pop(name, None)
        elif choice == 1:
            content[name] = [MetricRecord(), ConfigRecord(), ArrayRecord()][rng.integers(3)]
        elif choice == 2:
            content[f"{name}\x1b[0m" * int(rng.integers(1, 50))] = MetricRecord({"a": 1})
        elif isinstance(record, ArrayRecord):
            content[name] = odd_arrays(rng, record)
        elif isinstance(record, MetricRecord):
            keys = [*record, "clients", "choices", "loss", "metric", "train", "step"]
            put(record, str(rng.choice(keys)), odd(rng))
    return content


def odd_hosting(rng: np.random.Generator) -> RecordDict:
    """Return what a node says of itself that cannot be."""
    while True:
        record = Hosting(3, 2).to_record() if rng.random() < 0.9 else Hosting(1, 0, 0, 1).to_record()
        for _ in range(rng.integers(1, 3)):
            put(record, str(rng.choice(["version", "train", "validation", "first", "step"])), odd(rng))
        content = RecordDict({"hosting": record})
        content = content if rng.random() < 0.9 else spoilt(content, rng)
        try:
            admitted(content, MAX_CLIENTS, together=False)
        except Exception:
            return content


# --- the nodes


def honest(message: Message) -> RecordDict:
    """Return what a node with four training and two validation clients answers, a step towards the optimum."""
    content = RecordDict()
    if message.metadata.message_type.startswith("query"):
        return hosting_reply(Hosting(4, 2))
    theta = hypotheses_in(message.content)
    vectors = flatten(theta)
    nearest = vectors[np.linalg.norm(vectors - OPTIMUM, axis=1).argmin()]
    training, evaluation = training_in(message.content), evaluation_in(message.content)
    if training is not None:
        rows = np.tile(nearest + 0.3 * (OPTIMUM - nearest), (len(training.clients), 1))
        release = {"weight": rows[:, None].astype(np.float32)}
        content.update(training_reply(release, [1] * len(rows)))
    if evaluation is not None:
        loss = np.full(len(evaluation.clients), np.linalg.norm(nearest - OPTIMUM))
        content.update(evaluation_reply(loss, loss))
    return content


class HostileGrid(InProcessGrid):
    """Nodes of which some are hostile: they answer in any way, late, twice, or in another's name.

    It counts how many training clients each honest node was `asked` for. While it is `joining`, new hostile nodes come
    all the time; none of these says what can be of itself.
    """

    def __init__(self, honest_nodes: int, hostile_nodes: int, seed: int) -> None:
        super().__init__(client_app=lambda *_: None, run_config={}, node_configs=[{}] * (honest_nodes + hostile_nodes))
        ids = list(self.contexts)
        self._rng = np.random.default_rng(seed)
        self._first, self.honest = set(ids[:hostile_nodes]), set(ids[hostile_nodes:])
        self.hostile = set(self._first)
        self.hostile_replies = 0
        self.asked: Counter[int] = Counter()
        self.joining = False
        self._late: list[tuple[str, Message]] = []

    def get_node_ids(self) -> Iterable[int]:
        if self.joining:
            new = max(self.contexts) + 1
            self.contexts[new] = Context(1, new, {}, RecordDict(), {})
            self.hostile.add(new)
        return list(self.contexts)

    def _answer(self, message: Message) -> Message:
        node, rng = message.metadata.dst_node_id, self._rng
        if node in self.honest:
            training = training_in(message.content) if message.metadata.message_type == "train" else None
            self.asked[node] += len(training.clients) if training else 0
            return Message(honest(message), reply_to=message)
        self.hostile_replies += 1
        asks = message.metadata.message_type
        if asks == "query" and node in self._first:  # these host far more than all others
            return Message(hosting_reply(Hosting(10**5, 2)), reply_to=message)
        if rng.random() < 0.05:
            return Message(Error(int(rng.integers(20)), "\x1b[2J\r\n" + "x" * 10**4), reply_to=message)
        content = odd_hosting(rng) if asks == "query" else spoilt(honest(message), rng)
        reply = Message(content, reply_to=message)
        if rng.random() < 0.05:
            reply.metadata.__dict__["_src_node_id"] = int(rng.choice([*self.honest, 1, 2**40]))
        return reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for key in list(message_ids):
            reply = self._replies.pop(key, None)
            if reply is None:
                continue
            replies.append(reply)
            fate = self._rng.random()
            if reply.metadata.src_node_id in self.hostile and fate < 0.1:
                replies.append(reply)  # twice
            if reply.metadata.src_node_id in self.hostile and fate > 0.95:
                self._late.append((key, replies.pop()))
        if self._late and self._rng.random() < 0.3:
            replies.append(self._late.pop(0)[1])
        return replies


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ten thousand warnings are told to nobody."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.mark.slow
def test_no_reply_of_a_round_does_harm() -> None:
    """Each node is asked in each round for four clients, as if it had never failed."""
    grid = HostileGrid(honest_nodes=2, hostile_nodes=40, seed=1)
    fleet = Fleet(clients_per_round=10, max_participations=0, per_node="share=0.05", wait="nodes=3")
    sent = Hypotheses({"weight": np.array([[[1.0, 1.0]], [[-5.0, 4.0]]], np.float32)})
    task = paper_task(noise_multiplier=1.0)
    roster = fleet.roster(grid)
    stops = np.cumsum([hosting.train for _, hosting in roster.nodes])
    first = {node: stop - hosting.train for (node, hosting), stop in zip(roster.nodes, stops, strict=True)}
    everyone = np.sort(np.concatenate([first[node] + np.arange(4) for node in first]))
    honest_clients = {int(first[node]) + i for node in grid.honest for i in range(4)}
    round = 0
    while grid.hostile_replies < REPLIES:
        round += 1
        roster._absent.clear()
        training = fleet.ask_training(round, sent, task, grid, clients=everyone)
        evaluation = fleet.ask_evaluation(round, sent, task.evaluation, grid)
        replies, _ = fleet.exchange(round, grid, [*training.messages, *evaluation.messages], timeout=0.002)
        releases, scores = fleet.read(training, replies), fleet.read(evaluation, replies)
        assert honest_clients <= set(releases.clients.tolist())
        assert np.isfinite(releases.vectors).all()
        assert np.abs(releases.vectors).max() < 1e8
        assert scores is not None
        assert np.isfinite([scores.loss, scores.metric]).all()
    assert fleet.participations[sorted(honest_clients)].tolist() == [round] * 8
    assert len(roster) == 42


@pytest.mark.slow
def test_a_run_goes_on_as_it_should_with_a_fifth_of_its_nodes_hostile_and_more_that_come() -> None:
    rounds, size = 30, 50
    grid = HostileGrid(honest_nodes=20, hostile_nodes=5, seed=2)
    fleet = Fleet(clients_per_round=size, max_participations=0, per_node="share=0.04", wait="nodes=25", quorum=0.9)
    strategy = on(fleet, GroupPrivacy(hypotheses=2))
    setup = Setup(
        RunConfig(rounds=rounds, restarts=1, round_timeout=0.05, clients_per_round=size), strategy, fleet, LINEAR, None
    )
    start = {"weight": np.array([[[1.0, 1.0]], [[-5.0, 4.0]]], np.float32)}
    state = State.first(start)
    fleet.roster(grid)
    grid.joining = True
    Run(setup, grid, state).do()
    assert len(state.history) == rounds + 1
    assert all(np.isfinite(value).all() for value in (*state.hypotheses.values(), *state.best.values()))
    # Of the 50 that a round asks, two a node are the most: no fewer than 40 are of honest nodes.
    assert sum(grid.asked.values()) >= 40 * rounds
    assert min(grid.asked.values()) == max(grid.asked.values()) == 2 * rounds
    own = {node: hosting for node, hosting in fleet.roster(grid).nodes if node in grid.honest}
    assert len(own) == 20
    assert all(entry.loss is not None and 0 <= entry.loss < 1e3 for entry in state.history)
    assert state.best_round > 0, "nobody froze the best"
