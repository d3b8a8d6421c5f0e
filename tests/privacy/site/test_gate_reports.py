"""What leaves a node of its clients that report, and of a message that asks for training as well.

`test_gate.py` looks at training; here clients return loss and metric.
"""

from __future__ import annotations

import io
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from numpy.typing import NDArray

from tests.helpers.ledgers import all_spent
from tests.helpers.messages import (
    SIMULATED,
    Behind,
    arrived,
    asked,
    of_node,
    refused,
    released,
    releases,
    scores,
    stacked,
    task_of,
    through_gate,
    wire,
)
from tests.helpers.noise import rounding, sanitise
from umbel.privacy.mechanisms.laplace import Laplace
from umbel.privacy.mechanisms.randomness import streams
from umbel.privacy.mechanisms.sanitise import round_to_grid
from umbel.privacy.site.journal import Journal
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

SECRET = "diagnosis-of-patient-17"
SECRET_LOSS = 0.123456789
OWN: dict[str, Any] = {"data-path": f"/data/{SECRET}"}  # the gate alone never opens it
NOISY = {"role": "train", "reports": "noise=4.0 bound=3.0"}
ONE = {"weight": (2,)}
ZEROS = stacked(np.zeros((1, 2)), ONE)

Numbers = list[float] | NDArray[np.float64]


def request(clients: tuple[int, ...], hypotheses: Any = ZEROS, **changes: Any) -> RecordDict:
    """The content of a message that asks for evaluation alone."""
    return asked(hypotheses, None, EvaluationSpec(1, clients, **changes))


def reports(losses: Numbers, metrics: Numbers) -> Behind:
    """Clients that report as they should."""
    return Behind(scores=lambda task: [np.array([losses, metrics], float).T])


def what_left(reply: Message) -> tuple[list[float], list[float]] | None:
    """Check that a reply holds loss and metric alone; return them, or None for "refused"."""
    sent = wire(reply)
    assert SECRET.encode() not in sent
    assert SECRET.encode() not in repr(reply).encode()
    came = arrived(reply)
    if came.has_error():
        assert refused(came)
        for text in (struct.pack("<d", SECRET_LOSS), struct.pack("<f", SECRET_LOSS)):
            assert text not in sent
        return None
    assert set(came.content) == {"scores"}
    return scores(came)


# --- validation clients


MEAN = {"role": "validation", "reports": "noise=4.0 bound=3.0", "budget": 2.0}


@pytest.fixture
def site_of_mean(umbel_home: Path) -> Context:
    """A site that sets a budget, and has a ledger for it."""
    umbel_home.mkdir()
    Journal.create(umbel_home / "ledger.jsonl")
    return of_node(OWN | MEAN)


@pytest.mark.parametrize(
    "node_config",
    [
        SIMULATED,
        OWN | {"role": "validation"},
        OWN | MEAN | {"role": "split", "reports": "exact=yes"},
        OWN | MEAN | {"role": "split", "reports": "noise=0.0", "budget": "inf"},
    ],
    ids=["simulated", "own data", "a site that says so", "a site without a budget"],
)
@pytest.mark.parametrize("message_type", ["evaluate", "train"])
@pytest.mark.usefixtures("site_of_mean")
def test_loss_and_metric_of_validation_clients_leave_as_they_are(
    node_config: dict[str, Any], message_type: str
) -> None:
    context = of_node(node_config)
    handler = reports([0.5, 1e9], [0.25, 7.0])
    assert what_left(through_gate(request((4, 7)), context, handler, message_type)) == ([0.5, 1e9], [0.25, 7.0])
    assert all_spent(context, (4, 7)) == [0, 0]


def fails(*_: Any) -> Any:
    raise ValueError(f"{SECRET}: loss {SECRET_LOSS}")


EXACT = np.full((2, 2), SECRET_LOSS)
FAULTS: dict[str, Any] = {
    "a client too few": lambda _: [EXACT[1:]],
    "a third number": lambda _: [np.full((2, 3), SECRET_LOSS)],
    "single precision": lambda _: [EXACT.astype(np.float32)],
    "text": lambda _: SECRET,
    "an exception": fails,
}


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_clients_that_fail_report_nothing_in_simulation_and_noise_at_a_site(fault: str, noisy: bool) -> None:
    """A site that lets exact losses leave says refused."""
    for own in ({}, OWN):
        policy = NOISY if noisy else {"role": "validation"} if own else {}
        context = of_node((own or SIMULATED) | policy)
        found = what_left(through_gate(request((4, 7)), context, Behind(scores=FAULTS[fault])))
        assert (found is not None) == (noisy and bool(own))
        assert all_spent(context, (4, 7)) == [Fraction(1, 2) * noisy] * 2


