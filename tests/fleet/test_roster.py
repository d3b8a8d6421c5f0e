"""Clients have the same numbers whatever the nodes; a run waits for the nodes it needs and says which are missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, MetricRecord
from hypothesis import given
from hypothesis import strategies as st

import fleet.exchange
import fleet.roster
from fleet.exchange import Exchange
from fleet.roster import TRAIN, VALIDATION, Roster, check_enough, gather, sample
from protocol.demands import VERSION, Hosting
from protocol.errors import ConfigError, FleetError
from protocol.flower import ErrorCode
from tests.helpers.grids import PaperGrid

REFUSED = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "refused")
UNAVAILABLE = Error(ErrorCode.NODE_UNAVAILABLE, "gone")  # by Flower itself, in the name of no node

# Two partitions of a federation with 3 training clients (0, 1, 2) and 2 validation clients (3, 4).
EVEN, ODD = Hosting(train=2, validation=1, first=0, step=2), Hosting(train=1, validation=1, first=1, step=2)


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Wait without waiting."""
    clock = Clock()
    for module in (fleet.roster, fleet.exchange):
        monkeypatch.setattr(module, "time", clock)
    return clock


# --- numbers


def test_simulated_clients_are_numbered_by_partition_whatever_the_node_ids() -> None:
    for even, odd in ((7, 9), (9, 7)):
        roster = Roster({even: EVEN, odd: ODD})
        assert (roster.train, roster.validation, len(roster)) == (3, 2, 2)
        assert roster.simulated
        # Training clients 0 and 2 are the even node's first and second.
        assert roster.place(TRAIN, np.array([0, 1, 2])) == {even: ([0, 2], [0, 1]), odd: ([1], [0])}
        # Validation client 0 is client 3 of the federation, the odd node's second.
        assert roster.place(VALIDATION, np.array([0, 1])) == {odd: ([0], [1]), even: ([1], [2])}


def test_deployed_clients_are_numbered_by_node_id() -> None:
    roster = Roster({9: Hosting(train=2, validation=1), 7: Hosting(train=1, validation=2)})
    assert (roster.train, roster.validation, len(roster)) == (3, 3, 2)
    assert not roster.simulated
    # Node 7 comes first; a node counts its validation clients after its training clients.
    assert roster.place(TRAIN, np.array([0, 1, 2])) == {7: ([0], [0]), 9: ([1, 2], [0, 1])}
    assert roster.place(VALIDATION, np.array([0, 1, 2])) == {7: ([0, 1], [1, 2]), 9: ([2], [2])}


def test_a_node_without_clients_of_a_kind_is_passed_over() -> None:
    roster = Roster({5: Hosting(1, 0), 6: Hosting(0, 2), 7: Hosting(1, 0)})
    assert roster.place(TRAIN, np.array([0, 1])) == {5: ([0], [0]), 7: ([1], [0])}
    assert roster.place(VALIDATION, np.array([1])) == {6: ([0], [1])}


def test_positions_are_those_in_the_sample() -> None:
    roster = Roster({5: Hosting(10, 0), 6: Hosting(10, 0)})
    assert roster.place(TRAIN, np.array([3, 12, 17])) == {5: ([0], [3]), 6: ([1, 2], [2, 7])}


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


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ({5: EVEN, 6: Hosting(1, 1)}, "some nodes are simulated and some are not"),
        ({5: EVEN, 6: Hosting(1, 1, 1, 3)}, "or they split the federation differently"),
        ({5: EVEN, 6: EVEN}, "the simulated nodes do not split the federation among themselves"),
        ({5: EVEN}, "the simulated nodes do not split the federation among themselves"),
        ({5: Hosting(1, 1, 0, 0)}, "the simulated nodes do not split the federation among themselves"),
        ({5: EVEN, 6: Hosting(1, 1, 2, 2)}, "the simulated nodes do not split the federation among themselves"),
    ],
)
def test_nodes_that_do_not_fit_together_are_refused(nodes: dict[int, Hosting], reason: str) -> None:
    with pytest.raises(FleetError, match=reason):
        Roster(nodes)


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
    assert there.present(TRAIN, 16).tolist() == [2]
    assert there.present(VALIDATION, 16).tolist() == [1]


def test_a_node_that_answers_again_begins_anew() -> None:
    there = two_nodes()
    there.note(1, [], [20])
    there.note(3, [20], [])
    there.note(4, [], [20])
    assert there.present(TRAIN, 5).tolist() == [2]
    assert there.present(TRAIN, 6).tolist() == [0, 1, 2]


