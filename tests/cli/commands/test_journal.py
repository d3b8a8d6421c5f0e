"""`umbel site journal`, `site backup` and `site log`: what a site's people read of its journal."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from tests.helpers.cli import refused, said, umbel
from tests.helpers.ledgers import forget
from umbel.privacy.site.charges import Charge
from umbel.privacy.site.entry import Entry, outline
from umbel.privacy.site.journal import Journal, Names
from umbel.privacy.site.policy import Policy
from umbel.privacy.site.runs import Runs, digest_of
from umbel.protocol.errors import Refused
from umbel.protocol.release import Clipping, Kind, Release, RowPrivacy

RELEASE = Release(Kind.TRAIN, 11, 3.0, Clipping.PUBLIC, 0.5)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """A journal of eleven releases of client 0, and of one of client 1 without a public radius."""
    folder = tmp_path / "[old]"  # which is text, and no markup
    folder.mkdir()
    journal = Journal.create(folder / "ledger.jsonl")
    for _ in range(11):
        journal.charge(Charge("7", 1, RELEASE), [0])
    journal.charge(Charge("7", 1, Release(Kind.TRAIN, 11, 3.0, Clipping.UPDATE)), [1])
    return journal.path


def cells(output: str) -> list[list[str]]:
    """Return the cells of a printed table."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]


def test_show_tells_the_guarantee_and_none_where_there_is_none(ledger: Path) -> None:
    told = said("site", "journal", ledger)
    first, second, *_ = told.splitlines()
    assert first == f"{ledger} is an intact journal of 13 lines; its last hash is {Journal(ledger).head.hash}"
    assert second == "It records 12 charges, in 0 messages"
    one, other = cells(told)
    assert one[:3] == ["0", "11", "80.67"], "2 * 11/3 each"
    assert 40 < float(one[3]) < 60, "two radii apart"
    assert one[4] == "40.33"
    assert other == ["1", "1", "none", "none", "3.667"]


def test_show_names_the_clients_that_no_entry_covers(ledger: Path) -> None:
    told = "exact losses of validation clients"
    assert told not in said("site", "journal", ledger)
    for _ in range(3):
        Runs(ledger).count_evaluation("run", Policy())
    assert told in " ".join(said("site", "journal", ledger).split())


def test_show_tells_the_guarantee_of_a_row_beside_its_clients(ledger: Path) -> None:
    """Client 2 trained by DP-SGD alone; a row of client 0 costs what the client does."""
    rows = RowPrivacy(1.0, 1.0, 0.02, 10.0, 100)
    Journal(ledger).charge(Charge("7", 2, Release(Kind.TRAIN, 11, 0.0, Clipping.PUBLIC).trained_by(rows)), [2])
    clients = {row[0]: row for row in cells(said("site", "journal", ledger))}
    assert clients["2"][2:4] == ["none", "none"]
    assert 0.5 < float(clients["2"][4]) < 2
    assert clients["0"][4] == clients["0"][3]
    assert clients["1"][4] == "none"


def test_show_tells_what_was_spent_to_date_for_releases_without_a_plan(tmp_path: Path) -> None:
    made = Journal.create(tmp_path / "ledger.jsonl")
    for _ in range(20):
        made.charge(Charge("7", 1, Release(Kind.TRAIN, 1, 10.0, Clipping.PUBLIC, mechanism="gaussian")), [0])
    [[_, _, pure, at_delta, to_date, _]] = cells(said("site", "journal", "--to-date", made.path))
    assert pure == "none"
    assert float(at_delta) < float(to_date) < 2 * float(at_delta)


def test_export_writes_every_charge_and_the_other_tables_as_csv(ledger: Path) -> None:
    Names(ledger).extend([], ["anna"])
    runs, hypotheses = Runs(ledger), {"weight": np.zeros((1, 2), np.float32)}
    runs.count_evaluation("7", Policy())
    runs.record(Entry("7", "train", sent=[("spring", digest_of(hypotheses))]), True)
    runs.end("7", "spring", hypotheses, evaluates=True)
    with pytest.raises(Refused):
        runs.check_approved("7", {"rounds": 3}, "")

    def exported(table: str) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(said("site", "journal", ledger, "--csv", table))))

    charges = exported("charges")
    assert len(charges) == 12
    assert [charges[0][key] for key in ("n", "noise_multiplier", "clip_norm")] == ["11", "3.0", "0.5"]
    assert charges[-1]["clip_norm"] == ""
    for table, column, value in (
        ("clients", "name", '"anna"'), ("evaluations", "run", "7"), ("sent", "name", "spring"),
        ("ended", "run", "7"), ("requests", "run", "7"),
    ):  # fmt: skip
        assert exported(table)[0][column] == value


