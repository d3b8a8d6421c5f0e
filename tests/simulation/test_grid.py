"""The in-process grid keeps the contract of Flower's Grid, so that strategy and app cannot tell the difference."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from umbel.protocol.flower import ErrorCode
from umbel.protocol.simulated import runs_in_simulation
from umbel.simulation.grid import InProcessGrid


def counting_app() -> ClientApp:
    """An app that says who it is and how often it was called, and fails when it is asked to."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        calls = context.state.config_records.setdefault("calls", ConfigRecord({"n": 0}))
        calls["n"] = int(calls["n"]) + 1
        if "fail" in message.content:
            raise ZeroDivisionError("division by zero")
        said = ConfigRecord({"n": calls["n"], "node": context.node_id, "simulated": runs_in_simulation()})
        return Message(RecordDict({"said": said}), reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        configs = {"node": ConfigRecord(context.node_config), "run": ConfigRecord(context.run_config)}
        return Message(RecordDict(configs), reply_to=message)

    return app


@pytest.fixture
def grid() -> InProcessGrid:
    """Three nodes that count."""
    return InProcessGrid(counting_app(), {"seed": 7}, nodes=3)


def to(node: int, group: str = "1", kind: str = "train", fail: bool = False) -> Message:
    return Message(RecordDict({"fail": ConfigRecord()} if fail else {}), node, kind, group_id=group)


def said(reply: Message, record: str = "said") -> dict[str, Any]:
    return dict(reply.content.config_records[record])


# --- nodes


def test_simulated_nodes_have_ids_and_a_partition_each(grid: InProcessGrid) -> None:
    ids = list(grid.get_node_ids())
    assert len(set(ids)) == 3
    assert [node.node_id for node in grid.get_nodes()] == ids
    assert TaskIdentity.node_id not in ids, "that is the server"
    replies = grid.send_and_receive([to(node, kind="query") for node in ids])
    assert [said(reply, "node") for reply in replies] == [{"partition-id": i, "num-partitions": 3} for i in range(3)]


def test_sites_get_the_configuration_they_were_given_and_change_no_others() -> None:
    configs: list[dict[str, Any]] = [{"data-path": "/one"}, {"data-path": "/two", "noise-multiplier": 5}]
    shared = {"seed": 7}
    grid = InProcessGrid(counting_app(), shared, node_configs=configs)
    replies = grid.send_and_receive([to(node, kind="query") for node in grid.get_node_ids()])
    assert [said(reply, "node") for reply in replies] == configs
    first, second = grid.contexts.values()
    first.run_config["seed"] = 8
    assert (second.run_config["seed"], shared["seed"]) == (7, 7)


# --- messages


def test_a_reply_says_what_it_is_a_reply_to(grid: InProcessGrid) -> None:
    node = next(iter(grid.get_node_ids()))
    message = grid.create_message(RecordDict({"fail": ConfigRecord()}), "query", node, "round-4", ttl=60.0)
    asked = message.metadata
    assert (asked.message_type, asked.dst_node_id, asked.group_id, asked.ttl) == ("query", node, "round-4", 60.0)
    (reply,) = grid.send_and_receive([message])
    told = reply.metadata
    assert told.reply_to_message_id == asked.message_id != ""
    assert told.message_id not in ("", asked.message_id)
    assert (told.src_node_id, told.dst_node_id, told.run_id) == (node, asked.src_node_id, asked.run_id)
    assert (told.message_type, told.group_id) == ("query", "round-4")


def test_pushed_messages_are_pulled_once_by_their_ids(grid: InProcessGrid) -> None:
    """Each is answered by the node it is for."""
    nodes = list(grid.get_node_ids())[::-1]
    first, second, third = ids = list(grid.push_messages([to(node) for node in nodes]))
    assert len({*ids}) == 3
    replies = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages([third, first])}
    expected = {first: nodes[0], third: nodes[2]}
    assert {key: said(reply)["node"] for key, reply in replies.items()} == expected
    assert {key: reply.metadata.src_node_id for key, reply in replies.items()} == expected
    assert [reply.metadata.reply_to_message_id for reply in grid.pull_messages(ids)] == [second]
    assert list(grid.pull_messages([*ids, "no-such-message"])) == []


def test_a_message_can_be_made_before_any_flower_process_said_who_it_is_and_who_said_so_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, None)
    with pytest.raises(RuntimeError, match="TaskIdentity"):
        to(1)
    grid = InProcessGrid(counting_app(), {})
    (node,) = grid.get_node_ids()
    assert not next(iter(grid.send_and_receive([to(node)]))).has_error()
    monkeypatch.setattr(TaskIdentity, "_run_id", 11)
    InProcessGrid(counting_app(), {})
    assert TaskIdentity.run_id == 11