def test_when_every_node_is_silent_all_are_asked_again() -> None:
    there = two_nodes()
    there.note(1, [], [20, 30])
    assert there.present(TRAIN, 2).tolist() == [0, 1, 2]


def test_clients_of_a_node_that_joins_follow_those_that_there_are() -> None:
    there = two_nodes()
    there.join({10: Hosting(2, 0)})
    assert (there.train, there.validation) == (5, 2)
    assert there.place(TRAIN, np.arange(5)) == {20: ([0, 1], [0, 1]), 30: ([2], [0]), 10: ([3, 4], [0, 1])}


def test_a_run_that_goes_on_keeps_the_numbers_of_its_clients() -> None:
    before = two_nodes()
    now = Roster({10: Hosting(1, 0), 30: Hosting(1, 1)})  # 20 is not back yet, 10 is new
    resumed = Roster.resumed(before.nodes, now)
    assert resumed.place(TRAIN, np.arange(4)) == {20: ([0, 1], [0, 1]), 30: ([2], [0]), 10: ([3], [0])}


@pytest.mark.parametrize("now", [Hosting(1, 1), Hosting(3, 1), Hosting(2, 0)])
def test_a_node_that_hosts_other_clients_than_before_is_left_out_of_a_run_that_goes_on(now: Hosting) -> None:
    before = two_nodes()
    resumed = Roster.resumed(before.nodes, Roster({20: now, 30: Hosting(1, 1)}))
    assert (resumed.train, resumed.validation) == (3, 2)
    assert resumed.present(TRAIN, 1000).tolist() == [2], "whose numbers are taken, by nobody"


@pytest.mark.parametrize("kind", [TRAIN, VALIDATION])
def test_nobody_is_left_out_of_a_run_without_faults(kind: str) -> None:
    there = two_nodes()
    there.note(1, [20, 30], [])
    present: Callable[[int], list[int]] = lambda t: there.present(kind, t).tolist()  # noqa: E731
    assert present(2) == list(range(3 if kind == TRAIN else 2))


# --- waiting


def test_the_nodes_that_are_there_are_asked_once() -> None:
    grid = PaperGrid({5: EVEN, 6: ODD})
    assert gather(grid, min_nodes=1, wait_s=60).train == 3
    assert grid.queried == [5, 6]


def test_the_first_look_may_show_only_some_of_a_simulation() -> None:
    grid = PaperGrid({5: ODD, 6: EVEN}, looks=[[], [6], [6], [5, 6]])
    roster = gather(grid, min_nodes=1, wait_s=60)
    assert (roster.train, len(roster)) == (3, 2)
    assert grid.queried == [6, 5], "each was asked when it came"


def test_as_many_nodes_as_the_run_asks_for_are_waited_for() -> None:
    says = {node: Hosting(1, 0) for node in (5, 6, 7)}
    grid = PaperGrid(says, looks=[[5], [5, 6], [5, 6, 7]])
    assert len(gather(grid, min_nodes=2, wait_s=60)) == 2


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


def test_who_is_not_waited_for_is_not_asked_again_and_answers_all_the_same() -> None:
    grid, exchange = PaperGrid({5: Hosting(2, 0), 6: Hosting(1, 0)}, slow={6: 1}), Exchange()
    assert gather(grid, min_nodes=1, wait_s=60, exchange=exchange).train == 2
    assert exchange.awaited("query") == {6}
    (late,) = exchange.run(grid, [], timeout=1, keep_late=("query",))
    assert (late.node, exchange.awaited("query")) == (6, set())


def test_an_error_of_flowers_own_is_no_refusal_of_the_node() -> None:
    grid = PaperGrid({5: [UNAVAILABLE, Hosting(2, 0)]})
    assert gather(grid, min_nodes=1, wait_s=60).train == 2
    assert grid.queried == [5, 5], "the query was lost"


@pytest.mark.parametrize(
    ("says", "min_nodes", "counts"),
    [
        ({}, 1, "0 nodes host clients, 0 refused, and the run needs 1"),
        ({5: None}, 1, "0 nodes host clients, 0 refused, and the run needs 1"),
        ({5: Hosting(2, 0)}, 3, "1 nodes host clients, 0 refused, and the run needs 3"),
        ({5: Hosting(2, 0), 6: REFUSED}, 2, "1 nodes host clients, 1 refused, and the run needs 2"),
        ({5: Hosting(2, 0), 6: UNAVAILABLE}, 2, "1 nodes host clients, 0 refused, and the run needs 2"),
        ({5: Hosting(1, 0, 2, 4)}, 1, "1 nodes host clients, 0 refused, and the run needs 4"),
        ({5: EVEN, 6: ODD}, 3, "2 nodes host clients, 0 refused, and the run needs 3"),
    ],
)
def test_waiting_ends_with_how_many_are_missing(
    clock: Clock, says: dict[int, Any], min_nodes: int, counts: str
) -> None:
    with pytest.raises(FleetError, match=f"after 30 s {counts}; start more nodes, or lower min-nodes"):
        gather(PaperGrid(says), min_nodes=min_nodes, wait_s=30)
    assert 1030 <= clock.now < 1031


