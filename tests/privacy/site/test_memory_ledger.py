"""A ledger in memory: clients pay apart, and it travels with a node's state. For limits see `test_journal.py`."""

from __future__ import annotations

import math
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

CLIENTS = [*range(6), 2947, 2**62]
releases = st.builds(
    Release,
    st.just(Kind.TRAIN),
    st.integers(1, 2_000_000),
    st.sampled_from([0.0, 0.001, 0.1, 1.0, 3.0, 5.0, 1e9]),
    st.just(Clipping.UPDATE),
)
rounds = st.lists(st.tuples(st.lists(st.sampled_from(CLIENTS), unique=True, max_size=5), releases), max_size=12)


@settings(max_examples=examples(40))
@given(rounds)
def test_each_client_pays_for_itself_alone_however_the_state_travels(rounds: list[tuple[list[int], Release]]) -> None:
    """Between rounds Ray pickles a node's state, and a SuperNode keeps it as a protobuf message."""
    stays, moved = RecordDict(), RecordDict()
    paid: defaultdict[int, list[Fraction | None]] = defaultdict(list)
    for asked, release in rounds:
        for state in (stays, moved):
            Totals(state).charge(Charge("run", 1, release), asked)
        moved = recorddict_from_proto(recorddict_to_proto(pickle.loads(pickle.dumps(moved))))
        for client in asked:
            paid[client].append(release.paper_cost)
    for state in (stays, moved):
        for client in CLIENTS:
            costs = [math.inf if cost is None else cost for cost in paid[client]]
            assert participations(Totals(state), client) == len(costs)
            assert spent(Totals(state), client) == sum(costs)
        assert list(state) in ([], ["umbel.ledger"]), "the rest of the state is left alone"