# --- training clients that report


class Node(Behind):
    """Clients that train and score, and remember what they were asked; they fail at what is `broken`."""

    def __init__(self, *broken: str) -> None:
        super().__init__(self._train, self._score)
        self.broken = broken
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def _asked(self, part: str, clients: tuple[int, ...]) -> int:
        self.seen.append((part, clients))
        return fails() if part in self.broken else len(clients)  # type: ignore[no-any-return]

    def _train(self, task: TrainingSpec, assigned: NDArray[np.int64]) -> Any:
        m = self._asked("training", task.clients)
        return [np.zeros(m, int), np.ones((m, 2), np.float32)]

    def _score(self, task: EvaluationSpec) -> Any:
        losses = np.arange(self._asked("evaluation", task.clients), dtype=float)
        return [np.stack([losses, 10 * losses], axis=1)]


def test_a_node_that_does_not_say_who_is_charged_reports_nothing() -> None:
    node, context = Node(), of_node(SIMULATED | NOISY)
    node.check = lambda task, hypotheses: task.clients[1:]  # type: ignore[method-assign]
    assert what_left(through_gate(request((4, 7)), context, node)) is None
    assert (node.seen, all_spent(context, (4, 7))) == ([], [0, 0])


@pytest.mark.parametrize("budget", [8, "inf"])
def test_training_clients_report_nothing_unless_their_site_lets_them(budget: Any) -> None:
    node = Node()
    assert what_left(through_gate(request((4, 7)), of_node(OWN | {"budget": budget}), node)) is None
    assert node.seen == []
    assert left(through_gate(both(), of_node(OWN), Node())) == {"arrays", "released"}, "they train all the same"


def test_reports_of_training_clients_are_clipped_noised_and_charged() -> None:
    context = of_node(OWN | NOISY)
    handler = reports([0.5, 1e9], [0.25, -7.0])
    first, second = (what_left(through_gate(request((4, 7)), context, handler)) for _ in range(2))
    assert first != second, "the run's seed counts in simulation alone"
    assert np.abs([first, second]).max() < 1e3, "clipped to 3, with noise of a radius of 3 sqrt 2"
    # Two numbers at nu = 4 cost a half each time.
    assert all_spent(context, (4, 7)) == [1, 1]


def test_a_report_is_the_sanitised_point_with_noise_from_the_clients_own_stream() -> None:
    handler = reports([0.5, 9.0, np.nan], [0.25, -1.0, 2.0])
    found = what_left(through_gate(request((4, 7, 5)), of_node(SIMULATED | NOISY), handler))
    # Clipped to between 0 and 3, what is no number to 3, and centred.
    points = np.array([[0.5, 0.25], [3.0, 0.0], [3.0, 2.0]]) - 1.5
    noised = sanitise(points, 4.0, 3 * np.sqrt(2), "public", streams(3, "report", 1, [4, 7, 5])) + 1.5
    expected = round_to_grid(noised, rounding(2, 4.0, 3 * np.sqrt(2)), float(np.spacing(np.float32(3))))
    np.testing.assert_array_equal(np.array(found).T, expected)


def test_a_client_without_budget_reports_nothing() -> None:
    context = of_node(SIMULATED | NOISY | {"paper-budget": 0.5})
    through_gate(request((4,)), context, reports([0.5], [0.5]))
    found = what_left(through_gate(request((4, 7)), context, reports([0.5], [0.5])))
    assert np.isnan(found).tolist() == [[True, False], [True, False]]
    assert all_spent(context, (4, 7)) == [Fraction(1, 2)] * 2


# --- validation clients at a site with a budget


@pytest.mark.parametrize("entries", [{}, {"budget": "inf", "row-budget": 2.0}], ids=str)
@pytest.mark.usefixtures("site_of_mean")
def test_a_site_with_a_budget_reports_one_mean_and_charges_each_client(entries: dict[str, Any]) -> None:
    handler, context = reports([0.5, 9.0, np.nan], [0.25, -1.0, 2.0]), of_node(OWN | MEAN | entries)
    found = what_left(through_gate(request((4, 7, 5)), context, handler))
    assert found is not None
    assert [len(set(values)) for values in found] == [1, 1], "all three stand for their mean"
    # Two numbers at nu = 4, of which one client moves the sum by at most a radius, cost a half.
    assert all_spent(context, (4, 5, 7)) == [Fraction(1, 2)] * 3


