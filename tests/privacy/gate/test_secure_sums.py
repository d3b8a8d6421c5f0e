"""What a site adds to a secure sum: whole steps of its clients' clipped updates, charged before they leave."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from tests.helpers.errors import raises
from tests.helpers.ledgers import ledger_of
from tests.helpers.messages import arrived, asked, of_node, refused, stacked, task_of, through_gate
from tests.helpers.sites import simulated
from umbel.privacy.accounting.guarantee import guarantee
from umbel.privacy.gate import secure_sums
from umbel.privacy.gate.own_app import local_result
from umbel.privacy.gate.secure_sums import SecureSanitiser
from umbel.privacy.mechanisms.discrete_gaussian import ConcentratedLoss
from umbel.privacy.secure.party import Announcement
from umbel.privacy.secure.terms import Grid, Terms
from umbel.privacy.secure.wire import RECORD, Introduction, Request, Stage, masked_in
from umbel.protocol.errors import Refused
from umbel.protocol.messages import assigned_in, shared_in
from umbel.protocol.release import Clipping, Kind, Release

BOTH = np.array([[0.0], [100.0]])
TERMS = Terms("spring", length=4, bits=30, deviation=512.0)
TASK: dict[str, Any] = {
    "release_by": "secure", "clipping": "public", "clip_norm": 1.0, "noise_multiplier": 2.0,
    "mechanism": "discrete-gaussian",
}  # fmt: skip


def sanitiser(hypotheses: Any = BOTH, terms: Terms = TERMS, **changes: Any) -> SecureSanitiser:
    matrix = np.asarray(hypotheses, np.float64)
    layout = {"weight": (matrix.shape[1],)}
    return SecureSanitiser.of(simulated(), stacked(matrix, layout), task_of((0,), **TASK | changes), terms)


# --- the numbers


def test_the_sums_of_three_clients_by_hand() -> None:
    """A clip norm is 256 steps: updates of .5, -.251 and 9, the last clipped, and counts of one clip norm each."""
    trained = {"weight": np.array([[0.5], [-0.251], [109.0]], np.float32)}
    found = sanitiser().summed(trained, np.array([0, 0, 1]))
    assert sanitiser().grid == Grid(1 / 256, 256)
    assert found.tolist() == [128 - 64, 255, 512, 256]


def test_training_that_diverged_adds_nothing_but_its_count() -> None:
    trained = {"weight": np.array([[np.nan], [np.inf]], np.float32)}
    assert sanitiser().summed(trained, np.array([0, 1])).tolist() == [0, 0, 256, 256]


VECTORS = arrays(np.float32, (2, 3), elements=st.floats(-1e6, 1e6, width=32))


@given(VECTORS, st.lists(st.integers(0, 1), min_size=2, max_size=2), st.floats(0.01, 100))
def test_two_data_sets_of_a_client_are_at_most_two_clip_norms_apart(
    updates: NDArray[np.float32], chosen: list[int], clip_norm: float
) -> None:
    """Whether it chooses the same hypothesis or not, counts included: the distance that the account assumes."""
    one = sanitiser(np.zeros((2, 3)), replace(TERMS, length=8), clip_norm=clip_norm)
    first, second = (one.summed({"weight": updates[i : i + 1]}, np.array(chosen[i : i + 1])) for i in range(2))
    assert np.linalg.norm((first - second).astype(float)) <= 2 * (clip_norm / one.grid.step) * (1 + 1e-12)


@pytest.mark.parametrize("noise_multiplier", [0.3, 1.0, 2.0, 50.0])
def test_the_noise_is_nu_clip_norms(noise_multiplier: float) -> None:
    terms = replace(TERMS, deviation=512.0 * max(1.0, noise_multiplier))
    grid = sanitiser(terms=terms, noise_multiplier=noise_multiplier).grid
    assert math.isclose(terms.deviation * grid.step, noise_multiplier, rel_tol=1e-12)
    assert grid.weight * grid.step <= 1.0


def test_the_price_is_that_of_one_gaussian_two_clip_norms_away() -> None:
    """rho = (2 / nu)^2 / 2, for any k."""
    release = sanitiser(noise_multiplier=8.0, terms=replace(TERMS, deviation=4096.0)).release
    assert (release.kind, release.hypotheses, release.choice_epsilon) == (Kind.SECURE, 2, 0.0)
    found, one = guarantee({release: 1}), Release(Kind.SECURE, 3, 8.0, Clipping.PUBLIC, mechanism="discrete-gaussian")
    assert found == guarantee({replace(one, n=1): 1})
    assert found is not None
    delta = ConcentratedLoss((2 / 8.0) ** 2 / 2).delta(np.array([found.epsilon]))[0]
    assert math.isclose(delta, 1e-5, rel_tol=1e-3)


@pytest.mark.parametrize(
    ("terms", "changes"),
    [({"length": 5}, {}), ({"deviation": 0.0}, {}), ({}, {"noise_multiplier": 0.0}), ({}, {"mechanism": "laplace"}),
     ({"deviation": 256.0}, {"noise_multiplier": 300.0})],
)  # fmt: skip
def test_terms_that_do_not_fit_the_task_are_refused(terms: dict[str, Any], changes: dict[str, Any]) -> None:
    with raises(Refused, "refused.secure-terms"):
        sanitiser(terms=replace(TERMS, **terms), **changes)


# --- through the gate


def handler(msg: Message, context: Context) -> Message:
    there = len(assigned_in(msg.content))
    return Message(
        local_result(stacked(np.full((there, 1), 0.5), {"weight": (1,)}), np.zeros(there, np.int64)), reply_to=msg
    )


def node(place: int, **entries: Any) -> Context:
    return of_node({"partition-id": place, "num-partitions": 3} | entries, seed=7)


NODES = 3


def announced(terms: Terms = TERMS) -> dict[str, Announcement]:
    found = {}
    for place in range(NODES):
        site = simulated(**{"partition-id": place, "num-partitions": NODES})
        record = secure_sums.reply(site, 7, RecordDict(), Request(Stage.ANNOUNCE, terms))
        one = Introduction.read(RecordDict({RECORD: record}))
        found[one.name] = one.announcement
    return found


def request(round: int = 1, clients: int = 2, terms: Terms = TERMS, stage: Stage = Stage.MASK) -> RecordDict:
    content = asked(stacked(BOTH, {"weight": (1,)}), task_of(tuple(range(clients)), round=round, **TASK))
    content[RECORD] = Request(stage, terms, round, announced(terms)).to_record()
    return content


def test_masked_numbers_leave_once_their_clients_are_charged() -> None:
    context = node(0)
    reply = arrived(through_gate(request(), context, handler))
    assert {*reply.content} == {"secure", "released"}
    assert shared_in(reply.content, 2).all()
    assert {*masked_in(reply.content).boxes} == {"node 1", "node 2"}
    account = ledger_of(context).account(0)
    assert [(release.kind, times) for release, times in account.items()] == [(Kind.SECURE, 1)]


def test_the_party_remembers_its_round_in_the_nodes_own_memory() -> None:
    """So the same round is masked once, also if the server changes hypotheses, and whoever restarts has another key."""
    context = node(0)
    assert not refused(through_gate(request(), context, handler))
    assert refused(through_gate(request(), context, handler))
    assert not refused(through_gate(request(round=2), context, handler))
    assert sum(ledger_of(context).account(0).values()) == 2


@pytest.mark.parametrize("stage", [Stage.ANNOUNCE, Stage.AGREE, Stage.OPEN])
def test_training_for_a_sum_is_asked_for_with_its_parties(stage: Stage) -> None:
    context = node(0)
    assert refused(through_gate(request(stage=stage), context, handler))
    content = request()
    del content[RECORD]
    assert refused(through_gate(content, context, handler))
    content[RECORD] = ConfigRecord({"stage": "mask"})
    assert refused(through_gate(content, context, handler))
    assert not ledger_of(context).account(0)


def test_no_client_is_charged_for_a_sum_that_the_site_would_not_enter() -> None:
    context, content = node(0), request()
    others = {name: one for name, one in announced().items() if name != "node 2"}
    content[RECORD] = Request(Stage.MASK, TERMS, 1, others).to_record()
    assert refused(through_gate(content, context, handler))
    assert not ledger_of(context).account(0)


def test_a_site_without_clients_in_a_round_adds_masks_alone() -> None:
    context, content = node(1), request()
    del content["training"]
    reply = arrived(through_gate(content, context, handler))
    assert not shared_in(reply.content, 0).size
    assert masked_in(reply.content).numbers
    assert not any(ledger_of(context).account(client) for client in range(9))
