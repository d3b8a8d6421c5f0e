"""The exchange: a round closes when enough is there or time is up, and what comes later is of no use."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import count
from threading import Event
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.app import DEFAULT_TTL, ConfigRecord, Error, Message, RecordDict

import umbel.nodes.exchange
import umbel.nodes.transport
from tests.helpers.errors import raises
from umbel.nodes.exchange import Answer, Exchange
from umbel.nodes.transport import SuperLink, transport_of
from umbel.protocol.errors import DiskError
from umbel.protocol.flower import ErrorCode
from umbel.simulation.grid import InProcessGrid


class Answering(InProcessGrid):
    """Nodes 1, 2, … answer at once, but for some: their replies are there when the test says so."""

    def __init__(self, silent: Container[int] = ()) -> None:
        super().__init__(lambda *_: None, {}, node_configs=[{}])
        self.silent = silent
        self.sent: list[Message] = []
        self.arrived: list[Message] = []
        self._ids = count()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        for message in sent:
            message.metadata.__dict__["_message_id"] = str(next(self._ids))
        self.sent += sent
        self.arrived += [answers_of(message) for message in sent if message.metadata.dst_node_id not in self.silent]
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        due = [reply for reply in self.arrived if reply.metadata.reply_to_message_id in set(message_ids)]
        self.arrived = [reply for reply in self.arrived if reply not in due]
        return due


def to(node: int, kind: str = "train") -> Message:
    return Message(RecordDict({"config": ConfigRecord({"a": 1})}), node, kind, group_id="1")


def answers_of(sent: Message, node: int | None = None) -> Message:
    """The reply of the asked node, or of another."""
    reply = Message(RecordDict(), reply_to=sent)
    if node is not None:
        reply.metadata.__dict__["_src_node_id"] = node
    return reply


NOBODY = range(1000)


class Afar(Answering):
    """The same over a network: replies are pulled in threads, and `pulled` says what a pull of replies comes to."""

    in_process = False

    def __init__(self, pulled: Callable[[list[Message]], Any] = lambda due: due, silent: Container[int] = ()) -> None:
        super().__init__(silent)
        self.pulled, self.asked = pulled, Counter[str]()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.asked.update(wanted := list(message_ids))
        replies: Iterable[Message] = self.pulled(list(super().pull_messages(wanted)))
        return replies


def exchange_on(grid: Answering) -> Exchange:
    return Exchange(transport_of(grid))


def nodes(answers: Sequence[Answer]) -> list[int]:
    return sorted(answer.node for answer in answers)


def test_many_messages_are_sent_some_at_a_time() -> None:
    """Flower sends the parts of messages behind them all: the first to look would look for its parts in vain."""
    grid = Answering()
    pushes: list[int] = []
    push = grid.push_messages
    grid.push_messages = lambda messages: pushes.append(len(list(messages))) or push(messages)  # type: ignore
    assert nodes(exchange_on(grid).run([to(node) for node in range(1, 41)], timeout=600)) == list(range(1, 41))
    assert pushes == [16, 16, 8]


def cut_off(*replying: int) -> tuple[Afar, Event]:
    """Return nodes of which some have cut off their upload: whoever pulls it waits until the test lets go."""
    rest = Event()

    def pulled(due: list[Message]) -> list[Message]:
        if any(reply.metadata.src_node_id in replying for reply in due):
            rest.wait()
        return due

    return Afar(pulled), rest


def test_a_reply_that_does_not_end_holds_up_neither_the_others_nor_the_next_round() -> None:
    grid, rest = cut_off(2)
    exchange = exchange_on(grid)
    answers = exchange.run([to(1), to(2), to(3)], timeout=600, enough=lambda got: len(got) == 2)
    assert nodes(answers) == [1, 3]
    assert exchange.silent == {2}
    assert nodes(exchange.run([to(1), to(3)], timeout=600)) == [1, 3]
    rest.set()
    assert wait_until_dropped(exchange, grid) == 1, "when it does end it is late"


def test_many_replies_that_do_not_end_hold_up_no_other() -> None:
    """More of them than are pulled at a time, and asked for first."""
    grid, rest = cut_off(*range(41))
    messages = [to(node) for node in range(1, 51)]
    answers = exchange_on(grid).run(messages, timeout=600, enough=lambda got: len(got) == 10)
    assert nodes(answers) == list(range(41, 51))
    rest.set()


def pushing(grid: Answering, message: Message, *replies: Message) -> None:
    """Have replies there once messages are sent."""
    push = grid.push_messages

    def pushed(messages: Iterable[Message]) -> Iterable[str]:
        ids = push(messages)
        for reply in replies:
            reply.metadata.__dict__["_reply_to_message_id"] = message.metadata.message_id
        grid.arrived += replies
        return ids

    grid.push_messages = pushed  # type: ignore[method-assign]


def test_a_look_asks_for_few_of_many_replies_while_none_is_there() -> None:
    """Each costs a server a request: of two hundred nodes that compute, every look would keep it busy for seconds."""
    grid = Afar(silent=NOBODY)
    exchange_on(grid).run([to(node) for node in range(200)], timeout=600, enough=lambda _: True)
    assert 1 <= grid.asked.total() <= 16


def test_the_next_look_asks_for_those_that_the_last_one_left_out() -> None:
    grid = Afar(silent=NOBODY)
    exchange_on(grid).run([to(node) for node in range(100)], timeout=600, enough=lambda _: len(grid.asked) == 100)
    assert max(grid.asked.values()) <= 2


def test_replies_that_are_overdue_are_in_nobodys_way() -> None:
    """Hundreds of nodes are gone; those that are there are asked for in the first look."""
    exchange = exchange_on(grid := Afar(silent=NOBODY))
    exchange.run([to(node) for node in range(500)], timeout=600, enough=lambda _: True)
    grid.asked.clear()
    exchange.run([to(node) for node in range(10)], timeout=600, enough=lambda _: True)
    assert {str(500 + node) for node in range(10)} <= set(grid.asked)


def look(transport: SuperLink, number: int) -> int:
    """Look for so many replies, and return how many pulls are under way."""
    transport.collect(([str(i) for i in range(number)], (), ()), 0.0)
    return len(transport._pulls)


def test_other_pulls_take_over_from_those_that_are_stuck_and_not_from_slow_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, rest = [0.0], Event()
    grid = Afar(silent=NOBODY)
    grid.pull_messages = lambda _: [rest.wait()]  # type: ignore
    monkeypatch.setattr(umbel.nodes.transport, "time", SimpleNamespace(monotonic=lambda: now[0]))
    transport = SuperLink(grid)

    def under_way(second: float) -> int:
        now[0] = second
        return look(transport, 200)

    assert [under_way(second) for second in (0, 0.9, 1.1, 1.5)] == [16, 16, 32, 32]
    transport.usual = 2  # where the server is slow to hand out any
    assert [under_way(second) for second in (5, 8.5, 9.2)] == [32, 32, 48]
    transport.usual = 1000  # but whatever others take, a pull that is stuck is not waited for long
    assert [under_way(second) for second in (19.1, 19.3)] == [48, 64]
    rest.set()


def failure(code: int) -> Exception:
    return httpx.HTTPStatusError("", request=httpx.Request("POST", "http://superlink"), response=httpx.Response(code))


class Failing(Afar):
    """The SuperLink fails where it is asked for the reply of node 2, some times or always."""

    def __init__(self, times: int, error: Exception) -> None:
        super().__init__()
        self.times, self.error = times, error

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        second = {sent.metadata.message_id for sent in self.sent if sent.metadata.dst_node_id == 2}
        if self.times and second & {*message_ids}:
            self.times -= 1
            raise self.error
        return super().pull_messages(message_ids)


def test_a_superlink_is_asked_again_where_it_fails_for_want_of_time_and_not_where_it_says_no_or_is_not_there() -> None:
    assert nodes(exchange_on(Failing(3, failure(500))).run([to(1), to(2), to(3)], timeout=600)) == [1, 2, 3]
    for error in (failure(403), ConnectionError("no SuperLink")):
        with pytest.raises(type(error)):
            exchange_on(Failing(-1, error)).run([to(1), to(2)], timeout=600)


@pytest.mark.parametrize("error", [failure(500), ValueError("no array")], ids=["SuperLink", "Flower"])
def test_a_reply_that_the_superlink_or_flower_cannot_read_costs_that_one(error: Exception) -> None:
    """A site can make an answer that the SuperLink cannot handle; it is no reason to end the run."""
    exchange = exchange_on(Failing(-1, error))
    assert nodes(exchange.run([to(1), to(2), to(3)], timeout=600)) == [1, 3]
    assert exchange.silent == {2}


def test_a_reply_that_names_anothers_message_is_not_taken_for_the_others() -> None:
    def forged(due: list[Message]) -> list[Message]:
        for reply in due:
            if reply.metadata.src_node_id == 1:
                reply.metadata.__dict__["_reply_to_message_id"] = grid.sent[1].metadata.message_id
        return due

    exchange = exchange_on(grid := Afar(forged))
    assert nodes(exchange.run([to(1), to(2)], timeout=600)) == [2]
    assert exchange.silent == {1}


def test_answers_that_are_not_there_teach_how_slow_a_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node can make them slow; a reply is ten requests."""
    now = [0.0]
    monkeypatch.setattr(umbel.nodes.transport, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(due: list[Message]) -> list[Message]:
        now[0] += 0.2
        return due

    transport = SuperLink(Afar(slow))
    for _ in range(100):
        transport.collect((["0"], (), ()), seconds=600)
    assert transport.usual == pytest.approx(2.0, rel=0.01)


def wait_until_dropped(exchange: Exchange, grid: Answering) -> int:
    """Do rounds until one drops a reply; return how many it drops."""
    deadline = time.monotonic() + 600
    while not exchange.dropped and time.monotonic() < deadline:
        exchange.run([to(1)], timeout=600)
    return exchange.dropped


@pytest.mark.parametrize(("kind", "heard"), [("train", [1]), ("query", [1, 2])])
def test_a_reply_that_comes_late_is_dropped_and_counted_unless_it_is_wanted_all_the_same(
    kind: str, heard: list[int]
) -> None:
    exchange = exchange_on(grid := Answering(silent=[2]))
    assert nodes(exchange.run([to(1), to(2, kind)], timeout=0.02, keep_late=["query"])) == [1]
    grid.arrived.append(answers_of(grid.sent[1]))
    assert nodes(exchange.run([to(1)], timeout=60, keep_late=["query"])) == heard
    assert exchange.dropped == 2 - len(heard)


@pytest.mark.parametrize("others", [(None, None), (7, None)], ids=["a second", "in another node's name"])
def test_another_reply_to_a_message_is_dropped(others: tuple[int | None, ...]) -> None:
    exchange = exchange_on(grid := Answering(silent=NOBODY))
    message = to(1)
    pushing(grid, message, *(answers_of(message, node) for node in others))
    assert nodes(exchange.run([message], timeout=60)) == [1]
    assert exchange.dropped == 1


def test_a_lost_node_is_named_by_the_message_that_it_was_sent() -> None:
    # Flower's SuperLink, node 1, answers for a node that is gone.
    exchange = exchange_on(grid := Answering(silent=NOBODY))
    message = to(5)
    error = Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=message)
    error.metadata.__dict__["_src_node_id"] = 1
    pushing(grid, message, error)
    (answer,) = exchange.run([message], timeout=1)
    assert (answer.node, answer.reply.has_error()) == (5, True)


