"""A server's metrics, and the alerts and the dashboard that read them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.console.test_metrics import WHY_PUBLIC as OF_SITES
from tests.helpers.history import a_round
from tests.helpers.series import values_of
from tests.helpers.sources import ROOT
from umbel.cli.main import parts
from umbel.deploy.metrics import series
from umbel.protocol.metrics import exposition
from umbel.protocol.presence import Presence
from umbel.protocol.run_config import RunConfig
from umbel.server.run_folder import RunFolder
from umbel.server.status import RunState, SiteStatus, Status

WHY_PUBLIC = {
    "umbel_run_state": "every site notices when a run ends",
    "umbel_run_round": "every site sees it in each message",
    "umbel_run_rounds": "every site sees it in the run config",
    "umbel_run_round_seconds": "sites see when messages come",
    "umbel_run_stage_seconds": "sites see when messages come, and the server computes on what they sent",
    "umbel_run_paused": "depends on the sites that are there",
    "umbel_run_written_timestamp_seconds": "a time",
    "umbel_run_sites": "the sites that are there",
    "umbel_run_releases_total": "the server asked for them and got them",
    "umbel_run_refusals_total": "codes of messages, policy and participations alone",
    "umbel_server_database_bytes": "depends on the machine",
    "umbel_server_disk_free_bytes": "depends on the machine",
    "umbel_server_memory_bytes": "depends on the machine",
    "umbel_server_certificate_days_left": "certificates are public",
}
MONITORING = ROOT / "deploy" / "monitoring"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UMBEL_HOME", str(tmp_path))
    sites = [
        SiteStatus(name=name, presence=state, since=0, seen=0, training=5, validation=0, releases=n, refusals=codes)
        for name, state, n, codes in (
            ("north", Presence.ONLINE, 7, {"refused.waits": 2}), ("south", Presence.OFFLINE, 3, {}),
        )
    ]  # fmt: skip
    for name, written in (("now", time.time()), ("long-ago", time.time() - 1e6)):
        folder = RunFolder.make(tmp_path / "runs", name)
        folder.write_config(RunConfig().entries())
        (folder.path / "history.jsonl").write_text(a_round(0, stages={"pause": 0.5, "sites": 2.0}).line + "\n")
        folder.write_status(
            Status(round=4, rounds=20, pause_below=2, written=written, paused=written, sites=tuple(sites))
        )
    return tmp_path


def test_every_series_is_public_for_a_reason(home: Path) -> None:
    database = home / "state.db"
    database.write_bytes(b"x" * 10)
    (home / "state.db-wal").write_bytes(b"x" * 5)
    found = values_of(series(database, {}))
    assert found.keys() == WHY_PUBLIC.keys()
    assert found["umbel_run_state"] == {
        ("now", "running"): 1, ("now", "completed"): 0, ("now", "stopped"): 0, ("now", "failed"): 0,
    }  # fmt: skip
    assert found["umbel_run_round"] == {("now",): 4}, "a run that ended long ago is left out"
    assert found["umbel_run_stage_seconds"] == {("now", "pause"): 0.5, ("now", "sites"): 2.0}
    assert found["umbel_run_paused"] == {("now",): 1}
    assert found["umbel_run_sites"]["now", "offline"] == 1
    assert found["umbel_run_releases_total"]["now", "north"] == 7
    assert found["umbel_run_refusals_total"] == {("now", "north", "refused.waits"): 2}
    assert found["umbel_server_database_bytes"] == {(): 15}
    done = CliRunner().invoke(parts, ["server-metrics"])
    assert (done.exit_code, 'umbel_run_round{run="now"} 4.0' in done.output) == (0, True), done.output
    # A round after the last is none.
    folder = RunFolder(home / "runs" / "now")
    folder.write_status(folder.read_status().model_copy(update={"round": 21, "state": RunState.COMPLETED}))
    found = values_of(series(None, {}))
    assert found["umbel_run_round"] == found["umbel_run_rounds"] == {("now",): 20}
    assert [found["umbel_run_state"]["now", state] for state in ("completed", "running")] == [1, 0]


def test_a_damaged_run_and_a_journal_that_has_just_gone_hide_no_other_series(home: Path) -> None:
    (home / "runs" / "now" / "history.jsonl").write_text("rubbish\nrubbish\n")
    (home / "runs" / "now").rename(home / "runs" / "x\udcff")
    (home / "state[1].db").write_bytes(b"x" * 10)
    (home / "state[1].db-wal").symlink_to("gone")
    assert values_of(series(home / "state[1].db", {}))["umbel_server_database_bytes"] == {(): 10}
    assert b'umbel_run_round{run="x\\\\udcff"} 4.0' in exposition(lambda: series(None, {})), "a name that is no text"


def test_alerts_and_dashboard_read_series_that_exist() -> None:
    known = {*WHY_PUBLIC, *OF_SITES}
    alerts = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    asked = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    board = json.loads((MONITORING / "dashboard.json").read_text())
    asked += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = [name for expression in asked for name in re.findall(r"umbel_\w+", expression)]
    assert len(asked) > 20
    assert {*named} <= known
    assert known - {*named} <= {
        "umbel_site_releases_total", "umbel_site_clients", "umbel_site_runs_total",
        "umbel_site_last_message_timestamp_seconds",
    }  # fmt: skip
    assert {*re.findall(r'state!?="(\w+)"', " ".join(asked))} <= {str(state) for state in (*Presence, *RunState)}
    rules = {rule["alert"]: rule["expr"] for group in alerts["groups"] for rule in group["rules"]}
    of_runs = {name: asked for name, asked in rules.items() if "umbel_run_" in asked}
    assert of_runs.pop("UmbelRunFailed") == 'umbel_run_state{state="failed"} == 1'
    assert all(asked.endswith('and on(run) umbel_run_state{state="running"} == 1') for asked in of_runs.values())
