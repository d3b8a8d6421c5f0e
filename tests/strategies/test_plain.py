"""umbel's strategies in anybody's ServerApp: nodes of one client each, which know nothing of umbel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

import umbel
from tests.helpers.errors import raises
from tests.helpers.sources import ROOT
from umbel.protocol.errors import ConfigError
from umbel.simulation.grid import InProcessGrid
from umbel.strategies import IFCA, Callback, FedAvg, GroupPrivacy, SiteAverage, Stop

OPTIMA = np.array([[5.0, 6.0], [4.0, -4.5]])
NODES = 8


def best(arrays: ArrayRecord, node: int) -> np.ndarray[Any, Any]:
    """Return the hypothesis that is nearest to the optimum of a node; even ones have the first."""
    stacked = arrays["weight"].numpy()
    return stacked[np.square(stacked - OPTIMA[node % 2]).sum(1).argmin()]  # type: ignore[no-any-return]


def app(said: Callable[[Message, dict[str, Any]], None] = lambda *_: None) -> ClientApp:
    """Return a ClientApp whose training moves the nearest hypothesis half of the way to the node's optimum."""
    made = ClientApp()

    @made.train()
    def train(message: Message, context: Context) -> Message:
        sent = message.content.array_records["arrays"]
        model = best(sent, context.node_id)
        content = {
            "arrays": ArrayRecord({"weight": Array((model + OPTIMA[context.node_id % 2]) / 2)}),
            "metrics": MetricRecord({"num-examples": 3, "train-loss": float(context.node_id % 2)}),
        }
        said(message, content)
        return Message(RecordDict(content), reply_to=message)

    @made.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        model = best(message.content.array_records["arrays"], context.node_id)
        loss = float(np.square(model - OPTIMA[context.node_id % 2]).sum())
        content = RecordDict({"metrics": MetricRecord({"num-examples": 7, "loss": loss})})
        said(message, dict(content))
        return Message(content, reply_to=message)

    return made


START = umbel.stack([ArrayRecord({"weight": Array(np.array(one))}) for one in ([1.0, 1.0], [1.0, -1.0])])


def grid(**changes: Any) -> InProcessGrid:
    return InProcessGrid(app(**changes), {}, nodes=NODES)


# --- the core alone

ALONE = """
import sys
import flwr.clientapp, flwr.serverapp.strategy
before = {*sys.modules}
import umbel
umbel.ChooseHypothesis, umbel.LaplaceMod
mods = {name.partition(".")[0] for name in {*sys.modules} - before} - {*sys.stdlib_module_names, "numpy", "umbel"}
umbel.GroupPrivacy, umbel.hypotheses, umbel.stack, umbel.unstack
lines = 0

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from flower_app.client_app import app as client
from flower_app.server_app import app as server

CONTEXTS = {i + 1: Context(1, i + 1, {"partition-id": i}, RecordDict(), {}) for i in range(20)}


class Nodes(Grid):
    run = set_run = create_message = push_messages = pull_messages = get_nodes = None

    def get_node_ids(self):
        return list(CONTEXTS)

    def send_and_receive(self, messages, *, timeout=None):
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__.update(_message_id=str(node), _run_id=1)
            yield client(message, CONTEXTS[node])


Nodes.__abstractmethods__ = frozenset()
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
server(Nodes(), Context(1, 0, {}, RecordDict(), {"num-server-rounds": 2, "fraction-train": 1.0}))
for name in sorted({*sys.modules} - before):
    if name.partition(".")[0] == "umbel" and (file := sys.modules[name].__file__):
        lines += len(open(file).readlines())
heavy = {"torch", "scipy", "pandas", "pydantic"} & {*sys.modules}
print(lines, *heavy, *(name for name in mods if not name.startswith("_cython")))
"""


