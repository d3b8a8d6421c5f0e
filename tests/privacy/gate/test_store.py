"""A site's store: made and migrated in one step, with nothing lost that umbel 0.1 kept in three files."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sqlite3
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.helpers.errors import raises
from tests.helpers.paper import paper_run
from umbel.cli.main import app
from umbel.privacy.accounting.guarantee import guarantee, pure_spent
from umbel.privacy.gate.charges import Charge, paper_spent
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.runs import Runs, Status
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.site_log import SiteLog
from umbel.privacy.gate.store import Names, Store, beside, request_of
from umbel.protocol.errors import LedgerError, Refused
from umbel.protocol.release import Clipping, Kind, Release
from umbel.protocol.run_config import RunConfig

SAVED = Path(__file__).parents[2] / "saved_state"
EXPECTED: dict[str, Any] = json.loads((SAVED / "expected.json").read_text(encoding="utf-8"))
SITES = sorted(EXPECTED["sites"])


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved-state")
    with tarfile.open(SAVED / "state.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(params=SITES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = EXPECTED["sites"][name]
    return found


@pytest.fixture
def path(unpacked: Path, tmp_path: Path, name: str) -> Path:
    """A ledger as umbel 0.1 left it, with what lay beside it."""
    return shutil.copytree(unpacked / "sites" / name, tmp_path / name) / "ledger.sqlite"


def release_of(entry: dict[str, Any]) -> Release:
    """Return a release that umbel 0.1 told of."""
    entry = {"clipping" if key == "radius_mode" else key: value for key, value in entry.items()}
    return Release(**entry | {"kind": Kind(entry["kind"]), "clipping": Clipping(entry["clipping"])})


def words_of(value: Any) -> str:
    return "none" if value == float("inf") else str(value)


def test_what_every_client_spent_is_as_it_was(path: Path, expected: dict[str, Any]) -> None:
    accounts = Ledger(path, whole=True).accounts()
    assert {str(client) for client in accounts} == set(expected["clients"])
    for client, account in accounts.items():
        told = expected["clients"][str(client)]
        assert list(account.items()) == [(release_of(entry), times) for entry, times in told["releases"]]
        assert words_of(paper_spent(account)) == told["paper"]
        for delta, epsilon in told["epsilon"].items():
            found = guarantee(account, float(delta))
            assert (found and found.epsilon) == (epsilon if epsilon is None else pytest.approx(epsilon, rel=1e-9))
        assert (words_of(pure_spent(account)) if guarantee(account) else "none") == told["pure"]
    with sqlite3.connect(path) as connection:
        [(charges, head)] = connection.execute("SELECT charges, hash FROM head").fetchall()
    assert (charges, head.hex()) == (expected["charges"], expected["head"]), "the chain is the one that was written"


def test_who_can_pay_for_one_more_release_is_as_it_was(path: Path, name: str, expected: dict[str, Any]) -> None:
    limits = Site.of(next(iter(expected["nodes"].values()))).limits
    Ledger(path)
    for probe in expected["next"].values():
        copy = shutil.copy(path, path.with_name("probe.sqlite"))
        paid = Ledger(copy).charge(Charge("probe", 1, release_of(probe["release"])), probe["clients"], limits)
        assert list(map(int, paid)) == probe["paid"]


def test_the_charges_are_exported_as_they_were(path: Path, name: str, unpacked: Path) -> None:
    words = {"radius": "clip_norm", "radius_mode": "clipping"}
    before = csv.DictReader((unpacked / "exports" / f"{name}.csv").read_text().splitlines())
    done = CliRunner().invoke(app, ["ledger", "export", str(path)])
    expected = [{words.get(key, key): value for key, value in row.items()} for row in before]
    assert list(csv.DictReader(io.StringIO(done.output))) == expected


def test_the_log_is_as_it_was_and_agrees_with_the_ledger(path: Path, expected: dict[str, Any]) -> None:
    lines = list(SiteLog(beside(path)).lines())
    assert (len(lines), lines[-1]["hash"]) == (expected["log"]["lines"], expected["log"]["head"])
    assert Counter(line["decision"] for line in lines) == expected["log"]["decisions"]
    assert sum(line["paid"] for line in lines) == expected["log"]["paid"]
    done = CliRunner().invoke(app, ["log", "check", str(path)])
    assert done.exit_code == 0
    assert done.output.splitlines()[1:] == expected["log check"][1:]
    assert CliRunner().invoke(app, ["log", "show", str(path)]).exit_code == 0


def test_what_runs_asked_and_people_decided_is_as_it_was(path: Path, expected: dict[str, Any]) -> None:
    requests = Runs(path).requests()
    told = [(one.run, one.status, one.asks["n"]) for one in requests]
    assert told == [(one["run"], one["status"], one["n"]) for one in expected["requests"]]
    store = Store(path)
    evaluations = [[row["node"], row["run"], row["messages"]] for row in store.table("evaluations")]
    assert evaluations == expected["evaluations"]
    sent = Counter((row["run"], row["name"]) for row in store.table("sent"))
    assert sent == {(run, of): many for run, of, many in expected["sent"]}
    assert [row["run"] for row in store.table("ended")] == expected["ended"]
    listed = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["approvals", "list", "--all", "--ledger", str(path)])
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in listed.output.splitlines()]
    found = [row for row in rows if row and row[0].startswith(("asked", "price of a participation"))]
    assert all("every round" in row[0] for row in expected["prices"][2::3]), "which nothing enforced"
    expected["prices"] = [row for i, row in enumerate(expected["prices"]) if i % 3 < 2]
    changed = [(one[1], other[1]) for one, other in zip(found, expected["prices"], strict=True) if one != other]
    # The price of a site's release among several hypotheses is worked out more closely.
    closer = [
        (now, before)
        for now, before in changed
        if before.replace("at delta 1e-05: 0.9;", "at delta 1e-05: 0.891;") == now
    ]
    # The price of a message that asks for less noise than its run's settings say was theirs.
    noise = [
        float(one.asks["differs"]["noise_multiplier"]) for one in requests if "noise_multiplier" in one.asks["differs"]
    ]
    own = [(now, before) for now, before in changed if any(now.endswith(f" {2 / nu:g}") for nu in noise)]
    assert len(own) == len(noise)
    assert sorted(changed) == sorted(closer + own)


def test_a_request_is_known_by_todays_words(unpacked: Path, tmp_path: Path) -> None:
    """What was approved stays approved, where the run config is the same but for the names of settings."""
    path = shutil.copytree(unpacked / "sites" / "north", tmp_path / "north") / "ledger.sqlite"
    runs = Runs(path)
    approved = [request for request in runs.requests() if request.status is Status.APPROVED]
    assert approved
    for request in approved:
        runs.check_approved("a new run", request.asks, "")
    said = {"dataset": "", "model": "linear", "restarts": 1, "node-wait": 0.2, "device": "cpu"}
    asks = {"config": RunConfig.parse(paper_run() | said | {"rounds": 9}).unsigned(), "n": 2, "differs": {}}
    runs.check_approved("another", asks, "")
    asks["config"] |= {"noise-multiplier": 7.0, "rounds": 100}
    with raises(Refused, "refused.by-people", "another"):
        runs.check_approved("another", asks, "")


@pytest.mark.parametrize(
    ("first", "second", "after"),
    [
        ("approved", "refused", Status.REFUSED),
        ("refused", "approved", Status.REFUSED),
        ("waiting", "approved", Status.APPROVED),
        ("waiting", "waiting", Status.WAITING),
    ],
)
def test_requests_that_are_one_in_todays_words_become_one(north: Path, first: str, second: str, after: Status) -> None:
    """A server could ask for a model by its old and its new name, and no migration may fail for that."""
    with sqlite3.connect(f"{north}.runs.sqlite") as connection:
        [(text,)] = connection.execute("SELECT asks FROM requests WHERE id = 1").fetchall()
        for model, status in (("linear-7x1", first), ("linear inputs=7 outputs=1", second)):
            asks = json.loads(text)
            asks["config"]["model"] = model
            digest, text = request_of(asks)
            row = digest, status, text
            connection.execute("INSERT INTO requests (digest, at, run, status, asks) VALUES (?, '', '1', ?, ?)", row)
    found = [one.status for one in Runs(north).requests() if one.asks["config"]["model"] == "linear inputs=7 outputs=1"]
    assert found == [after]


def test_the_files_beside_the_ledger_are_taken_over_once(path: Path) -> None:
    Store(path)
    assert not path.with_name("ledger.sqlite.runs.sqlite").exists()
    kept = path.with_name("ledger.sqlite.runs.sqlite.taken-over")
    assert kept.exists()
    path.unlink()
    assert Runs.create(path).requests() == [], "what was decided since may be otherwise"


# --- faults while a ledger is migrated


@pytest.fixture
def north(unpacked: Path, tmp_path: Path) -> Path:
    return shutil.copytree(unpacked / "sites" / "north", tmp_path / "old") / "ledger.sqlite"


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("ledger.sqlite*") if file.is_file()}


def by_hand(path: Path, change: str) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(change)
    connection.close()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("UPDATE charges SET radius = 30 WHERE id = 2", "charge 2"),
        ("UPDATE releases SET what = replace(what, '5.0', '9.0')", "totals"),
        ("DELETE FROM charges WHERE id = 69", "68 of 69"),
        ("DELETE FROM head", ""),
        ("DROP TABLE totals", ""),
    ],
)
def test_a_damaged_ledger_of_umbel_0_1_is_refused(north: Path, change: str, part: str) -> None:
    by_hand(north, change)
    with raises(LedgerError, "ledger.damaged", part):
        Ledger(north)


def zeros(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(4096) + content[8192:])


def runs_of_another_program(path: Path) -> None:
    path.with_name("ledger.sqlite.runs.sqlite").write_bytes(b"text")


def runs_damaged(path: Path) -> None:
    zeros(path.with_name("ledger.sqlite.runs.sqlite"))


def names_cut_off(path: Path) -> None:
    path.with_name("ledger.sqlite.clients.json").write_text('["anna", ')


@pytest.mark.parametrize("fault", [zeros, runs_of_another_program, runs_damaged, names_cut_off])
def test_what_cannot_be_migrated_is_left_as_it_is(north: Path, fault: Any) -> None:
    fault(north)
    before = files(north.parent)
    for kind in (Ledger, Runs, Names):
        with raises(LedgerError, "ledger.damaged"):
            kind(north)
    assert files(north.parent) == before


def test_a_migration_that_is_cut_off_leaves_the_ledger_of_before(north: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(north.parent)

    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("umbel.privacy.gate.store._add_names", full)
        north.with_name("ledger.sqlite.clients.json").write_text('["anna"]')
        with pytest.raises(LedgerError):
            Ledger(north)
        north.with_name("ledger.sqlite.clients.json").unlink()
    assert files(north.parent) == before
    assert sum(sum(account.values()) for account in Ledger(north, whole=True).accounts().values()) == 69


@pytest.mark.parametrize("kind", [Ledger, Runs])
def test_a_migration_that_was_killed_while_it_was_committed_is_done_again(north: Path, kind: type[Store]) -> None:
    """The file's header is of today, and SQLite's journal has that of before."""
    connection = sqlite3.connect(north, isolation_level=None)
    connection.execute("PRAGMA cache_size = 1")  # so that pages are written before the end
    connection.executescript("BEGIN IMMEDIATE; PRAGMA user_version = 4; UPDATE charges SET at = 'late';")
    half, journal = bytearray(north.read_bytes()), Path(f"{north}-journal").read_bytes()
    connection.close()
    half[60:64] = (4).to_bytes(4, "big")
    north.write_bytes(half)
    Path(f"{north}-journal").write_bytes(journal)
    kind(north)
    assert sum(sum(account.values()) for account in Ledger(north, whole=True).accounts().values()) == 69
    assert Runs(north).requests()


def test_what_umbel_0_1_kept_without_a_ledger_goes_into_a_new_one(unpacked: Path, tmp_path: Path) -> None:
    """A site may have been asked, and have numbered its clients, before its first charge."""
    path = shutil.copytree(unpacked / "sites" / "west", tmp_path / "west") / "ledger.sqlite"
    path.unlink()
    Ledger.create(path)
    assert Names(path).read() == ["anna", "bert", "carl", "aaron"]
    assert {row["run"] for row in Store(path).table("sent")}


# --- a ledger of version 4, which did not say who decided on a request


@pytest.fixture
def four(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    by_hand(path, (SAVED / "ledger-4.sql").read_text(encoding="utf-8"))
    path.chmod(0o600)
    return path


def test_a_ledger_of_version_4_keeps_all_that_it_held(four: Path) -> None:
    before = rows_of(four)
    accounts = Ledger(four, whole=True).accounts()
    # Clients 0 and 2 released twice and once; client 2 also reported.
    assert {client: sum(account.values()) for client, account in accounts.items()} == {0: 2, 1: 1, 2: 2}
    assert accounts[0] == {Release(Kind.TRAIN, 11, 10.0, Clipping.PUBLIC, None, choice_epsilon=1.0, hypotheses=2): 2}
    assert Names(four).read() == ["anna", "bert", 7]
    after = rows_of(four)
    assert after.pop("signed") == []
    assert [row[6:] for row in after["requests"]] == [("", "", "", "")] * 3, "version 4 did not record who decided"
    after["requests"] = [row[:6] for row in after["requests"]]
    assert after == before


def test_what_was_decided_under_version_4_still_holds(four: Path) -> None:
    runs = Runs(four, "node")
    approved, refused, waiting = runs.requests()
    assert [one.status for one in (approved, refused, waiting)] == [Status.APPROVED, Status.REFUSED, Status.WAITING]
    asks = {"n": 11, "differs": {}}
    said = {"dataset": "", "model": "linear", "noise-multiplier": 10.0}
    runs.check_approved("42", asks | {"config": RunConfig.parse(said | {"rounds": 5}).unsigned()}, "")
    with raises(Refused, "refused.by-people"):
        runs.check_approved("42", asks | {"config": RunConfig.parse(said | {"rounds": 6}).unsigned()}, "")
    with raises(Refused, "refused.told-before"):
        runs.end("41", "run", {"w": np.ones((2, 11), np.float32)}, True)


def test_a_migration_of_version_4_that_is_cut_off_leaves_the_ledger_of_before(
    four: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(four.parent)

    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("umbel.privacy.gate.store._add_tables", full)
        with pytest.raises(LedgerError):
            Ledger(four)
    assert files(four.parent) == before
    assert Ledger(four, whole=True).accounts()


def rows_of(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of each table."""
    connection = sqlite3.connect(path)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    rows = {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables}
    connection.close()
    return rows


