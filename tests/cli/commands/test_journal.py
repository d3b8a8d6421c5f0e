"""The site commands of `umbel` as a user types them: price, site journal, site log."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from typer.testing import CliRunner

from tests.helpers.errors import ended
from tests.helpers.ledgers import forget
from umbel.cli.main import app
from umbel.privacy.gate.charges import Charge
from umbel.privacy.gate.entry import Entry, outline
from umbel.privacy.gate.journal import Journal, Names
from umbel.privacy.gate.policy import Policy
from umbel.privacy.gate.runs import Runs, digest_of
from umbel.protocol.errors import Refused
from umbel.protocol.release import Clipping, Kind, Release, RowPrivacy

PRICE = "price parameters=11 noise-multiplier=3 hypotheses=5 clients=2062 clients-per-round=100 rounds=100"

BACKWARDS = "price parameters=11 hypotheses=5 clients=2062 clients-per-round=100 target-epsilon=8 participations=4"


def run(command: str, *more: str) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command.split(), *more])
    return done.exit_code, done.output


def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.jsonl"
    Journal.create(path)
    for _ in range(11):
        Journal(path).charge(Charge("7", 1, Release(Kind.TRAIN, 11, 3.0, Clipping.PUBLIC, 0.5)), [0])
    Journal(path).charge(Charge("7", 1, Release(Kind.TRAIN, 11, 3.0, Clipping.UPDATE)), [1])
    return path


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        # An open choice has no guarantee.
        (PRICE, ("median 5, most 18", "median none, most none", "the choice among 5 hypotheses is open", "heuristic")),
        # One participation costs 2 * 11/3 + 1 = 8.333, five of them 41.67, and eighteen 150.
        (
            PRICE + " choice-epsilon=1",
            ("median 41.67, most 150", "between any two data sets of a client", "step size x curvature"),
        ),
        (BACKWARDS, ("median 4, most 4", "epsilon at delta 1e-05", "choice-epsilon")),
    ],
)
def test_price_tells_the_guarantee_or_works_out_its_noise(command: str, lines: tuple[str, ...]) -> None:
    code, output = run(command)
    assert code == 0
    for line in lines:
        assert line in output


def test_price_names_a_figure_that_cannot_be() -> None:
    code, output = run(PRICE.replace("noise-multiplier=3", "noise-multiplier=0"))
    assert code == 2
    assert "noise-multiplier" in output
    assert "[config.impossible-figure]" in output


def test_show_tells_the_guarantee_and_none_where_there_is_none(tmp_path: Path) -> None:
    """Client 0 has eleven participations with a public radius and one hypothesis, client 1 one without."""
    code, output = run("site journal", str(ledger(tmp_path)))
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    assert rows[0][:3] == ["0", "11", "80.67"], "2 * 11/3 each"
    assert 40 < float(rows[0][3]) < 60, "two radii apart"
    assert rows[0][4] == "40.33"
    assert rows[1] == ["1", "1", "none", "none", "3.667"]


def test_brackets_in_a_ledgers_path_are_text(tmp_path: Path) -> None:
    (tmp_path / "[old]").mkdir()
    code, output = run("site journal", str(ledger(tmp_path / "[old]")))
    assert code == 0, output
    assert "[old]" in output


def test_show_names_the_clients_that_no_entry_covers(tmp_path: Path) -> None:
    path, said = ledger(tmp_path), "exact losses of validation clients"
    assert said not in run("site journal", str(path))[1]
    for _ in range(3):
        Runs(path).count_evaluation("run", Policy())
    output = " ".join(run("site journal", str(path))[1].split())
    assert said in output
    assert "in 3 messages" in output


def test_export_writes_every_charge_as_csv(tmp_path: Path) -> None:
    code, output = run("site journal --csv charges", str(ledger(tmp_path)))
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(output)))
    assert len(rows) == 12
    assert [rows[0][key] for key in ("n", "noise_multiplier", "clip_norm")] == ["11", "3.0", "0.5"]
    assert rows[-1]["clip_norm"] == ""


@pytest.mark.parametrize("table", ["clients", "evaluations", "sent", "ended", "requests"])
def test_export_writes_the_other_tables_as_csv(tmp_path: Path, table: str) -> None:
    path = ledger(tmp_path)
    Names(path).extend([], ["anna"])
    runs, hypotheses = Runs(path), {"weight": np.zeros((1, 2), np.float32)}
    runs.count_evaluation("7", Policy())
    runs.record(Entry("7", "train", sent=[("spring", digest_of(hypotheses))]), True)
    runs.end("7", "spring", hypotheses, evaluates=True)
    with pytest.raises(Refused):
        runs.check_approved("7", {"rounds": 3}, "")
    code, output = run("site journal", str(path), "--csv", table)
    assert code == 0
    row = next(csv.DictReader(io.StringIO(output)))
    assert row.get("run", "7") == "7"
    assert row.get("name", "") in ('"anna"', "spring", "")


def test_check_says_whether_the_file_is_whole(tmp_path: Path) -> None:
    path = ledger(tmp_path)
    head = Journal(path).head
    first, second, *_ = run("site journal", str(path))[1].splitlines()
    assert first == f"{path} is an intact journal of 13 lines; its last hash is {head.hash}"
    assert second == "It records 12 charges, in 0 messages"
    path.write_bytes(b"not a ledger")
    code, output = run("site journal", str(path))
    assert code == 1
    assert "[ledger.another-file]" in output


@pytest.mark.parametrize("command", ["site journal", "site log"])
def test_a_file_that_is_not_there_is_not_made(tmp_path: Path, command: str) -> None:
    code, output = run(command, str(tmp_path / "none.jsonl"))
    assert code == 1
    assert "[ledger.missing]" in output
    assert list(tmp_path.iterdir()) == []


def test_create_makes_an_empty_ledger_once(tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    for words in ("site journal --create", "site journal"):
        assert run(words, str(path))[1].startswith(f"{path} is an intact journal of 1 line; ")
    code, output = run("site journal --create", str(path))
    assert code == 1
    assert "[ledger.exists]" in output


# --- copies


def charged(path: Path) -> int:
    return sum(sum(account.values()) for account in Journal(path).accounts().values())


def answer(path: Path, run: str) -> None:
    """Charge client 0 once, and record it, as a site does for a message."""
    entry = Entry(run, "train")
    entry.charge(sum(Journal(path).charge(Charge(run, 1, Release(Kind.TRAIN, 11, 3.0, Clipping.PUBLIC, 0.5)), [0])))
    Journal(path).record(entry, True)


def test_a_backup_has_what_was_charged_and_recorded_while_the_site_works(tmp_path: Path) -> None:
    path, copy = ledger(tmp_path), tmp_path / "copy.jsonl"
    answer(path, "8")
    Journal(path).charge(Charge("8", 2, Release(Kind.TRAIN, 11, 3.0, Clipping.PUBLIC, 0.5)), [0])
    code, output = run("site backup", str(path), str(copy))
    assert (code, output) == (0, f"{copy} is a copy of {path}, with 16 lines\n")
    assert copy.stat().st_mode & 0o077 == 0, "it is the site's alone"
    answer(path, "9")
    assert charged(copy) == 14


def test_a_backup_is_refused_until_what_it_lacks_is_charged(tmp_path: Path) -> None:
    path, copy = ledger(tmp_path), tmp_path / "copy.jsonl"
    answer(path, "8")
    run("site backup", str(path), str(copy))
    answer(path, "9")
    copy.replace(path)
    forget()
    for command in (["site", "journal", str(path)], ["site", "approve", "d" * 32, "--ledger", str(path)]):
        ended(*run(command[0], *command[1:]), "ledger.behind", "umbel site check --repair")


def test_a_backup_never_replaces_another_and_a_failed_one_leaves_nothing(tmp_path: Path) -> None:
    path, copy = ledger(tmp_path), tmp_path / "copy.jsonl"
    assert run("site backup", str(path), str(copy))[0] == 0
    before = copy.read_bytes()
    ended(*run("site backup", str(path), str(copy)), "ledger.exists", "copy.jsonl")
    ended(*run("site backup", str(path), str(tmp_path / "none" / "copy.jsonl")), "ledger.no-copy", "none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
        ended(*run("site backup", str(path), str(tmp_path / "other.jsonl")), "ledger.no-copy", "other")
    assert copy.read_bytes() == before
    assert {file.name for file in tmp_path.glob("*.jsonl")} == {path.name, copy.name}


# --- the site's log


def logged(tmp_path: Path) -> Journal:
    """A journal of three messages: two charges, a refusal, and a part."""
    log = Journal(ledger(tmp_path))
    asked = {"training": {"round": 4, "clients": 2, "noise_multiplier": 3.0, "run": ""}}
    log.record(Entry("7", "train", asked, paid=2), True)
    log.record(Entry("7", "train", asked, reasons=["train: \x1b[31mtoo little noise"]), False)
    log.record(Entry("7", "train", asked, paid=1, reasons=["train: 1 of 2 clients cannot pay any more"]), True)
    return log


def test_log_show_prints_what_was_asked_decided_and_why(tmp_path: Path) -> None:
    code, output = run("site log", str(logged(tmp_path).path))
    assert code == 0
    for text in ("round 4", "clients 2", "answered", "refused", "partly", "cannot pay any more"):
        assert text in output
    assert "\x1b" not in output, "what a server wrote does nothing to a terminal"


def test_log_show_counts_the_parts_of_a_message_that_umbel_does_not_know(tmp_path: Path) -> None:
    log = Journal(ledger(tmp_path))
    log.record(Entry("7", "query", outline(RecordDict({"strange": ConfigRecord({"a": 1})}))), True)
    code, output = run("site log", str(log.path))
    assert code == 0
    assert "others: 1" in output


def test_log_show_leaves_out_what_is_not_asked_for(tmp_path: Path) -> None:
    path = str(logged(tmp_path).path)
    output = run("site log --refused", str(tmp_path / "ledger.jsonl"))[1]  # it takes the ledger for its log
    assert [word in output for word in ("answered", "refused", "partly")] == [False, True, True]
    assert "round 4" in run("site log --since 2020-01-01", path)[1]
    assert "round 4" not in run("site log --since 2999-01-01", path)[1]


def test_a_damaged_journal_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    log = logged(tmp_path)
    log.path.write_bytes(log.path.read_bytes()[:-9] + b"\n")
    code, output = run("site log", str(log.path))
    assert code == 1
    assert "too little noise" in output
    assert "[ledger.damaged]" in output
    assert run("site journal", str(log.path))[0] == 1


def cells(output: str) -> list[list[str]]:
    """Return the cells of a printed table."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]


