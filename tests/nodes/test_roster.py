"""Clients have the same numbers whatever the nodes; a run waits for the nodes it needs and says which are missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Error, MetricRecord
from flwr.serverapp import Grid
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare

import umbel.nodes.exchange
import umbel.nodes.roster
import umbel.protocol.presence
from tests.helpers.errors import raises
from tests.helpers.grids import PaperGrid
from umbel.nodes.exchange import Exchange
from umbel.nodes.roster import TRAIN, VALIDATION, Roster, admitted, fellows
from umbel.nodes.sampler import draw, largest_share, sample
from umbel.nodes.transport import transport_of
from umbel.protocol.errors import FleetError, ProtocolError
from umbel.protocol.flower import ErrorCode
from umbel.protocol.messages import hosting_reply
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import Hosting


def gather(grid: Grid, min_nodes: int, wait_s: float, **changes: Any) -> Roster:
    run = RunConfig(wait=f"nodes={min_nodes} seconds={wait_s}", **{"clients_per_round": 1} | changes)
    return umbel.nodes.roster.gather(Exchange(transport_of(grid)), run)


REFUSED = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "refused")
UNAVAILABLE = Error(ErrorCode.NODE_UNAVAILABLE, "gone")  # by Flower itself, in the name of no node

# Two partitions of a dataset with 3 training clients (0, 1, 2) and 2 validation clients (3, 4).
EVEN, ODD = Hosting(train=2, validation=1, first=0, step=2), Hosting(train=1, validation=1, first=1, step=2)


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Wait without waiting."""
    clock = Clock()
    for module in (umbel.nodes.roster, umbel.nodes.exchange, umbel.protocol.presence):
        monkeypatch.setattr(module, "time", clock)
    return clock


# --- numbers


def test_nodes_that_are_away_are_left_out_until_they_are_seen_again() -> None:
    roster = Roster({7: EVEN, 9: ODD})
    for seen, training in (([7, 9], [0, 1, 2]), ([9], [1]), ([], [0, 1, 2]), ([7], [0, 2]), ([9, 7, 11], [0, 1, 2])):
        roster.see(seen)
        assert roster.present(TRAIN, 1).tolist() == training, "all of them where there is nobody else"
        assert roster.gone(1) == {7, 9} - set(seen)


@st.composite
def rosters(draw: st.DrawFn) -> tuple[Roster, dict[str, list[tuple[int, int]]]]:
    """A roster, and for each role the (node, local) of each client, listed one by one."""
    nodes = draw(st.lists(st.integers(1, 2**62), min_size=1, max_size=6, unique=True))
    if draw(st.booleans()):
        train, validation = draw(st.integers(1, 12)), draw(st.integers(0, 12))
        hosting = {}
        where = []
        for first, node in enumerate(nodes):
            mine = list(range(first, train + validation, len(nodes)))
            hosting[node] = Hosting(sum(c < train for c in mine), sum(c >= train for c in mine), first, len(nodes))
            where += [(c, (node, local)) for local, c in enumerate(mine)]
        listed = [place for _, place in sorted(where)]
        return Roster(hosting), {TRAIN: listed[:train], VALIDATION: listed[train:]}
    hosting = {node: Hosting(draw(st.integers(0, 5)), draw(st.integers(0, 5))) for node in nodes}
    order = sorted(nodes)
    return Roster(hosting), {
        TRAIN: [(node, i) for node in order for i in range(hosting[node].train)],
        VALIDATION: [(node, hosting[node].train + i) for node in order for i in range(hosting[node].validation)],
    }


