"""The in-process grid keeps the contract of Flower's Grid, so that strategy and app cannot tell the difference."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from umbel.protocol.flower import ErrorCode, Run
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


def test_nodes_have_ids_of_their_own(grid: InProcessGrid) -> None:
    ids = list(grid.get_node_ids())
    assert len(set(ids)) == 3
    assert [node.node_id for node in grid.get_nodes()] == ids
    assert TaskIdentity.node_id not in ids, "that is the server"


def test_simulated_nodes_get_a_partition_each(grid: InProcessGrid) -> None:
    replies = grid.send_and_receive([to(node, kind="query") for node in grid.get_node_ids()])
    assert [said(reply, "node") for reply in replies] == [{"partition-id": i, "num-partitions": 3} for i in range(3)]


def test_sites_get_the_configuration_they_were_given() -> None:
    configs: list[dict[str, Any]] = [{"data-path": "/one"}, {"data-path": "/two", "noise-multiplier": 5}]
    grid = InProcessGrid(counting_app(), {}, node_configs=configs)
    replies = grid.send_and_receive([to(node, kind="query") for node in grid.get_node_ids()])
    assert [said(reply, "node") for reply in replies] == configs


def test_a_node_that_changes_its_configuration_changes_no_other() -> None:
    shared = {"seed": 7}
    grid = InProcessGrid(counting_app(), shared, nodes=2)
    first, second = grid.contexts.values()
    first.run_config["seed"] = 8
    assert (second.run_config["seed"], shared["seed"]) == (7, 7)


# --- messages


def test_a_reply_says_what_it_is_a_reply_to(grid: InProcessGrid) -> None:
    node = next(iter(grid.get_node_ids()))
    message = to(node, group="round-4")
    (reply,) = grid.send_and_receive([message])
    assert reply.metadata.reply_to_message_id == message.metadata.message_id != ""
    assert reply.metadata.message_id not in ("", message.metadata.message_id)
    assert (reply.metadata.src_node_id, reply.metadata.dst_node_id) == (node, message.metadata.src_node_id)
    assert (reply.metadata.message_type, reply.metadata.group_id) == ("train", "round-4")
    assert reply.metadata.run_id == message.metadata.run_id


def test_a_message_of_the_grids_own_making_is_one_like_any_other(grid: InProcessGrid) -> None:
    node = next(iter(grid.get_node_ids()))
    message = grid.create_message(RecordDict({"fail": ConfigRecord()}), "query", node, "4", ttl=60.0)
    metadata = message.metadata
    assert (metadata.message_type, metadata.dst_node_id, metadata.group_id, metadata.ttl) == ("query", node, "4", 60.0)
    (reply,) = grid.send_and_receive([message])
    assert reply.metadata.group_id == "4"


def test_pushed_messages_are_pulled_by_their_ids(grid: InProcessGrid) -> None:
    """Each is answered by the node it is for."""
    ids = list(grid.get_node_ids())[::-1]
    first, second, third = grid.push_messages([to(node) for node in ids])
    assert len({first, second, third}) == 3
    replies = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages([third, first])}
    assert {key: said(reply)["node"] for key, reply in replies.items()} == {first: ids[0], third: ids[2]}
    assert {key: reply.metadata.src_node_id for key, reply in replies.items()} == {first: ids[0], third: ids[2]}


def test_each_reply_is_pulled_once(grid: InProcessGrid) -> None:
    ids = list(grid.push_messages([to(node) for node in grid.get_node_ids()]))
    assert len(list(grid.pull_messages(ids[:2]))) == 2
    assert len(list(grid.pull_messages(ids))) == 1
    assert list(grid.pull_messages([*ids, "no-such-message"])) == []


def test_a_message_can_be_made_before_any_flower_process_said_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, None)
    with pytest.raises(RuntimeError, match="TaskIdentity"):
        to(1)
    grid = InProcessGrid(counting_app(), {})
    (node,) = grid.get_node_ids()
    assert not next(iter(grid.send_and_receive([to(node)]))).has_error()


def test_who_a_flower_process_is_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_run_id", 11), ("_node_id", 22), ("_task_id", 33)):
        monkeypatch.setattr(TaskIdentity, name, value)
    InProcessGrid(counting_app(), {})
    assert (TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id) == (11, 22, 33)


def test_the_run_is_the_one_that_was_set(grid: InProcessGrid) -> None:
    run = Run.create_empty(run_id=5)
    grid.set_run(run)
    assert grid.run is run


def sharing(change: Callable[[Any], None]) -> list[Any]:
    """Send one content to three nodes, each of which changes its record; return what each saw before."""
    app, seen = ClientApp(), []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(deepcopy(dict(message.content)))
        change(message)
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app, {}, nodes=3)
    content = RecordDict(
        {
            "arrays": ArrayRecord({"w": Array(np.zeros(2, np.float32))}),
            "config": ConfigRecord({"clients": [1, 2], "rate": 0.5}),
            "metrics": MetricRecord({"sizes": [3, 4]}),
        }
    )
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


def test_a_plain_strategy_sends_each_node_the_same_though_the_first_writes_into_it() -> None:
    app, seen = ClientApp(), []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(message.content["arrays"]["w"].numpy().tolist())
        message.content["arrays"] = ArrayRecord({"w": Array(np.full(2, 7, np.float32))})
        content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    start = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    result = FedAvg(fraction_evaluate=0.0).start(InProcessGrid(app, {}, 2), start, num_rounds=1)
    assert seen == [[0, 0]] * 2
    assert result.arrays["w"].numpy().tolist() == [7, 7]


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


def test_large_arrays_are_not_copied_for_each_node() -> None:
    app, seen = ClientApp(), []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(message.content["arrays"]["w"].data)
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(2, np.float32))})})
    grid = InProcessGrid(app, {}, nodes=2)
    replies = grid.send_and_receive([Message(content, node, "train") for node in grid.get_node_ids()])
    data = [content["arrays"]["w"].data, *seen, *(reply.content["arrays"]["w"].data for reply in replies)]
    assert len({id(one) for one in data}) == 1


# --- failures


def test_an_exception_becomes_an_error_reply_as_in_flowers_engines(grid: InProcessGrid) -> None:
    first, second, third = grid.get_node_ids()
    replies = list(grid.send_and_receive([to(first), to(second, group="4", fail=True), to(third)]))
    assert [reply.has_error() for reply in replies] == [False, True, False]
    error = replies[1]
    assert not error.has_content()
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
    for expected in (1, 2, 3):
        (reply,) = grid.send_and_receive([to(first)])
        assert said(reply)["n"] == expected
    (reply,) = grid.send_and_receive([to(second)])
    assert said(reply)["n"] == 1, "each its own"
    assert grid.contexts[first].state.config_records["calls"]["n"] == 3


@pytest.mark.parametrize("fail", [False, True])
def test_only_while_a_node_answers_is_this_a_simulation(grid: InProcessGrid, fail: bool) -> None:
    node = next(iter(grid.get_node_ids()))
    assert not runs_in_simulation()
    (reply,) = grid.send_and_receive([to(node, fail=fail)])
    assert not runs_in_simulation()
    assert reply.has_error() if fail else said(reply)["simulated"] is True
