"""Journals that were restored, cut off, deleted, damaged or killed: no charge is lost, and no answer is without one.

The suite damages some hundreds and kills some dozens; ``make test-all`` 4,600 and 800.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.errors import raises
from tests.helpers.ledgers import forget, participations, spent
from umbel.privacy.site.charges import Charge
from umbel.privacy.site.entry import Entry
from umbel.privacy.site.journal import Journal, Names
from umbel.privacy.site.policy import Policy
from umbel.privacy.site.runs import Runs, Status
from umbel.privacy.site.totals import State
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import LedgerError, Refused
from umbel.protocol.release import Clipping, Kind, Release

TRAIN = Charge("7", 1, Release(Kind.TRAIN, 11, 3.0, Clipping.PUBLIC))
SMALL = Charge("8", 1, Release(Kind.TRAIN, 7, 6.0, Clipping.PUBLIC))
REPORT = Charge("7", 1, Release(Kind.REPORT, 2, 20.0, Clipping.PUBLIC))
POLICY = Policy.parse({"min-noise-multiplier": 2.0, "reports": "noise=10.0"})
CLIENTS = [ClientInDataset(number) for number in range(4)]
DIGEST = "d" * 64


def answer(path: Path, charge: Charge, clients: Sequence[ClientInDataset]) -> None:
    """Answer a message, as a site does in a process of its own."""
    forget()
    journal, entry = Journal(path), Entry(charge.run, "train")
    entry.charge(sum(journal.charge(charge, clients)))
    journal.record(entry, True)


@dataclass(frozen=True)
class Books:
    """A journal, its index and its witness at several times, and what its clients have spent at the end."""

    files: tuple[Path, ...]
    times: list[tuple[bytes, ...]]
    spent: list[Fraction | float]

    @property
    def path(self) -> Path:
        return self.files[0]

    def restore(self, *times: int | None) -> Path:
        """Let each file be as it was at a time, or None for a file that is gone."""
        for file, content, time in zip(self.files, zip(*self.times, strict=True), times, strict=True):
            file.unlink(missing_ok=True)
            if time is not None:
                file.write_bytes(content[time])
        forget()
        return self.path

    def repaired(self) -> list[Fraction | float]:
        """Return what clients have spent once the journal was repaired, which is left in order."""
        assert Journal(self.path, opened=False).repair(POLICY, CLIENTS)
        for _ in range(2):
            forget()
            assert Journal(self.path, opened=False).repair(POLICY, CLIENTS) == "", "nothing more to do"
        return [spent(Journal(self.path), client) for client in CLIENTS]


@pytest.fixture
def books(tmp_path: Path) -> Books:
    path = Journal.create(tmp_path / "ledger.jsonl").path
    journal = Journal(path)
    files = path, journal.index, journal.witness.path
    times = []
    for number, (charge, clients) in enumerate([(TRAIN, [0]), (REPORT, [0, 1]), (TRAIN, [1, 2]), (SMALL, [2])]):
        Names(path).extend([*range(number)], [number])
        answer(path, charge, [ClientInDataset(client) for client in clients])
        times.append(tuple(file.read_bytes() for file in files))
    return Books(files, times, [spent(Journal(path), client) for client in CLIENTS])


TIMES = (0, 2, 3, None)


@pytest.mark.parametrize("when", list(product(TIMES, TIMES, TIMES)), ids=str)
def test_whatever_is_restored_is_caught_up_or_refused_and_repaired(
    books: Books, when: tuple[int | None, int | None, int | None]
) -> None:
    """The journal, index and witness as they were after the first, the third and the last message, or gone.

    If the newest of the three are gone too, nobody can tell.
    """
    known = max(-1 if time is None else time for time in when)
    path, journal = books.restore(*when), -1 if when[0] is None else when[0]
    if known == -1:
        with raises(LedgerError, "ledger.missing"):
            Journal(path)
        return
    if journal == known:
        found = [participations(Journal(path), client) for client in CLIENTS]
        assert found == [[1, 0, 0, 0], [], [2, 2, 1, 0], [2, 2, 2, 0]][known]
        assert Names(path).read() == [*range(known + 1)]
        answer(path, TRAIN, [CLIENTS[3]])
        return
    for use in (Journal, Names, Runs, Journal.create):
        with raises(LedgerError, "ledger.behind", path):
            use(path)
    found = books.repaired()
    if known == 3:
        assert all(after >= before for after, before in zip(found, books.spent, strict=True))
        if when[1] == 3:
            assert found == books.spent, "the index knows who was charged"
            assert Names(path).read() == [0, 1, 2, 3]
        elif when[0] == 0 and when[1] in (0, None):
            # The least noise that the policy accepts, for the largest model so far, twice, and never another report
            # than the one that is missing.
            assert found[3] == 2 * Fraction(11, 2) + Fraction(2, 10)
    answer(path, TRAIN, CLIENTS)


def test_a_price_above_what_the_policy_accepts_now_counts(books: Books) -> None:
    """The policy was another once: with less noise, and more hypotheses."""
    dear = replace(TRAIN.release, noise_multiplier=0.5, hypotheses=9, choice_epsilon=9.0)
    answer(books.path, replace(TRAIN, release=dear), [CLIENTS[0]])
    books.path.write_bytes(books.times[-1][0])
    books.files[1].unlink()
    forget()
    books.repaired()
    [(release, times)] = Journal(books.path).account(CLIENTS[3]).items()
    assert times == 1
    assert release == replace(dear, hypotheses=2)


def test_an_index_of_another_history_adds_what_is_larger(books: Books) -> None:
    """As after a restored set of files went on, and the index is that of the lost ones."""
    index = books.files[1].read_bytes()
    path = books.restore(0, 0, 0)
    answer(path, SMALL, [CLIENTS[3]])
    expected = [max(one, spent(Journal(path), client)) for one, client in zip(books.spent, CLIENTS, strict=True)]
    books.files[1].write_bytes(index)
    forget()
    with raises(LedgerError, "ledger.behind", books.files[1]):
        Journal(path)
    assert books.repaired() == expected


def test_a_repaired_journal_has_requests_decisions_signatures_and_counts_again(books: Books) -> None:
    def waits(rounds: int) -> str:
        with pytest.raises(Refused):
            Runs(books.path).check_approved("7", {"rounds": rounds}, "")
        return Runs(books.path).requests()[-1].digest

    runs, limits = Runs(books.path), Policy.parse({"max-evaluations": 2})
    refused, approved = waits(1), waits(2)
    runs.decide(refused, Status.APPROVED, "Dr. Day")
    older = [file.read_bytes() for file in books.files]
    runs.decide(refused, Status.REFUSED, "Dr. Day", "too many")
    runs.decide(approved, Status.APPROVED, "Dr. Day")
    runs.use_signature("7", DIGEST)
    for _ in range(2):
        runs.count_evaluation("7", limits)
    runs.record(Entry("7", "train"), True)
    books.path.write_bytes(older[0])
    forget()
    books.repaired()
    runs = Runs(books.path)
    found = {request.digest: (request.status, request.reason) for request in runs.requests()}
    assert found[refused] == (Status.REFUSED, "too many")
    assert found[approved][0] is Status.APPROVED
    for fault, use in (
        ("refused.signature", lambda: runs.use_signature("8", DIGEST)),
        ("refused.evaluations", lambda: runs.count_evaluation("7", limits)),
    ):
        with raises(Refused, fault):
            use()


def test_an_older_copy_is_refused_by_whatever_name(books: Books, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    other = tmp_path / "folder" / "other.jsonl"
    other.symlink_to(books.path)
    answer(other, TRAIN, CLIENTS)
    answer(books.path, TRAIN, CLIENTS)
    books.path.write_bytes(books.times[3][0])
    forget()
    with raises(LedgerError, "ledger.behind", other):
        Journal(other)
    assert [file.name for file in other.parent.iterdir()] == [other.name]


def test_a_process_that_has_read_more_refuses_an_older_copy(books: Books) -> None:
    journal = Journal(books.path)
    for file, content in zip(books.files, books.times[0], strict=True):
        file.write_bytes(content)
    with raises(LedgerError, "ledger.behind"):
        journal.charge(TRAIN, CLIENTS)


def test_a_charge_without_an_outcome_is_not_lost(books: Books) -> None:
    """Its clients trained, and the process was killed; then the journal was restored from a backup, and the index."""
    Journal(books.path).charge(TRAIN, [CLIENTS[3]])
    for file, content in zip(books.files[:2], books.times[3][:2], strict=True):
        file.write_bytes(content)
    forget()
    with raises(LedgerError, "ledger.behind", books.files[2]):
        Journal(books.path)


def test_lines_of_two_histories_make_no_journal(books: Books) -> None:
    """The last line of one stands after those of another, as where a disk was put together from two backups."""
    path = books.restore(2, 2, 2)
    Names(path).extend([0, 1, 2], [4])
    answer(path, TRAIN, [CLIENTS[0]])
    *lines, _ = path.read_bytes().splitlines(keepends=True)
    books.restore(3, None, None)
    path.write_bytes(b"".join([*lines, path.read_bytes().splitlines(keepends=True)[-1]]))
    with raises(LedgerError, "ledger.damaged"):
        Journal(path)


def test_what_nobody_knows_any_more_is_charged_to_all_who_have_a_number_and_people_are_asked_again(
    books: Books,
) -> None:
    """The table lacks some clients' rows at the time of the repair; the refusal of a request was lost."""
    runs = Runs(books.path)
    with pytest.raises(Refused):
        runs.check_approved("7", {"rounds": 1}, "")
    [request] = runs.requests()
    runs.decide(request.digest, Status.APPROVED, "Dr. Day")
    before = books.path.read_bytes()
    runs.decide(request.digest, Status.REFUSED, "Dr. Day")
    answer(books.path, TRAIN, [CLIENTS[3]])
    books.path.write_bytes(before)
    books.files[1].unlink()
    forget()
    assert "1 approved requests wait again" in Journal(books.path, opened=False).repair(POLICY, [])
    assert participations(Journal(books.path), CLIENTS[3]) == 1
    assert Runs(books.path).requests() == [replace(request, policy="")]