@given(rosters(), st.sampled_from([TRAIN, VALIDATION]), st.data())
def test_every_client_is_placed_once_on_the_node_that_hosts_it(
    drawn: tuple[Roster, dict[str, list[tuple[int, int]]]], role: str, data: st.DataObject
) -> None:
    roster, where = drawn
    assert {TRAIN: roster.train, VALIDATION: roster.validation} == {role: len(where[role]) for role in where}
    clients = sorted(data.draw(st.sets(st.sampled_from(range(len(where[role])))) if where[role] else st.just(set())))
    found = {}
    for node, (positions, locals_) in roster.place(role, np.array(clients, np.int64)).items():
        assert positions, "a node that hosts none of them is not asked"
        found |= {position: (node, local) for position, local in zip(positions, locals_, strict=True)}
    assert [found[position] for position in range(len(clients))] == [where[role][client] for client in clients]
    assert len(found) == len(clients)


@pytest.mark.parametrize("other", [Hosting(1, 1), Hosting(1, 1, 1, 3), EVEN, None, Hosting(1, 1, 2, 2)])
def test_nodes_that_do_not_fit_together_are_refused(other: Hosting | None) -> None:
    with raises(FleetError, "nodes.mixed"):
        Roster({5: EVEN} | ({} if other is None else {6: other}))


# --- the roster, as nodes come and go


def two_nodes() -> Roster:
    """Node 20 hosts training clients 0 and 1, node 30 client 2, and validation clients 0 and 1."""
    return Roster({30: Hosting(1, 1), 20: Hosting(2, 1)})


def test_a_silent_node_is_left_out_for_longer_each_time() -> None:
    there = two_nodes()
    left_out = []
    for silent_in in (1, 3, 7, 15):
        there.note(silent_in, [], [20])
        left_out.append(next(t for t in range(silent_in + 1, 99) if 0 in there.present(TRAIN, t)) - silent_in - 1)
    assert left_out == [1, 3, 7, 15]
    there.note(17, [20], [])
    there.note(18, [], [20])
    assert 0 in there.present(TRAIN, 20), "one that answered begins anew"
    assert there.present(TRAIN, 16).tolist() == [2]
    assert there.present(VALIDATION, 16).tolist() == [1]


def test_a_node_that_refuses_is_left_out_like_a_silent_one() -> None:
    there = two_nodes()
    there.note(1, [20], [], {30: "refused.noise"})
    assert [there.present(TRAIN, round).tolist() for round in (2, 3)] == [[0, 1], [0, 1, 2]]


def test_each_node_has_a_state_and_since_when(clock: Clock) -> None:
    there = two_nodes()
    there.join({40: Hosting(1, 0), 50: Hosting(0, 1)})
    began = clock.now
    there.note(1, [], [20], {30: ""})
    there.see([20, 30, 40, 50], late=[50])
    clock.sleep(60)
    there.see([20, 30, 50], late=[50])
    states = {node: there.state(node, 2) for node in (20, 30, 40, 50)}
    assert {node: str(state.presence) for node, state in states.items()} == {
        20: "silent", 30: "refused", 40: "offline", 50: "late",
    }  # fmt: skip
    assert {node: state.since - began for node, state in states.items()} == {20: 0, 30: 0, 40: 60, 50: 0}
    assert there.state(20, 3).presence == "online"
    there.see([40])
    assert there.state(50, 3).presence == "offline"
    assert "node 50 (offline since " in there.missing(3)


@pytest.mark.parametrize(("seen", "least", "enough"), [
    ([20, 30], 2, True), ([20], 2, False), ([20], 1, True), ([50], 1, False), ([20, 50], 2, True), ([], 1, False),
])  # fmt: skip
def test_a_round_needs_so_many_nodes_and_training_clients_on_one(seen: list[int], least: int, enough: bool) -> None:
    there = two_nodes()
    there.join({50: Hosting(0, 1)})
    there.see(seen)
    assert there.enough(1, least) == enough


def test_in_a_pause_a_node_that_failed_is_asked_again_after_a_time_that_grows(clock: Clock) -> None:
    there, waits = two_nodes(), []
    for _ in range(10):
        there.note(7, [30], [20])
        began = clock.now
        while not there.enough(8, 2):
            clock.sleep(1)
            there.readmit(8)
        waits.append(clock.now - began)
    assert waits == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