@pytest.mark.parametrize("command", ["journal", "log"])
def test_a_file_that_is_not_there_is_not_made(tmp_path: Path, command: str) -> None:
    refused("ledger.missing", "site", command, tmp_path / "none.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_create_makes_an_empty_ledger_once(tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    for words in (("--create",), ()):
        assert said("site", "journal", *words, path).startswith(f"{path} is an intact journal of 1 line; ")
    refused("ledger.exists", "site", "journal", "--create", path)


# --- copies


def answer(path: Path, run: str) -> None:
    """Charge client 0 once, and record it, as a site does for a message."""
    entry = Entry(run, "train")
    entry.charge(sum(Journal(path).charge(Charge(run, 1, RELEASE), [0])))
    Journal(path).record(entry, True)


def test_a_backup_has_what_was_charged_and_recorded_and_is_refused_until_what_it_lacks_is_charged(ledger: Path) -> None:
    copy = ledger.with_name("copy.jsonl")
    answer(ledger, "8")
    Journal(ledger).charge(Charge("8", 2, RELEASE), [0])
    assert said("site", "backup", ledger, copy) == f"{copy} is a copy of {ledger}, with 16 lines\n"
    assert copy.stat().st_mode & 0o077 == 0, "it is the site's alone"
    answer(ledger, "9")
    assert sum(sum(account.values()) for account in Journal(copy).accounts().values()) == 14
    copy.replace(ledger)
    forget()
    for words in (("journal", ledger), ("approve", "d" * 32, "--ledger", ledger)):
        refused("ledger.behind", "site", *words, parts=("umbel site check --repair",))


def test_a_backup_never_replaces_another_and_a_failed_one_leaves_nothing(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, folder = ledger.with_name("copy.jsonl"), ledger.parent
    said("site", "backup", ledger, copy)
    before = copy.read_bytes()
    refused("ledger.exists", "site", "backup", ledger, copy)
    refused("ledger.no-copy", "site", "backup", ledger, folder / "none" / "copy.jsonl")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
    refused("ledger.no-copy", "site", "backup", ledger, folder / "other.jsonl")
    assert copy.read_bytes() == before
    assert {file.name for file in folder.glob("*.jsonl")} == {ledger.name, copy.name}


# --- the site's log


@pytest.fixture
def log(ledger: Path) -> Path:
    """A journal of four messages: an answer, a refusal, a part, and something that umbel does not know."""
    log = Journal(ledger)
    asked = {"training": {"round": 4, "clients": 2, "noise_multiplier": 3.0, "run": ""}}
    log.record(Entry("7", "train", asked, paid=2), True)
    log.record(Entry("7", "train", asked, reasons=["train: \x1b[31mtoo little noise"]), False)
    log.record(Entry("7", "train", asked, paid=1, reasons=["train: 1 of 2 clients cannot pay any more"]), True)
    log.record(Entry("7", "query", outline(RecordDict({"strange": ConfigRecord({"a": 1})}))), True)
    return ledger


def test_the_log_prints_what_was_asked_decided_and_why(log: Path) -> None:
    told = said("site", "log", log)
    for text in ("round 4", "clients 2", "answered", "refused", "partly", "cannot pay any more", "others: 1"):
        assert text in told
    assert "\x1b" not in told, "what a server wrote does nothing to a terminal"
    told = said("site", "log", "--refused", log)
    assert [word in told for word in ("answered", "refused", "partly")] == [False, True, True]
    assert ["round 4" in said("site", "log", "--since", day, log) for day in ("2020-01-01", "2999-01-01")] == [
        True, False,
    ]  # fmt: skip


def test_a_damaged_journal_is_shown_as_far_as_it_goes(log: Path) -> None:
    log.write_bytes(log.read_bytes()[:-9] + b"\n")
    code, told = umbel("site", "log", log)
    assert (code, "too little noise" in told, "[ledger.damaged]" in told) == (1, True, True)
    refused("ledger.damaged", "site", "journal", log)
    log.write_bytes(b"not a ledger")
    refused("ledger.another-file", "site", "journal", log)