def sharing(change: Callable[[Any], None]) -> list[Any]:
    """Send one content to three nodes, each of which changes its record; return what each saw before."""
    app, seen = ClientApp(), []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(deepcopy(dict(message.content)))
        change(message)
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app, {}, nodes=3)
    content = RecordDict({
        "arrays": ArrayRecord({"w": Array(np.zeros(2, np.float32))}),
        "config": ConfigRecord({"clients": [1, 2], "rate": 0.5}),
        "metrics": MetricRecord({"sizes": [3, 4]}),
    })  # fmt: skip
    messages = [Message(content, node, "train", group_id="1") for node in grid.get_node_ids()]
    assert not any(reply.has_error() for reply in grid.send_and_receive(messages))
    assert {message.metadata.group_id for message in messages} == {"1"}
    return [*seen, dict(content)]


@pytest.mark.parametrize(
    "change",
    [
        lambda message: message.content.update(arrays=ArrayRecord({"w": Array(np.ones(2, np.float32))})),
        lambda message: message.content["arrays"].update(w=Array(np.ones(2, np.float32))),
        lambda message: setattr(message.content["arrays"]["w"], "data", Array(np.ones(2, np.float32)).data),
        lambda message: message.content["config"].update(rate=1.0),
        lambda message: message.content["config"]["clients"].append(3),
        lambda message: message.content["metrics"]["sizes"].clear(),
        lambda message: message.content.pop("metrics"),
        lambda message: setattr(message.metadata, "group_id", "2"),
    ],
)
def test_a_node_that_changes_its_message_changes_no_other(change: Callable[[Any], None]) -> None:
    """Neither that of another node, nor the server's."""
    first, *others = sharing(change)
    assert others == [first] * 3


def test_a_node_keeps_what_it_replied_whatever_becomes_of_the_reply() -> None:
    """A reply may hold a record of the node's state."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        kept = context.state.config_records.setdefault("kept", ConfigRecord({"rounds": []}))
        kept["rounds"].append(int(message.metadata.group_id))
        return Message(RecordDict({"said": kept}), reply_to=message)

    grid = InProcessGrid(app, {})
    (node,) = grid.get_node_ids()
    (first,) = grid.send_and_receive([to(node, group="1")])
    (second,) = grid.send_and_receive([to(node, group="2")])
    assert said(first)["rounds"] == [1]
    said(second)["rounds"].clear()
    assert grid.contexts[node].state.config_records["kept"]["rounds"] == [1, 2]


# --- failures


def test_an_exception_becomes_an_error_reply_as_in_flowers_engines(grid: InProcessGrid) -> None:
    first, second, third = grid.get_node_ids()
    _, error, _ = replies = list(grid.send_and_receive([to(first), to(second, group="4", fail=True), to(third)]))
    assert [reply.has_error() for reply in replies] == [False, True, False]
    assert error.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert error.error.reason == "<class 'ZeroDivisionError'>:<'division by zero'>"
    assert (error.metadata.src_node_id, error.metadata.group_id, error.metadata.message_type) == (second, "4", "train")


def test_an_interrupt_is_no_reply() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise KeyboardInterrupt

    grid = InProcessGrid(app, {})
    with pytest.raises(KeyboardInterrupt):
        grid.send_and_receive([to(node) for node in grid.get_node_ids()])
    assert not runs_in_simulation()


# --- what a node keeps, and where it believes it runs


def test_a_node_keeps_its_state_from_round_to_round(grid: InProcessGrid) -> None:
    first, second, _ = grid.get_node_ids()
    replies = [*grid.send_and_receive([to(first)] * 3), *grid.send_and_receive([to(second)])]
    assert [said(reply)["n"] for reply in replies] == [1, 2, 3, 1], "each its own"
    assert grid.contexts[first].state.config_records["calls"]["n"] == 3


@pytest.mark.parametrize("fail", [False, True])
def test_only_while_a_node_answers_is_this_a_simulation(grid: InProcessGrid, fail: bool) -> None:
    node = next(iter(grid.get_node_ids()))
    assert not runs_in_simulation()
    (reply,) = grid.send_and_receive([to(node, fail=fail)])
    assert not runs_in_simulation()
    assert reply.has_error() if fail else said(reply)["simulated"] is True
