"""A site's ledger on disk."""

from __future__ import annotations

import math
import os
import sqlite3
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict

from tests.helpers.errors import raises
from tests.helpers.forks import forks
from tests.helpers.ledgers import spent
from umbel.privacy.gate.charges import Charge, Limits
from umbel.privacy.gate.ledger import Ledger, MemoryLedger
from umbel.privacy.gate.runs import Runs
from umbel.privacy.gate.store import Names, digest_of_totals
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import LedgerError
from umbel.protocol.release import Clipping, Kind, Release

TRAIN = Charge(run="7", round=1, release=Release(Kind.TRAIN, 11, 3.0, Clipping.UPDATE))
COST = Fraction(11, 3)


def paper(budget: int | Fraction) -> Limits:
    return Limits(paper_budget=Fraction(budget))


@pytest.fixture
def no_ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def path(no_ledger: Path) -> Path:
    """A new, empty ledger."""
    return Ledger.create(no_ledger).path


@pytest.fixture(params=["on disk", "in memory"])
def ledger(request: pytest.FixtureRequest, no_ledger: Path) -> Ledger | MemoryLedger:
    """A new, empty ledger of each kind: both answer the same questions alike."""
    return Ledger.create(no_ledger) if request.param == "on disk" else MemoryLedger(RecordDict())


def test_one_that_is_not_there_is_not_made_by_opening_it(no_ledger: Path) -> None:
    """It may be one that was lost."""
    with raises(LedgerError, "ledger.missing", no_ledger, f"umbel site journal --create {no_ledger}"):
        Ledger(no_ledger)
    assert not no_ledger.exists()


def test_one_that_is_there_is_not_made_anew(path: Path) -> None:
    Ledger(path).charge(TRAIN, [0])
    assert spent(Ledger.create(path), 0) == Fraction(11, 3)


def test_sums_are_exact(ledger: Ledger | MemoryLedger) -> None:
    for _ in range(30):
        ledger.charge(TRAIN, [0])
    ledger.charge(Charge("7", 2, Release(Kind.TRAIN, 11, 0.1, Clipping.PUBLIC, 0.5)), [0])
    assert spent(ledger, 0) == 110 + 110, ".1 is a tenth, and not the binary number next to it"
    assert spent(ledger, 1) == 0


def test_every_charge_is_a_row(path: Path) -> None:
    Ledger(path).charge(Charge("run", 3, Release(Kind.TRAIN, 11, 3.0, Clipping.PUBLIC, 0.25)), [4, 9])
    rows = list(Ledger(path).rows())
    assert [row["client"] for row in rows] == [4, 9]
    assert rows[0]["at"].startswith("20")  # type: ignore[attr-defined]
    expected = {"run": "run", "round": 3, "kind": "train", "n": 11, "noise_multiplier": 3.0}
    assert rows[0].items() >= (expected | {"clipping": "public", "clip_norm": 0.25}).items()


def test_the_norm_of_an_update_is_not_written_down(path: Path) -> None:
    Ledger(path).charge(TRAIN, [0])
    assert next(Ledger(path).rows())["clip_norm"] is None


def test_what_a_client_spent_is_told_by_release_whatever_its_radius(path: Path) -> None:
    """Releases of one price are one account; the accountant takes them as they are."""
    public = Release(Kind.TRAIN, 11, 3.0, Clipping.PUBLIC)
    report = Release(Kind.REPORT, 2, 4.0, Clipping.PUBLIC)
    ledger = Ledger(path)
    for radius in (0.25, 0.5):
        ledger.charge(Charge("7", 1, replace(public, radius=radius)), [0])
    ledger.charge(Charge("7", 1, report), [0, 1])
    ledger.charge(TRAIN, [1])
    assert ledger.accounts() == {0: {public: 2, report: 1}, 1: {report: 1, TRAIN.release: 1}}
    assert list(ledger.account(1)) == [report, TRAIN.release], "in the order in which they came first"


