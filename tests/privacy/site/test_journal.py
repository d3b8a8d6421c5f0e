"""A site's journal: what clients pay, how the chain grows, and processes that share it."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.errors import raises
from tests.helpers.examples import examples
from tests.helpers.forks import forks
from tests.helpers.ledgers import forget, participations, spent
from umbel.privacy.site import journal as module
from umbel.privacy.site.charges import Charge, Limits, priced, read, written
from umbel.privacy.site.config import Site
from umbel.privacy.site.entry import Entry
from umbel.privacy.site.journal import Journal, Names
from umbel.privacy.site.totals import Totals, from_ranges, in_ranges
from umbel.protocol.errors import LedgerError
from umbel.protocol.release import Clipping, Kind, Release

TRAIN = Charge(run="7", round=1, release=Release(Kind.TRAIN, 11, 3.0, Clipping.UPDATE))
COST = Fraction(11, 3)


def paper(budget: int | Fraction) -> Limits:
    return Limits(paper_budget=Fraction(budget))


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def path(nowhere: Path) -> Path:
    """A new, empty journal."""
    return Journal.create(nowhere).path


@pytest.fixture(params=["on disk", "in memory"])
def ledger(request: pytest.FixtureRequest, nowhere: Path) -> Journal | Totals:
    """A journal, and a simulation's totals: both answer the same questions alike."""
    return Journal.create(nowhere) if request.param == "on disk" else Totals(RecordDict())


# --- what clients pay


def test_sums_are_exact(ledger: Journal | Totals) -> None:
    for _ in range(30):
        ledger.charge(TRAIN, [0])
    ledger.charge(Charge("7", 2, Release(Kind.TRAIN, 11, 0.1, Clipping.PUBLIC, 0.5)), [0])
    assert spent(ledger, 0) == 110 + 110, ".1 is a tenth, and not the binary number next to it"
    assert spent(ledger, 1) == 0


def test_a_client_pays_as_long_as_the_budget_lasts_and_to_the_last_penny(ledger: Journal | Totals) -> None:
    """The budget of 11 is exactly three participations of 11/3."""
    limits = paper(11)
    assert [ledger.charge(TRAIN, [0], limits) for _ in range(4)] == [[True], [True], [True], [False]]
    assert ledger.charge(TRAIN, [0, 1], limits) == [False, True]
    assert ledger.charge(TRAIN, [0, 1, 2], limits, at_least=3) == [False] * 3
    assert (spent(ledger, 0), spent(ledger, 1)) == (11, COST)


def test_no_budget_covers_a_release_without_noise(ledger: Journal | Totals) -> None:
    bare = Charge("7", 1, Release(Kind.TRAIN, 11, 0.0, Clipping.UPDATE))
    assert ledger.charge(bare, [0], paper(10**9)) == [False]
    assert ledger.charge(bare, [0]) == [True]
    assert spent(ledger, 0) == math.inf
    assert ledger.charge(TRAIN, [0], paper(10**9)) == [False]


def test_a_client_releases_no_more_often_than_it_may_whatever_that_costs(ledger: Journal | Totals) -> None:
    """With ever more noise a release costs ever less; it may still tell a little."""
    limits = Limits(participations=2)
    cheap = Charge("7", 1, Release(Kind.TRAIN, 11, 1e12, Clipping.PUBLIC, 0.5))
    assert [ledger.charge(cheap, [0, 1], limits) for _ in range(3)] == [[True, True], [True, True], [False, False]]
    assert ledger.charge(cheap, [0, 5], limits) == [False, True]


