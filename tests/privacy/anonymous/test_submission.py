"""Submissions as bytes: what comes from the network is checked before anything else happens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.errors import raises
from tests.privacy.anonymous.conftest import KEYS, Server, identity, submission
from umbel.privacy.anonymous.submission import LONGEST_HEAD, Submission, closing_in, closing_request, listed
from umbel.protocol.errors import RelayError

TERMS = Server().terms()
ONE = submission(TERMS, "east", 1)


def with_head(head: Any, rest: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return len(text).to_bytes(4, "big") + text + rest


def head_of(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data[4 : 4 + int.from_bytes(data[:4], "big")])
    return found


def test_a_submission_and_a_closing_travel() -> None:
    assert Submission.read(ONE.to_bytes()) == ONE
    assert closing_in(closing_request(TERMS, b"signature")) == (TERMS, b"signature")


def test_the_size_depends_on_nothing_that_a_client_does() -> None:
    sizes = {len(submission(TERMS, "east", 1, value).to_bytes()) for value in [(0, 0), (1e30, -1e-30), (7.5, 2)]}
    assert len(sizes) == 1


@given(st.binary(max_size=300))
def test_bytes_that_are_no_submission_are_refused(data: bytes) -> None:
    with raises(RelayError, "relay.request"):
        Submission.read(data)


@pytest.mark.parametrize(
    "data",
    [with_head([]), with_head(b"[" * 5000), with_head(b" " * (LONGEST_HEAD + 1)), (1 << 31).to_bytes(4, "big") + b"{}",
     with_head(b"\xff")],
)  # fmt: skip
def test_a_head_that_is_none_is_refused(data: bytes) -> None:
    with raises(RelayError, "relay.request"):
        Submission.read(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [("run", "x" * 201), ("run", 3), ("round", -1), ("round", 1 << 40), ("round", True), ("round", 1.0), ("size", None),
     ("key", "ab"), ("closing", "no"), ("least", "3"), ("colluding", -1), ("site", []), ("signature", "zz"),
     ("admission", 5)],
)  # fmt: skip
def test_a_wrong_entry_is_refused(name: str, value: Any) -> None:
    with raises(RelayError, "relay.request"):
        Submission.read(with_head(head_of(ONE.to_bytes()) | {name: value}, ONE.sealed))


def test_a_list_of_sites_is_known_by_names_and_keys_in_any_order() -> None:
    assert listed(dict(reversed(KEYS.items()))) == listed(KEYS)
    assert listed({**KEYS, "west": identity("thief").public_key()}) != listed(KEYS)
    assert listed({"a": KEYS["east"]}) != listed({"b": KEYS["east"]})