# --- making one


@pytest.fixture
def no_store(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def test_a_site_without_limits_gets_one_and_a_site_with_limits_does_not(no_store: Path) -> None:
    site = {"data-path": "/data/own", "ledger-path": str(no_store)}
    with raises(LedgerError, "ledger.missing", no_store):
        Runs.of(Site.of(site | {"budget": 8.0}))
    assert not no_store.exists()
    Runs.of(Site.of(site))
    assert no_store.stat().st_mode & 0o077 == 0, "it is the site's alone"
    Names.of(Site.of(site | {"budget": 8.0}))


@pytest.mark.parametrize(
    ("entries", "answered_before", "made"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"budget": "8"}, False, False),
        ({"max-participations": "3"}, False, False),
        ({"max-evaluations-in-all": "9"}, False, False),
        ({"max-evaluations": "9"}, False, True),  # of one run, which begins with the ledger
    ],
    ids=str,
)
@pytest.mark.parametrize("named", [False, True], ids=["default place", "named place"])
def test_a_site_that_may_have_lost_its_store_gets_no_empty_one(
    entries: dict[str, str], answered_before: bool, made: bool, named: bool, tmp_path: Path, umbel_home: Path
) -> None:
    """These sites have no budget unless they set one. A store in a named place may lie on a volume that is missing."""
    path = tmp_path / "ledger.sqlite" if named else umbel_home / "ledger.sqlite"
    umbel_home.mkdir()
    if answered_before:
        beside(path).touch()
    site = Site.of({"data-path": "/data/own"} | entries | ({"ledger-path": str(path)} if named else {}))
    assert Store.begin(site) == path
    assert path.exists() is made