def test_a_budget_is_the_epsilon_between_any_two_data_sets(ledger: Journal | Totals) -> None:
    """n = 11, nu = 10 and choice-epsilon 1 cost 2.2 + 1 a participation: three of them fit 9.6, to the last penny."""
    limits = Limits(Fraction(96, 10))
    private = Charge("7", 1, Release(Kind.TRAIN, 11, 10.0, Clipping.PUBLIC, 0.5, hypotheses=5, choice_epsilon=1.0))
    assert [ledger.charge(private, [0], limits) for _ in range(4)] == [[True], [True], [True], [False]]
    report = Charge("7", 1, Release(Kind.REPORT, 2, 20.0, Clipping.PUBLIC, 1.0))
    assert ledger.charge(report, [0, 1], limits) == [False, True], "reports count too: 2/20"


def test_a_client_is_charged_as_often_in_a_run_as_the_run_may_ask(path: Path) -> None:
    journal, other = Journal(path), replace(TRAIN, run="8")
    found = [journal.charge(one, [0, 1], most=2) for one in (TRAIN, TRAIN, TRAIN, other)]
    assert found == [[True] * 2, [True] * 2, [False] * 2, [True] * 2]


def test_what_a_client_spent_is_told_by_release_whatever_its_radius(path: Path) -> None:
    """Releases of one price are one account in every process; the accountant takes them as they are. -0.0 is 0.0."""
    public = Release(Kind.TRAIN, 11, 3.0, Clipping.PUBLIC)
    report = Release(Kind.REPORT, 2, 4.0, Clipping.PUBLIC)
    for radius, choice, noise in ((0.25, -0.0, 3.0), (0.5, 0.0, 3), (None, 0, 3.0)):
        release = replace(public, radius=radius, choice_epsilon=choice, noise_multiplier=noise)
        Journal(path).charge(Charge("7", 1, release), [0])
        written.cache_clear()
        read.cache_clear()
    forget()
    ledger = Journal(path)
    ledger.charge(Charge("7", 1, report), [0, 1])
    ledger.charge(TRAIN, [1])
    assert ledger.accounts() == {0: {public: 3, report: 1}, 1: {report: 1, TRAIN.release: 1}}
    assert list(ledger.account(1)) == [report, TRAIN.release], "in the order in which they came first"


def test_every_charge_is_a_row(path: Path) -> None:
    Journal(path).charge(Charge("run", 3, Release(Kind.TRAIN, 11, 3.0, Clipping.PUBLIC, 0.25)), [4, 9])
    Journal(path).charge(TRAIN, [0])
    *rows, last = Journal(path).rows()
    assert [row["client"] for row in rows] == [4, 9]
    assert rows[0]["at"].startswith("20")
    expected = {"run": "run", "round": 3, "kind": "train", "n": 11, "noise_multiplier": 3.0, "times": 1}
    assert rows[0].items() >= (expected | {"clipping": "public", "clip_norm": 0.25}).items()
    assert last["clip_norm"] is None, "the norm of an update is not written down"


@given(st.lists(st.integers(0, 10**6), max_size=200))
def test_ranges_hold_each_client_and_no_other(clients: list[int]) -> None:
    assert from_ranges(in_ranges(clients)) == sorted(set(clients))


# --- the file


def test_one_that_is_not_there_is_not_made_by_opening_it(nowhere: Path) -> None:
    """It may be one that was lost."""
    with raises(LedgerError, "ledger.missing", nowhere, f"umbel site journal --create {nowhere}"):
        Journal(nowhere)
    assert not nowhere.exists()


def test_one_that_is_there_is_not_made_anew(path: Path) -> None:
    Journal(path).charge(TRAIN, [0])
    assert spent(Journal.create(path), 0) == COST