@pytest.mark.parametrize("max_share", [1.0, 0.9])
def test_a_round_does_not_wait_for_an_absent_site_that_alone_has_validation_clients(max_share: float) -> None:
    there = Roster({20: Hosting(2, 0), 30: Hosting(1, 0), 50: Hosting(0, 2)})
    assert draw(there, VALIDATION, 1, [0], 2, max_share).tolist() == [0, 1]
    there.note(1, [20, 30], [50])
    assert draw(there, VALIDATION, 2, [0], 2, max_share).tolist() == []
    assert draw(there, VALIDATION, 3, [0], 2, max_share).tolist() == [0, 1]
    there.see([])
    assert draw(there, VALIDATION, 3, [0], 2, max_share).tolist() == []
    assert draw(there, TRAIN, 3, [0], 3, max_share).tolist() == [0, 1, 2], "better than no round"


def test_all_sites_refuse_once_each_with_training_clients_has_refused_so_often_in_a_row() -> None:
    there = two_nodes()
    there.join({50: Hosting(0, 1)})
    refused, found = {20: "refused.budget", 30: ""}, []
    for answered, refusing in (([], refused), ([], refused), ([30], {20: ""}), ([], refused), ([], refused)):
        there.note(1, answered, [50], refusing)
        found.append(there.refuses(2))
    assert found == [False, True, False, False, True]
    there.note(1, [], [20], {})
    assert not there.refuses(2), "one that is silent may be back"


def test_clients_keep_their_numbers_where_a_node_joins_or_a_run_goes_on() -> None:
    there = two_nodes()
    there.join({10: Hosting(2, 0)})
    assert (there.train, there.validation) == (5, 2)
    assert there.place(TRAIN, np.arange(5)) == {20: ([0, 1], [0, 1]), 30: ([2], [0]), 10: ([3, 4], [0, 1])}
    now = Roster({10: Hosting(1, 0), 30: Hosting(1, 1)})  # 20 is not back yet, 10 is new
    resumed = Roster.resumed(two_nodes().nodes, now)
    assert resumed.place(TRAIN, np.arange(4)) == {20: ([0, 1], [0, 1]), 30: ([2], [0]), 10: ([3], [0])}


@pytest.mark.parametrize("now", [Hosting(1, 1), Hosting(3, 1), Hosting(2, 0)])
def test_a_node_that_hosts_other_clients_than_before_is_left_out_of_a_run_that_goes_on(now: Hosting) -> None:
    before = two_nodes()
    resumed = Roster.resumed(before.nodes, Roster({20: now, 30: Hosting(1, 1)}))
    assert (resumed.train, resumed.validation) == (3, 2)
    assert resumed.present(TRAIN, 1000).tolist() == [2], "whose numbers are taken, by nobody"


# --- waiting


@pytest.mark.parametrize(
    ("says", "looks", "min_nodes", "train", "queried"),
    [
        ({5: EVEN, 6: ODD}, [[5, 6]], 1, 3, [5, 6]),
        # The first look may show only some of a simulation: each is asked when it came.
        ({5: ODD, 6: EVEN}, [[], [6], [6], [5, 6]], 1, 3, [6, 5]),
        # An error of Flower's own is no refusal of the node: the query was lost.
        ({5: [UNAVAILABLE, Hosting(2, 0)]}, [[5]], 1, 2, [5, 5]),
        # A node that refuses is asked once, and left out where nodes serve their own data.
        ({5: Hosting(2, 0), 6: REFUSED, 7: Hosting(1, 0)}, [[5, 6], [5, 6], [5, 6, 7]], 2, 3, [5, 6, 7]),
    ],
)
def test_each_node_that_comes_is_asked_once(
    says: dict[int, Any], looks: list[list[int]], min_nodes: int, train: int, queried: list[int]
) -> None:
    grid = PaperGrid(says, looks=looks)
    assert gather(grid, min_nodes, wait_s=60).train == train
    assert grid.queried == queried


