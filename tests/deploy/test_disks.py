"""Full disks at the server and at a site, as real processes meet them.

A limit on the size of their files stands for the disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.deploy.conftest import CLIENTS, SHORT, deployed
from tests.deploy.processes import RUN_S, limit_files, wait_until
from tests.deploy.tampered.sitecustomize import HOLD

pytestmark = [
    pytest.mark.rest(
        twin="tests/privacy/site/test_journal.py::test_a_disk_that_fills_up_after_the_charge_takes_the_outcome_and_then_no_charge"
    ),
    pytest.mark.timeout(5400),
]

CONFIG: dict[str, Any] = SHORT | {
    "wait": "nodes=2", "rounds": 3, "clients_per_round": 2 * CLIENTS, "round_timeout": 900.0,
}  # fmt: skip


def test_what_has_no_room_charges_nobody_and_ends_the_run_which_then_goes_on(tmp_path: Path) -> None:
    """The disk of the south is full in round 3, while the north holds its reply back, then the server's, and then that
    of the server's database."""
    with deployed(tmp_path / "deployment", "north", "south", database=True) as deployment:
        north, south = deployment.nodes.values()

        def replies() -> int:
            """Return how many replies the server has begun to take."""
            return deployment.superlink.log.count("[Fleet.PushMessages] Push replies")

        north.tamper({2: HOLD})
        run = deployment.submit(**CONFIG)
        wait_until("round 2", lambda: 2 in north.rounds_paid(run) and south.has_answered(2, run), RUN_S)
        south.fill_disk()
        before = replies()
        north.tamper({3: HOLD})
        # The north's reply of round 2, and what the south says about round 3: its own log cannot grow now.
        wait_until("refusal", lambda: replies() >= before + 2, RUN_S)
        assert south.ready() == (503, "ledger.disk-full")
        south.fill_disk(False)
        wait_until("readiness", lambda: south.ready() == (200, ""), RUN_S)
        assert south.rounds_paid(run) == [1, 2]

        wait_until("round 3", lambda: 3 in north.rounds_paid(run), RUN_S)
        limit_files(deployment.superlink.server_apps, full=True)
        north.tamper({})
        assert deployment.wait(run) == "finished:failed"
        log = deployment.server_log(run)
        for words in ("[disk.full]", "MiB free", f"resume={run.folder.name!r}"):
            assert words in log
        assert run.rounds == 2, "the last whole round"

        deployment.resume(run, **CONFIG)
        assert deployment.wait(run) == "finished:completed"
        assert [entry["releases"] for entry in run.history][1:4] == [2 * CLIENTS] * 3
        assert [north.rounds_paid(run), south.rounds_paid(run)] == [[1, 2, 3]] * 2
        # What was charged in round 3 before the server's disk was full stays charged.
        assert [len(north.charges), len(south.charges)] == [4 * CLIENTS, 3 * CLIENTS]

        deployment.superlink.fill_disk()
        wait_until("fault", lambda: deployment.ready() == (503, "disk.full"), RUN_S)
        deployment.superlink.fill_disk(False)
        run = deployment.submit(**CONFIG | {"rounds": 1})
        assert deployment.wait(run) == "finished:completed"
        assert run.history[1]["releases"] == 2 * CLIENTS, "no site is lost"