OLD = b"SQLite format 3\0" + bytes(44) + b"\0\0\0\1" + bytes(4) + b"UMBL" + bytes(28)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("ledger.jsonl", b"", "ledger.empty"),
        ("ledger.jsonl", b"client,spent\n0,3.7\n", "ledger.another-file"),
        ("ledger.jsonl", OLD, "ledger.another-file"),
        ("ledger.index", OLD, "ledger.name"),
        ("ledger.jsonl", b'{"number":1,"kind":"begin","version":9,"at":"', "ledger.version"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(
    name: str, content: bytes, code: str, tmp_path: Path
) -> None:
    """Such as the ledger of an older umbel, also by the name that the configuration has for it."""
    (tmp_path / name).write_bytes(content)
    for use in (Journal, Journal.create, Names):
        with raises(LedgerError, code, tmp_path / name):
            use(tmp_path / name)
    assert (tmp_path / name).read_bytes() == content


def test_a_folder_that_is_not_there_is_named_and_one_in_place_of_the_file_refused(tmp_path: Path) -> None:
    with raises(LedgerError, "ledger.no-folder", "ledger-path"):
        Journal.create(tmp_path / "nowhere" / "ledger.jsonl")
    with raises(LedgerError, "ledger.unusable", tmp_path):
        Journal(tmp_path)


def test_a_line_follows_each_other_and_only_the_site_may_read_them(path: Path) -> None:
    for _ in range(3):
        Journal(path).charge(TRAIN, [0])
    lines = list(Journal(path).lines())
    assert [line["number"] for line in lines] == [1, 2, 3, 4]
    assert [line["previous"] for line in lines[1:]] == [line["hash"] for line in lines[:-1]]
    journal = Journal(path)
    for file in (journal.path, journal.witness.path):
        assert file.stat().st_mode & 0o077 == 0


def test_processes_that_number_clients_at_once_do_not_give_a_number_twice(path: Path) -> None:
    names = Names(path)
    names.extend([], ["anna"])
    with raises(LedgerError, "ledger.clients-changed", path):
        names.extend([], ["bert"])
    assert names.read() == ["anna"]


def test_who_reads_slowly_holds_up_no_charge(path: Path) -> None:
    journal = Journal(path)
    journal.charge(TRAIN, range(5))
    rows, lines = journal.rows(), journal.lines()
    assert (next(rows)["client"], next(lines)["kind"]) == (0, "begin")
    assert all(journal.charge(TRAIN, range(0, 9000, 3))), "which are more bytes than a reader takes at once"
    assert [row["client"] for row in rows] == [1, 2, 3, 4], "those that there were"
    assert [line["clients"] for line in lines] == ["0-4"]


# --- a site's own


@pytest.mark.parametrize(
    ("entries", "answered_before", "made"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"budget": "8"}, False, False),
        ({"max-participations": "3"}, False, False),
        ({"max-evaluations": "9"}, False, True),  # of one run, which begins with the journal
    ],
    ids=str,
)
@pytest.mark.parametrize("named", [False, True], ids=["default place", "named place"])
def test_a_site_that_may_have_lost_its_journal_gets_no_empty_one(
    entries: dict[str, str], answered_before: bool, made: bool, named: bool, tmp_path: Path, umbel_home: Path
) -> None:
    """These sites have no budget unless they set one. A journal in a named place may lie on a missing volume."""
    path = tmp_path / "ledger.jsonl" if named else umbel_home / "ledger.jsonl"
    umbel_home.mkdir()
    if answered_before:
        Journal.create(path).index.unlink(missing_ok=True)
        path.unlink()
        forget()
    site = Site.of({"data-path": "/data/own"} | entries | ({"ledger-path": str(path)} if named else {}))
    if made:
        Journal.of(site)
    else:
        with raises(LedgerError, "ledger.behind" if answered_before else "ledger.missing"):
            Journal.of(site)
    assert path.exists() is made


