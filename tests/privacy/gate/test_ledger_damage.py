"""Ledgers that were damaged: each is refused, or still tells at least what was spent.

The suite damages some hundreds; ``DAMAGED_LEDGERS=10000`` says how many instead.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.errors import raises
from tests.helpers.ledgers import spent
from umbel.privacy.gate.charges import Charge, Limits
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.runs import Runs
from umbel.privacy.gate.store import Names
from umbel.protocol.errors import LedgerError, Refused
from umbel.protocol.release import Clipping, Kind, Release

DAMAGED = int(os.environ.get("DAMAGED_LEDGERS", "240"))
PAGE = 4096
CHARGE = Charge("7", 1, Release(Kind.TRAIN, 11, 3.0, Clipping.UPDATE))
REPORT = Charge("7", 1, Release(Kind.REPORT, 2, 4.0, Clipping.PUBLIC, 0.5))
NO_BUDGET = Limits(paper_budget=Fraction(0))


COLUMNS = "at, run, round, client, release, clip_norm, hash"


@dataclass(frozen=True)
class Sound:
    """A ledger before it is damaged, and what its clients have spent."""

    now: bytes
    before: bytes
    """The file as it was some charges earlier."""
    halfway: tuple[bytes, bytes]
    """The file and SQLite's journal in the middle of one more charge, which is not yet paid."""
    spent: tuple[Fraction | float, ...]


