"""Whole runs whose server reads releases and not their senders, and a server that guesses them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message
from safetensors.numpy import load_file

from tests.helpers.errors import raises
from tests.helpers.paper import ACCEPTED
from tests.helpers.relays import Served, known, served
from tests.helpers.sources import ROOT
from tests.privacy.anonymous.conftest import KEYS, Server, submission
from tests.strategies.test_secure_average import keys
from umbel.data import Manifest, offsets_of, write_dataset
from umbel.privacy.anonymous import batches
from umbel.privacy.anonymous.link import RelayLink
from umbel.privacy.anonymous.submission import Submission
from umbel.privacy.gate.ledger import Ledger
from umbel.protocol.arrays import flatten
from umbel.protocol.errors import ConfigError, RelayError
from umbel.protocol.flower import ErrorCode
from umbel.protocol.messages import submissions_in
from umbel.protocol.release import Kind
from umbel.server.observer import Observer, Run
from umbel.simulation import in_process
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import play, run_config

pytestmark = pytest.mark.rest(twin="tests/privacy/anonymous/test_batches.py::test_the_order_says_nothing")

CONFIG: dict[str, Any] = {
    "clipping": "public", "choice_epsilon": 1.0, "noise_multiplier": 2.0, "restarts": 1, "rounds": 3,
    "clients_per_round": 60, "clip_norm": 2.0,
}  # fmt: skip
LEAST = 50


def played(nodes: int = 4, **changes: Any) -> Run:
    return play(run_config("synthetic", **CONFIG | {"anonymous_least": LEAST} | changes), nodes=nodes, strict=False)


def moved(found: Run) -> Any:
    return flatten(found.state.hypotheses)


# --- in simulation


@pytest.mark.parametrize("strategy", ["group-privacy", "geometric-median", "cfl", "flower:FedAvg"])
def test_a_strategy_learns_the_same_from_releases_without_senders(strategy: str) -> None:
    """Up to the order in which numbers are added."""
    options = {"strategy": strategy, "hypotheses": 2}
    found, known = played(**options), played(**options, anonymous_least=0)
    assert np.allclose(moved(found), moved(known), rtol=1e-6, atol=1e-6)
    assert [entry.groups for entry in found.state.history] == [entry.groups for entry in known.state.history]


def test_neither_the_number_of_nodes_nor_encryption_changes_the_result() -> None:
    assert np.array_equal(moved(played(nodes=4)), moved(played(nodes=7)))


def test_the_server_counts_each_asked_client_and_no_others() -> None:
    outcomes: list[Any] = []

    class Watch(Observer):
        def after_round(self, run: Run) -> None:
            outcomes.append(run.outcome)

    config = run_config("synthetic", **CONFIG | {"anonymous_least": LEAST, "max_participations": 2})
    found = play(config, nodes=4, observers=[Watch()])
    assert found.fleet.participations.sum() == 3 * 60
    assert set(found.fleet.participations) <= {1, 2}
    assert {*outcomes[0].clients.tolist()} == {-1}
    assert len(outcomes[0].groups) == 60


def test_a_run_resumes_with_other_keys_and_the_same_result(umbel_home: Path) -> None:
    config = CONFIG | {"anonymous_least": LEAST, "rounds": 4}
    straight = in_process.run(run_config("synthetic", **config), nodes=3)
    begun = in_process.run(run_config("synthetic", **config | {"rounds": 2}), nodes=3)
    in_process.run(run_config("synthetic", **config | {"resume": str(begun)}), nodes=3)
    for name, value in load_file(straight / "latest.safetensors").items():
        assert np.array_equal(value, load_file(begun / "latest.safetensors")[name])


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"anonymous_least": 61}, "config.conflict"), ({"clipping": "update", "choice_epsilon": 0.0}, "config.conflict"),
     ({"strategy": "site-average"}, "config.anonymous"),
     ({"strategy": "ifca"}, "config.anonymous")],
    ids=str,
)  # fmt: skip
def test_runs_that_cannot_be_anonymous_are_refused(changes: dict[str, Any], code: str) -> None:
    with raises(ConfigError, code):
        played(**changes)


def changing(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Change a node's submissions; `change` gets them, and the number of the node."""

    class Grid(InProcessGrid):
        def _answer(self, message: Message) -> Message:
            reply = super()._answer(message)
            if not reply.has_error() and "anonymous" in reply.content:
                place = sorted(self.contexts).index(message.metadata.dst_node_id)
                found = change(submissions_in(reply.content), place)
                reply.content["anonymous"]["submissions"] = found
            return reply

    monkeypatch.setattr(in_process, "InProcessGrid", Grid)


