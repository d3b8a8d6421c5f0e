"""What a node does with a request for anonymous releases: it checks, charges, and acknowledges the same in any case."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from tests.helpers.errors import raises
from tests.helpers.ledgers import ledger_of, participations
from tests.helpers.messages import arrived, asked, of_node, records, refused, stacked, task_of, through_gate, wire
from tests.helpers.relays import Served, known, served
from tests.privacy.anonymous.conftest import Server
from tests.strategies.test_secure_average import keys
from umbel.privacy.anonymous.link import RelayLink
from umbel.privacy.anonymous.submission import Submission
from umbel.privacy.anonymous.terms import Opening, Terms
from umbel.privacy.gate import gate
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.own_app import local_result
from umbel.privacy.gate.policy import Policy
from umbel.privacy.gate.runs import Runs
from umbel.privacy.gate.site import Site
from umbel.protocol.errors import Refused, RelayError, SiteError
from umbel.protocol.messages import assigned_in, submissions_in
from umbel.protocol.release import Kind

BOTH = stacked(np.array([[0.0, 0.0], [1.0, 1.0]]), {"weight": (2,)})
TASK: dict[str, Any] = {
    "release_by": "anonymous", "clipping": "public", "clip_norm": 1.0, "noise_multiplier": 2.0, "choice_epsilon": 1.0,
    "run": "spring",
}  # fmt: skip
LEAST = 4
KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"


def handler(msg: Message, context: Context) -> Message:
    assigned = assigned_in(msg.content)
    chosen = np.maximum(assigned, 0)
    return Message(local_result({"weight": BOTH["weight"][chosen] + np.float32(0.5)}, chosen), reply_to=msg)


def request(server: Server, clients: tuple[int, ...] = (0, 1, 2, 3, 4), least: int = LEAST, **task: Any) -> RecordDict:
    content = asked(BOTH, task_of(clients, **TASK | task))
    content["anonymous"] = opening(server, least).to_record()
    return content


def opening(server: Server, least: int = LEAST) -> Opening:
    return Opening(
        server.private.public_key().public_bytes_raw(), server.closing.public_key().public_bytes_raw(), least
    )


def terms(server: Server, **task: Any) -> Terms:
    one = task_of(**TASK | task)
    return Terms.of(opening(server), one, one.round, BOTH)


# --- in simulation


def test_a_simulated_node_hands_its_submissions_to_the_server() -> None:
    server = Server()
    reply = arrived(through_gate(request(server), of_node({"partition-id": 0, "num-partitions": 3}), handler))
    assert set(reply.content) == {"anonymous"}
    found = [Submission.read(one) for one in submissions_in(reply.content)]
    assert len({one.admission for one in found}) == len(found) == 5
    assert {(one.site, one.least, one.terms.digest) for one in found} == {("node 0", LEAST, terms(server).digest)}
    vectors, wrong = terms(server).opened([one.sealed for one in found], server.private)
    assert (vectors.shape, wrong) == ((5, 2), 0)


def test_the_ledger_charges_what_holds_against_relay_and_server_together() -> None:
    context = of_node({"partition-id": 0, "num-partitions": 1})
    through_gate(request(Server()), context, handler)
    [(release, times)] = ledger_of(context).account(3).items()
    assert (release.kind, release.noise_multiplier, release.choice_epsilon, times) == (Kind.TRAIN, 2.0, 1.0, 1)


# --- a site


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], str]:
    return keys(tmp_path_factory.mktemp("keys"), "east", "west")


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory, listed: tuple[dict[str, str], str]) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("relay"), known(listed[1]), 2) as found:
        yield found


@pytest.fixture
def entries(relay: Served, listed: tuple[dict[str, str], str]) -> dict[str, Any]:
    """A site's policy."""
    return {
        "data-path": "/data/hospital", "release": "anonymous", "relay": relay.url, "relay-ca": relay.ca,
        "parties": listed[1], "party-key": listed[0]["east"], "anonymous-least": LEAST,
    }  # fmt: skip


def read(relay: Served, server: Server, **task: Any) -> Any:
    batch = terms(server, **task)
    sealed = relay.link.close(batch, server.closing.sign(batch.closing_text), 100)
    return server.read(sealed, batch)