def fill_other_tables(path: Path, number: int, clients: int) -> None:
    """Write to the other tables of the store, so that pages of all tables lie between each other."""
    names, runs = Names(path), Runs(path)
    names.extend(names.read(), [f"client-{number}-{client}" for client in range(clients // 4 + 1)])
    for hypothesis in range(3):
        runs.note_sent(str(number), "", {"weight": np.full(2, hypothesis, np.float32)})
    with suppress(Refused):
        runs.check_approved(str(number), {"rounds": number, "text": "x" * 10 * clients}, "")
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM sent WHERE id % 3 = 0")  # which frees pages
    connection.commit()
    connection.close()


def sound(folder: Path, clients: int, rounds: int) -> Sound:
    ledger = Ledger.create(folder / f"{clients}.sqlite")
    for number in range(rounds):
        if number == rounds // 2:
            before = ledger.path.read_bytes()
        ledger.charge(REPORT if number % 3 else CHARGE, range(number % 2, clients))
        if number < rounds // 2:
            # No later: with a later page of another table, the ledger of earlier would be whole.
            fill_other_tables(ledger.path, number, clients)
    now = ledger.path.read_bytes()
    connection = sqlite3.connect(ledger.path, isolation_level=None)
    connection.execute("PRAGMA cache_size = 1")  # so that pages are written before the end
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(f"INSERT INTO charges SELECT id + 100000, {COLUMNS} FROM charges")
    connection.execute("UPDATE totals SET times = times + 1")
    connection.execute("UPDATE head SET charges = 2 * charges")
    halfway = ledger.path.read_bytes(), Path(f"{ledger.path}-journal").read_bytes()
    connection.close()
    return Sound(now, before, halfway, tuple(spent(ledger, client) for client in range(clients)))


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> list[Sound]:
    """Ledgers of 6 pages, and of tables that are trees of some pages."""
    folder = tmp_path_factory.mktemp("sound")
    return [sound(folder, clients, rounds) for clients, rounds in ((3, 4), (40, 6), (400, 3))]


Damage = Callable[[Path, Sound, np.random.Generator], None]
Change = Callable[[bytearray, Sound, np.random.Generator], object]


def pages(content: bytes | bytearray, rng: np.random.Generator, many: int) -> list[slice]:
    return [slice(PAGE * i, PAGE * (i + 1)) for i in rng.integers(len(content) // PAGE, size=many).tolist()]


def a_bit(content: bytearray, _: Sound, rng: np.random.Generator) -> None:
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))


def a_bit_of_the_header_or_of_a_pages_own(content: bytearray, _: Sound, rng: np.random.Generator) -> None:
    [page] = pages(content, rng, 1)
    content[page.start + int(rng.integers(120))] ^= 1 << int(rng.integers(8))


def some_bytes(content: bytearray, _: Sound, rng: np.random.Generator) -> None:
    for place in rng.integers(len(content), size=rng.integers(2, 50)).tolist():
        content[place] = int(rng.integers(256))


def the_end_is_cut_off(content: bytearray, _: Sound, rng: np.random.Generator) -> None:
    del content[int(rng.integers(len(content))) :]


def the_last_pages_are_cut_off(content: bytearray, _: Sound, rng: np.random.Generator) -> None:
    del content[PAGE * int(rng.integers(1, len(content) // PAGE)) :]


def a_page_or_half_of_zeros(content: bytearray, _: Sound, rng: np.random.Generator) -> None:
    [page] = pages(content, rng, 1)
    start = page.start + int(rng.integers(2)) * PAGE // 2
    content[start : page.stop] = bytes(page.stop - start)


def two_pages_swapped(content: bytearray, _: Sound, rng: np.random.Generator) -> None:
    one, other = pages(content, rng, 2)
    content[one], content[other] = content[other], content[one]


def a_page_twice(content: bytearray, _: Sound, rng: np.random.Generator) -> None:
    one, other = pages(content, rng, 2)
    content[one] = content[other]


def a_page_of_earlier(content: bytearray, ledger: Sound, rng: np.random.Generator) -> None:
    """A write that was lost."""
    [page] = pages(ledger.before, rng, 1)
    content[page] = ledger.before[page]


def all_pages_of_earlier_but_one(content: bytearray, ledger: Sound, rng: np.random.Generator) -> None:
    """All of them would be the ledger of earlier, whole, which nothing in it tells; the first is but the header."""
    changed = [
        slice(at, at + PAGE)
        for at in range(PAGE, len(ledger.before), PAGE)
        if ledger.before[at : at + PAGE] != ledger.now[at : at + PAGE]
    ]
    kept = changed[int(rng.integers(len(changed)))]
    content[:] = ledger.before
    content[kept] = ledger.now[kept]


def on_disk(change: Change) -> Damage:
    """Return what damages the bytes of a file so."""

    def damage(path: Path, ledger: Sound, rng: np.random.Generator) -> None:
        content = bytearray(ledger.now)
        change(content, ledger, rng)
        path.write_bytes(content)

    return damage


def halfway(path: Path, ledger: Sound, rng: np.random.Generator) -> None:
    """A crash in the middle of a charge, and the journal that would undo it is gone, or damaged."""
    content, journal = ledger.halfway
    path.write_bytes(content)
    damaged = bytearray(journal)
    match int(rng.integers(4)):
        case 0:
            return
        case 1:
            del damaged[int(rng.integers(len(damaged))) :]
        case 2:
            damaged[rng.integers(len(damaged))] ^= 1 << int(rng.integers(8))
        case _:
            start = int(rng.integers(len(damaged)))
            damaged[start : start + PAGE] = bytes(len(damaged[start : start + PAGE]))
    Path(f"{path}-journal").write_bytes(damaged)


CHANGES: list[Change] = [
    a_bit, a_bit_of_the_header_or_of_a_pages_own, some_bytes, the_end_is_cut_off, the_last_pages_are_cut_off,
    a_page_or_half_of_zeros, two_pages_swapped, a_page_twice, a_page_of_earlier, all_pages_of_earlier_but_one,
]  # fmt: skip
DAMAGES = {change.__name__: on_disk(change) for change in CHANGES} | {"halfway": halfway}


def test_a_crash_in_the_middle_of_a_charge_leaves_what_was_paid(ledgers: list[Sound], tmp_path: Path) -> None:
    """Or the journals that are damaged below would be of no use to begin with."""
    for number, ledger in enumerate(ledgers):
        path = tmp_path / f"{number}.sqlite"
        path.write_bytes(ledger.halfway[0])
        Path(f"{path}-journal").write_bytes(ledger.halfway[1])
        found = Ledger(path)
        assert tuple(spent(found, client) for client in range(len(ledger.spent))) == ledger.spent


@pytest.mark.slow
@pytest.mark.parametrize("way", DAMAGES)
def test_a_damaged_ledger_is_refused_or_tells_at_least_what_was_spent(
    way: str, ledgers: list[Sound], tmp_path: Path
) -> None:
    refused = 0
    number = -(-DAMAGED // len(DAMAGES))
    for seed in range(number):
        rng = np.random.default_rng([[*DAMAGES].index(way), seed])
        ledger = ledgers[int(rng.integers(len(ledgers)))]
        folder = tmp_path / "damaged"
        folder.mkdir()
        path = folder / "ledger.sqlite"
        DAMAGES[way](path, ledger, rng)
        clients = range(len(ledger.spent))
        try:
            damaged = Ledger(path)
            tells = list(damaged.accounts())
            some = sorted({*clients[:3], *rng.integers(len(clients), size=3).tolist()})
            assert damaged.charge(CHARGE, some, NO_BUDGET) == [False] * len(some)
            found = [spent(damaged, client) for client in some]
            assert all(told >= ledger.spent[client] for told, client in zip(found, some, strict=True)), seed
            assert set(tells) == set(clients), seed
            damaged.charge(CHARGE, some)
            assert spent(Ledger(path), some[0]) >= found[0] + Fraction(11, 3), seed
        except LedgerError:
            refused += 1
        shutil.rmtree(folder)
    assert refused > 0


def test_a_journal_that_was_sent_deletes_no_file_of_the_person(tmp_path: Path) -> None:
    """A journal may name a second file, and SQLite deletes that file without a look at it."""
    path, precious = Ledger.create(tmp_path / "ledger.sqlite").path, tmp_path / "precious.txt"
    precious.write_text("mine")
    magic, name = bytes.fromhex("d9d505f920a163d7"), bytes(precious)
    header = magic + struct.pack(">IIIII", 0, 1, path.stat().st_size // PAGE, 512, PAGE)
    named = struct.pack(">I", 2**30 // PAGE + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    Path(f"{path}-journal").write_bytes(header.ljust(512, b"\0") + named)
    link = tmp_path / "link.sqlite"
    link.symlink_to(path)
    for one in (path, link):
        with raises(LedgerError, "ledger.damaged", "ledger.sqlite-journal"):
            Ledger(one).accounts()
    assert precious.read_text() == "mine"
