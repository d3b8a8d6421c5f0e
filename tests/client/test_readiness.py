"""A site that could answer nothing says so before a message comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.paper import ACCEPTED
from umbel.client.readiness import Readiness
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.site_log import Entry, SiteLog
from umbel.privacy.gate.store import Reserve, beside


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return Ledger.create(tmp_path / "ledger.sqlite").path


def code(readiness: Readiness) -> str:
    fault = readiness.fault()
    return fault.code if fault else ""


def test_it_is_ready_while_its_files_are_whole_and_again_once_they_are(
    ledger: Path, caplog: pytest.LogCaptureFixture
) -> None:
    readiness = Readiness(ledger)
    assert code(readiness) == ""
    whole = ledger.read_bytes()
    ledger.write_bytes(b"SQLite format 3\0")
    assert [code(readiness), code(readiness)] == ["ledger.another-file"] * 2
    ledger.unlink()
    assert code(readiness) == "ledger.missing"
    ledger.write_bytes(whole)
    assert code(readiness) == ""
    SiteLog(beside(ledger)).answered(Entry("7", "train"), True)
    with beside(ledger).open("ab") as log:
        log.write(b"something else\n")
    assert code(readiness) == "log.broken-chain"
    told = [line for line in caplog.messages if "ready" in line]
    assert [line.rpartition("[")[2].rstrip("]") for line in told] == [
        "ledger.another-file", "ledger.missing", "This site is ready again", "log.broken-chain",
    ]  # fmt: skip


def test_a_full_disk_is_a_reason_until_there_is_room(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readiness, free = Readiness(ledger), [1 << 40]
    monkeypatch.setattr("umbel.privacy.gate.store.free_space", lambda _: free[0])
    assert code(readiness) == ""
    assert Reserve(ledger).path.stat().st_size == 1 << 20
    free[0] = 0
    assert code(readiness) == "disk.full"
    free[0] = 1 << 40
    assert code(readiness) == ""


@pytest.mark.parametrize("path", ["ledger.sqlite", "ledger.sqlite.log.jsonl", ""])
def test_a_disk_that_becomes_read_only_is_a_reason_although_no_file_changes(
    ledger: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    SiteLog(beside(ledger)).answered(Entry("7", "train"), True)
    readiness = Readiness(ledger)
    assert code(readiness) == ""
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda one, mode: one != ledger.parent / path)
        assert code(readiness) == "site.permissions"
    assert code(readiness) == ""


def test_a_policy_that_becomes_invalid_and_data_that_go_are_reasons_until_they_are_whole(
    tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ACCEPTED:  # the environment of tests, which the file does not accept
        monkeypatch.delenv(f"UMBEL_{key.replace('-', '_').upper()}", raising=False)
    data, policy = tmp_path / "data", tmp_path / "policy.toml"
    data.mkdir()
    whole = f"data-path = '{data}'\nledger-path = '{ledger}'\n# end\n"
    policy.write_text(whole)
    policy.chmod(0o600)
    readiness = Readiness.of({"policy-file": str(policy)})
    assert readiness
    assert code(readiness) == ""
    for text, reason in [("budgett = 1\n" + whole, "site.unknown-key"), (whole[:-6], "site.policy-cut")]:
        policy.write_text(text)
        assert code(readiness) == reason
    policy.write_text(whole)
    assert code(readiness) == ""
    data.rmdir()
    assert code(readiness) == "site.no-data"


def test_a_site_that_makes_its_ledger_itself_needs_none_before_the_first_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"data-path": str(tmp_path)}
    first = Readiness.of(own)
    assert first
    assert code(first) == ""
    named = Readiness.of(own | {"ledger-path": str(tmp_path / "ledger.sqlite"), "budget": 1.0})
    assert named
    assert code(named) == "ledger.missing"


def test_a_full_disk_is_a_reason_also_before_the_first_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_HOME", str(tmp_path))
    monkeypatch.setattr("umbel.privacy.gate.store.free_space", lambda _: 0)
    readiness = Readiness.of({"data-path": str(tmp_path)})
    assert readiness
    assert code(readiness) == "disk.full"


def test_another_process_looks_and_writes_nothing(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looking, free = Readiness(ledger, keeps=False), [1 << 40]
    monkeypatch.setattr("umbel.privacy.gate.store.free_space", lambda _: free[0])
    assert code(looking) == ""
    assert [file.name for file in ledger.parent.iterdir()] == [ledger.name]
    free[0] = (2 << 20) - 1  # too little to keep room, and as much besides
    assert code(looking) == "disk.full"
