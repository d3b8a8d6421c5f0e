"""A site's ledger on disk."""

from __future__ import annotations

import math
import multiprocessing
import sqlite3
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from privacy.ledger import Account, Charge, Ledger, Limits
from protocol.errors import LedgerError
from protocol.release import Kind, RadiusMode, Release

TRAIN = Charge(run="7", round=1, release=Release(Kind.TRAIN, 11, 3.0, RadiusMode.UPDATE))
COST = TRAIN.release.cost


@pytest.fixture
def no_ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def path(no_ledger: Path) -> Path:
    """A new, empty ledger."""
    return Ledger.create(no_ledger).path


def test_one_that_is_not_there_is_not_made_by_opening_it(no_ledger: Path) -> None:
    """It may be one that was lost."""
    with pytest.raises(LedgerError, match=r"there is no ledger .*: python -m privacy ledger create PATH"):
        Ledger(no_ledger)
    assert not no_ledger.exists()


def test_one_that_is_there_is_not_made_anew(path: Path) -> None:
    Ledger(path).charge(TRAIN, [0])
    assert Ledger.create(path).spent(0) == Fraction(11, 3)


def test_sums_are_exact(path: Path) -> None:
    ledger = Ledger(path)
    for _ in range(30):
        ledger.charge(TRAIN, [0])
    ledger.charge(Charge("7", 2, Release(Kind.TRAIN, 11, 0.1, RadiusMode.PUBLIC, 0.5)), [0])
    assert ledger.spent(0) == Fraction(110) + 11 / Fraction(0.1)
    assert ledger.spent(1) == 0


def test_every_charge_is_a_row(path: Path) -> None:
    Ledger(path).charge(Charge("run", 3, Release(Kind.TRAIN, 11, 3.0, RadiusMode.PUBLIC, 0.25)), [4, 9])
    rows = list(Ledger(path).rows())
    assert [row["client"] for row in rows] == [4, 9]
    assert rows[0]["at"].startswith("20")  # type: ignore[attr-defined]
    expected = {"run": "run", "round": 3, "kind": "train", "n": 11, "noise_multiplier": 3.0}
    assert rows[0].items() >= (expected | {"radius_mode": "public", "radius": 0.25}).items()


def test_the_norm_of_an_update_is_not_written_down(path: Path) -> None:
    Ledger(path).charge(TRAIN, [0])
    assert next(Ledger(path).rows())["radius"] is None


def test_what_a_client_spent_is_told_by_release_whatever_its_radius(path: Path) -> None:
    """Releases of one price are one account; the accountant takes them as they are."""
    public = Release(Kind.TRAIN, 11, 3.0, RadiusMode.PUBLIC)
    report = Release(Kind.REPORT, 2, 4.0, RadiusMode.PUBLIC)
    ledger = Ledger(path)
    for radius in (0.25, 0.5):
        ledger.charge(Charge("7", 1, replace(public, radius=radius)), [0])
    ledger.charge(Charge("7", 1, report), [0, 1])
    ledger.charge(TRAIN, [1])
    accounts = ledger.accounts()
    assert set(accounts) == {
        Account(0, public, 2), Account(0, report, 1), Account(1, report, 1), Account(1, TRAIN.release, 1)
    }  # fmt: skip
    assert {account: account.spent for account in accounts}[Account(0, public, 2)] == Fraction(22, 3)


def test_it_survives_being_closed_and_opened(path: Path) -> None:
    Ledger(path).charge(TRAIN, [0, 1])
    Ledger(path).charge(TRAIN, [1])
    assert (Ledger(path).spent(0), Ledger(path).spent(1)) == (Fraction(11, 3), Fraction(22, 3))


def test_a_client_pays_as_long_as_the_budget_lasts_and_to_the_last_penny(path: Path) -> None:
    """The budget of 11 is exactly three participations of 11/3."""
    ledger, limits = Ledger(path), Limits(Fraction(11))
    assert [ledger.charge(TRAIN, [0], limits) for _ in range(4)] == [[True], [True], [True], [False]]
    assert ledger.affordable([0, 1], COST, limits) == [False, True]
    assert ledger.charge(TRAIN, [0, 1], limits) == [False, True]
    assert (ledger.spent(0), ledger.spent(1)) == (11, Fraction(11, 3))


