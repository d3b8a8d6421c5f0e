"""What a batch's releases have in common, and that only the server reads them, for these terms alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.helpers.errors import raises
from tests.privacy.anonymous.conftest import HYPOTHESES, Server
from umbel.privacy.anonymous.terms import OVERHEAD, Opening
from umbel.protocol.errors import ProtocolError

VECTORS = arrays(np.float32, st.tuples(st.integers(0, 5), st.just(2)), elements=st.floats(width=32, allow_nan=False))


@given(VECTORS)
def test_the_server_reads_the_releases_and_no_order(vectors: Any) -> None:
    server = Server()
    terms = server.terms()
    sealed = terms.sealed(vectors)
    assert {len(one) for one in sealed} <= {2 * 4 + OVERHEAD} == {terms.sealed_size}
    found = server.read(sealed, terms)
    assert sorted(map(bytes, found)) == sorted(map(bytes, vectors))
    assert np.array_equal(found, server.read(sealed[::-1], terms))
    assert found.shape == (len(vectors), 2)


def test_the_same_release_looks_different_each_time() -> None:
    terms = Server().terms()
    first, second = terms.sealed(np.ones((2, 2), np.float32))
    assert first != second


@pytest.mark.parametrize(
    "changes",
    [{"round": 2}, {"hypotheses": {"weight": HYPOTHESES["weight"] + 1e-6}}, {"noise_multiplier": 3.0},
     {"clip_norm": 0.02}, {"choice_epsilon": 1.0}],
)  # fmt: skip
def test_another_round_task_or_hypothesis_is_another_batch(changes: dict[str, Any]) -> None:
    """So a server that sends sites different hypotheses cannot tell them apart in one batch."""
    server = Server()
    terms, others = server.terms(), server.terms(**changes)
    assert terms.digest != others.digest
    sealed = terms.sealed(np.ones((1, 2), np.float32))
    assert others.opened(sealed, server.private)[1] == 1


def test_another_order_of_the_arrays_is_another_batch() -> None:
    """A release has its numbers in the order of the message, so a server could mark a site by it."""
    server, bias = Server(), np.full((2, 1), 100.0, np.float32)
    one = server.terms(hypotheses={**HYPOTHESES, "bias": bias})
    other = server.terms(hypotheses={"bias": bias, **HYPOTHESES})
    assert one.size == other.size
    assert one.digest != other.digest


def test_which_clients_are_asked_changes_nothing() -> None:
    server = Server()
    assert server.terms(clients=(1, 2)).digest == server.terms(clients=(5,)).digest


def test_another_servers_key_opens_nothing() -> None:
    server, thief = Server(), Server()
    terms = server.terms()
    found, wrong = terms.opened(terms.sealed(np.ones((3, 2), np.float32)), thief.private)
    assert (found.shape, wrong) == ((0, 2), 3)


@pytest.mark.parametrize("junk", [b"", b"x" * 31, bytes(56), b"x" * 200])
def test_what_is_no_release_is_counted_and_left_out(junk: bytes) -> None:
    server = Server()
    terms = server.terms()
    assert terms.opened([junk], server.private)[1] == 1


def test_a_release_that_a_relay_repeats_counts_once() -> None:
    server = Server()
    terms = server.terms()
    first, second = terms.sealed(np.ones((2, 2), np.float32))
    found, wrong = terms.opened([first, second, first, first], server.private)
    assert (len(found), wrong) == (2, 2)


OPENING = Opening(b"k" * 32, b"c" * 32, 7)


def test_the_keys_travel() -> None:
    assert Opening.read(RecordDict({"anonymous": OPENING.to_record()})) == OPENING


@pytest.mark.parametrize(
    "changes", [{"key": b"short"}, {"closing": "text"}, {"least": 0}, {"least": True}, {"least": 1 << 40}, {"key": 3}]
)
def test_keys_that_are_none_are_refused(changes: dict[str, Any]) -> None:
    record = ConfigRecord({**OPENING.to_record(), **changes})
    with raises(ProtocolError, "protocol.anonymous"):
        Opening.read(RecordDict({"anonymous": record}))