def test_a_node_may_take_as_long_to_answer_as_the_run_waits_and_is_asked_once(clock: Clock) -> None:
    grid = PaperGrid({5: Hosting(2, 0)}, slow={5: 180})
    assert gather(grid, min_nodes=1, wait_s=60).train == 2
    assert grid.queried == [5]
    assert grid.lifetimes == [60], "so long a reply to it is worth something"
    assert 1040 < clock.now < 1060, "not before it answered"


def test_a_node_that_comes_later_is_asked_while_others_are_awaited(clock: Clock) -> None:
    grid = PaperGrid({5: Hosting(2, 0), 6: Hosting(1, 0)}, looks=[[5]] * 100 + [[5, 6]], slow={5: 180})
    assert gather(grid, min_nodes=2, wait_s=60).train == 3
    assert grid.queried == [5, 6]
    first, second = grid.lifetimes
    assert first == 60
    assert 1 < second < 55, "as long as the run will still wait"


def test_of_a_thousand_slow_nodes_none_is_forgotten() -> None:
    says = {node: Hosting(1, 0, node, 1500) for node in range(1500)}
    grid = PaperGrid(says, slow=dict.fromkeys(says, 20))
    assert gather(grid, min_nodes=1, wait_s=60).train == 1500
    assert grid.queried == list(says)


@pytest.mark.parametrize(
    ("says", "min_nodes"),
    [
        ({}, 1), ({5: None}, 1), ({5: Hosting(2, 0)}, 3), ({5: Hosting(2, 0), 6: REFUSED}, 2),
        ({5: Hosting(2, 0), 6: UNAVAILABLE}, 2), ({5: Hosting(1, 0, 2, 4)}, 1), ({5: EVEN}, 2),
    ],
)  # fmt: skip
def test_waiting_ends(clock: Clock, says: dict[int, Any], min_nodes: int) -> None:
    with raises(FleetError, "nodes.missing"):
        gather(PaperGrid(says), min_nodes=min_nodes, wait_s=30)
    assert 1030 <= clock.now < 1031


WAITS = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "refused [refused.waits]")


def test_a_site_whose_people_have_not_approved_yet_is_asked_again(
    clock: Clock,
) -> None:
    grid = PaperGrid({5: [WAITS, WAITS, Hosting(2, 0)]})
    assert gather(grid, min_nodes=1, wait_s=300).train == 2
    assert grid.queried == [5, 5, 5]
    assert 1010 <= clock.now < 1015, "after 5 seconds each"


def test_a_simulation_cannot_do_without_a_part_and_gets_no_more_nodes_than_it_has(clock: Clock) -> None:
    with raises(FleetError, "nodes.refused"):
        gather(PaperGrid({5: EVEN, 6: REFUSED}), min_nodes=1, wait_s=60)
    with raises(FleetError, "nodes.too-few"):
        gather(PaperGrid({5: EVEN, 6: ODD}), min_nodes=3, wait_s=300)
    assert clock.now == 1000, "there is nothing to wait for"


@pytest.mark.rest
def test_a_site_is_asked_the_more_rarely_the_longer_it_waits(clock: Clock) -> None:
    day = 86_400
    grid = PaperGrid({5: [WAITS] * day})
    with raises(FleetError, "nodes.missing"):
        gather(grid, min_nodes=1, wait_s=day)
    assert len(grid.queried) < 1.1 * day / 60


class Afar(PaperGrid):
    """Nodes that are not in the server's process."""

    in_process = False