def test_strategies_and_mods_need_flower_and_numpy_alone() -> None:
    """Also to run the example. The text that a hospital has to review is at most 4,000 lines."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples" / "flower_app")])}
    told = subprocess.check_output([sys.executable, "-c", ALONE], text=True, env=environment)
    assert "found [[" in told
    lines, *others = told.splitlines()[-1].split()
    assert not others
    assert int(lines) <= 4_000


# --- rounds


def test_both_optima_are_found_and_metrics_describe_the_hypotheses_after_so_many_rounds() -> None:
    strategy = GroupPrivacy(fraction_evaluate=1.0)
    result = strategy.start(grid(), START, num_rounds=5)
    left = np.square(START["weight"].numpy() - OPTIMA).sum(1)
    np.testing.assert_allclose(result.arrays["weight"].numpy(), OPTIMA + (START["weight"].numpy() - OPTIMA) / 2**5)
    for r in range(6):
        assert result.evaluate_metrics_clientapp[r]["loss"] == pytest.approx(float(left.mean()) / 4**r)
    assert result.train_metrics_clientapp[1] == {
        "asked": 8, "releases": 8, "lost-nodes": 0, "groups": [4, 4], "num-examples": 3.0, "train-loss": 0.5,
    }  # fmt: skip
    assert [outcome.counts.tolist() for outcome in strategy.history] == [[4, 4]] * 5


def test_a_message_says_how_many_hypotheses_it_has_and_in_which_round() -> None:
    seen: list[Any] = []
    strategy = GroupPrivacy(fraction_train=0.5, fraction_evaluate=0.25)
    strategy.start(
        grid(said=lambda message, _: seen.append((message.metadata.message_type, dict(message.content["config"])))),
        START, num_rounds=1, train_config=ConfigRecord({"lr": 0.1}),
    )  # fmt: skip
    assert seen.count(("train", {"lr": 0.1, "server-round": 1, "k": 2})) == 4
    assert seen.count(("evaluate", {"server-round": 1, "k": 2})) == 2, "before the first round"
    assert seen.count(("evaluate", {"server-round": 2, "k": 2})) == 2, "after it"
    assert len(seen) == 8


def test_one_exchange_evaluates_and_trains_unless_something_may_end_the_run() -> None:
    class Patient(Stop):
        def may_stop(self, round: int) -> bool:
            return round == 2

        def after_evaluate(self, round: int, metrics: MetricRecord | None) -> str | None:
            return "near enough" if round == 2 else None

    class Two(GroupPrivacy):
        def aggregate_evaluate(self, server_round: int, replies: Any) -> MetricRecord | None:
            kinds.append([reply.metadata.message_type for reply in replies])
            return super().aggregate_evaluate(server_round, replies)

    def exchanges(strategy: GroupPrivacy, *callbacks: Callback) -> list[set[str]]:
        seen: list[set[str]] = []
        plain = strategy.nodes.exchange

        def exchange(round: int, grid: Any, messages: Any, timeout: float) -> Any:
            seen.append({message.metadata.message_type for message in messages})
            return plain(round, grid, messages, timeout)

        strategy.nodes.exchange = exchange  # type: ignore[method-assign]
        strategy.start(grid(), START, num_rounds=4, callbacks=callbacks)
        return seen

    kinds: list[list[str]] = []
    both, evaluation, training = {"train", "evaluate"}, {"evaluate"}, {"train"}
    assert exchanges(GroupPrivacy(fraction_evaluate=1.0)) == [both] * 4 + [evaluation]
    assert exchanges(GroupPrivacy(fraction_evaluate=1.0), Patient()) == [both, both, evaluation]
    assert exchanges(Two(fraction_evaluate=1.0)) == [evaluation, training] * 4 + [evaluation]
    assert kinds == [["evaluate"] * 8] * 5, "each method sees the replies to its own messages"


def test_the_server_may_evaluate_too() -> None:
    counts = lambda round, arrays: MetricRecord({"k": float(len(umbel.unstack(arrays)))})  # noqa: E731
    result = GroupPrivacy().start(grid(), START, num_rounds=2, evaluate_fn=counts)
    assert {r: metrics["k"] for r, metrics in result.evaluate_metrics_serverapp.items()} == {0: 2, 1: 2, 2: 2}
    assert not result.evaluate_metrics_clientapp, "no node is asked to evaluate unless fraction_evaluate says so"


# --- replies of no use


def fails(message: Message, content: dict[str, Any]) -> None:
    raise ValueError("a secret")


def says(**values: Any) -> Any:
    """Return what puts other arrays in a reply's place."""
    arrays = ArrayRecord({name: Array(np.asarray(value)) for name, value in values.items()})
    return lambda message, content: content.update(arrays=arrays)


@pytest.mark.parametrize(
    "spoil",
    [says(weight=np.ones((8, 2))), says(weight=np.full(2, np.nan)), says(bias=np.ones(2)),
     says(weight=np.array([1e39, 0.0])), fails],
    ids=["a row a client", "not finite", "another name", "too large for the model's type", "fails"],
)  # fmt: skip
def test_a_reply_that_is_not_one_model_is_left_out(spoil: Any) -> None:
    """How many clients a reply speaks for never follows from a shape."""

    def said(message: Message, content: dict[str, Any]) -> None:
        if message.metadata.dst_node_id % 4 == 0:
            spoil(message, content)

    start = ArrayRecord({"weight": Array(START["weight"].numpy().astype(np.float32))})
    counts = GroupPrivacy().start(grid(said=said), start, num_rounds=1).train_metrics_clientapp[1]
    assert (counts["asked"], counts["releases"], counts["lost-nodes"], counts["groups"]) == (8, 6, 2, [2, 4])


# --- what is refused