def test_a_batch_that_is_too_small_teaches_nothing_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In round 1 one of four nodes sends nothing, so that 43 of 60 releases come."""
    calls: list[int] = []

    def change(found: list[bytes], place: int) -> list[bytes]:
        calls.append(place)
        return [] if len(calls) <= 4 and place == 0 else found

    changing(monkeypatch, change)
    found = played(max_participations=0)
    assert [entry.moved for entry in found.state.history if entry.asked] == [False, True, True]
    assert [entry.releases for entry in found.state.history if entry.asked] == [0, 60, 60]
    assert found.fleet.participations.sum() == 3 * 60


@pytest.mark.parametrize(
    ("code", "counted"), [(ErrorCode.CLIENT_APP_CRASHED, 60), (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, 43)]
)
def test_the_clients_of_an_app_that_crashed_count_and_those_of_one_that_refuses_do_not(
    monkeypatch: pytest.MonkeyPatch, code: int, counted: int
) -> None:
    """It may have crashed after the relay took their releases. 17 of the 60 asked clients are at the first node."""

    class Grid(InProcessGrid):
        def _answer(self, message: Message) -> Message:
            reply = super()._answer(message)
            first = message.metadata.dst_node_id == min(self.contexts)
            return Message(Error(code, ""), reply_to=message) if first and "anonymous" in reply.content else reply

    monkeypatch.setattr(in_process, "InProcessGrid", Grid)
    assert played(rounds=1, anonymous_least=40).fleet.participations.sum() == counted


def test_a_hostile_site_spoils_no_more_than_its_own_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """It repeats a release, sends one that no key opens, and numbers that are none."""

    def change(found: list[bytes], place: int) -> list[bytes]:
        if place:
            return found
        return [found[0], found[0], found[1][:-1], b"", *found[2:]]

    changing(monkeypatch, change)
    found = played(rounds=1, anonymous_least=40)
    assert found.state.history[0].moved
    assert 40 <= found.state.history[0].releases < 60
    assert found.state.history[0].lost_nodes == 1


def test_a_batch_with_more_releases_than_clients_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def hands_on_twice(self: batches.Batches, *args: Any) -> list[bytes]:
        raise batches.too_many()

    monkeypatch.setattr(batches.Batches, "close", hands_on_twice)
    found = played(rounds=1)
    assert not found.state.history[0].moved


def test_a_relay_that_replays_an_older_batch_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each release is encrypted for its round alone."""
    first: list[bytes] = []
    closes = batches.Batches.close

    def replays(self: batches.Batches, *args: Any) -> list[bytes]:
        found = closes(self, *args)
        first[:] = first or found
        return first

    monkeypatch.setattr(batches.Batches, "close", replays)
    found = played()
    assert [entry.releases for entry in found.state.history if entry.asked] == [60, 0, 0]


# --- at sites, through a relay


NAMES = ("north", "south", "west")


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], str]:
    return keys(tmp_path_factory.mktemp("keys"), *NAMES)


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory, listed: tuple[dict[str, str], str]) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("relay"), known(listed[1]), 2) as found:
        yield found


@pytest.fixture
def nodes(relay: Served, listed: tuple[dict[str, str], str], umbel_home: Path) -> list[dict[str, Any]]:
    """Three sites with the same data."""
    umbel_home.mkdir()
    return [
        {
            "data-path": str(ROOT / "datasets" / "synthetic.json"), "role": "split", **ACCEPTED,
            "release": "anonymous", "relay": relay.url, "relay-ca": relay.ca, "parties": listed[1],
            "party-key": listed[0][name], "anonymous-least": LEAST,
            "ledger-path": str(umbel_home / f"{place}.sqlite"),
        }
        for place, name in enumerate(NAMES)
    ]  # fmt: skip


def at_sites(nodes: list[dict[str, Any]], relay: Served, **changes: Any) -> Run:
    own = {"dataset": "", "min_nodes": 3, "anonymous-least": LEAST, "relay": relay.url, "relay-ca": relay.ca}
    config = run_config("synthetic", **CONFIG | own | changes, model="linear")
    return play(config, node_configs=nodes, strict=False)