def test_releases_reach_the_server_through_the_relay_alone(entries: dict[str, Any], relay: Served) -> None:
    server = Server()
    reply = through_gate(request(server), of_node(entries), handler)
    assert dict(arrived(reply).content["anonymous"]) == {}
    assert set(reply.content) == {"anonymous"}
    found = read(relay, server)
    assert found.shape == (5, 2)
    assert [participations(ledger_of(of_node(entries)), client) for client in range(6)] == [1] * 5 + [0]


def test_the_acknowledgement_is_the_same_for_all(entries: dict[str, Any], relay: Served, umbel_home: Path) -> None:
    """For sites of one client and of five, over budget, whose training fails, or whose relay takes nothing."""
    server, limited = Server(), entries | {"max-participations": 1}
    umbel_home.mkdir()
    Ledger.create(umbel_home / "ledger.sqlite")

    def fails(msg: Message, context: Context) -> Message:
        raise MemoryError("client 3 has 10,000 rows")

    def acknowledged(content: RecordDict, policy: dict[str, Any], does: Any = handler) -> tuple[str, int]:
        reply = through_gate(content, of_node(policy), does)
        assert not reply.has_error()
        return str(records(reply)), len(wire(reply))

    found = {acknowledged(request(server, (0,)), limited), acknowledged(request(server), limited)}
    found.add(acknowledged(request(server, round=2), limited))
    found.add(acknowledged(request(server, (7,), round=3), entries, fails))
    relay.batches.close(terms(server), server.closing.sign(terms(server).closing_text), 100)
    found.add(acknowledged(request(server, (8,)), entries))  # too late
    assert found == {("{'anonymous': {}}", next(iter(found))[1])}


def test_a_client_that_is_asked_twice_in_a_round_counts_once(entries: dict[str, Any], relay: Served) -> None:
    server = Server()
    for clients in ((0, 1, 2, 3), (0, 1, 4)):
        through_gate(request(server, clients), of_node(entries), handler)
    assert len(read(relay, server)) == 5


def test_the_largest_minimum_counts(entries: dict[str, Any], relay: Served) -> None:
    """The server asks for batches of nine, the site for four, the relay for two, and five releases come."""
    server = Server()
    through_gate(request(server, least=9), of_node(entries), handler)
    with raises(RelayError, "relay.too-few"):
        read(relay, server)


@pytest.mark.parametrize(
    ("policy", "message", "code"),
    [({}, {"least": LEAST - 1}, "anonymous-least"), ({"anonymous-least": 600}, {}, "anonymous-least"),
     ({"clip-norm-floor": 1.5}, {}, "anonymous"), ({"insecure-seed": True, "budget": "inf"}, {}, "anonymous"),
     ({"release": "any", "relay": ""}, {}, "no-relay"), ({"release": "client", "relay": ""}, {}, "release"),
     ({"release": "site", "relay": ""}, {}, "release"), ({}, {"release_by": "client"}, "release"),
     ({}, {"noise_multiplier": 0.5}, "noise"), ({"max-choice-epsilon": 2.0}, {"choice_epsilon": 0.0}, "choice")],
    ids=str,
)  # fmt: skip
def test_a_site_whose_policy_asks_for_more_charges_no_client(
    entries: dict[str, Any], policy: dict[str, Any], message: dict[str, Any], code: str
) -> None:
    reply = through_gate(request(Server(), **message), of_node(entries | policy), handler)
    assert refused(reply)
    assert reply.error.reason == f"refused [refused.{code}]"
    assert not Ledger(Site.of(entries).ledger_path).account(0)  # type: ignore[arg-type]


def test_smaller_batches_than_were_approved_wait(entries: dict[str, Any], umbel_home: Path) -> None:
    """The site's own minimum allows them, but its people approved a run with larger ones."""
    umbel_home.mkdir()
    Ledger.create(umbel_home / "ledger.sqlite")
    run: dict[str, Any] = {
        "anonymous-least": LEAST + 2, "clients-per-round": 10, "clip-norm": 1.0, "noise-multiplier": 2.0,
        "choice-epsilon": 1.0,
    }  # fmt: skip
    context = of_node(entries | {"approve": "ask"}, **run)
    for least in (LEAST + 2, LEAST):
        assert refused(through_gate(request(Server(), least=least), context, handler))
    asked_for, fewer = (one.asks["differs"] for one in Runs(umbel_home / "ledger.sqlite").requests())
    assert fewer == asked_for | {"anonymous_least": str(LEAST)}


