"""A relay's batches, against a hostile server, a hostile site and strangers."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.errors import raises
from tests.privacy.anonymous.conftest import KEYS, LEAST, Server, identity, submission
from umbel.privacy.anonymous.batches import Batches
from umbel.privacy.anonymous.submission import Submission, listed
from umbel.privacy.anonymous.terms import Terms
from umbel.protocol.errors import RelayError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def relay(**options: Any) -> Batches:
    return Batches(KEYS, LEAST, **options)


def filled(found: Batches, terms: Terms, east: int = 2, west: int = 1, **changes: Any) -> Batches:
    """Let sites submit so many releases, with values that tell them apart."""
    for site, count in (("east", east), ("west", west)):
        for client in range(count):
            found.submit(submission(terms, site, client, (client, ord(site[0])), **changes))
    return found


# --- what it hands on


def test_a_batch_is_handed_on_once_and_forgotten() -> None:
    server = Server()
    terms, there = server.terms(), relay()
    filled(there, terms)
    assert there.held == (3, 3 * (terms.sealed_size + Batches.beside))
    found = server.read(server.close(there, terms), terms)
    assert found.tolist() == [[0.0, 101.0], [0.0, 119.0], [1.0, 101.0]]
    assert there.held == (0, 0)
    with raises(RelayError, "relay.too-few"):
        server.close(there, terms)


def test_the_order_says_nothing() -> None:
    """Each of three releases comes first equally often in 600 batches: chi-squared below 23, a false alarm in 1e5."""
    firsts: Counter[bytes] = Counter()
    server = Server()
    for round in range(600):
        terms = server.terms(round)
        there = filled(relay(), terms)
        firsts[bytes(server.read(server.close(there, terms)[:1], terms)[0])] += 1
    assert len(firsts) == 3
    assert sum((count - 200) ** 2 / 200 for count in firsts.values()) < 23


def test_a_client_counts_once() -> None:
    """A server that asks a client twice in a round gets one release, and the batch is no larger."""
    server = Server()
    terms, there = server.terms(), relay()
    filled(there, terms)
    there.submit(submission(terms, "east", 0, (9, 9)))
    assert there.held[0] == 3
    assert 9.0 not in server.read(server.close(there, terms), terms)


def test_clients_of_two_sites_may_have_the_same_admission() -> None:
    server = Server()
    terms = server.terms()
    assert len(server.close(filled(relay(), terms, 2, 2), terms)) == 4


def tried(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a call returns, and the code of the relay's refusal, if it refuses."""
    try:
        return call(), ""
    except RelayError as error:
        return None, error.code


SITES = st.sampled_from(sorted(KEYS))
STEPS = st.one_of(st.tuples(st.integers(1, 2), SITES, st.integers(0, 4)), st.integers(1, 2))
"""A client of a site submits in a round, or the server closes a round."""


@given(st.lists(STEPS, max_size=25))
def test_in_any_order_of_events_a_release_is_handed_on_at_most_once_and_never_among_few(steps: list[Any]) -> None:
    server, there = Server(), relay()
    waiting: dict[int, set[tuple[str, int]]] = {1: set(), 2: set()}
    closed: set[int] = set()
    for step in steps:
        if isinstance(step, int):
            found, code = tried(lambda: server.close(there, server.terms(step)))  # noqa: B023 (called at once)
            if step in closed or len(waiting[step]) < LEAST:
                assert code == "relay.too-few"
            else:
                values = server.read(found, server.terms(step)).tolist()
                assert sorted(map(tuple, values)) == sorted((client, ord(site[0])) for site, client in waiting[step])
            closed |= {step} if waiting[step] else set()
        else:
            round, site, client = step
            one = submission(server.terms(round), site, client, (client, ord(site[0])))
            _, code = tried(lambda: there.submit(one))  # noqa: B023 (called at once)
            assert code == ("relay.closed" if round in closed else "")
            if not code:
                waiting[round].add((site, client))
    assert there.held[0] == sum(len(clients) for round, clients in waiting.items() if round not in closed)


# --- too few


@given(st.integers(1, 6), st.integers(0, 6), st.integers(1, 6), st.integers(0, 3))
def test_the_largest_minimum_counts_without_the_sites_that_may_collude(
    least: int, others: int, own: int, colluding: int
) -> None:
    server = Server()
    terms, there = server.terms(), relay()
    filled(there, terms, east=0, west=others)
    for client in range(own):
        there.submit(submission(terms, "east", client, least=least, colluding=colluding))
    counted = own + others - sum(sorted((own, others), reverse=True)[:colluding])
    if counted >= max(least, LEAST):
        assert len(server.close(there, terms)) == own + others
    else:
        with raises(RelayError, "relay.too-few"):
            server.close(there, terms)


def test_closing_twice_does_not_tell_whether_anyone_had_released() -> None:
    """Not one bit about a client whose budget is spent: a batch with one release and one with none look the same."""
    server, told = Server(), []
    for released in (True, False):
        there = relay()
        if released:
            there.submit(submission(server.terms(), "east", 1))
        told.append([tried(lambda: server.close(there, server.terms())) for _ in range(2)])  # noqa: B023
    assert told[0] == told[1]


def test_a_batch_closed_early_is_lost_and_does_not_grow() -> None:
    """So a server cannot look when enough have come."""
    server = Server()
    terms, there = server.terms(), relay()
    filled(there, terms, 1, 1)
    with raises(RelayError, "relay.too-few"):
        server.close(there, terms)
    assert there.held == (0, 0)
    with raises(RelayError, "relay.closed"):
        there.submit(submission(terms, "east", 5))
    with raises(RelayError, "relay.too-few"):
        server.close(there, terms)


