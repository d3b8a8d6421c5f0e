"""What a site may put into the server's database: its answer, as large as the round needs, over Flower's own state."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import HTTPException
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node

from tests.helpers.flower_parts import found
from tests.helpers.replies import evaluation_reply, site_reply, training_reply
from umbel.deploy.flower import _Answers
from umbel.nodes.transport import largest_answer
from umbel.protocol import flower
from umbel.protocol.arrays import Arrays
from umbel.protocol.messages import hosting_reply, query, round_request
from umbel.protocol.records import pack
from umbel.protocol.tasks import EvaluationSpec, Hosting, TrainingSpec

MIB = 1 << 20

nested = found("flwr.supercore.inflatable.inflatable_object:get_all_nested_objects")
tree_of = found("flwr.supercore.inflatable.inflatable_object:get_object_tree")
to_proto = found("flwr.common.serde:message_to_proto")
bare = found("flwr.app.message:remove_content_from_message")


class Server:
    """A SuperLink's state, with umbel's bound on answers before Flower's own handlers."""

    def __init__(self, database: str, most: int) -> None:
        managers = found("flwr.superlink.federation.noop_federation_manager:NoOpFederationManager")()
        objects = found("flwr.supercore.object_store.object_store_factory:ObjectStoreFactory")(database)
        states = found("flwr.server.superlink.linkstate.linkstate_factory:LinkStateFactory")
        self.state = states(database, managers, objects).state()
        self.nodes = [self.state.create_node("owner", "owner", bytes([key]), 60.0) for key in range(2)]
        assert all(self.state.activate_node(node, 60.0) for node in self.nodes)
        # A copy: another test may have replaced parts of it.
        spec = importlib.util.find_spec("flwr.superlink.servicer.fleet.fleet_handlers")
        assert spec is not None
        assert spec.loader is not None
        self.handlers = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.handlers)
        self.restart(most)

    def restart(self, most: int) -> None:
        self.answers = _Answers(most, self.handlers.push_messages, self.handlers.push_object)

    def run(self) -> int:
        """Begin a run."""
        federation = found("flwr.supercore.constant:NOOP_FEDERATION_ID")
        run = int(self.state.create_run(None, None, None, {}, federation, None, None, "flwr-serverapp"))
        task = self.state.get_run_info(run_ids=[run])[0].primary_task_id
        assert self.state.claim_task(task)
        assert self.state.activate_task(task)
        return run

    def ask(self, run: int, content: RecordDict, node: int = 0, limited: bool = True) -> Message:
        """Send a node a message, as a ServerApp's transport does."""
        message = Message(content, self.nodes[node], "train", group_id="3")
        if limited:
            flower.limit_answer(message, largest_answer(content))
        message.metadata.__dict__.update(_run_id=run, _src_node_id=1)
        message.metadata.__dict__["_message_id"] = message.object_id
        session = self.state.start_session(run)
        assert self.state.store_message_and_object_tree(bare(message), tree_of(message), session)[0]
        return message


