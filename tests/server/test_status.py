"""The status of a run at real sites, saved after each round and in a pause."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.errors import raises
from umbel.nodes.roster import Roster
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import Hosting
from umbel.server.run_folder import RunFolder
from umbel.server.status import FILE, status_of


@pytest.fixture
def roster() -> Roster:
    """Site south hosts clients 0 and 1, node 9 client 2; a third has no training client."""
    found = Roster({5: Hosting(2, 0), 9: Hosting(1, 1), 11: Hosting(0, 3)})
    found.names.learn({5: "south", 11: "west"})
    return found


def test_each_site_has_its_state_its_releases_and_its_refusals(roster: Roster) -> None:
    for code in ("refused.noise", "refused.noise", "", "refused.waits"):
        roster.note(1, [5], [], {9: code})
    roster.see([5, 9])
    status = status_of(RunConfig(rounds=7, wait="below=2"), roster, 3, np.array([2, 0, 1]))
    assert (status.round, status.rounds, status.pause_below, status.paused) == (3, 7, 2, 0)
    south, ninth, west = status.sites
    assert (south.name, south.presence, south.releases, south.refusals) == ("south", "online", 2, {})
    assert (ninth.name, ninth.presence, ninth.releases) == ("node 9", "refused", 1)
    assert ninth.refusals == {"refused.noise": 2, "": 1, "refused.waits": 1}
    assert (west.presence, west.training, west.validation, west.seen) == ("offline", 0, 3, 0)
    assert 0 < ninth.since <= ninth.seen <= west.since <= status.written


def test_a_site_makes_it_no_longer_by_its_name_or_by_codes_that_it_makes_up(roster: Roster, tmp_path: Path) -> None:
    roster.names.learn({5: "\U000e0001" * 1000})
    for round in range(1, 201):
        roster.note(round, [], [], {5: f"refused.{'a' * (round % 40)}{'b' * (round // 40)}"})
    folder = RunFolder(tmp_path)
    folder.write_status(status_of(RunConfig(), roster, 1, np.zeros(3, int)))
    [fifth, *_] = folder.read_status().sites
    assert sum(fifth.refusals.values()) == 200
    assert len(fifth.refusals) == 51
    assert (tmp_path / FILE).stat().st_size < 10_000


@pytest.mark.parametrize("change", [{}, {"round": "x"}, {"written": math.nan}, {"more": 1}, {"sites": [{"name": "a"}]}])
def test_it_is_read_as_it_was_written_and_else_refused(roster: Roster, tmp_path: Path, change: dict[str, Any]) -> None:
    status, folder = status_of(RunConfig(), roster, 1, np.zeros(3, int), paused=10.0, ends=20.0), RunFolder(tmp_path)
    with raises(ConfigError, "config.status", "simulation"):
        folder.read_status()
    folder.write_status(status)
    assert folder.read_status() == status
    (tmp_path / FILE).write_text(json.dumps(status.model_dump(mode="json") | change))
    with raises(ConfigError, "config.status", FILE) if change else nullcontext():
        folder.read_status()