def charged(umbel_home: Path) -> list[Kind]:
    ledgers = [Ledger(path) for path in umbel_home.glob("*.sqlite")]
    accounts = [ledger.account(client) for ledger in ledgers for client in range(100)]
    return [release.kind for account in accounts for release, times in account.items() for _ in range(times)]


def test_sites_release_through_their_relay(nodes: Any, relay: Served, umbel_home: Path) -> None:
    found = at_sites(nodes, relay)
    assert [entry.releases for entry in found.state.history if entry.asked] == [60] * 3
    assert all(entry.moved for entry in found.state.history if entry.asked)
    assert {*charged(umbel_home)} == {Kind.TRAIN}
    assert relay.batches.held == (0, 0)


def test_a_run_without_a_relay_does_not_start(nodes: Any, relay: Served, umbel_home: Path) -> None:
    for url in ("", "http://relay:8443"):
        with raises(ConfigError, "config.no-relay"):
            at_sites(nodes, replace(relay, url=url))
    with raises(RelayError, "relay.away"):
        at_sites(nodes, replace(relay, url="https://127.0.0.1:1"))
    assert not charged(umbel_home)


def test_sites_with_other_minima_or_none_take_no_part(nodes: Any, relay: Served, umbel_home: Path) -> None:
    """One wants larger batches than the server asks for, and one names its clients. The third's alone are too few."""
    nodes[0] |= {"anonymous-least": LEAST + 1}
    nodes[1] |= {"release": "client", "relay": ""}
    found = at_sites(nodes, relay, rounds=1)
    entry = found.state.history[0]
    assert (entry.lost_nodes, entry.releases, entry.moved) == (2, 0, False)
    assert 0 < len(charged(umbel_home)) == found.fleet.participations.sum() < LEAST


def test_a_relay_that_is_away_in_a_round_stops_no_run(
    nodes: Any, relay: Served, umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server finds it away when it closes the first batch. Its clients are charged, and the next round works."""
    closes, away = RelayLink.close, [True]

    def close(self: RelayLink, *args: Any) -> list[bytes]:
        if away:
            away.clear()
            raise RelayError("the relay is away", code="relay.away")
        return closes(self, *args)

    monkeypatch.setattr(RelayLink, "close", close)
    found = at_sites(nodes, relay, rounds=2)
    assert [entry.releases for entry in found.state.history if entry.asked] == [0, 60]
    assert len(charged(umbel_home)) == found.fleet.participations.sum()


def test_a_server_that_sends_a_site_other_hypotheses_gets_no_batch(
    nodes: Any, relay: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would mark its releases. Of the other two sites 40 releases are left, too few as well."""

    class Marks(InProcessGrid):
        def _answer(self, message: Message) -> Message:
            if message.metadata.dst_node_id == min(self.contexts) and "training" in message.content:
                task: Any = message.content["training"]
                message.content["training"] = ConfigRecord({**task, "step_size": 0.05})
            return super()._answer(message)

    monkeypatch.setattr(in_process, "InProcessGrid", Marks)
    found = at_sites(nodes, relay, rounds=1)
    assert (found.state.history[0].releases, found.state.history[0].moved) == (0, False)


# --- a server that guesses


def chance(places: Any, senders: Any, generator: np.random.Generator, draws: int = 9_999) -> float:
    """Return the probability, by permutations within each round, of senders so far from even over the places.

    `places` and `senders` (rounds, m) hold m different numbers in each round.
    """
    m = places.shape[1]

    def uneven(of: Any) -> float:
        table = np.bincount((places * m + of).ravel(), minlength=m * m)
        return float(np.square(table).sum())

    found = uneven(senders)
    return (1 + sum(uneven(generator.permuted(senders, axis=1)) >= found for _ in range(draws))) / (1 + draws)


def views(there: Served, rounds: int) -> dict[str, Any]:
    """Return what a server sees of each round's eight releases, as ranks, and their senders.

    East sends first, and says so before west; the value of a release tells the test who sent it.
    """
    seen: dict[str, list[Any]] = {"places": [], "sizes": [], "bytes": [], "senders": []}
    for round in range(rounds):
        server = Server()
        terms = server.terms(round)
        for sender in range(8):
            there.link.submit(submission(terms, "east" if sender < 4 else "west", sender, (sender, 0)))
        sealed = there.link.close(terms, server.closing.sign(terms.closing_text), 8)
        seen["senders"].append([int(server.read([one], terms)[0, 0]) for one in sealed])
        seen["places"].append(range(8))
        seen["sizes"].append(np.argsort([len(one) for one in sealed], kind="stable"))
        seen["bytes"].append(np.argsort(sealed).argsort())
    return {name: np.array(value) for name, value in seen.items()}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("relay"), KEYS, 8) as found:
        yield found