class Unregistered(Answering):
    """Flower takes no message to node 2, whose registration is gone, and says so by an empty id."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = super().push_messages(messages)
        gone = [sent.metadata.dst_node_id == 2 for sent in messages]
        self.arrived = [one for one in self.arrived if one.metadata.src_node_id != 2]
        return ["" if it else one for it, one in zip(gone, ids, strict=True)]


def test_a_message_that_cannot_be_sent_is_silence_and_the_log_names_the_site(caplog: pytest.LogCaptureFixture) -> None:
    exchange = exchange_on(Unregistered())
    exchange.names.learn({1: "north", 2: "south\x1b[31m", 3: ""})
    assert nodes(exchange.run([to(1), to(2), to(3)], timeout=600)) == [1, 3]
    assert exchange.silent == {2}
    assert [one for one in caplog.messages if "registered" in one] == [
        r"site south\x1b[31m got no message: it is no longer registered"
    ]
    exchange.run([to(2, "query")], timeout=600, keep_late=["query"])
    assert exchange.silent == set(), "an invitation is asked for again by itself"


def test_a_node_is_late_until_it_replies_or_its_message_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = exchange_on(grid := Answering(silent=[2, 3]))
    exchange.run([to(1), to(2), to(3, "query")], timeout=0.02, keep_late=["query"])
    assert exchange.late(keep_late=["query"]) == set(), "Flower delivers it no longer than the round waits"
    now = time.monotonic()
    monkeypatch.setattr(umbel.nodes.exchange.time, "monotonic", lambda: now - 60)
    assert exchange.late(keep_late=["query"]) == {2}
    grid.arrived.append(answers_of(grid.sent[1]))
    exchange.run([], timeout=0)
    assert exchange.late(keep_late=["query"]) == set()


@pytest.mark.parametrize("timeout", [7, 2 * DEFAULT_TTL])
def test_a_message_dies_with_its_round_but_for_those_whose_replies_are_of_use_however_late(timeout: float) -> None:
    grid = Answering()
    exchange_on(grid).run([to(1), to(1, "query")], timeout, keep_late=["query"])
    round_message, invitation = grid.sent
    assert round_message.metadata.ttl == timeout
    assert invitation.metadata.ttl > 3600


def test_a_long_round_tells_how_many_nodes_have_replied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(umbel.nodes.exchange, "_TELL_S", 0.02)
    invited = to(3, "query")
    with caplog.at_level(logging.INFO, "flwr"):
        exchange_on(Answering([2, 3])).run([to(1), to(2), invited], 0.1, keep_late=("query",), name="round 7")
    assert caplog.messages
    assert {text.split(", ")[0] for text in caplog.messages} == {"round 7: 1 of 2 nodes have replied"}
    caplog.clear()
    with caplog.at_level(logging.INFO, "flwr"):
        exchange_on(Answering([2])).run([to(1), to(2)], 0.1)
    assert not caplog.messages, "a message outside of a round"


def test_a_long_round_may_be_ended_by_whoever_watches_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites whose replies find no room on the server's disk would keep it waiting."""

    def full() -> None:
        raise DiskError("the disk is full", code="disk.full")

    monkeypatch.setattr(umbel.nodes.exchange, "_TELL_S", 0.02)
    exchange = exchange_on(Answering([2]))
    exchange.watch = full
    with raises(DiskError, "disk.full"):
        exchange.run([to(1), to(2)], 60, name="round 7")