@pytest.mark.parametrize(
    ("strategy", "arrays", "code"),
    [
        (GroupPrivacy(hypotheses=3), START, "config.hypotheses"),
        (FedAvg(), START, "config.hypotheses"),
        (GroupPrivacy(), ArrayRecord({"a": Array(np.ones((2, 3))), "b": Array(np.ones((3, 2)))}), "config.stack"),
        (GroupPrivacy(), ArrayRecord({"a": Array(np.asarray(1.0))}), "config.stack"),
        (GroupPrivacy(), ArrayRecord(), "config.stack"),
        (IFCA(), START, "config.plain-nodes"),
        (SiteAverage(), START, "config.plain-nodes"),
    ],
)
def test_what_cannot_work_is_refused_before_anybody_trains(strategy: Any, arrays: ArrayRecord, code: str) -> None:
    seen: list[Any] = []
    with raises(ConfigError, code):
        strategy.start(grid(said=lambda *_: seen.append(1)), arrays, num_rounds=1)
    assert not seen


# --- Flower's wrappers


def test_a_wrapper_of_flowers_runs_one_hypothesis_and_not_several() -> None:
    def wrapped(strategy: Any) -> Any:
        return DifferentialPrivacyServerSideFixedClipping(strategy, 1e-9, 100.0, NODES)

    one = umbel.stack(umbel.unstack(START)[:1])
    result = wrapped(FedAvg()).start(grid(), one, num_rounds=8)
    np.testing.assert_allclose(result.arrays["weight"].numpy(), OPTIMA.mean(0, keepdims=True), atol=0.05)
    assert [result.train_metrics_clientapp[r]["releases"] for r in (1, 8)] == [8, 8]
    with raises(ConfigError, "config.foreign-loop"):
        wrapped(GroupPrivacy()).start(grid(), START, num_rounds=1)
    assert wrapped(GroupPrivacy(foreign_loop=True)).strategy.allows_several


# --- a strategy that makes its messages itself, and other models


class Own(GroupPrivacy):
    """Makes its messages itself, of a kind, for the first four nodes."""

    kind: str

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> list[Message]:
        content = RecordDict({"arrays": arrays, "config": ConfigRecord({"k": 2})})
        return [Message(content, node, self.kind) for node in [*grid.get_node_ids()][:4]]


@pytest.mark.parametrize("kind", ["train", "train.mine"])
def test_a_strategy_may_make_its_messages_itself(kind: str) -> None:
    made = app()
    made.train("mine")(lambda message, context: made._registered_funcs["train.default"](message, context))
    strategy = Own()
    strategy.kind = kind
    result = strategy.start(InProcessGrid(made, {}, nodes=NODES), START, num_rounds=1)
    counts = result.train_metrics_clientapp[1]
    assert (counts["asked"], counts["releases"], counts["lost-nodes"]) == (4, 4, 0)


def test_arrays_may_have_different_types_and_whole_numbers_are_rounded() -> None:
    values = {"n": np.array([1, 2]), "h": np.ones((2, 1), np.float16), "weight": START["weight"].numpy()}

    def said(message: Message, content: dict[str, Any]) -> None:
        own = {"n": 1 + message.metadata.dst_node_id % 2, "h": np.ones(1, np.float16), "weight": np.ones(2)}
        says(**own)(message, content)

    start = ArrayRecord({name: Array(value) for name, value in values.items()})
    result = GroupPrivacy().start(grid(said=said), start, num_rounds=1)
    assert result.train_metrics_clientapp[1]["releases"] == 8
    assert result.arrays["n"].numpy().dtype == np.int64
    assert 2 in result.arrays["n"].numpy(), "the mean of four 1 and four 2, rounded to the even number"


def test_a_strategy_may_start_again_with_other_hypotheses() -> None:
    strategy = GroupPrivacy()
    three = umbel.hypotheses({"weight": np.zeros(2)}, k=3, seed=0)
    for start, k in ((START, 2), (three, 3)):
        strategy.start(grid(), start, num_rounds=2)
        assert (strategy.hypotheses, [outcome.round for outcome in strategy.history]) == (k, [1, 2])


@pytest.mark.parametrize(
    ("made", "run", "code"),
    [
        ({"weighted_by_key": "num-examples"}, {}, "config.weighted"),
        ({"fraction_train": 1.5}, {}, "config.fraction"),
        ({"fraction_evaluate": -1.0}, {}, "config.fraction"),
        ({"min_train_nodes": 0}, {}, "config.fraction"),
        ({}, {"train_config": ConfigRecord({"k": 7})}, "config.plain-nodes"),
        ({}, {"evaluate_every": 0}, "config.rounds"),
    ],
)
def test_what_cannot_be_asked_is_refused(made: dict[str, Any], run: dict[str, Any], code: str) -> None:
    """An entry of the config cannot take the place of umbel's."""
    with raises(ConfigError, code):
        GroupPrivacy(**made).start(grid(), START, num_rounds=1, **run)