def test_a_client_pays_as_long_as_the_budget_lasts_and_to_the_last_penny(ledger: Ledger | MemoryLedger) -> None:
    """The budget of 11 is exactly three participations of 11/3."""
    limits = paper(11)
    assert [ledger.charge(TRAIN, [0], limits) for _ in range(4)] == [[True], [True], [True], [False]]
    assert ledger.charge(TRAIN, [0, 1], limits) == [False, True]
    assert (spent(ledger, 0), spent(ledger, 1)) == (11, Fraction(11, 3))


def test_no_budget_covers_a_release_without_noise(ledger: Ledger | MemoryLedger) -> None:
    bare = Charge("7", 1, Release(Kind.TRAIN, 11, 0.0, Clipping.UPDATE))
    assert ledger.charge(bare, [0], paper(10**9)) == [False]
    assert ledger.charge(bare, [0]) == [True]
    assert spent(ledger, 0) == math.inf
    assert ledger.charge(TRAIN, [0], paper(10**9)) == [False]


def test_a_client_releases_no_more_often_than_it_may_whatever_that_costs(ledger: Ledger | MemoryLedger) -> None:
    """With ever more noise a release costs ever less; it may still tell a little."""
    limits = Limits(participations=2)
    cheap = Charge("7", 1, Release(Kind.TRAIN, 11, 1e12, Clipping.PUBLIC, 0.5))
    assert [ledger.charge(cheap, [0, 1], limits) for _ in range(3)] == [[True, True], [True, True], [False, False]]
    assert ledger.charge(cheap, [0, 5], limits) == [False, True]


def test_a_budget_is_the_epsilon_between_any_two_data_sets(ledger: Ledger | MemoryLedger) -> None:
    """n = 11, nu = 10 and choice-epsilon 1 cost 2.2 + 1 a participation: three of them fit 9.6, to the last penny."""
    limits = Limits(Fraction(96, 10))
    private = Charge("7", 1, Release(Kind.TRAIN, 11, 10.0, Clipping.PUBLIC, 0.5, hypotheses=5, choice_epsilon=1.0))
    assert [ledger.charge(private, [0], limits) for _ in range(4)] == [[True], [True], [True], [False]]
    report = Charge("7", 1, Release(Kind.REPORT, 2, 20.0, Clipping.PUBLIC, 1.0))
    assert ledger.charge(report, [0, 1], limits) == [False, True], "reports count too: 2/20"


def test_what_has_no_guarantee_fits_no_budget(ledger: Ledger | MemoryLedger) -> None:
    limits = Limits(Fraction(10**9))
    for release in (TRAIN.release, Release(Kind.TRAIN, 11, 10.0, Clipping.PUBLIC, 0.5, hypotheses=2)):
        assert ledger.charge(Charge("7", 1, release), [0], limits) == [False]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "ledger.empty"),
        (b"client,spent\n0,3.7\n", "ledger.another-file"),
        (b"SQLite format 3\0" + bytes(84), "ledger.another-file"),
    ],
)
def test_a_file_that_is_no_ledger_is_refused_and_left_as_it_is(no_ledger: Path, content: bytes, code: str) -> None:
    no_ledger.write_bytes(content)
    with raises(LedgerError, code, no_ledger):
        Ledger(no_ledger)
    assert no_ledger.read_bytes() == content


def test_a_damaged_ledger_is_refused_and_left_as_it_is(path: Path) -> None:
    Ledger(path).charge(TRAIN, list(range(2000)))
    damaged = bytearray(path.read_bytes())
    damaged[8192:12288] = b"\xff" * 4096
    path.write_bytes(damaged)
    with raises(LedgerError, "ledger.damaged", path, "backup"):
        Ledger(path)
    assert path.read_bytes() == bytes(damaged)


@pytest.mark.parametrize("version", [0, 5, 9])
def test_a_ledger_of_another_version_is_refused_and_left_as_it_is(path: Path, version: int) -> None:
    Ledger(path).charge(TRAIN, [0])
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    content = path.read_bytes()
    for kind in (Ledger, Runs, Names):
        for open_store in (kind, kind.create):
            with raises(LedgerError, "ledger.version", path, f"version {version}", "version 1", "ledger-path"):
                open_store(path)
    assert path.read_bytes() == content


# --- the chain of hashes


