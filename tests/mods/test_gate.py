"""The gate of an ordinary Flower app: what leaves, what it costs, who decides; `test_gate_hostile` attacks it."""

from __future__ import annotations

import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import FedAvg
from scipy import stats

import umbel
from tests.helpers.errors import raises
from tests.helpers.flower_apps import Node, answered, arrays, asks, left
from tests.helpers.messages import refused
from umbel.mods import gate
from umbel.mods.gate import Gate
from umbel.nodes.words import code_in
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.policy import Policy
from umbel.privacy.site.refusals import REMEDIES
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Clipping, Kind, Release
from umbel.simulation.grid import InProcessGrid

PAIR = {"w": np.zeros(2, np.float32)}
WIDE = {"w": np.zeros(30, np.float32)}
"""So many numbers that noise, though it is rounded, is not the same twice, or nothing, by chance."""
RARE = 1e-9
"""The chance of a false alarm of each test of a law."""


def adds(*update: float) -> Any:
    return lambda msg: answered(msg, lambda value: value + np.float32(update), train_loss=0.7, **{"num-examples": 61})


def unchanged(msg: Message) -> Message:
    return answered(msg, lambda value: value)


# --- what leaves


@pytest.mark.parametrize(("update", "leaves"), [((3.0, 4.0), (0.6, 0.8)), ((0.3, -0.4), (0.3, -0.4))])
def test_an_update_is_clipped_around_what_the_server_sent(update: tuple[float, ...], leaves: tuple[float, ...]) -> None:
    start = np.array([10.0, -2.0], np.float32)
    reply = Node(Gate(0.0, 1.0), adds(*update)).send(asks({"w": start}))
    np.testing.assert_allclose(left(reply)["w"], start + leaves, rtol=1e-6)


def test_arrays_keep_their_names_order_shapes_and_types_and_all_else_is_dropped() -> None:
    sent = {
        "z.weight": np.ones((2, 3), np.float32),
        "half": np.ones(2, np.float16),
        "scalar": np.float32(4.0),
        "double": np.ones((1, 2, 2), np.float64),
        "empty": np.ones((0, 3), np.float32),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    }
    reply = Node(Gate(0.0, 0.5), lambda msg: answered(msg, lambda v: v + v.dtype.type(1), loss=3.0)).send(asks(sent))
    leaves = left(reply)
    assert list(leaves) == list(sent)
    moved = [np.square(value - sent[name], dtype=float).sum() for name, value in leaves.items()]
    assert math.sqrt(sum(moved)) == pytest.approx(0.5, rel=1e-3), "all arrays together are one update"
    assert [(v.dtype, v.shape) for v in leaves.values()] == [(v.dtype, v.shape) for v in map(np.asarray, sent.values())]


def test_the_reply_has_the_names_that_the_strategy_uses() -> None:
    content = asks(PAIR)
    content["model"] = content.pop("arrays")

    def train(msg: Message) -> Message:
        return Message(RecordDict({"mine": msg.content["model"], "m": MetricRecord({"rows": 9})}), reply_to=msg)

    reply = Node(Gate(1.0, 1.0, weighted_by_key="rows"), train).send(content)
    assert set(reply.content) == {"model", "metrics"}
    assert dict(reply.content["metrics"]) == {"rows": 1}


def test_what_is_frozen_goes_back_as_it_came_and_costs_nothing() -> None:
    sent = {"backbone.w": np.ones(5, np.float32), "bn.num_batches_tracked": np.int64(7), "head.w": np.zeros(2, "f4")}
    node = Node(Gate(1.0, 1.0, frozen="backbone.* *.num_batches_tracked"), lambda msg: answered(msg, lambda v: v + 1))
    leaves = left(node.send(asks(sent)))
    np.testing.assert_array_equal(leaves["backbone.w"], sent["backbone.w"])
    assert leaves["bn.num_batches_tracked"] == 7
    assert leaves["bn.num_batches_tracked"].dtype == np.int64
    assert [release.n for release in node.account] == [2]