def test_a_batch_that_nobody_has_sent_to_can_be_closed_later() -> None:
    """Otherwise strangers could fill the relay's memory by closing batches that they opened."""
    server = Server()
    terms, there = server.terms(), relay()
    with raises(RelayError, "relay.too-few"):
        server.close(there, terms)
    assert len(server.close(filled(there, terms), terms)) == 3


def test_sites_that_got_other_hypotheses_are_in_another_batch() -> None:
    server = Server()
    there, marked = relay(), server.terms(hypotheses={"weight": np.full((2, 2), 7.0, np.float32)})
    filled(there, server.terms(), east=2, west=0)
    filled(there, marked, east=0, west=1)
    for terms in (server.terms(), marked):
        with raises(RelayError, "relay.too-few"):
            server.close(there, terms)


def test_a_batch_with_more_releases_than_asked_clients_is_lost() -> None:
    server = Server()
    terms = server.terms()
    with raises(RelayError, "relay.too-many"):
        server.close(filled(relay(), terms), terms, most=2)


# --- who may


def test_a_server_cannot_fill_a_batch_with_releases_of_its_own() -> None:
    server = Server()
    terms, there = server.terms(), relay()
    filled(there, terms, 1, 0)
    own = Ed25519PrivateKey.generate()
    for client in range(600):
        one = submission(terms, "west", client)
        with raises(RelayError, "relay.signature"):
            there.submit(replace(one, signature=own.sign(one.text)))
    with raises(RelayError, "relay.too-few"):
        server.close(there, terms)


def test_a_site_that_is_not_listed_is_refused() -> None:
    thief = identity("thief")
    one = submission(Server().terms(), "thief", 1)
    with raises(RelayError, "relay.sites"):
        relay().submit(one)
    wider = listed({**KEYS, "thief": thief.public_key()})
    with raises(RelayError, "relay.sites"):  # its people have other sites in mind than the relay's
        relay().submit(submission(Server().terms(), "east", 1, listed=wider))


@pytest.mark.parametrize(
    "changes",
    [{"least": 1}, {"colluding": 1}, {"admission": "client 8"}, {"sealed": bytes(56)}, {"site": "west"},
     {"terms": Server().terms()}, {"signature": b""}, {"signature": bytes(64)}],
)  # fmt: skip
def test_what_a_site_signed_cannot_be_changed(changes: dict[str, Any]) -> None:
    one = submission(Server().terms(), "east", 1, least=5)
    with raises(RelayError, "relay.signature"):
        relay().submit(replace(one, **changes))


def test_a_release_of_one_batch_is_none_of_another() -> None:
    """Neither of another round, nor of another run with the same numbers."""
    server = Server()
    terms, there = server.terms(), relay()
    filled(there, terms)
    server.close(there, terms)
    for later in (server.terms(2), Server().terms()):
        one = submission(terms, "east", 0)
        with raises(RelayError, "relay.signature"):
            there.submit(replace(one, terms=later))


def test_only_the_server_that_opened_a_batch_closes_it() -> None:
    server, other = Server(), Server()
    terms, there = server.terms(), relay()
    filled(there, terms)
    with raises(RelayError, "relay.signature"):
        other.close(there, terms)
    with raises(RelayError, "relay.signature"):
        there.close(replace(terms, closing=b"\xff" * 32), bytes(64), 9)
    assert len(server.close(there, terms)) == 3


# --- bounds


@pytest.mark.parametrize("longer", [-1, 1, 1000])
def test_a_release_of_another_size_is_refused(longer: int) -> None:
    terms = Server().terms()
    sealed = bytes(terms.sealed_size + longer)
    with raises(RelayError, "relay.size"):
        relay().submit(submission(terms, "east", 1, sealed=sealed))


def test_memory_is_bounded() -> None:
    server = Server()
    terms, there = server.terms(), relay(memory=3 * (56 + Batches.beside) + 55 + Batches.beside)
    filled(there, terms)
    with raises(RelayError, "relay.full"):
        there.submit(submission(terms, "east", 7))
    assert len(server.close(there, terms)) == 3
    filled(there, server.terms(2))


def test_memory_counts_more_than_ciphertexts() -> None:
    """A listed site could send millions of the shortest ones: each takes the memory of its place."""
    terms, there = Server().terms(), relay(memory=100 * 1024)
    names = ["x" * 100 + str(client) for client in range(100)]
    tracemalloc.start()
    try:
        with raises(RelayError, "relay.full"):
            for name in names:
                there.submit(Submission.read(submission(terms, "east", 0, admission=name).to_bytes()))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 100 * 1024


def test_the_number_of_batches_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batches, "most_open", 2)
    server, there = Server(), relay()
    for round in (1, 2):
        there.submit(submission(server.terms(round), "east", 1))
    with raises(RelayError, "relay.full"):
        there.submit(submission(server.terms(3), "east", 1))
    there.submit(submission(server.terms(2), "east", 2))


def test_the_memory_of_closed_batches_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batches, "most_closed", 2)
    server, there = Server(), relay()
    for round in range(5):
        server.close(filled(there, server.terms(round)), server.terms(round))
    for round in (3, 4):
        with raises(RelayError, "relay.closed"):
            there.submit(submission(server.terms(round), "east", 9))


def test_a_batch_that_nobody_closes_is_forgotten() -> None:
    clock, server = Clock(), Server()
    terms, there = server.terms(), relay(clock=clock)
    filled(there, terms)
    clock.now = Batches.open_seconds + 1
    there.submit(submission(server.terms(2), "east", 1))
    assert there.held[0] == 1
    with raises(RelayError, "relay.too-few"):
        server.close(there, terms)
