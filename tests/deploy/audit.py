"""What must be true after every run, whatever has died, lied or come too late meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from umbel.nodes.roster import TRAIN, Roster
from umbel.server.run_folder import RunFolder

if TYPE_CHECKING:
    from tests.deploy.processes import Member, Run


def audit(run: Run, nodes: Iterable[Member]) -> None:
    """Fail unless the sites' ledgers cover all that the server has used of a run.

    A charge is written before a release is drawn, and is of one client in one round: where the server has used no more
    releases than there are charges, of any client and in any round, it has used none twice and none that nobody
    paid for.
    """
    if not run.history:
        return
    ledgers = {int(node.node_id): node.charges for node in nodes if node.node_id}
    charges = [
        (node, row["client"], row["round"])
        for node, rows in ledgers.items()
        for row in rows
        if row["run"] in run.ids and row["kind"] in ("train", "site", "secure")
    ]

    of_round = Counter(round for *_, round in charges)
    for entry in run.history:
        assert entry["releases"] <= of_round[entry["number"]], f"round {entry['number']} used what nobody paid for"

    of_client = Counter((node, client) for node, client, _ in charges)
    hosting = RunFolder(run.folder).read_nodes()
    # As the server numbers them: those that joined later follow the others.
    roster = Roster.resumed(hosting, Roster(dict(hosting)))
    clients = np.array(sorted(run.participations), np.int64)
    for node, (positions, locals_) in roster.place(TRAIN, clients).items():
        for position, client in zip(positions, locals_, strict=True):
            used, paid = run.participations[clients[position]], of_client[node, client]
            assert used <= paid, f"client {client} of node {node} paid {paid} times and was used {used} times"

    assert sum(entry["releases"] for entry in run.history) == run.releases, "a release counts once"