def test_the_mean_is_of_clipped_reports_with_noise_once() -> None:
    handler = reports([0.5, 9.0, np.nan], [0.25, -1.0, 2.0])
    found = what_left(through_gate(request((4, 7, 5)), of_node(SIMULATED | MEAN), handler))
    total = np.array([[0.5 + 3.0 + 3.0, 0.25 + 0.0 + 2.0]])
    noise = Laplace(4.0).noise([2], np.full((1, 1), 3 * np.sqrt(2)), iter(streams(3, "mean report", 1, [0])))
    expected = round_to_grid(total + noise, rounding(2, 4.0, 3 * np.sqrt(2)), float(np.spacing(np.float32(9)))) / 3
    np.testing.assert_array_equal(np.array(found).T, np.repeat(expected, 3, axis=0))


def test_a_client_over_budget_is_not_in_the_mean_and_nothing_is_computed_on_it(site_of_mean: Context) -> None:
    """Else the time that it takes would tell of the data for nothing, as often as a server likes."""
    node = Node()
    found = [what_left(through_gate(request(who), site_of_mean, node)) for who in [(4,)] * 4 + [(4, 7), (4,)]]
    assert [np.isnan(one).any(axis=0).tolist() for one in found] == [[False]] * 4 + [[True, False], [True]]
    assert node.seen == [("evaluation", (4,))] * 4 + [("evaluation", (7,))]
    assert all_spent(site_of_mean, (4, 7)) == [2, Fraction(1, 2)]


# --- both in one message


def both(**changes: Any) -> RecordDict:
    """The content of a message that asks clients 0 and 1 to train and clients 4, 7 and 5 to report."""
    return asked(ZEROS, task_of((0, 1), **changes), EvaluationSpec(1, (4, 7, 5)))


def left(reply: Message) -> set[str]:
    """Return the records of a reply, which is checked to hold what is allowed alone."""
    assert SECRET.encode() not in wire(reply)
    came = arrived(reply)
    if came.has_error():
        assert refused(came)
        return set()
    if "released" in came.content:
        assert {"clients"} <= set(came.content.metric_records["released"]) <= {"clients", "step"}
        assert set(releases(came)) == {"weight"}
    if "scores" in came.content:
        assert scores(came) == ([0.0, 1.0, 2.0], [0.0, 10.0, 20.0])
    return set(came.content)


BOTH = {"arrays", "released", "scores"}


@pytest.mark.parametrize("changes", [{"noise_multiplier": 0.0}, {"noise_multiplier": 0.5}, {"disclose_choice": True}])
def test_a_node_whose_training_is_refused_reports_all_the_same(changes: dict[str, Any], node_log: io.StringIO) -> None:
    node, context = Node(), of_node(OWN | {"role": "split"})
    assert left(through_gate(both(**changes), context, node)) == {"scores"}
    assert node.seen == [("evaluation", (4, 7, 5))], "nothing was trained"
    assert "umbel refused to answer (train): " in node_log.getvalue()


def test_a_node_whose_clients_have_no_budget_left_reports_all_the_same() -> None:
    node, context = Node(), of_node(SIMULATED | {"paper-budget": 0.4})
    content = asked(ZEROS, task_of((0,), noise_multiplier=5.0), EvaluationSpec(1, (4, 7, 5)))
    assert left(through_gate(content, context, node)) == BOTH
    reply = through_gate(both(), context, node)
    assert left(reply) == BOTH
    assert released(reply) == [0, 1]
    assert left(through_gate(both(), context, node)) == {"scores"}
    assert [what for what, _ in node.seen] == ["training", "evaluation"] * 2 + ["evaluation"]
    assert ("training", (1,)) in node.seen, "who cannot pay is not even trained"
    assert all_spent(context, (0, 1)) == [Fraction(2, 5)] * 2


@pytest.mark.parametrize(
    ("broken", "records"),
    [
        ([], BOTH),
        (["training"], {"scores"}),
        (["evaluation"], {"arrays", "released"}),
        (["training", "evaluation"], set()),
    ],
)
def test_what_goes_wrong_with_one_part_does_not_hold_up_the_other(broken: list[str], records: set[str]) -> None:
    node, context = Node(*broken), of_node(SIMULATED)
    assert left(through_gate(both(), context, node)) == records
    assert node.seen == [("training", (0, 1)), ("evaluation", (4, 7, 5))], "each is asked for by itself"
    assert all_spent(context, (0, 1, 4, 5, 7)) == [Fraction(2, 5)] * 2 + [0] * 3, "who is asked to train has paid"
    # A part that makes no sense is one, too.
    content = both()
    for part in broken:
        content[part]["clients"] = []
    assert left(through_gate(content, of_node(SIMULATED), Node())) == records