@pytest.mark.parametrize(
    "changes",
    [{"train": -1}, {"train": 10**12}, {"validation": 10**6}, {"train": 0, "validation": 0}, {"first": 0, "step": 1}],
    ids=str,
)
def test_a_node_that_says_what_cannot_be_is_named_and_left_out(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    good = {1: Hosting(2, 1), 2: Hosting(3, 0), 3: Hosting(0, 1)}
    bad = MetricRecord({**Hosting(2, 1).to_record(), **changes})
    for says in ({4: bad, **good}, {**good, 4: bad}):
        assert dict(gather(Afar(says), min_nodes=3, wait_s=60).nodes) == good
    assert "node 4 " in caplog.text


def test_a_site_that_lies_about_its_part_of_a_dataset_changes_nothing_for_the_others() -> None:
    """Another site's clients keep their numbers at that site, and two may say that they are the same part."""
    honest = {2: Hosting(2, 1, 0, 2), 5: Hosting(2, 1, 1, 2)}
    for lie in (Hosting(10**5, 1, 1, 2), Hosting(2, 1, 0, 2), Hosting(1, 1, 0, 2**62)):
        roster = gather(Afar({1: lie, **honest}), min_nodes=3, wait_s=60)
        assert roster.train == lie.train + 4
        numbers = np.arange(lie.train, lie.train + 4)
        assert roster.place(TRAIN, numbers) == {2: ([0, 1], [0, 1]), 5: ([2, 3], [0, 1])}
        assert roster.place(VALIDATION, np.array([1, 2])) == {2: ([0], [2]), 5: ([1], [2])}


def test_the_bound_on_what_a_node_hosts_is_the_runs() -> None:
    says = {1: Hosting(3, 0), 2: Hosting(2, 2), 3: Hosting(2, 1)}
    assert [node for node, _ in gather(Afar(says), 1, 60, per_node="clients=3").nodes] == [1, 3]
    with raises(ProtocolError, "protocol.too-many-clients"):
        admitted(hosting_reply(says[2]), 3, together=False)
    part = Hosting(10**7, 10**7, 0, 1)
    assert admitted(hosting_reply(part), 3, together=True) == part, "one node may simulate all"


def test_more_nodes_are_waited_for_until_they_host_as_many_clients_as_a_round_asks(clock: Clock) -> None:
    says = {5: Hosting(1, 0), 6: Hosting(4, 2)}
    asked: dict[str, Any] = {"clients_per_round": 5, "validation": "clients=2"}
    for looks, train in (([[5]] * 9 + [[5, 6]], 5), ([[5]], 1)):  # for as long as the run waits
        assert gather(Afar(says, looks), 1, 60, **asked).train == train
    assert clock.now >= 1060


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        ({5: EVEN, 6: ODD, 7: Hosting(1, 1)}, [5, 6]),
        ({5: EVEN, 6: Hosting(1, 1)}, [6]),
        ({5: EVEN, 6: ODD, 7: EVEN}, [5, 6]),
        ({5: EVEN, 6: ODD, 7: Hosting(1, 1, 0, 3)}, [5, 6]),
        ({}, []),
    ],
)
def test_of_nodes_that_do_not_fit_together_most_are_kept(nodes: dict[int, Hosting], left: list[int]) -> None:
    assert list(fellows(nodes)) == left


# --- a node's share


def shares(
    roster: Roster, max_share: float = 1.0, role: str = TRAIN, size: int = 20, rounds: int = 200
) -> NDArray[np.float64]:
    """Return how many clients of each node a round asks on average, and check what every draw is."""
    hosts = {TRAIN: roster.train, VALIDATION: roster.validation}[role]
    asked = np.zeros(len(roster))
    for t in range(1, rounds + 1):
        clients = draw(roster, role, t, [0, 1, t], size, max_share)
        assert clients.tolist() == sorted(set(clients.tolist()))
        assert set(clients.tolist()) <= set(range(hosts))
        placed = roster.place(role, clients)
        asked += [len(placed.get(node, ([], []))[0]) for node, _ in roster.nodes]
    return asked / rounds


def test_without_a_bound_a_node_that_says_it_hosts_many_is_asked_for_nearly_all() -> None:
    nodes = {node: Hosting(50, 0) for node in range(1, 10)} | {10: Hosting(20_000, 0)}
    assert shares(Roster(nodes))[9] > 19.3
    found = shares(Roster(nodes), 0.2)
    assert found[9] == 4
    np.testing.assert_allclose(found[:9], 16 / 9, atol=0.3)