def test_show_tells_the_guarantee_of_a_row_beside_its_clients(tmp_path: Path) -> None:
    """Client 2 trained by DP-SGD alone; a row of client 0 costs what the client does."""
    path = ledger(tmp_path)
    assert "row" not in run("site journal", str(path))[1]
    rows = RowPrivacy(1.0, 1.0, 0.02, 10.0, 100)
    Journal(path).charge(Charge("7", 2, Release(Kind.TRAIN, 11, 0.0, Clipping.PUBLIC).trained_by(rows)), [2])
    code, output = run("site journal", str(path))
    assert code == 0
    assert "differ by one row, added or removed" in output
    clients = {row[0]: row for row in cells(output)}
    assert clients["2"][2:4] == ["none", "none"]
    assert 0.5 < float(clients["2"][4]) < 2
    assert clients["0"][4] == clients["0"][3]
    assert clients["1"][4] == "none"


def test_show_tells_what_was_spent_to_date_for_releases_without_a_plan(tmp_path: Path) -> None:
    made = Journal.create(tmp_path / "ledger.jsonl")
    for _ in range(20):
        made.charge(Charge("7", 1, Release(Kind.TRAIN, 1, 10.0, Clipping.PUBLIC, mechanism="gaussian")), [0])
    code, output = run("site journal --to-date", str(made.path))
    assert code == 0
    assert "holds at all times at once" in output
    [[_, _, pure, at_delta, to_date, _]] = cells(output)
    assert pure == "none"
    assert float(at_delta) < float(to_date) < 2 * float(at_delta)