def test_a_pattern_that_matches_nothing_is_a_slip_of_the_pen(node_log: io.StringIO) -> None:
    assert refused(Node(Gate(1.0, 1.0, frozen="backbon.*"), unchanged).send(asks(PAIR)))
    assert "umbel.Gate's frozen names 'backbon.*'" in node_log.getvalue()


# --- the law of the noise, and its price


@pytest.mark.parametrize("own_data", [False, True], ids=["simulation", "site"])
@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_the_noise_has_the_law_that_is_paid_for(mechanism: str, own_data: bool, tmp_path: Path) -> None:
    """Of n components, at nu = 2 and r = 0.5: normals of deviation nu r, or a norm of Gamma(n, nu r / n)."""
    n, nu, r = 4000, 2.0, 0.5
    folder, policy = (tmp_path, {"mechanisms": "laplace gaussian"}) if own_data else (None, {})
    node = Node(Gate(nu, r, mechanism), unchanged, folder, **policy)
    noise = left(node.send(asks({"w": np.zeros(n, np.float32)})))["w"].astype(float)
    if mechanism == "gaussian":
        low, high = stats.chi2.ppf([RARE / 2, 1 - RARE / 2], n)
        assert low < (noise**2).sum() / (nu * r) ** 2 < high
    else:
        low, high = stats.gamma.ppf([RARE / 2, 1 - RARE / 2], n, scale=nu * r / n)
        assert low < np.linalg.norm(noise) < high
    assert stats.kstest(noise / noise.std(), "norm").pvalue > RARE
    assert node.account == {Release(Kind.TRAIN, n, nu, Clipping.PUBLIC, mechanism=mechanism): 1}


@pytest.mark.parametrize("own_data", [False, True], ids=["simulation", "site"])
def test_the_same_message_is_answered_with_other_noise_and_charged_again(own_data: bool, tmp_path: Path) -> None:
    """A server that could have the noise twice would subtract it."""
    node = Node(Gate(2.0, 1.0), unchanged, tmp_path if own_data else None)
    first, second = (left(node.send(asks(WIDE)))["w"] for _ in range(2))
    assert (first != second).any()
    assert node.paid == 2


# --- who decides