def test_no_budget_covers_a_release_without_noise(path: Path) -> None:
    ledger = Ledger(path)
    bare = Charge("7", 1, Release(Kind.TRAIN, 11, 0.0, RadiusMode.UPDATE))
    assert ledger.charge(bare, [0], Limits(Fraction(10**9))) == [False]
    assert ledger.charge(bare, [0]) == [True]
    assert ledger.spent(0) == math.inf
    assert ledger.affordable([0], COST, Limits(Fraction(10**9))) == [False]


def test_a_client_releases_no_more_often_than_it_may_whatever_that_costs(path: Path) -> None:
    """With ever more noise a release costs ever less; it may still tell a little."""
    ledger, limits = Ledger(path), Limits(participations=2)
    cheap = Charge("7", 1, Release(Kind.TRAIN, 11, 1e12, RadiusMode.PUBLIC, 0.5))
    assert [ledger.charge(cheap, [0, 1], limits) for _ in range(3)] == [[True, True], [True, True], [False, False]]
    assert ledger.affordable([0, 5], cheap.release.cost, limits) == [False, True]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty: charges may be lost"),
        (b"client,spent\n0,3.7\n", "is not umbel's ledger"),
        (b"SQLite format 3\0" + bytes(84), "is not umbel's ledger"),
    ],
)
def test_a_file_that_is_no_ledger_is_refused_and_left_as_it_is(no_ledger: Path, content: bytes, reason: str) -> None:
    no_ledger.write_bytes(content)
    with pytest.raises(LedgerError, match=f"{no_ledger}.*{reason}|{reason}"):
        Ledger(no_ledger)
    assert no_ledger.read_bytes() == content


def test_another_programs_database_is_refused_and_left_as_it_is(no_ledger: Path) -> None:
    connection = sqlite3.connect(no_ledger)
    connection.execute("CREATE TABLE patients (name TEXT)")
    connection.close()
    before = no_ledger.read_bytes()
    with pytest.raises(LedgerError, match="is not umbel's ledger; set ledger-path to another file"):
        Ledger(no_ledger)
    assert no_ledger.read_bytes() == before


def test_a_damaged_ledger_is_refused_and_left_as_it_is(path: Path) -> None:
    Ledger(path).charge(TRAIN, list(range(2000)))
    damaged = bytearray(path.read_bytes())
    damaged[8192:12288] = b"\xff" * 4096
    path.write_bytes(damaged)
    with pytest.raises(LedgerError, match=r"is damaged.*restore it from a backup"):
        Ledger(path)
    assert path.read_bytes() == bytes(damaged)


def test_a_ledger_cut_short_is_refused(path: Path) -> None:
    Ledger(path).charge(TRAIN, list(range(2000)))
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(LedgerError, match="is damaged"):
        Ledger(path)


def test_a_ledger_of_a_later_version_is_refused(path: Path) -> None:
    Ledger(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(LedgerError, match="is of version 9, this umbel reads 1; upgrade umbel"):
        Ledger(path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="make it, or set ledger-path"):
        Ledger.create(tmp_path / "nowhere" / "ledger.sqlite")


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="is not a file"):
        Ledger(tmp_path)


def test_a_ledger_that_is_removed_while_in_use_is_not_made_anew(path: Path) -> None:
    """An empty ledger in its place would forget what was spent."""
    ledger = Ledger(path)
    path.unlink()
    with pytest.raises(LedgerError, match="cannot be opened"):
        ledger.charge(TRAIN, [0])
    assert not path.exists()


def _charge_often(path: Path, times: int, clients: list[int], limits: Limits) -> None:
    for _ in range(times):
        Ledger(path).charge(TRAIN, clients, limits)


@pytest.mark.slow
def test_two_processes_lose_no_charge_and_make_none_twice(path: Path) -> None:
    """10,000 charges: 2 processes, 250 transactions each, 20 clients a transaction; none is lost."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_charge_often, args=(path, 250, list(range(20)), Limits())) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    accounts = Ledger(path).accounts()
    assert sum(account.times for account in accounts) == 10_000
    assert {account.times for account in accounts} == {500}


@pytest.mark.slow
def test_two_processes_together_never_exceed_the_budget(path: Path) -> None:
    """Room for 30 participations, 2 x 40 attempts."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_charge_often, args=(path, 40, [0], Limits(Fraction(110)))) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert Ledger(path).spent(0) == 110