class Site:
    """A node that answers as Flower's does, or worse."""

    def __init__(self, server: Server, node: int = 0) -> None:
        self.server, self.node = server, Node(node_id=server.nodes[node])

    def reply(self, message: Message, content: RecordDict) -> Message:
        reply = Message(content, reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        return reply

    def begin(self, reply: Message, tree: ObjectTree | None = None, took: float = 1.0, **said: Any) -> Any:
        """Announce an answer and its parts."""
        proto = to_proto(bare(reply))
        for name, value in said.items():
            setattr(proto.metadata, name, value)
        request = PushMessagesRequest(
            node=self.node, messages_list=[proto], message_object_trees=[tree or tree_of(reply)],
            clientapp_runtime_list=[took],
        )  # fmt: skip
        return self.server.answers.push_messages(request, self.server.state)

    def send(self, run: int, session: str, name: str, content: bytes) -> bool:
        """Send a part of it."""
        part = {"run_id": run, "object_id": name, "object_content": content, "session_id": session}
        request = PushObjectRequest(node=self.node, **part)
        return bool(self.server.answers.push_object(request, self.server.state).stored)

    def answer(self, message: Message, content: RecordDict) -> list[str]:
        """Send an answer with all of its parts, and return their names."""
        reply = self.reply(message, content)
        begun, parts = self.begin(reply), nested(reply)
        # Flower has some already, by their digests: of other answers.
        missing, run = set(begun.objects_to_push), message.metadata.run_id
        assert reply.object_id in missing
        assert all(self.send(run, begun.session_id, name, parts[name].deflate()) for name in missing)
        return sorted(missing)


@pytest.fixture(params=["file", pytest.param("memory", marks=pytest.mark.rest)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Server:
    flower.identify()
    return Server(str(tmp_path / "state.db") if request.param == "file" else ":flwr-in-memory:", 100 * MIB)


def arrays(rows: int, n: int) -> Arrays:
    return {"weight": np.random.default_rng(rows + n).normal(size=(rows, n)).astype(np.float32)}


def trained(n: int) -> RecordDict:
    """Return what two clients reply."""
    return training_reply(arrays(2, n), [1, 1])


def order(n: int = 10, **task: Any) -> RecordDict:
    asked = TrainingSpec(noise_multiplier=0.0, **task).asking(3, (0, 1))
    return round_request(pack(arrays(3, n)), asked, EvaluationSpec().asking(3, (0, 1)))


def refused(code: int, call: Callable[..., Any], *arguments: Any, **more: Any) -> None:
    with pytest.raises(HTTPException) as raised:
        call(*arguments, **more)
    assert raised.value.status_code == code


def test_a_site_that_answers_more_than_the_round_needs_is_cut_off(server: Server, tmp_path: Path) -> None:
    def stored() -> int:
        """Return the bytes that the database has on the disk, and in memory where it has none."""
        if files := list(tmp_path.glob("state.db*")):
            return sum(file.stat().st_size for file in files)
        return sum(len(entry.content) for entry in server.state.object_store.store.values())

    run, site = server.run(), Site(server)
    message, before = server.ask(run, order()), stored()
    reply = site.reply(message, trained(9_000_000))
    begun = site.begin(reply)
    for name, one in nested(reply).items():
        if len(content := one.deflate()) > MIB:
            refused(413, site.send, run, begun.session_id, name, content)
    assert stored() - before < MIB
    # Nor does it help to begin again, by which a counted session would end, or to name none.
    for _ in range(3):
        begun = site.begin(reply)
        refused(413, site.send, run, begun.session_id, name := next(iter(nested(reply))), bytes(MIB))
    refused(403, site.send, run, "", name, bytes(100))
    assert not site.send(run, "invented", name, bytes(100))


@pytest.mark.parametrize("by", ["client", "site"])
def test_an_honest_answer_of_a_large_model_passes(server: Server, by: str) -> None:
    run, site, n = server.run(), Site(server), 3_000_000
    sums = {"clipping": "public", "release_by": "site", "choice_epsilon": 1.0} if by == "site" else {}
    content = site_reply(arrays(3, n), [1.5] * 3, [1, 1]) if sums else training_reply(arrays(2, n), [1, 1], [0, 1])
    scored = RecordDict({**content, **evaluation_reply(np.ones(2), np.ones(2))})
    assert len(site.answer(server.ask(run, order(n, **sums)), scored)) > 10, "an array of several parts"
    assert site.answer(server.ask(run, query()), hosting_reply(Hosting(5, 2)))


def test_runs_at_once_have_their_own_bounds_and_so_have_nodes_below_the_operators(server: Server) -> None:
    small, large, one, two = server.run(), server.run(), *(Site(server, node) for node in range(2))
    kilobytes = server.ask(small, order())
    assert one.answer(server.ask(large, order(MIB)), trained(MIB))
    assert two.answer(server.ask(large, order(), 1, limited=False), trained(MIB + 1)), "the operator's bound alone"
    refused(413, one.answer, kilobytes, trained(MIB + 2))
    # A node that says its answer is for another's message, or another run's, has begun none.
    begun = two.begin(two.reply(kilobytes, trained(10)), src_node_id=server.nodes[1])
    assert (list(begun.objects_to_push), begun.session_id) == ([], "")
    server.restart(most=MIB)
    refused(413, one.answer, server.ask(large, order(MIB)), trained(MIB + 3))


def test_an_answer_is_one_message_and_one_tree(server: Server) -> None:
    site, message = Site(server), server.ask(server.run(), order())
    reply = site.reply(message, trained(10))
    # Flower would take any number of trees for one answer, and keeps what a message says of itself, however long.
    refused(403, site.begin, reply, tree_of(site.reply(message, trained(9))))
    refused(413, site.begin, reply, group_id="x" * MIB)

    def begin_without_end() -> None:
        for _ in range(100):
            site.begin(reply, group_id="x" * 5_000)

    with pytest.raises(HTTPException):  # each time with a new session
        begin_without_end()


@pytest.mark.parametrize("took", [math.nan, math.inf, 1e308, -1.0])
def test_a_site_says_no_time_that_a_list_of_runs_cannot_show(server: Server, took: float) -> None:
    """`flwr list` adds up what the answers of a run took, and fails at a sum that is infinite or none."""
    run, site = server.run(), Site(server)
    for seconds in (took, took, 2.5):
        site.begin(site.reply(server.ask(run, order()), RecordDict()), took=seconds)
    assert server.state.get_run_info(run_ids=[run])[0].clientapp_runtime == 2.5


def test_what_was_refused_or_lost_may_be_sent_again(server: Server) -> None:
    """A part whose way is cut off, by which its node sends it once more, counts once."""
    run, site, n = server.run(), Site(server), MIB // 4
    reply = site.reply(server.ask(run, order(n)), trained(n))
    begun, parts = site.begin(reply), {name: one.deflate() for name, one in nested(reply).items()}
    largest = max(parts, key=lambda name: len(parts[name]))
    assert site.send(run, begun.session_id, largest, parts[largest])
    for _ in range(5):
        refused(413, site.send, run, begun.session_id, largest, bytes(4 * MIB))
        assert not site.send(run, begun.session_id, largest, bytes(20_000)), "it is there"
    # A server that restarts in between still takes the rest.
    server.restart(100 * MIB)
    assert all(site.send(run, begun.session_id, name, parts[name]) for name in parts.keys() - {largest})


@pytest.mark.parametrize("clients", [1, 3000])
def test_a_bound_is_no_more_than_the_answer_and_some_room(clients: int) -> None:
    flower.identify()
    model = {f'layer"{i}.wéight': np.ones((clients, 20), np.float32) for i in range(50)}
    asked = TrainingSpec().asking(1, tuple(range(clients)))
    first = {name: value[:1] for name, value in model.items()}
    content = round_request(pack(first), asked, EvaluationSpec().asking(1, asked.clients))
    scores = evaluation_reply(*np.random.default_rng(1).normal(size=(2, clients)))
    answer = RecordDict({**training_reply(model, [1] * clients, [9] * clients), **scores})
    reply = Message(answer, reply_to=Message(content, 5, "train", group_id="1"))
    size = sum(len(one.deflate()) for one in nested(reply).values()) + tree_of(reply).ByteSize()
    assert size < largest_answer(content) < 1.01 * size + 2 * ((1 << 16) + 32 * clients)
    # Messages of another kind have room for an answer of words.
    for content in (query(), RecordDict(), RecordDict({"training": MetricRecord(), "evaluation": ConfigRecord()})):
        assert largest_answer(content) == 1 << 16
    # The bound travels in the group of a message, and its reply bears the group as it was.
    flower.limit_answer(message := Message(RecordDict(), 5, "train", group_id="restart-3"), 4711)
    reply = Message(RecordDict(), reply_to=message)
    assert "4711" in reply.metadata.group_id
    flower.drop_limit(reply)
    assert reply.metadata.group_id == "restart-3"
