"""`umbel server status` and `umbel server status`: what the operator of a run sees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from umbel.cli.main import app
from umbel.protocol.presence import Presence
from umbel.server.run_folder import RunFolder
from umbel.server.status import SiteStatus, Status

NOON = 1_790_000_000.0


def umbel(*words: str, code: int = 0) -> str:
    told = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(words), prog_name="umbel")
    assert told.exit_code == code, told.output
    return told.output


def site(name: str, presence: Presence = Presence.ONLINE, **refusals: int) -> SiteStatus:
    codes = {f"refused.{reason}" if reason != "untold" else "": times for reason, times in refusals.items()}
    since = 0 if presence is Presence.ONLINE else NOON
    return SiteStatus(
        name=name, presence=presence, since=since, seen=NOON, training=206, validation=12, releases=41, refusals=codes
    )


@pytest.fixture
def folder(umbel_home: Path, kept: Path) -> RunFolder:
    """A run of three rounds over."""
    folder = umbel_home / "runs" / "20260101-100000-one"
    shutil.copytree(kept, folder)
    return RunFolder(folder)


def write(folder: RunFolder, *sites: SiteStatus, ended: str = "", **more: float) -> None:
    (folder.path / "outcome.json").write_text(json.dumps({"stopped": ended}))
    folder.write_status(Status(round=4, rounds=20, pause_below=2, written=NOON, sites=sites, **more))  # type: ignore[arg-type]


def test_sites_are_listed_with_state_and_reasons(folder: RunFolder) -> None:
    write(folder, site("north"), site("south\x1b[31m", Presence.REFUSED, noise=2, untold=1))
    text = umbel("server", "status")
    north, south = [line for line in text.splitlines() if "206" in line]
    assert "online" in north
    assert "41" in north
    assert "refused since" in south
    assert "2 x refused.noise, 1 x no reason told" in south
    assert "\x1b[31m" not in text


def test_the_status_says_what_a_run_waits_for_and_until_when(folder: RunFolder) -> None:
    write(folder, site("north"), site("south", Presence.OFFLINE), paused=NOON, ends=NOON + 86400)
    text = " ".join(umbel("server", "status").split())
    assert "3 of 20 done" in text
    assert "1 of 2 can be asked; a round needs 2 sites" in text
    assert "paused" in text
    assert "time left" not in text


def test_the_status_of_a_run_that_is_over_says_why_it_ended(folder: RunFolder) -> None:
    write(folder, site("north"), ended="all 20 rounds done")
    text = umbel("server", "status")
    assert "all 20 rounds done" in text
    assert "time left" not in text
    write(folder, site("north"))
    assert "time left" in umbel("server", "status")


def test_a_simulation_has_no_sites(folder: RunFolder) -> None:
    assert "[config.status]" in umbel("server", "status", code=2)