def test_the_charge_comes_before_the_app_sees_a_message_and_outlives_a_crash(tmp_path: Path) -> None:
    seen = []

    def killed(msg: Message) -> Message:
        seen.append(node.paid)
        raise KeyboardInterrupt

    node = Node(Gate(2.0, 1.0), killed, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        node.send(asks(PAIR))
    assert (seen, node.paid) == ([1], 1)


@pytest.mark.parametrize(("own_data", "who"), [(False, "a client"), (True, "this site's client")])
def test_the_log_says_what_was_spent(
    own_data: bool, who: str, tmp_path: Path, node_log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two numbers at a noise multiplier of 2 cost a pure epsilon of 2 * 2 / 2 each time; at a delta 3.993 for two."""
    monkeypatch.setattr(gate, "_told", {})
    node = Node(Gate(2.0, 1.0), unchanged, tmp_path if own_data else None)
    for _ in range(2):
        node.send(asks(PAIR))
    assert f"after 2 releases {who} has spent epsilon 3.993 at delta 1e-05" in node_log.getvalue()


def test_a_budget_refuses_once_it_is_spent_and_who_cannot_pay_does_not_train() -> None:
    """Pure epsilon 2 n / nu = 1 a participation."""
    node = Node(Gate(4.0, 1.0, budget=3.0), adds(1.0, 0.0))
    assert [refused(node.send(asks(PAIR, round + 1))) for round in range(5)] == [False] * 3 + [True] * 2
    assert (node.asked, node.paid) == (3, 3)


@pytest.fixture
def no_budget_of_the_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UMBEL_BUDGET")


ROWS: dict[str, Any] = {"protect": "rows", "budget": "inf", "row-budget": 2.5}
NORMAL = Gate(2.0, 1.0, "gaussian", budget=10.0, delta=1e-5)


@pytest.mark.usefixtures("no_budget_of_the_sites")
@pytest.mark.parametrize(
    ("gate", "policy", "answers"),
    [
        # Each participation costs a pure epsilon of 2 n / nu = 1. A site's own budget takes the place of the app's.
        (Gate(4.0, 1.0, budget=2.0), {}, 2),
        (Gate(4.0, 1.0, budget=2.0), {"budget": 5.0}, 5),
        (Gate(4.0, 1.0, budget=2.0), {"budget": 1.0}, 1),
        # An app cannot hide rows in training. Noise that hides a client hides them, at the same price.
        (Gate(4.0, 1.0, budget=100.0), ROWS, 2),
        (Gate(0.5, 1.0, budget=100.0), ROWS, 0),
        # Four participations at nu = 2 have an epsilon of 9.997, whatever less noise the site would accept.
        (NORMAL, {"mechanisms": "gaussian"}, 4),
        (NORMAL, {"mechanisms": "gaussian", "min-noise-multiplier": 1.0}, 4),
        (NORMAL, {"mechanisms": "gaussian", "budget": "9.998 delta=1e-5"}, 4),
    ],
)
def test_a_site_answers_as_often_as_its_budget_and_the_apps_allow(
    gate: Gate, policy: dict[str, Any], answers: int, tmp_path: Path
) -> None:
    node = Node(gate, unchanged, tmp_path, **policy)
    assert [refused(node.send(asks(PAIR))) for _ in range(answers + 1)] == [False] * answers + [True]


@pytest.mark.usefixtures("no_budget_of_the_sites")
def test_an_app_with_a_budget_does_not_lower_a_sites_least_noise(tmp_path: Path) -> None:
    reply = Node(Gate(0.5, 1.0, budget=100.0), unchanged, tmp_path).send(asks(PAIR))
    assert code_in(reply.error.reason) == "refused.noise"


@pytest.mark.usefixtures("no_budget_of_the_sites")
@pytest.mark.parametrize(("asked", "delta", "answers"), [(100.0, 0.0, 2), (100.0, 1e-5, 2), (4.0, 0.0, 1)])
def test_an_app_only_narrows_the_budget_of_a_policy_file(
    asked: float, delta: float, answers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has the default, 8, of which each participation takes 4."""
    for name in ("CLIPPING", "MAX_CHOICE_EPSILON"):
        monkeypatch.delenv(f"UMBEL_{name}")
    (tmp_path / "policy.toml").write_text('role = "train"\n# end')
    (tmp_path / "policy.toml").chmod(0o644)
    gate = Gate(1.0, 1.0, budget=asked, delta=delta)
    node = Node(gate, unchanged, tmp_path, policy_file=str(tmp_path / "policy.toml"))
    assert [refused(node.send(asks(PAIR))) for _ in range(3)] == [False] * answers + [True] * (3 - answers)


@pytest.mark.parametrize(
    ("gate", "policy", "reason"),
    [
        (Gate(2.0, 1.0), {"min-noise-multiplier": 3.0}, "this site accepts no less than 3.0"),
        (Gate(0.0, 1.0), {}, "unsanitised release"),
        (Gate(2.0, 1.0, "gaussian"), {}, "this site accepts laplace"),
        (Gate(2.0, 1.0, "gaussian"), {"mechanisms": "gaussian", "budget": 9.0}, "a delta"),
        (Gate(2.0, 1.0), {"release": "site"}, "this site has release"),
        (Gate(2.0, 1.0), {"role": "validation"}, "clients of role validation do not train"),
        (Gate(2.0, 1.0), {"role": "split"}, "role split is for umbel's own datasets"),
        (Gate(2.0, 1.0), {"protect": "both"}, 'this site has protect = "both"'),
        (Gate(2.0, 1.0), {"protect": "rows", "budget": "inf"}, "needs a row-budget"),
        (Gate(2.0, 1.0), {"budged": 3.0}, "did you mean budget?"),
        (Gate(2.0, 1.0), {"device": "cpu"}, "there is no device"),
        (Gate(2.0, 1.0), {"app-keys": "budget"}, "app-keys names budget"),
    ],
)
def test_a_sites_policy_wins_and_one_that_cannot_be_used_closes_it(
    gate: Gate, policy: dict[str, Any], reason: str, tmp_path: Path, node_log: io.StringIO
) -> None:
    node = Node(gate, unchanged, tmp_path, **policy)
    assert refused(node.send(asks(PAIR)))
    assert reason in node_log.getvalue()
    assert node.asked == 0
    assert not list(Journal(node.path).rows())


HEEDED = {
    "allow-unsanitised", "app", "app-keys", "budget", "bundle", "data-path", "ledger-path",
    "max-choice-epsilon", "max-evaluations", "max-hypotheses", "max-participations",
    "max-seconds", "mechanisms", "min-clients", "min-noise-multiplier", "paper-budget", "clipping",
    "protect", "release", "reports", "row-budget", "role", "policy-file", "witness-path",
}  # fmt: skip


def test_every_entry_of_a_site_is_heeded_here_or_closes_it(tmp_path: Path, node_log: io.StringIO) -> None:
    """An entry that did nothing would be taken for a limit."""
    values = {"approve": "ask", "place": "0/1", "max-work": "epochs=5"}
    for name in set(Policy.names()) - HEEDED:
        (tmp_path / name).mkdir()
        value = values.get(name, "/models" if name == "keep-model" else str(Policy.model_fields[field(name)].default))
        assert refused(Node(Gate(2.0, 1.0), unchanged, tmp_path / name, **{name: value}).send(asks(PAIR)))
        assert f"umbel refused to answer (train): {name} " in node_log.getvalue(), "for this or for what it needs"


def field(name: str) -> str:
    return name.replace("-", "_")


def test_entries_that_a_site_says_are_the_apps_own_are_let_be(tmp_path: Path) -> None:
    node = Node(Gate(2.0, 1.0), unchanged, tmp_path, device="cpu", workers=2, **{"app-keys": "device workers"})
    assert not refused(node.send(asks(PAIR)))
    assert node.grid.contexts[node.id].node_config["device"] == "cpu", "and the app sees them"


def test_a_node_outside_a_simulation_needs_a_ledger_alone(node_log: io.StringIO, tmp_path: Path) -> None:
    """What it says of partitions is no proof of a simulation; where it runs is. The app opens its own data."""
    node = Node(Gate(2.0, 1.0), unchanged)

    def reply() -> Message:
        message = Message(asks(PAIR), node.id, "train", group_id="1")
        return node.grid._app(message, node.grid.contexts[node.id])

    assert refused(reply())
    assert "[site.no-ledger]" in node_log.getvalue()
    ledger = tmp_path / "ledger.jsonl"
    node.grid.contexts[node.id].node_config["ledger-path"] = str(ledger)
    assert not refused(reply())
    assert [sum(account.values()) for account in Journal(ledger).accounts().values()] == [1]


def test_each_message_stands_in_the_sites_log(tmp_path: Path) -> None:
    node = Node(Gate(2.0, 1.0), unchanged, tmp_path, max_participations=1)
    for _ in range(2):
        node.send(asks(PAIR, 4))
    node.send(asks({"w": np.int64(3)}))
    lines = list(Journal(node.path).messages())
    assert [(line["decision"], line["paid"]) for line in lines] == [("answered", 1), ("refused", 0), ("refused", 0)]
    assert lines[0]["asked"]["training"]["noise_multiplier"] == 2.0
    assert lines[0]["asked"]["training"]["round"] == 4
    assert lines[0]["asked"]["hypotheses"] == {"k": 1, "n": 2}
    assert "is of type int64" in lines[2]["reason"]


# --- reports


def scored(msg: Message) -> Message:
    """An ordinary evaluate function. Means, and scores of scikit-learn, are of a type of NumPy's."""
    metrics = MetricRecord({"eval_loss": np.mean([0.0, 0.5]), "eval_acc": 0.5, "num-examples": 61, "rows": [1.0, 2.0]})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


REPORTS = Gate(2.0, 1.0, reports=["eval_loss", "eval_acc"])


@pytest.mark.parametrize(
    ("gate", "own_data", "policy"),
    [(Gate(2, 1), False, {}), (REPORTS, False, {}), (REPORTS, True, {}), (Gate(2, 1), True, {"role": "validation"})],
)
def test_nobody_reports_unless_app_and_site_let_them(
    gate: Gate, own_data: bool, policy: dict[str, Any], tmp_path: Path
) -> None:
    """The server reads why, in the same words whatever the data are."""
    node = Node(gate, unchanged, tmp_path if own_data else None, scored, **policy)
    reply = node.send(asks(PAIR), "evaluate")
    assert reply.error.reason == f"refused [refused.no-reports]{REMEDIES['refused.no-reports']}"
    assert code_in(reply.error.reason) == "refused.no-reports", "as umbel's own server reads it"
    assert node.asked == 0


def test_a_validation_site_reports_what_the_app_names_and_no_sample_count(tmp_path: Path) -> None:
    node = Node(REPORTS, unchanged, tmp_path, scored, role="validation", max_evaluations=2)
    replies = [node.send(asks(PAIR), "evaluate") for _ in range(3)]
    assert dict(replies[0].content["metrics"]) == {"eval_loss": 0.25, "eval_acc": 0.5, "num-examples": 1}
    assert [refused(reply) for reply in replies] == [False, False, True]
    assert node.paid == 0, "exact losses have no price"


@pytest.mark.usefixtures("no_budget_of_the_sites")
def test_an_apps_budget_holds_for_clients_that_report_alone(tmp_path: Path) -> None:
    """Two numbers at nu = 10 cost a fifth."""
    gate = Gate(2.0, 1.0, budget=0.4, reports=["eval_loss"])
    node = Node(gate, unchanged, tmp_path, scored, role="validation")
    assert [refused(node.send(asks(PAIR), "evaluate")) for _ in range(3)] == [False, False, True]
    assert node.paid == 2


def test_an_apps_budget_closes_no_validation_site_that_has_none(tmp_path: Path) -> None:
    gate = Gate(2.0, 1.0, budget=10.0, reports=["eval_loss"])
    node = Node(gate, unchanged, tmp_path, scored, role="validation")
    assert [refused(node.send(asks(PAIR), kind)) for kind in ("evaluate", "train")] == [False, True]
    assert (node.asked, node.paid) == (1, 0)


@pytest.mark.parametrize("names", [["eval_loss"], ["eval_acc", "eval_loss"]])
def test_a_training_site_reports_with_noise_and_pays(names: list[str], tmp_path: Path) -> None:
    node = Node(Gate(2.0, 1.0, reports=names), unchanged, tmp_path, scored, reports="noise=1e6 bound=2.0")
    replies = [dict(node.send(asks(PAIR), "evaluate").content["metrics"]) for _ in range(8)]
    assert {reply.pop("num-examples") for reply in replies} == {1}
    assert {tuple(reply) for reply in replies} == {tuple(names)}
    # Of a deviation of millions, and so rounded that one in forty is 0: all eight are with a chance of 1e-13.
    assert max(abs(value) for reply in replies for value in reply.values()) > 1e4
    [(release, times)] = node.account.items()
    assert (release.kind, release.n, release.noise_multiplier, times) == (Kind.REPORT, 2, 1e6, 8)


# --- with stock strategies


def test_stock_fedavg_goes_on_with_a_model_that_has_frozen_whole_numbers_and_ends_as_flower_does() -> None:
    """FedAvg averages whole numbers into fractions, and sends those in the next round."""
    node = Node(Gate(0.0, 1.0, frozen="steps", budget=None), adds(0.5, 0.0))
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    found = strategy.start(node.grid, arrays(PAIR | {"steps": np.int64(3)}), num_rounds=3)
    np.testing.assert_allclose(found.arrays["w"].numpy(), [1.5, 0.0], rtol=1e-6)
    assert found.arrays["steps"].numpy() == 3


STOCK = "FedAdagrad FedAdam FedAvg FedAvgM FedMedian FedProx FedTrimmedAvg FedYogi Krum MultiKrum Bulyan"


@pytest.mark.parametrize("name", STOCK.split())
def test_stock_strategies_understand_the_replies(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Those but for FedAvg itself send what they have made of the replies in the second round."""
    caplog.set_level("INFO", "flwr")
    app = Node(Gate(1.0, 1.0), unchanged).grid._app
    grid = InProcessGrid(app, {}, nodes=5)
    needs: dict[str, Any] = {"proximal_mu": 0.1} if name == "FedProx" else {}
    found = getattr(strategies, name)(fraction_evaluate=0.0, **needs).start(grid, arrays(WIDE), num_rounds=2)
    assert caplog.text.count("aggregate_train: Received 5 results and 0 failures") == 2
    assert np.isfinite(found.arrays["w"].numpy()).all()
    assert (found.arrays["w"].numpy() != 0).any()


# --- what an app says


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        ({"noise_multiplier": math.inf}, "protocol.wrong-value", "noise-multiplier"),
        ({"clip_norm": 0.0}, "protocol.wrong-value", "clip-norm"),
        ({"clip_norm": None}, "protocol.wrong-value", "clip-norm"),
        ({"mechanism": "laplase"}, "config.unknown-name", "'laplase'"),
        ({"budget": -1.0}, "site.wrong-value", "budget"),
        ({"delta": 1e-5}, "config.delta", "budget"),
        ({"mechanism": "gaussian", "budget": 4.0}, "config.delta", "gaussian"),
        ({"budget": 1.0, "delta": 2.0}, "site.wrong-value", "delta"),
        ({"frozen": ["backbone.*"]}, "config.frozen-patterns", "frozen"),
        ({"reports": "eval_loss"}, "config.reports", "reports"),
        ({"reports": ["a", "b", "c"]}, "config.reports", "reports"),
        ({"reports": ["num-examples"]}, "config.reports", "reports"),
        ({"choice_epsilon": 1.0}, "config.choice-epsilon", ""),
    ],
)
def test_an_argument_that_cannot_be_used_is_named_at_once(arguments: dict[str, Any], code: str, part: str) -> None:
    with raises(ConfigError, code, "umbel.Gate", part):
        Gate(**{"noise_multiplier": 2.0, "clip_norm": 1.0} | arguments)


# --- a choice among hypotheses

STACKED = {"w": np.array([[0, 0], [5, 6], [4, -4]], np.float32)}


def near_the_second(arrays: ArrayRecord, context: Context) -> float:
    return float(np.square(arrays["w"].numpy() - [5, 5]).sum())


def test_the_hypothesis_that_fits_is_trained_and_released_alone() -> None:
    seen: list[Any] = []

    def train(msg: Message) -> Message:
        seen.append((msg.content["arrays"]["w"].numpy().tolist(), dict(msg.content["config"])))
        return answered(msg, lambda value: value + np.float32((0.3, 0.4)))

    node = Node(Gate(0.0, 1.0, choose=near_the_second), train)
    reply = node.send(asks(STACKED, k=3))
    np.testing.assert_allclose(left(reply)["w"], [5.3, 6.4], rtol=1e-6)
    assert seen == [([5, 6], {"server-round": 1, "lr": 0.1})]
    assert node.paid == 1
    one = node.send(asks({"w": np.float32([1, 2])}))
    np.testing.assert_allclose(left(one)["w"], [1.3, 2.4], rtol=1e-6, err_msg="an ordinary message passes as before")


def test_choice_and_update_are_one_charge() -> None:
    node = Node(Gate(2.0, 1.0, choose=near_the_second, choice_epsilon=1.5), adds(1.0, 1.0))
    assert not refused(node.send(asks(STACKED, k=3)))
    [(release, times)] = node.account.items()
    assert (times, release.hypotheses, release.choice_epsilon, release.noise_multiplier) == (1, 3, 1.5, 2.0)


def test_the_choice_is_randomised_as_much_as_said() -> None:
    """Among 3 at ln 4 the best is trained 4 times in 6. Of 600 choices; a false alarm in a billion runs."""

    def train(msg: Message) -> Message:
        trained[int(msg.content["arrays"]["w"].numpy()[0])] += 1
        return unchanged(msg)

    trained: Counter[int] = Counter()
    node = Node(Gate(0.0, 1.0, choose=near_the_second, choice_epsilon=math.log(4)), train)
    for _ in range(600):
        node.send(asks(STACKED, k=3))
    expected = np.array([100, 400, 100])
    assert stats.chisquare([trained[0], trained[5], trained[4]], expected).pvalue > RARE


def test_a_site_with_a_budget_refuses_an_open_choice(tmp_path: Path) -> None:
    node = Node(Gate(2.0, 1.0, choose=near_the_second), adds(1.0, 1.0), tmp_path, budget=8.0)
    assert refused(node.send(asks(STACKED, k=3)))
    assert (node.paid, node.asked) == (0, 0)


@pytest.mark.parametrize(
    ("gate", "content"),
    [
        (Gate(0.0, 1.0), asks(STACKED, k=3)),
        (Gate(0.0, 1.0, choose=near_the_second), asks(STACKED, k=2)),
        (Gate(0.0, 1.0, choose=near_the_second), asks(STACKED, k=0)),
        (
            Gate(0.0, 1.0, choose=near_the_second, frozen="count"),
            asks(STACKED | {"count": np.array([1, 2, 3])}, k=3),
        ),
    ],
    ids=["no loss to choose by", "fewer than the arrays", "none", "frozen arrays that tell the choice"],
)
def test_hypotheses_that_do_not_fit_are_refused_before_the_charge(gate: Gate, content: RecordDict) -> None:
    node = Node(gate, unchanged)
    assert refused(node.send(content))
    assert (node.paid, node.asked) == (0, 0)


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_a_choice_before_the_gate_would_not_be_charged_and_is_refused(epsilon: float) -> None:
    node = Node(Gate(2.0, 1.0), unchanged)
    node.grid._app = ClientApp(mods=[umbel.ChooseHypothesis(near_the_second, epsilon), Gate(2.0, 1.0)])
    node.grid._app.train()(lambda msg, context: unchanged(msg))
    assert refused(node.send(asks(STACKED, k=3)))
    assert node.paid == 0


def test_what_an_app_does_to_its_message_does_not_show_in_the_reply() -> None:
    def train(msg: Message) -> Message:
        msg.metadata.group_id = "diagnosis"
        msg.metadata.message_type = "train.diagnosis"
        return unchanged(msg)

    for made, content in (
        (Gate(0.0, 1.0), asks(PAIR)),
        (Gate(0.0, 1.0, choose=near_the_second), asks(STACKED, k=3)),
    ):
        reply = Node(made, train).send(content)
        assert not refused(reply)
        assert "diagnosis" not in f"{reply.metadata.group_id} {reply.metadata.message_type}"