def test_a_relay_that_is_away_costs_nothing(entries: dict[str, Any]) -> None:
    reply = through_gate(request(Server()), of_node(entries | {"relay": "https://127.0.0.1:1"}), handler)
    assert reply.error.reason == "refused [refused.relay-away]"
    assert not Ledger(Site.of(entries).ledger_path).account(0)  # type: ignore[arg-type]


def test_a_relay_that_goes_meanwhile_costs_the_round(entries: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = dict(entries)

    def cut(msg: Message, context: Context) -> Message:
        context.node_config["relay"] = "https://127.0.0.1:1"
        return handler(msg, context)

    context = of_node(policy)
    reply = through_gate(request(Server()), context, cut)
    assert not reply.has_error()
    assert participations(ledger_of(of_node(entries)), 0) == 1


def test_a_release_that_the_relay_refuses_keeps_no_other_from_it(
    entries: dict[str, Any], relay: Served, monkeypatch: pytest.MonkeyPatch, node_log: io.StringIO
) -> None:
    """As where its memory is full for a moment; a relay that is away is not asked for each."""
    server, refusals = Server(), [RelayError("no room", code="relay.full"), None]

    def submit(link: RelayLink, submission: Submission) -> None:
        if error := refusals.pop(0) if refusals else None:
            raise error
        take(link, submission)

    take = RelayLink.submit
    monkeypatch.setattr(RelayLink, "submit", submit)
    through_gate(request(server), of_node(entries), handler)
    assert len(read(relay, server)) == 4
    assert "no room" in node_log.getvalue()
    refusals += [RelayError("it is away", code="relay.away"), None]
    through_gate(request(server, round=2), of_node(entries), handler)
    assert refusals == [None]


def test_nothing_goes_to_the_relay_that_is_not_on_record(
    entries: dict[str, Any], relay: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    with monkeypatch.context() as patch:
        patch.setattr("umbel.privacy.gate.site_log.SiteLog.answered", _full)
        assert refused(through_gate(request(server), of_node(entries), handler))
    with raises(RelayError, "relay.too-few"):
        read(relay, server)


def _full(*_: Any) -> None:
    raise OSError("no space left on device")


@pytest.mark.parametrize(
    "changes",
    [{"key": b"short"}, {"closing": b""}, {"least": 0}, {"least": True}], ids=str,
)  # fmt: skip
def test_keys_that_are_none_charge_no_client(entries: dict[str, Any], changes: dict[str, Any]) -> None:
    content = request(Server())
    for name, value in changes.items():
        content["anonymous"][name] = value
    assert refused(through_gate(content, of_node(entries), handler))
    del content["anonymous"]
    assert refused(through_gate(content, of_node(entries), handler))
    assert not Ledger(Site.of(entries).ledger_path).account(0)  # type: ignore[arg-type]


def test_a_key_with_which_no_release_can_be_encrypted_is_refused(entries: dict[str, Any]) -> None:
    """The point of order one gives everyone the same secret."""
    content = request(Server())
    content["anonymous"]["key"] = bytes(32)
    reply = through_gate(content, of_node(entries), handler)
    assert refused(reply)
    assert not Ledger(Site.of(entries).ledger_path).account(0)  # type: ignore[arg-type]


# --- the policy


@pytest.mark.parametrize(
    "changes",
    [{"relay": ""}, {"relay-ca": ""}, {"parties": ""}, {"party-key": ""}, {"relay": "http://relay:8443"},
     {"report-noise-multiplier": 5.0}, {"parties": f"east={KEY} eastern={KEY}"},
     *({"release": other} for other in ("client", "site", "secure", "any"))],
    ids=str,
)  # fmt: skip
def test_a_policy_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    whole = {
        "data-path": "/data", "release": "anonymous", "relay": "https://relay:8443", "relay-ca": "/ca.crt",
        "parties": f"east={KEY}", "party-key": "/key",
    }  # fmt: skip
    Policy.of(whole)
    with raises(SiteError, "site.conflict"):
        Policy.of(whole | changes)


def test_no_other_way_through_the_gate_releases_anonymously() -> None:
    """A passage that is asked for an ordinary release of an anonymous task returns none."""
    content, context = request(Server()), of_node({"partition-id": 0, "num-partitions": 1})
    found: list[Any] = []

    def keeps(self: gate.Passage, task: Any, opening: Any) -> Any:
        found.append((self, task))
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate.Passage, "train_anonymously", keeps)
        through_gate(content, context, handler)
    [(passage, task)] = found
    with raises(Refused, "refused.anonymous"):
        passage.train(task)
