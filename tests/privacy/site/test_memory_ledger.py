"""A ledger in memory: clients pay apart, and it travels with a node's state. What limits mean is in test_ledger.py."""

from __future__ import annotations

import pickle
from collections import defaultdict
from fractions import Fraction

from flwr.app import RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.ledgers import participations, spent
from umbel.privacy.site.charges import Charge
from umbel.privacy.site.totals import Totals
from umbel.protocol.release import Clipping, Kind, Release


def of(cost: Fraction | None) -> Charge:
    """Return a charge of the given cost, whose denominator is not above 1000."""
    n, nu = (11, 0.0) if cost is None else (cost.numerator, float(cost.denominator))
    return Charge("run", 1, Release(Kind.TRAIN, n, nu, Clipping.UPDATE))


def price(n: int, nu: float) -> Fraction | None:
    return Release(Kind.TRAIN, n, nu, Clipping.UPDATE).paper_cost


prices = st.one_of(
    st.none(), st.builds(price, st.integers(1, 2_000_000), st.sampled_from([0.001, 0.1, 1.0, 3.0, 5.0, 1e9]))
)
clients = st.one_of(st.integers(0, 5), st.sampled_from([2**62, 2947]))
rounds = st.lists(st.tuples(st.lists(clients, unique=True, max_size=5), prices), max_size=12)


@settings(max_examples=examples(40))
@given(rounds)
def test_each_client_pays_for_itself_alone(rounds: list[tuple[list[int], Fraction | None]]) -> None:
    ledger = Totals(RecordDict())
    paid: defaultdict[int, list[Fraction | None]] = defaultdict(list)
    for asked, cost in rounds:
        ledger.charge(of(cost), asked)
        for client in asked:
            paid[client].append(cost)
    for client in [*range(6), 2947, 2**62]:
        finite = [cost for cost in paid[client] if cost is not None]
        assert participations(ledger, client) == len(paid[client])
        assert spent(ledger, client) == (float("inf") if len(finite) < len(paid[client]) else sum(finite))


@settings(max_examples=examples(40))
@given(rounds)
def test_the_ledger_survives_the_ways_a_state_travels(rounds: list[tuple[list[int], Fraction | None]]) -> None:
    """Between rounds Ray pickles a node's state, and a SuperNode keeps it as a protobuf message."""
    stays, moved = Totals(RecordDict()), RecordDict()
    for asked, cost in rounds:
        stays.charge(of(cost), asked)
        Totals(moved).charge(of(cost), asked)
        moved = recorddict_from_proto(recorddict_to_proto(pickle.loads(pickle.dumps(moved))))
    for client in [*range(6), 2947, 2**62]:
        assert spent(Totals(moved), client) == spent(stays, client)
        assert participations(Totals(moved), client) == participations(stays, client)


def test_the_ledger_of_another_node_is_another_and_the_rest_of_the_state_is_left_alone() -> None:
    here, there = RecordDict(), RecordDict()
    Totals(here).charge(of(Fraction(1)), [0])
    assert spent(Totals(there), 0) == 0
    assert (list(here), list(there)) == (["umbel.ledger"], [])