def test_order_size_and_bytes_do_not_tell_who_sent_which(other: Served) -> None:
    """At a level of .0003 for each of three: a false alarm in 1,000 runs. They come together, at the same time."""
    seen, generator = views(other, 60), np.random.default_rng(1)
    for name in ("places", "sizes", "bytes"):
        assert chance(seen[name], seen["senders"], generator) > 0.0003, name


def test_the_same_guess_finds_out_where_a_relay_does_not_shuffle(
    other: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches.SystemRandom, "shuffle", lambda *_: None)
    seen = views(other, 20)
    assert chance(seen["places"], seen["senders"], np.random.default_rng(1)) <= 0.0003


def test_a_relay_sees_ciphertext_alone() -> None:
    server = Server()
    value = np.array([0.7310585, -2.1269281], np.float32)
    terms = server.terms()
    found = [submission(terms, "east", client, value).to_bytes() for client in range(50)]
    assert len({len(one) for one in found[:10]}) == 1
    assert not any(value[:1].tobytes() in Submission.read(one).sealed for one in found)
    assert len({Submission.read(one).sealed for one in found}) == 50


def dataset(folder: Path, order: list[int]) -> Path:
    """Write twelve training clients with different data, in an order, and two for validation."""
    slopes = [*np.linspace(-2, 2, 12)[order], 1.0, -1.0]
    features = np.tile(np.array([[1.0, 0.0], [0.0, 1.0]], np.float32), (len(slopes), 1))
    targets = np.repeat(slopes, 2).astype(np.float32)
    split = {"train": 12, "validation": 2}
    manifest = Manifest(name="clients", clients=14, split=split, model="linear", loss="mse")
    write_dataset(folder, manifest, features, targets, offsets_of([2] * 14))
    return folder


def left_by(
    folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch, least: int, caplog: pytest.LogCaptureFixture
) -> dict[str, Any]:
    """Return what a run without noise or chance leaves at its server, apart from times and the names of files."""
    caplog.clear()
    monkeypatch.setenv("UMBEL_HOME", str(folder))
    config = run_config("synthetic", **CONFIG | {
        "dataset": str(data), "anonymous_least": least, "clients_per_round": 12, "noise_multiplier": 0.0,
        "choice_epsilon": 0.0, "batch_size": 0,
    })  # fmt: skip
    path = in_process.run(config, nodes=3)
    history = [json.loads(line) for line in (path / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    found: dict[str, Any] = {"history": [{**entry, "seconds": 0, "stages": 0} for entry in history]}
    lines = [record.getMessage() for record in caplog.records]
    found["log"] = [re.sub(r"/\S+|\d[\d.]* (s|min|h)\b.*", "", line) for line in lines]
    for file in ("participations.jsonl", "ledger.csv"):
        found[file] = (path / file).read_text(encoding="utf-8")
    for file in path.glob("*.safetensors"):
        found[file.name] = {name: value.tolist() for name, value in load_file(file).items()}
    return found


def test_what_is_left_at_the_server_does_not_depend_on_which_client_is_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients change places, and the run's folder and log are the same. Where releases have senders, they are not."""
    straight, mixed = [*range(12)], [7, 2, 11, 0, 5, 9, 1, 10, 4, 8, 3, 6]
    data = [dataset(tmp_path / name, order) for name, order in (("straight", straight), ("mixed", mixed))]
    for least, same in ((12, True), (0, False)):
        one, other = (left_by(tmp_path / f"{least}-{i}", data[i], monkeypatch, least, caplog) for i in range(2))
        assert "releases.safetensors" in one
        assert len(one["log"]) > 5
        assert (one == other) is same