def test_a_new_store_is_on_the_disk_by_its_name_and_so_is_its_folder(
    umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut that took it away would take the log too, and an empty store would forget what was spent."""
    home, synced, fsync = umbel_home / "made" / "now", [], os.fsync
    monkeypatch.setenv("UMBEL_HOME", str(home))

    def look(descriptor: int) -> None:
        folder = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((folder, [file.name for file in folder.iterdir() if not file.name.startswith(".")]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    assert Store.begin(Site.of({"data-path": "/data/own"})) == home / "ledger.sqlite"
    assert (home, ["ledger.sqlite"]) in synced
    for folder, name in ((home.parent, "now"), (umbel_home, "made")):
        assert (folder, [name]) in synced
    assert umbel_home.parent in [folder for folder, _ in synced]


# --- clients' names


def test_names_keep_their_type_and_their_order(no_store: Path) -> None:
    names = Names.create(no_store)
    names.extend([], [7, "7"])
    names.extend([7, "7"], ["a\u0000b"])
    assert Names(no_store).read() == [7, "7", "a\u0000b"]


def test_processes_that_number_clients_at_once_do_not_give_a_number_twice(no_store: Path) -> None:
    names = Names.create(no_store)
    names.extend([], ["anna"])
    with raises(LedgerError, "ledger.clients-changed", no_store):
        names.extend([], ["bert"])
    assert names.read() == ["anna"]
