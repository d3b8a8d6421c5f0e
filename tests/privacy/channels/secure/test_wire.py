"""The messages of secure sums as records, and records that are none."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict

from tests.helpers.errors import raises
from tests.privacy.channels.secure.conftest import TERMS, Federation
from umbel.privacy.channels.secure import wire
from umbel.privacy.channels.secure.wire import Introduction, Request, Stage
from umbel.protocol.errors import ProtocolError


def content(record: ConfigRecord) -> RecordDict:
    return RecordDict({wire.RECORD: record})


def test_messages_arrive_as_they_were_sent() -> None:
    federation = Federation()
    found = federation.third(federation.second(federation.first(gone=["c"])))
    announced = federation.announced
    for request in (
        Request(Stage.ANNOUNCE, TERMS),
        Request(Stage.MASK, TERMS, 3, announced),
        Request(Stage.AGREE, TERMS, 3, survivors=("a", "b")),
        Request(Stage.OPEN, TERMS, 3, announced, signatures=found.signatures, boxes=found.boxes("a")),
    ):
        assert Request.read(content(request.to_record())) == request
    for one in found._masked.values():
        assert wire.masked_in(content(wire.masked_record(one))) == one
    for opened in found._opened.values():
        assert wire.opened_in(content(wire.opened_record(opened))) == opened
    assert wire.signature_in(content(wire.signature_record(b"signed"))) == b"signed"
    introduction = Introduction("a", "ssh-ed25519 AAAA", announced["a"])
    assert Introduction.read(content(introduction.to_record())) == introduction


@pytest.mark.parametrize(
    "change",
    [{"stage": "else"}, {"stage": 1}, {"round": True}, {"round": 1.0}, {"run": b""}, {"least": 3.0}, {"bits": True},
     {"names": ["a"]}, {"names": ["a", "a"]}, {"names": [1, 2]}, {"publics": ["a", "b"]}, {"survivors": [1]},
     {"run": "r" * 5000},
     {"names": ["a", "b" * 5000]}, {"signatures-of": ["a"]}, {"signatures-of": ["a", "a"], "signatures": [b"", b""]},
     {"boxes": [1], "boxes-of": ["a"]}],
    ids=str,
)  # fmt: skip
def test_requests_that_are_none_are_refused(change: dict[str, Any]) -> None:
    announced = dict(list(Federation().announced.items())[:2])
    record = Request(Stage.OPEN, TERMS, 1, announced).to_record()
    for name, value in change.items():
        record[name] = value
    with raises(ProtocolError, "protocol.secure-message"):
        Request.read(content(record))


@pytest.mark.parametrize("name", ["stage", "run", "length", "deviation", "names", "survivors", "boxes-of", "round"])
def test_requests_without_an_entry_are_refused(name: str) -> None:
    record = Request(Stage.MASK, TERMS).to_record()
    del record[name]
    with raises(ProtocolError, "protocol.secure-message"):
        Request.read(content(record))


@pytest.mark.parametrize("name", ["n" * 5000, "north\nsite north is left out", "\x1b[2J", ""])
def test_a_name_that_does_not_fit_a_line_of_the_servers_log_is_refused(name: str) -> None:
    introduction = Introduction(name, "ssh-ed25519 AAAA", Federation().announced["a"])
    with raises(ProtocolError, "protocol.secure-message"):
        Introduction.read(content(introduction.to_record()))


def test_replies_that_are_none_are_refused() -> None:
    for read in (wire.masked_in, wire.opened_in, wire.signature_in, Introduction.read):
        with raises(ProtocolError, "protocol.secure-message"):
            read(content(ConfigRecord({"numbers": 1, "layers": [1]})))
        with raises(ProtocolError, "protocol.records"):
            read(RecordDict())
