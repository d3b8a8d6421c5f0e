"""The server's side of secure sums: how long it waits, and with whom it begins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Message, RecordDict

from tests.privacy.channels.secure.conftest import TERMS, identity, listed
from umbel.nodes import exchange
from umbel.nodes.exchange import Answer, Exchange
from umbel.privacy.channels.secure.party import Party
from umbel.privacy.channels.secure.server import Together, terms_of
from umbel.privacy.channels.secure.terms import LARGEST, Terms
from umbel.privacy.channels.secure.wire import RECORD, Introduction
from umbel.protocol.signatures import line_of
from umbel.protocol.tasks import TrainingSpec

NAMES = [f"site {number}" for number in range(5)]


class Network:
    """Nodes 0 to 4, of which some never reply, or as `others`; a second passes each time the server looks."""

    def __init__(self, silent: Sequence[int], monkeypatch: pytest.MonkeyPatch, timeout: float = 3600.0) -> None:
        self.silent, self.names, self.now, self.timeout = silent, defaultdict(str), 0.0, timeout
        self.known = self
        self.asked: list[int] = []
        self.others: dict[int, Introduction] = {}
        monkeypatch.setattr(exchange.time, "monotonic", lambda: self.now)

    def stage(self, name: str, contents: Mapping[int, RecordDict], enough: int) -> dict[int, RecordDict]:
        network: Any = self
        return Exchange.stage(network, name, contents, enough, self.timeout)

    def run(
        self, messages: Sequence[Message], timeout: float, over: Callable[[Sequence[Answer]], bool]
    ) -> list[Answer]:
        self.asked = [message.metadata.dst_node_id for message in messages]
        answers = [self.answer(message) for message in messages if message.metadata.dst_node_id not in self.silent]
        began = self.now
        while len(answers) < len(messages) and self.now < began + timeout and not over(answers):
            self.now += 1
        return answers

    def introduction(self, node: int) -> Introduction:
        keys = listed(*NAMES)
        party = Party(TERMS, NAMES[node], keys, identity(NAMES[node]).sign, bytes([node]) * 32)
        lines = {name: line_of(key) for name, key in keys.items()}
        return Introduction(party.name, lines[party.name], party.announce(), lines)

    def answer(self, message: Message) -> Answer:
        node = message.metadata.dst_node_id
        record = (self.others.get(node) or self.introduction(node)).to_record()
        return Answer(node, message.metadata.message_type, Message(RecordDict({RECORD: record}), reply_to=message))


def round_of(together: Together, round: int, nodes: int = 5) -> list[int]:
    """Invite nodes; return those that were."""
    messages = [Message(RecordDict(), node, "train") for node in range(nodes)]
    return [message.metadata.dst_node_id for message in together.invite(messages, round)]


@pytest.mark.parametrize("silent", [[], [0], [1, 4]])
def test_a_site_that_never_says_who_it_is_holds_up_no_round(monkeypatch: pytest.MonkeyPatch, silent: list[int]) -> None:
    """A round's timeout is an hour; the others are not kept waiting for it, in any round."""
    network: Any = Network(silent, monkeypatch)
    together = Together(TERMS, network)
    for round in (1, 2):
        assert round_of(together, round) == [node for node in range(5) if node not in silent]
    assert network.now < 30
    assert network.asked == (silent or [0, 1, 2, 3, 4])


def test_too_few_sites_are_waited_for_until_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    network: Any = Network([0, 1, 2], monkeypatch, timeout=100.0)
    assert round_of(Together(TERMS, network), 1) == [3, 4]
    assert network.now == 100


def test_two_nodes_with_one_name_are_one_party(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of one site with the same policy, or a copy of a site: the first that replies takes part."""
    network: Any = Network([], monkeypatch)
    network.others[4] = network.introduction(0)
    assert round_of(Together(TERMS, network), 1) == [0, 1, 2, 3]


def test_a_node_keeps_no_party_out_whose_name_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others list that name with another key."""
    network: Any = Network([], monkeypatch)
    own = Ed25519PrivateKey.from_private_bytes(bytes(32))
    party, line = Party(TERMS, NAMES[4], {NAMES[4]: own.public_key()}, own.sign, bytes(32)), line_of(own.public_key())
    network.others[0] = Introduction(party.name, line, party.announce(), {party.name: line})
    together = Together(TERMS, network)
    for round in (1, 2):
        assert round_of(together, round) == [1, 2, 3, 4]


def test_a_node_that_fails_is_asked_again_once_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    network: Any = Network([], monkeypatch)
    together = Together(TERMS, network)
    round_of(together, 1)
    together.forget([2])
    assert NAMES[2] not in {one.name for one in together.parties.values()}
    round_of(together, 2)
    assert network.asked == [2]


@pytest.mark.parametrize("noise_multiplier", [0.0, 0.1, 1.0, 50.0, 5000.0])
@pytest.mark.parametrize("parties", [3, 100])
def test_a_runs_terms_are_such_as_sites_accept(noise_multiplier: float, parties: int) -> None:
    """Also with much noise, where a clip norm has fewer steps."""
    task = TrainingSpec(noise_multiplier=noise_multiplier, mechanism="discrete-gaussian", clip_norm=1.0, run="spring")
    terms: Terms = terms_of(task, {"weight": np.zeros((2, 3), np.float32)}, 1000, parties, 0, 3)
    terms.check_parties(parties)
    assert terms.length == 8
    assert terms.deviation <= LARGEST