def test_a_killed_repair_is_begun_again(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        """Stands for the end of the process."""

    for step, sort in (("pwrite", "journal"), ("pwrite", "witness"), ("fsync", "witness")):
        books.restore(0, None, 3)
        calls: list[Any] = []
        does: Callable[..., Any] = getattr(os, step)

        def end(*arguments: Any, does: Any = does, calls: Any = calls, sort: str = sort) -> Any:
            named = os.readlink(f"/proc/self/fd/{arguments[0]}")
            if named.endswith("jsonl" if sort == "journal" else "witness"):
                raise Killed
            return does(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, step, end)
            with pytest.raises(Killed):
                Journal(books.path, opened=False).repair(POLICY, CLIENTS)
        forget()
        Journal(books.path, opened=False).repair(POLICY, CLIENTS)
        forget()
        found = [spent(Journal(books.path), client) for client in CLIENTS]
        assert all(after >= before for after, before in zip(found, books.spent, strict=True))


# --- damaged files


Damage = Callable[[bytearray, Books, np.random.Generator, int], object]


def a_bit(content: bytearray, _: Books, rng: np.random.Generator, __: int) -> None:
    written = len(bytes(content).rstrip(b"\0"))
    content[rng.integers(written)] ^= 1 << int(rng.integers(8))


def the_end_is_cut_off(content: bytearray, _: Books, rng: np.random.Generator, __: int) -> None:
    del content[int(rng.integers(len(content))) :]


def zeros(content: bytearray, _: Books, rng: np.random.Generator, __: int) -> None:
    start = int(rng.integers(len(content)))
    content[start : start + 512] = bytes(len(content[start : start + 512]))


def lines_gone_or_twice(content: bytearray, _: Books, rng: np.random.Generator, __: int) -> None:
    lines = bytes(content).splitlines(keepends=True)
    place = int(rng.integers(len(lines)))
    content[:] = b"".join([*lines[:place], *[lines[place]] * (2 * int(rng.integers(2))), *lines[place + 1 :]])


def an_older_one(content: bytearray, books: Books, rng: np.random.Generator, file: int) -> None:
    content[:] = books.times[int(rng.integers(3))][file]


def a_part_of_an_older_one(content: bytearray, books: Books, rng: np.random.Generator, file: int) -> None:
    older = books.times[int(rng.integers(3))][file]
    start = int(rng.integers(len(older)))
    content[start : start + 4096] = older[start : start + 4096]


def gone(content: bytearray, *_: object) -> None:
    content.clear()


DAMAGES: list[Damage] = [
    a_bit, the_end_is_cut_off, zeros, lines_gone_or_twice, an_older_one, a_part_of_an_older_one, gone,
]  # fmt: skip
FILES = [(0,), (1,), (2,), *combinations(range(3), 2)]


def damaged(books: Books, number: int) -> None:
    """Damage one file, or two; the journal or the witness is refused, or all tell at least what was spent."""
    rng = np.random.default_rng([7, number])
    which = FILES[number % len(FILES)]
    books.restore(3, 3, 3)
    for file in which:
        content = bytearray(books.times[3][file])
        damage = DAMAGES[int(rng.integers(len(DAMAGES)))]
        damage(content, books, rng, file)
        books.files[file].write_bytes(content) if content or damage is not gone else books.files[file].unlink()
    if which == (0, 2) and not books.files[1].exists():
        return
    forget()
    try:
        found = [spent(Journal(books.path), client) for client in CLIENTS]
    except LedgerError as fault:
        if fault.code in ("ledger.another-file", "ledger.version"):  # to be moved away
            return
        found = books.repaired()
    assert all(after >= before for after, before in zip(found, books.spent, strict=True)), number
    answer(books.path, TRAIN, CLIENTS)
    forget()
    after = [spent(Journal(books.path), client) for client in CLIENTS]
    assert [one - other for one, other in zip(after, found, strict=True)] == [Fraction(11, 3)] * 4, number


@pytest.mark.slow
def test_a_damaged_file_is_refused_and_repaired_or_tells_at_least_what_was_spent(books: Books) -> None:
    for number in range(120):
        damaged(books, number)


@pytest.mark.rest
def test_so_are_4600(books: Books) -> None:
    for number in range(120, 4720):
        damaged(books, number)


# --- kills


STEPS = ("pwrite", "fsync", "ftruncate", "posix_fallocate", "close", "replace")


def _answers(path: Path, alive: int, half: bool, told: int) -> None:
    """Answer messages until so many steps were done, and die amid the next one."""
    left = [alive]

    def dying(step: str) -> Callable[..., Any]:
        does = getattr(os, step)

        def do(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                if half and step == "pwrite":
                    does(arguments[0], arguments[1][: len(arguments[1]) // 2], arguments[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return does(*arguments)

        return do

    for step in STEPS:
        setattr(os, step, dying(step))
    save = State.save

    def saved(state: State, index: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            index.write_bytes(index.read_bytes()[:5000]) if half and index.exists() else index.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        save(state, index)

    State.save = saved  # type: ignore[method-assign]
    for _ in range(2):
        answer(path, TRAIN, CLIENTS)
        os.write(told, b"answered\n")
    os._exit(0)


def killed(path: Path, alive: Sequence[int], half: bool) -> tuple[int, int]:
    """Let a process each answer messages for so many steps; return how many were killed, and what was answered."""
    answered, told = os.pipe()
    children = []
    for steps in alive:
        if (child := os.fork()) == 0:
            try:
                _answers(path, steps, half, told)
            finally:
                os._exit(1)
        children.append(child)
    os.close(told)
    with os.fdopen(answered) as text:
        left = len(text.readlines())
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert {*statuses} <= {0, -signal.SIGKILL}
    return sum(status != 0 for status in statuses), left


def paid(path: Path) -> int:
    """Return how often each client has paid: a charge is made for all or for none."""
    forget()
    [times] = {participations(Journal(path), client) for client in CLIENTS}
    return times


def test_what_left_is_paid_for_whenever_the_process_is_killed(tmp_path: Path) -> None:
    """At every step of two messages, and amid each write."""
    kills = 0
    for alive, half in product(range(30), (False, True)):
        folder = tmp_path / f"{alive} {half}"
        folder.mkdir()
        path = Journal.create(folder / "ledger.jsonl").path
        ends, left = killed(path, [alive], half)
        times = paid(path)
        assert left <= sum(line["paid"] > 0 for line in Journal(path).messages()) <= times <= left + 1
        Journal(path).index.unlink(missing_ok=True)
        assert paid(path) == times, "and the lines say so, too"
        answer(path, TRAIN, CLIENTS)
        assert paid(path) == times + 1, "what was left unfinished is written over"
        kills += ends
    assert kills == 60


@pytest.mark.rest
def test_so_it_is_800_times_with_two_at_work(tmp_path: Path) -> None:
    """Each of them reads what the other one has charged."""
    rng, path = np.random.default_rng(1), Journal.create(tmp_path / "ledger.jsonl").path
    answered = 0
    for _ in range(800):
        half, alive = bool(rng.integers(2)), rng.integers(60, size=2).tolist()
        answered += killed(path, alive, half)[1]
        assert paid(path) >= answered
    assert sum(1 for _ in Journal(path).lines()) > 2 * answered > 800
    assert len(list(tmp_path.glob(".*"))) <= 1, "what killed processes leave is written over"