def test_a_node_that_refuses_is_left_out_where_nodes_serve_their_own_data() -> None:
    grid = PaperGrid({5: Hosting(2, 0), 6: REFUSED, 7: Hosting(1, 0)}, looks=[[5, 6], [5, 6], [5, 6, 7]])
    roster = gather(grid, min_nodes=2, wait_s=60)
    assert roster.place(TRAIN, np.array([0, 1, 2])) == {5: ([0, 1], [0, 1]), 7: ([2], [0])}
    assert grid.queried == [5, 6, 7], "it is asked once"


def test_a_simulation_cannot_do_without_a_part_of_its_federation(clock: Clock) -> None:
    with pytest.raises(FleetError, match="1 of the simulated nodes refused to take part; the log above says why"):
        gather(PaperGrid({5: EVEN, 6: REFUSED}), min_nodes=1, wait_s=60)
    assert clock.now == 1000, "there is nothing to wait for"


def test_another_version_is_refused() -> None:
    theirs = MetricRecord({**EVEN.to_record(), "version": VERSION + 1})
    expected = f"node 6 speaks protocol {VERSION + 1}, this server speaks {VERSION}; install the same umbel everywhere"
    with pytest.raises(FleetError, match=expected):
        gather(PaperGrid({5: ODD, 6: theirs}), min_nodes=1, wait_s=60)


@pytest.mark.parametrize(
    "changes", [{"train": -1}, {"validation": -1}, {"train": 1.0}, {"first": 0.0}, {"train": [1]}, {"step": None}]
)
def test_counts_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    record = EVEN.to_record()
    for key, value in changes.items():
        if value is None:
            del record[key]
        else:
            record[key] = value
    with pytest.raises(FleetError, match="node 5 reports counts that cannot be"):
        gather(PaperGrid({5: record}), min_nodes=1, wait_s=60)


# --- sampling


def test_a_sample_is_without_replacement_and_in_order() -> None:
    for round in range(1, 50):
        drawn = sample([0, 1, round], 20, 12).tolist()
        assert drawn == sorted(set(drawn))
        assert len(drawn) == 12
        assert set(drawn) <= set(range(20))


def test_a_sample_of_all_is_everybody() -> None:
    assert sample([0, 1, 1], 5, 5).tolist() == [0, 1, 2, 3, 4]


def test_a_sample_depends_on_its_seed_alone() -> None:
    assert sample([3, 1, 4], 1000, 20).tolist() == sample([3, 1, 4], 1000, 20).tolist()
    others = [sample(seed, 1000, 20).tolist() for seed in ([3, 1, 5], [3, 2, 4], [4, 1, 4])]
    assert sample([3, 1, 4], 1000, 20).tolist() not in others


@pytest.mark.parametrize("role", [TRAIN, VALIDATION])
@pytest.mark.parametrize("size", [3, 9, 50])
def test_a_draw_is_a_sample_of_those_who_are_present(role: str, size: int) -> None:
    """As it is drawn from a list of them, which is not made when nobody is left out."""
    roster = Roster({1: Hosting(8, 5), 2: Hosting(6, 4)})
    for silent in ([], [2], [1, 2]):
        roster.note(1, [], silent)
        there = roster.present(role, 2)
        expected = there[sample([0, 1, 2], len(there), min(size, len(there)))]
        np.testing.assert_array_equal(roster.draw(role, 2, [0, 1, 2], size), expected, strict=True)


def test_a_role_that_nobody_has_draws_nobody() -> None:
    assert Roster({1: Hosting(8, 0)}).draw(VALIDATION, 1, [0], 0).tolist() == []


def test_asking_for_more_than_there_are_names_the_key() -> None:
    check_enough("clients-per-round", 7, 7)
    with pytest.raises(ConfigError, match="clients-per-round = 8, but the nodes host only 7 such clients; lower it"):
        check_enough("clients-per-round", 8, 7)
