"""A site that could answer nothing says so before a message comes."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.helpers.paper import ACCEPTED
from umbel.client.readiness import Readiness
from umbel.privacy.site.journal import Journal


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return Journal.create(tmp_path / "ledger.jsonl").path


def code(readiness: Readiness) -> str:
    fault = readiness.fault()
    return fault.code if fault else ""


def test_it_is_ready_while_and_as_soon_as_its_files_are_whole(ledger: Path, caplog: pytest.LogCaptureFixture) -> None:
    readiness = Readiness(ledger)
    assert code(readiness) == ""
    whole = ledger.read_bytes()
    ledger.write_bytes(b"SQLite format 3\0")
    assert [code(readiness), code(readiness)] == ["ledger.another-file"] * 2
    ledger.unlink()
    assert code(readiness) == "ledger.behind"
    ledger.write_bytes(whole)
    assert code(readiness) == ""
    with ledger.open("ab") as log:
        log.write(b"something else\n")
    assert code(readiness) == "ledger.damaged"
    told = [line for line in caplog.messages if "ready" in line]
    assert [line.rpartition("[")[2].rstrip("]") for line in told] == [
        "ledger.another-file", "ledger.behind", "This site is ready again", "ledger.damaged",
    ]  # fmt: skip


@pytest.mark.parametrize("file", ["journal", "witness", "folder"])
def test_a_disk_that_becomes_read_only_is_a_reason_although_no_file_changes(
    ledger: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readiness = Readiness(ledger)
    assert code(readiness) == ""
    path = {"journal": ledger, "witness": Journal(ledger).witness.path, "folder": ledger.parent}[file]
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda one, mode: one != path)
        assert code(readiness) == "site.permissions"
    assert code(readiness) == ""


def test_a_full_disk_is_a_reason_until_there_is_room(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readiness, before = Readiness(ledger), ledger.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
        assert code(readiness) == "ledger.disk-full"
    assert code(readiness) == ""
    assert ledger.read_bytes() == before, "nothing is written"


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


def test_a_site_that_makes_its_ledger_itself_needs_none_before_the_first_message_but_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(**entries: object) -> str:
        readiness = Readiness.of({"data-path": str(tmp_path), **entries})
        assert readiness
        return code(readiness)

    assert first() == ""
    assert first(**{"ledger-path": str(tmp_path / "ledger.jsonl"), "budget": 1.0}) == "ledger.missing"
    monkeypatch.setenv("UMBEL_HOME", str(tmp_path))
    monkeypatch.setattr("umbel.protocol.home.free_space", lambda _: 0)
    assert first() == "disk.full"