def test_below_its_bound_a_node_is_asked_as_often_as_it_hosts() -> None:
    """Ten nodes that host 10, 20, ..., 100 clients."""
    nodes = {node: Hosting(10 * node, 0) for node in range(1, 11)}
    expected = np.arange(1, 11) * 20 / 55
    np.testing.assert_allclose(shares(Roster(nodes), 0.99, rounds=1000), expected, atol=0.15)


def test_no_client_of_a_node_is_asked_more_often_than_another() -> None:
    roster, times = Roster({1: Hosting(4, 0), 2: Hosting(8, 0), 3: Hosting(8, 0)}), np.zeros(20)
    for t in range(3000):
        drawn = draw(roster, TRAIN, 1, [0, 1, t], 6, 0.5)
        assert (np.diff(drawn) > 0).all(), "nobody is drawn twice"
        times[drawn] += 1
    for own in (times[:4], times[4:12], times[12:]):
        assert chisquare(own).pvalue > 1e-6


def test_a_share_of_all_who_validate_is_bounded_too() -> None:
    nodes = {node: Hosting(1, 50) for node in range(1, 9)} | {9: Hosting(1, 10**5), 10: Hosting(1, 10**5)}
    roster = Roster(nodes)
    found = shares(roster, 0.2, VALIDATION, roster.validation, rounds=1)
    assert found[:8].tolist() == [50] * 8
    assert found[8] == found[9] == 133
    assert found[8] / found.sum() <= 0.2


@pytest.mark.parametrize("role", [TRAIN, VALIDATION])
def test_a_bounded_draw_depends_on_its_seed_and_on_who_is_there(role: str) -> None:
    nodes = {node: Hosting(20, 20) for node in range(1, 7)}
    roster = Roster(nodes)
    one = draw(roster, role, 3, [0, 1, 3], 12, 0.25).tolist()
    assert one == draw(Roster(nodes), role, 3, [0, 1, 3], 12, 0.25).tolist()
    assert one != draw(roster, role, 3, [1, 1, 3], 12, 0.25).tolist()
    roster.note(3, [], [2])
    assert not set(draw(roster, role, 4, [0, 1, 4], 12, 0.25).tolist()) & set(range(20, 40))


def test_in_simulation_a_share_plays_no_part() -> None:
    seed = [0, 1, 2]
    roster = Roster({5: EVEN, 6: ODD})
    assert draw(roster, TRAIN, 1, seed, 2, 0.1).tolist() == draw(roster, TRAIN, 1, seed, 2).tolist()


@pytest.mark.parametrize(
    ("counts", "size", "share", "most"),
    [
        ([50] * 10, 20, 0.2, 4),
        ([50] * 10, 20, 0.01, 2),  # a tenth is the least there can be; that of nine is 2.2
        ([10**6, 1], 20, 0.2, 20),  # of two nodes one may have all
        ([50, 50, 50, 1], 60, 0.1, 20),  # one that hosts next to nothing does not make the round small
        ([], 3, 0.5, 1),
    ],
)
def test_the_largest_share_by_hand(counts: list[int], size: int, share: float, most: int) -> None:
    assert largest_share(counts, size, share) == most


# --- sampling


@pytest.mark.parametrize("role", [TRAIN, VALIDATION])
@pytest.mark.parametrize("size", [3, 50])
def test_a_draw_is_a_sample_of_those_who_are_present(role: str, size: int) -> None:
    """As it is drawn from a list of them, which is not made when nobody is left out."""
    roster = Roster({1: Hosting(8, 5), 2: Hosting(6, 4)})
    for silent in ([], [2], [1, 2]):
        roster.note(1, [], silent)
        there = roster.present(role, 2)
        expected = there[sample([0, 1, 2], len(there), min(size, len(there)))]
        np.testing.assert_array_equal(draw(roster, role, 2, [0, 1, 2], size), expected, strict=True)
        assert (np.diff(expected) > 0).all(), "nobody is drawn twice"