@contextmanager
def by_hand(path: Path) -> Iterator[sqlite3.Connection]:
    """Change a ledger's tables past umbel."""
    connection = sqlite3.connect(path)
    yield connection
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("UPDATE charges SET clip_norm = 3.0000000000000004 WHERE id = 5", "charge 5"),
        ("UPDATE charges SET release = 2 WHERE id = 5", ""),
        ("UPDATE releases SET what = replace(what, '3.0', '9.0')", "totals"),
        ("UPDATE charges SET client = 7 WHERE id = 5", "charge 5"),
        ("UPDATE charges SET at = 'earlier' WHERE id = 1", "charge 1"),
        ("DELETE FROM charges WHERE id = 5", "charge 5"),
        ("UPDATE charges SET id = 100 WHERE id = 5", "charge 5"),
        ("DELETE FROM charges WHERE id > 8", "8 of 12"),
        ("DELETE FROM charges", "0 of 12"),
        ("INSERT INTO charges SELECT 13, at, run, round, 5, release, clip_norm, hash FROM charges "
         "WHERE id = 12", "charge 13"),
        ("UPDATE totals SET times = 1 WHERE client = 2", "totals"),
        ("DELETE FROM totals WHERE client = 2", "totals"),
        ("DELETE FROM totals", "totals"),
        ("DELETE FROM head", "its number of charges is missing"),
        ("UPDATE head SET charges = 11", "12 of 11"),
        ("UPDATE head SET hash = zeroblob(32)", "its last charge has been changed"),
        ("DROP TABLE totals", "its tables are not a ledger's"),
        ("CREATE TRIGGER late AFTER INSERT ON charges BEGIN DELETE FROM charges; END", "its tables are not a ledger's"),
    ],
)  # fmt: skip
def test_what_was_changed_or_has_gone_is_found(path: Path, change: str, reason: str) -> None:
    for _ in range(3):
        Ledger(path).charge(TRAIN, range(4))
    with by_hand(path) as connection:
        connection.execute(change)
    with raises(LedgerError, "ledger.damaged", reason):
        Ledger(path)


def test_totals_that_are_not_the_sums_of_the_charges_are_found(path: Path) -> None:
    Ledger(path).charge(TRAIN, range(4))
    with by_hand(path) as connection:
        connection.execute("UPDATE totals SET times = 2")
        releases, totals = (connection.execute(f"SELECT * FROM {table}").fetchall() for table in ("releases", "totals"))
        connection.execute("UPDATE head SET totals = ?", (digest_of_totals(releases, totals),))
    with raises(LedgerError, "ledger.damaged", "sums"):
        Ledger(path)


def test_text_that_is_none_is_damage_like_any_other(path: Path) -> None:
    Ledger(path).charge(TRAIN, [0])
    path.write_bytes(path.read_bytes().replace(b"update", b"up\xffate", 1))
    with pytest.raises(LedgerError):
        Ledger(path)


def test_a_ledger_that_changed_behind_its_back_is_found_while_in_use(path: Path) -> None:
    ledger = Ledger(path)
    ledger.charge(TRAIN, range(4))
    with by_hand(path) as connection:
        connection.execute("DELETE FROM totals WHERE client = 2")
    for ask in (
        lambda: ledger.account(0),
        lambda: ledger.charge(TRAIN, [0]),
        ledger.accounts,
        lambda: [*ledger.rows()],
    ):
        with raises(LedgerError, "ledger.damaged", "totals"):
            ask()


def test_an_older_copy_put_in_its_place_while_in_use_is_found(path: Path) -> None:
    ledger, older = Ledger(path), path.read_bytes()
    ledger.charge(TRAIN, range(4))
    path.write_bytes(older)
    with raises(LedgerError, "ledger.damaged", 4, 0):
        ledger.charge(TRAIN, [0])


def test_one_process_goes_on_where_another_has_charged(path: Path) -> None:
    here, there = Ledger(path), Ledger(path)
    for ledger in (here, there, there, here):
        ledger.charge(TRAIN, [0])
    assert spent(here, 0) == spent(there, 0) == spent(Ledger(path), 0) == 4 * Fraction(11, 3)