def test_a_new_journal_is_on_the_disk_by_its_name_and_so_is_its_folder(
    umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut that took it away would forget what was spent."""
    home, synced, fsync = umbel_home / "made" / "now", [], os.fsync
    monkeypatch.setenv("UMBEL_HOME", str(home))

    def look(descriptor: int) -> None:
        folder = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((folder, [file.name for file in folder.iterdir()] if folder.is_dir() else []))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    journal = Journal.of(Site.of({"data-path": "/data/own"}))
    assert any(folder == home and "ledger.jsonl" in names for folder, names in synced)
    assert any(folder == journal.witness.path.parent and names for folder, names in synced)
    for folder, name in ((home.parent, "now"), (umbel_home, "made")):
        assert (folder, [name]) in synced


# --- many processes


def _charge_often(path: Path, unlinks: bool) -> None:
    for number in range(20):
        journal = Journal(path)
        if unlinks:
            forget()
            journal.index.unlink(missing_ok=True)
        journal.charge(TRAIN, [200], paper(55))
        if number % 2:
            journal.charge(TRAIN, range(100))
        journal.record(Entry("7", "train", charges=1 + number % 2), True)


@pytest.mark.slow
@pytest.mark.parametrize("unlinks", [False, True], ids=["", "the index deleted under them"])
def test_two_processes_lose_no_charge_make_none_twice_and_never_exceed_a_budget_together(
    path: Path, unlinks: bool
) -> None:
    """2,000 charges of 100 clients without a limit, of which none is lost; and room for 15 of one more's 40."""
    workers = [forks().Process(target=_charge_often, args=(path, unlinks)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    accounts = Journal(path).accounts()
    assert spent(Journal(path), 200) == 55
    assert {client: dict(account) for client, account in accounts.items() if client != 200} == {
        client: {TRAIN.release: 20} for client in range(100)
    }
    assert len(list(Journal(path).messages())) == 40
    assert path.stat().st_size == Journal(path).head.size, "no room is left over"


def test_a_process_that_was_forked_in_the_middle_of_a_charge_locks_nobody_out(path: Path) -> None:
    children: list[int] = []

    class Forking(Limits):
        def paying(self, *arguments: Any) -> list[bool]:
            if (child := os.fork()) == 0:
                signal.pause()
            children.append(child)
            return super().paying(*arguments)

    assert Journal(path).charge(TRAIN, [0], Forking()) == [True]
    try:
        with path.open() as file:
            module.fcntl.flock(file, module.fcntl.LOCK_EX | module.fcntl.LOCK_NB)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


# --- a full disk


class Disk:
    """A disk that is full: a file can be written only where it has room already."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.full, write, allocate = False, os.pwrite, os.posix_fallocate

        def pwrite(file: int, text: bytes, at: int) -> int:
            return write(file, text[: max(0, os.fstat(file).st_size - at)] if self.full else text, at)

        def fallocate(file: int, at: int, length: int) -> None:
            if self.full and at + length > os.fstat(file).st_size:
                raise OSError(28, "No space left on device")
            allocate(file, at, length)

        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(os, "posix_fallocate", fallocate)


def test_a_disk_that_fills_up_after_the_charge_takes_the_outcome_and_then_no_charge(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, journal, entry = Disk(monkeypatch), Journal(path), Entry("7", "train", {"x": "y" * 20_000})
    journal.record(Entry("7", "query"), True)
    assert journal.charge(TRAIN, [0, 1]) == [True, True]
    entry.charge(2)
    disk.full = True
    with raises(LedgerError, "ledger.disk-full"):
        journal.record(Entry("7", "query", {"x": "y" * 20_000}), True)
    journal.record(entry, True)
    before = path.read_bytes()
    for use in (lambda: journal.charge(TRAIN, [0]), lambda: journal.record(Entry("7", "query"), True)):
        with raises(LedgerError, "ledger.disk-full", path):
            use()
        assert path.read_bytes() == before
    disk.full = False
    assert journal.charge(TRAIN, [0]) == [True]
    forget()
    assert {client: sum(own.values()) for client, own in Journal(path).accounts().items()} == {0: 2, 1: 1}
    assert [line["message"] for line in Journal(path).messages()] == ["query", "train"]


def test_without_room_for_a_witness_nothing_leaves(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, journal = Disk(monkeypatch), Journal(path)
    journal.charge(TRAIN, [0])
    journal.witness.path.unlink()
    disk.full = True
    with raises(LedgerError, "ledger.disk-full"):
        journal.record(Entry("7", "train", charges=1), True)


@pytest.mark.parametrize("fails", ["fsync", "pwrite"])
def test_a_line_that_cannot_be_finished_leaves_no_half_of_itself(
    fails: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(path)
    journal.charge(TRAIN, [0])
    head = journal.head
    does: Callable[..., Any] = getattr(os, fails)
    file = os.fstat(os.open(path, os.O_RDONLY))

    def broken(descriptor: int, *arguments: Any) -> Any:
        if os.path.samestat(os.fstat(descriptor), file) and not (arguments and not arguments[0].strip(b"\0")):
            arguments and does(descriptor, arguments[0][:100], *arguments[1:])
            raise OSError(5, "Input/output error")
        return does(descriptor, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, broken)
        with raises(LedgerError, "ledger.unusable"):
            journal.charge(TRAIN, [0, 1])
    forget()
    assert Journal(path).head == head
    assert Journal(path).charge(TRAIN, [1]) == [True]
    forget()
    assert list(Journal(path).accounts()) == [0, 1]


def test_the_room_for_outcomes_is_given_back(path: Path) -> None:
    """Two messages at once; of a killed one a little room stays, for good."""
    journal = Journal(path)
    journal.charge(TRAIN, [0])
    journal.charge(TRAIN, [1])
    for _ in range(2):
        journal.record(Entry("7", "train", charges=1), True)
    assert path.stat().st_size == journal.head.size
    for line in path.read_text().splitlines():
        assert list(json.loads(line))[-2:] == ["previous", "hash"]


def test_a_client_with_a_limit_makes_so_many_kinds_of_release_and_no_more() -> None:
    """Noise near 10^12, another each time, costs nothing; the ledger would grow by each for ever."""
    limits = Limits(budget=Fraction(1))
    account: dict[Release, int] = {}
    for number in range(300):
        release = Release(Kind.TRAIN, 11, 1e12 + number, Clipping.PUBLIC)
        if limits.allow(account, release):
            account[priced(release)] = 1
    assert len(account) == 256
    assert limits.allow(account, next(iter(account))), "what it has made before it may make again"
    assert Limits().allow(account, Release(Kind.TRAIN, 11, 7.0, Clipping.PUBLIC)), "without a limit nothing is one"


# --- in a simulation's memory


CLIENTS = [*range(6), 2947, 2**62]
releases = st.builds(
    Release,
    st.just(Kind.TRAIN),
    st.integers(1, 2_000_000),
    st.sampled_from([0.0, 0.001, 0.1, 1.0, 3.0, 5.0, 1e9]),
    st.just(Clipping.UPDATE),
)
rounds = st.lists(st.tuples(st.lists(st.sampled_from(CLIENTS), unique=True, max_size=5), releases), max_size=12)


@settings(max_examples=examples(40))
@given(rounds)
def test_each_client_pays_for_itself_alone_however_the_state_travels(rounds: list[tuple[list[int], Release]]) -> None:
    """Between rounds Ray pickles a node's state, and a SuperNode keeps it as a protobuf message."""
    stays, moved = RecordDict(), RecordDict()
    paid: defaultdict[int, list[Fraction | None]] = defaultdict(list)
    for asked, release in rounds:
        for state in (stays, moved):
            Totals(state).charge(Charge("run", 1, release), asked)
        moved = recorddict_from_proto(recorddict_to_proto(pickle.loads(pickle.dumps(moved))))
        for client in asked:
            paid[client].append(release.paper_cost)
    for state in (stays, moved):
        for client in CLIENTS:
            costs = [math.inf if cost is None else cost for cost in paid[client]]
            assert participations(Totals(state), client) == len(costs)
            assert spent(Totals(state), client) == sum(costs)
        assert list(state) in ([], ["umbel.ledger"]), "the rest of the state is left alone"
