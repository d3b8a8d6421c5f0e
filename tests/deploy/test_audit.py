"""The audit that every deployment ends with finds what it looks for."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.deploy.audit import audit
from tests.deploy.processes import Run
from umbel.protocol.tasks import Hosting
from umbel.server.run_folder import RunFolder

LATE, FIRST = 3, 7
"""Two nodes; the one with the lower number joined later, so that its clients come after the other's."""


def run_with(folder: Path, releases: list[int], participations: dict[int, int]) -> Run:
    """Leave the folder of a run that went on once: releases of each round, and how often each client was used."""
    run = Run(folder, ["5", "6"])
    left = RunFolder(folder / "run-000005")
    left.write_config({})
    left.write_nodes([(FIRST, Hosting(2, 0)), (LATE, Hosting(1, 0))])
    lines = [json.dumps({"number": number, "releases": count}) for number, count in enumerate(releases, 1)]
    (left.path / "history.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (left.path / "participations.jsonl").write_text(json.dumps(participations) + "\n", encoding="utf-8")
    return run


def site(node: int, *charges: tuple[str, int, int]) -> Any:
    """Return a site whose ledger holds charges: run, round and client."""
    rows = [{"run": run, "round": round, "client": client, "kind": "train"} for run, round, client in charges]
    return SimpleNamespace(node_id=str(node), charges=rows)


FIRST_PAID = site(FIRST, ("5", 1, 0), ("5", 1, 1), ("6", 2, 0), ("6", 2, 1))
LATE_PAID = site(LATE, ("6", 2, 0))


@pytest.mark.parametrize(
    ("releases", "participations", "sites", "fault"),
    [
        ([2, 2], {0: 2, 1: 1, 2: 1}, [FIRST_PAID, LATE_PAID], ""),
        ([3, 2], {0: 2, 1: 2, 2: 1}, [FIRST_PAID, LATE_PAID], "round 1 used what nobody paid for"),
        ([2, 2], {0: 2, 1: 1, 2: 1}, [FIRST_PAID, site(LATE, ("9", 2, 0))], "client 0 of node 3 paid 0 times"),
        ([1, 2], {0: 1, 2: 2}, [FIRST_PAID, LATE_PAID], "client 0 of node 3 paid 1 times and was used 2 times"),
        ([2, 2], {0: 1, 1: 1, 2: 1}, [FIRST_PAID, LATE_PAID], "a release counts once"),
    ],
)
def test_what_the_ledgers_do_not_cover_is_found(
    tmp_path: Path, releases: list[int], participations: dict[int, int], sites: list[Any], fault: str
) -> None:
    with pytest.raises(AssertionError, match=fault) if fault else nullcontext():
        audit(run_with(tmp_path, releases, participations), sites)
    audit(Run(tmp_path / "none", ["5"]), [FIRST_PAID])  # a run without a round has used nothing