class TestLong:
    """Of a long ledger, the last charges and the totals are checked on opening."""

    @pytest.fixture
    def long(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr("umbel.privacy.gate.ledger._WHOLE", 20)
        monkeypatch.setattr("umbel.privacy.gate.ledger._TAIL", 5)
        for _ in range(5):
            Ledger(path).charge(TRAIN, range(6))
        return path

    @pytest.mark.parametrize(
        "change",
        ["UPDATE charges SET client = 7 WHERE id = 28", "DELETE FROM charges WHERE id > 27", "DELETE FROM totals"],
    )
    def test_what_sums_are_made_of_is_checked(self, long: Path, change: str) -> None:
        with by_hand(long) as connection:
            connection.execute(change)
        with raises(LedgerError, "ledger.damaged"):
            Ledger(long)

    def test_an_old_charge_is_looked_at_when_all_are_and_no_sum_comes_from_it(self, long: Path) -> None:
        with by_hand(long) as connection:
            connection.execute("DELETE FROM charges WHERE id = 3")
        assert spent(Ledger(long), 2) == 5 * Fraction(11, 3)
        assert Ledger(long).charge(TRAIN, [2], paper(5 * COST)) == [False]
        with raises(LedgerError, "ledger.damaged", "charge 3"):
            Ledger(long, whole=True)

    def test_it_is_charged_like_any_other(self, long: Path) -> None:
        ledger = Ledger(long)
        ledger.charge(TRAIN, [0, 9])
        assert (spent(ledger, 0), spent(ledger, 9)) == (22, Fraction(11, 3))
        assert spent(Ledger(long, whole=True), 0) == 22


# --- where it lies


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_ledger_that_may_not_be_read_is_named(path: Path) -> None:
    path.chmod(0)
    with raises(LedgerError, "ledger.unusable"):
        Ledger(path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with raises(LedgerError, "ledger.no-folder", "ledger-path"):
        Ledger.create(tmp_path / "nowhere" / "ledger.sqlite")


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with raises(LedgerError, "ledger.unusable", tmp_path):
        Ledger(tmp_path)


def test_a_ledger_that_is_removed_while_in_use_is_not_made_anew(path: Path) -> None:
    """An empty ledger in its place would forget what was spent."""
    ledger = Ledger(path)
    path.unlink()
    with raises(LedgerError, "ledger.unusable"):
        ledger.charge(TRAIN, [0])
    assert not path.exists()


def test_no_other_process_charges_between_the_question_and_the_charge(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another charges whenever no transaction of this one holds it up. A budget of one release is spent once.

    While the question is asked, it waits: two that asked and then both want to write would both fail.
    """
    here, other, asked = Ledger(path), Ledger(path), []
    transaction = Ledger._transaction

    class Asked(Limits):
        def paying(self, clients: Sequence[ClientInDataset], *rest: Any) -> list[bool]:
            asked.append(clients)
            with (
                closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as third,
                pytest.raises(sqlite3.OperationalError, match="locked"),
            ):
                third.execute("BEGIN IMMEDIATE")
            return super().paying(clients, *rest)

    @contextmanager
    def between(ledger: Ledger, write: bool = False) -> Iterator[sqlite3.Connection]:
        if ledger is here and asked:
            other.charge(TRAIN, asked[0], paper(COST))
        with transaction(ledger, write) as connection:
            yield connection

    monkeypatch.setattr(Ledger, "_transaction", between)
    assert here.charge(TRAIN, [0], Asked(paper_budget=COST)) == [True]
    assert asked == [[0]]
    assert spent(other, 0) == COST
    assert other.charge(TRAIN, [0], paper(COST)) == [False]


def test_a_charge_is_on_disk_when_its_transaction_ends(path: Path) -> None:
    """SQLite's EXTRA, 3: file, journal and folder are flushed, so that a power cut takes no charge back."""
    with Ledger(path)._transaction(write=True) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)


def _charge_often(path: Path) -> None:
    for number in range(20):
        Ledger(path).charge(TRAIN, [200], paper(55))
        if number % 2:
            Ledger(path).charge(TRAIN, range(100))


@pytest.mark.slow
def test_two_processes_lose_no_charge_make_none_twice_and_never_exceed_a_budget_together(path: Path) -> None:
    """2,000 charges of 100 clients without a limit, of which none is lost; and room for 15 of one more's 40."""
    workers = [forks().Process(target=_charge_often, args=(path,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    accounts = Ledger(path).accounts()
    assert spent(Ledger(path), 200) == 55
    assert {client: dict(account) for client, account in accounts.items() if client != 200} == {
        client: {TRAIN.release: 20} for client in range(100)
    }


def test_ledger_and_process_stay_small_at_any_number_of_new_noises(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near 10^12 noise costs almost nothing, and each new value would stay in the ledger and in the totals."""
    monkeypatch.setattr("umbel.privacy.gate.charges._KINDS", 8)
    limits, clients = Limits(budget=Fraction(1)), [ClientInDataset(client) for client in range(50)]

    def ask(first: int, last: int) -> tuple[int, int, int]:
        """Return how many clients were charged, the bytes of the file, and the largest memory in use."""
        tracemalloc.reset_peak()
        paid = 0
        for number in range(first, last):
            release = Release(Kind.TRAIN, 11, 1e12 + number, Clipping.PUBLIC)
            paid += sum(Ledger(path).charge(Charge("7", number, release), clients, limits))
        return paid, path.stat().st_size, tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    try:
        assert ask(0, 10)[0] == 8 * len(clients)
        paid, size, peak = ask(10, 15)
        paid_later, size_later, peak_later = ask(15, 60)
    finally:
        tracemalloc.stop()
    assert (paid, paid_later) == (0, 0)
    assert size_later == size
    assert peak_later < 1.1 * peak + 100_000


def test_releases_that_are_equal_are_one_however_they_were_written(path: Path) -> None:
    """-0.0 is 0.0, and its text is another."""
    ledger = Ledger(path)
    for zero in (0.0, -0.0):
        release = Release(Kind.TRAIN, 11, 3.0, Clipping.PUBLIC, 0.5, hypotheses=2, choice_epsilon=zero)
        ledger.charge(Charge("7", 1, release), [0])
    assert list(Ledger(path, whole=True).account(0).values()) == [2]


def test_a_full_disk_is_named_and_nothing_is_charged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(path)
    connect = sqlite3.connect

    def small(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        connection.execute("PRAGMA max_page_count = 1")  # no more than the pages that are there
        return connection

    monkeypatch.setattr("umbel.privacy.gate.store.sqlite3.connect", small)
    with raises(LedgerError, "ledger.disk-full", path):
        ledger.charge(TRAIN, [ClientInDataset(client) for client in range(1000)])
    monkeypatch.setattr("umbel.privacy.gate.store.sqlite3.connect", connect)
    assert Ledger(path, whole=True).accounts() == {}


@contextmanager
def somebody_reads(path: Path) -> Iterator[None]:
    """Another process reads the ledger, so that no change is written meanwhile."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT * FROM head").fetchall()
        yield


def test_a_charge_that_could_not_be_written_is_none_and_the_ledger_is_no_damaged_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever restored a backup then would forget what was spent since."""
    monkeypatch.setattr("umbel.privacy.gate.store._BUSY_S", 0)
    ledger = Ledger(path)
    ledger.charge(TRAIN, [0])
    with somebody_reads(path), raises(LedgerError, "ledger.unusable"):
        ledger.charge(TRAIN, [0, 1])
    assert spent(ledger, 0) == COST
    assert ledger.charge(TRAIN, [1], paper(COST)) == [True]
    assert spent(ledger, 1) == COST


def test_who_reads_slowly_holds_up_no_charge(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``umbel site journal --csv charges`` does, whose output goes to a pager."""
    monkeypatch.setattr("umbel.privacy.gate.store._BUSY_S", 0)
    monkeypatch.setattr("umbel.privacy.gate.store._PAGE", 2)
    ledger = Ledger(path)
    ledger.charge(TRAIN, range(5))
    rows, clients = ledger.rows(), Ledger(path).table("charges")
    read = [next(rows)["client"]], [next(clients)["client"]]
    assert ledger.charge(TRAIN, [9]) == [True]
    assert [*read[0], *(row["client"] for row in rows)] == [0, 1, 2, 3, 4], "those that there were"
    assert [*read[1], *(row["client"] for row in clients)] == [0, 1, 2, 3, 4, 9]
