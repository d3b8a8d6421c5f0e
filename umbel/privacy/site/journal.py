"""A site's journal: its only book, with a line for all that must outlive a crash.

A line is JSON with the SHA-256 of the line before it and of itself. Lines are only ever added, under a lock on the
file, and are on disk before what they record has any effect: a charge before a client trains, a message's outcome
before its reply leaves. There is no key: the chain detects damage, but no forger.

Two other files tell a journal that was restored from a backup, cut off or deleted: the index beside it
(`umbel.privacy.site.totals`), which says what the lines add up to, and a `Witness` elsewhere. If one of them is behind
the journal, it catches up. If the journal is behind, the site refuses everything until `Journal.repair`.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from itertools import compress, islice
from logging import WARNING
from pathlib import Path
from typing import Any, Self

from umbel.privacy.site.charges import NO_LIMITS, OF_ROWS, Account, Charge, Limits, read, sort_of, written
from umbel.privacy.site.config import Site
from umbel.privacy.site.entry import Decision, Entry
from umbel.privacy.site.policy import Policy
from umbel.privacy.site.totals import Head, Line, State, from_ranges, in_ranges, key_of
from umbel.privacy.site.witness import Witness, write_at
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import LedgerError
from umbel.protocol.home import free_text, is_full, make_home_of, sync
from umbel.protocol.log import log
from umbel.protocol.plugins import distrust

VERSION = 1
"""The version of the journals that this umbel writes, and the only one that it reads."""
INDEX = ".index"
_FIRST = b'{"number":1,"kind":"begin","version":'
_END = b',"hash":"'
_ROOM = 1 << 16
"""Bytes for the outcome of a message that was charged: more than the longest one."""
_MOST_ROOM = 16 * _ROOM  # processes that were killed leave some
_WAITS = {"status": "waiting", "decided": "", "person": "", "reason": ""}
# The errors that Python raises for odd values in lines.
_FAULTS = (ArithmeticError, LookupError, TypeError, ValueError)

_states: dict[Path, State] = {}  # by the journal's path: what this process has read


class Journal:
    """An open journal. Opening it, and each use, adds up what other processes have added.

    Parameters
    ----------
    path : Path
        An existing journal; see `create` and `of`.
    witness : Path, optional
        The folder of its witness.
    node : str
        Identifies a node among those that share the journal.
    policy : str
        The digest of the site's policy, for the record.
    opened : bool
        False for `repair` alone.

    Raises
    ------
    LedgerError
        If the file is not a journal, is of another version, is damaged, or lacks lines. It stays unchanged.
    """

    def __init__(
        self,
        path: Path,
        *,
        witness: Path | None = None,
        node: str = "",
        policy: str = "",
        opened: bool = True,
    ) -> None:
        self._key = Path(os.path.realpath(path))  # so that all names of a journal have one index and one witness
        if self._key.suffix == INDEX:
            text = f"{path} is the name of an index: name the journal beside it, as {path.with_suffix('.jsonl').name}"
            raise LedgerError(f"{text}, in ledger-path; it is not opened, even if it is a ledger", code="ledger.name")
        self.path, self._node, self._policy = path, node, policy
        self.index, self.witness = self._key.with_suffix(INDEX), Witness(self._key, witness)
        if opened:
            with self._locked():
                pass

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make an empty journal in an existing folder. An existing one is opened."""
        cls(path, opened=False)._make()
        return cls(path)

    @classmethod
    def of(cls, site: Site) -> Self:
        """Open the journal of a site that serves data; make it under the conditions of `may_begin`."""
        assert site.ledger_path is not None, "a site that serves data has a journal"
        digest = sha256(site.identity.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        about: dict[str, Any] = {"witness": site.witness_folder, "node": digest, "policy": site.policy.digest}
        if not site.ledger_path.exists() and may_begin(site):
            make_home_of(site.ledger_path)
            log(WARNING, "umbel made a new, empty ledger: %s", site.ledger_path)
            cls(site.ledger_path, opened=False, **about)._make()
        return cls(site.ledger_path, **about)

    # --- charges

    def charge(
        self,
        charge: Charge,
        clients: Sequence[ClientInDataset],
        limits: Limits = NO_LIMITS,
        at_least: int = 1,
        most: float = math.inf,
    ) -> list[bool]:
        """Charge all clients within their limits at once, and return these; none if there are fewer than `at_least`.

        A client with `most` releases of this kind in this run is over its limits.

        The lock is held from check to charge, so that processes that share the journal cannot exceed the limits
        together. On return the charge is on disk, and there is room for the message's outcome.
        """
        with self._locked() as file:
            state = self._state
            taken = state.taken(charge, clients) if most < math.inf else [0] * len(clients)
            able = [client for client, times in zip(clients, taken, strict=True) if times < most]
            paid = {*compress(able, limits.paying(able, state.spent, state.account, charge.release, at_least))}
            if paid:
                self._add(file, _charge_line(charge, paid, limited=most < math.inf), room=_ROOM)
        return [client in paid for client in clients]

    def accounts(self) -> dict[ClientInDataset, Account]:
        """Return the releases of every client, by client."""
        with self._locked():
            account = cache(self._state.account)  # many clients have made the same releases
            clients = sorted((int(client), spent) for client, spent in self._state.facts["client"].items())
            return {ClientInDataset(client): account(spent) for client, spent in clients}

    def account(self, client: ClientInDataset) -> Account:
        """Return the releases of a client."""
        return self.accounts().get(client, {})

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every charge of a client, oldest first."""
        charges = [line for line in self.lines() if line["kind"] == "charges"]
        # A table has the same columns in each row.
        left_out = {"radius", *(() if any(read(line["release"]).by_rows for line in charges) else OF_ROWS)}
        for line in charges:
            about = {key: value for key, value in asdict(read(line["release"])).items() if key not in left_out}
            for client in from_ranges(line["clients"]):
                row = {"at": line["at"], "run": line["run"], "round": line["round"], "client": client}
                yield row | about | {"clip_norm": line["clip_norm"], "times": line["times"]}

    def distrust(self, named: str = "") -> Self:
        """Let mechanisms of releases run no code that the journal alone names: somebody may have sent it.

        `named` are those that the site names itself, separated by spaces.
        """
        distrust(*{read(text).mechanism for text in self._state.all("release")} - {*named.split()})
        return self

    # --- messages

    def record(self, entry: Entry, answered: bool) -> None:
        """Add the outcome of a message; on return it is on disk."""
        partly = Decision.PARTLY if entry.reasons else Decision.ANSWERED
        line = entry.line(partly if answered else Decision.REFUSED)
        sent = [[self._node, entry.run, *one] for one in entry.sent]
        about = {"policy": self._policy} | ({"sent": sent} if sent else {})
        with self._locked() as file:
            self._add(file, line | about, room=-_ROOM * entry.charges)

    def messages(self) -> Iterator[Line]:
        """Yield the outcome of every message, and every decision of people, oldest first."""
        return (line for line in self.lines() if line["kind"] == "message")

    def lines(self) -> Iterator[Line]:
        """Yield every line that there is now, oldest first; no process waits for a reader that takes its time."""
        # No further: what comes after the last line may be written just now.
        return (line for line, _ in islice(lines_of(self.path), self.head.number))

    # --- the file

    @property
    def head(self) -> Head:
        """The end of the last line."""
        with self._locked():
            return self._state.head

    def holds(self, head: Head) -> bool:
        """Return whether a line ends there, and has that hash."""
        with self._locked() as file:
            return _holds(file, head)

    def keep_room(self) -> None:
        """Raise `LedgerError` unless there is room for a charge and its outcome."""
        with self._locked() as file:
            size = os.fstat(file).st_size
            os.posix_fallocate(file, size, 2 * _ROOM)
            os.ftruncate(file, size)

    def copy_to(self, path: Path) -> int:
        """Copy the journal to a new file in one step, also while others use it; return the number of lines."""
        try:
            with _scratch(path) as scratch:
                with self.path.open("rb") as file, scratch.open("wb") as copy:
                    copy.write(file.read(self.head.size))
                    os.fsync(copy.fileno())
                lines = sum(1 for _ in lines_of(scratch))
        except FileExistsError:
            raise LedgerError(f"{path} exists already; name another file", code="ledger.exists") from None
        except OSError as error:
            raise LedgerError(f"the copy {path} cannot be made: {error}", code="ledger.no-copy") from error
        return lines

    def repair(self, policy: Policy, clients: Iterable[ClientInDataset]) -> str:
        """Let a journal that is damaged or lacks lines be used again; return what was done, or an empty text.

        Lines after the first that is damaged are moved to another file. The index's larger totals are added. Each
        message that only the witness knows of is charged to every client in journal, index and data (`clients`), at
        the dearest price of its sort so far, or the dearest that the policy accepts, whichever is larger. If it knows
        of lines that are in neither, approved requests wait again: people may have refused them since.
        """
        with suppress(LedgerError):
            sum(1 for _ in Journal(self.path, witness=self.witness.path.parent).lines())
            return ""
        index, witnessed, prices = State.load(self.index), Head(), list[tuple[str, int]]()
        with suppress(LedgerError):
            witnessed, prices = self.witness.read()
        if not self.path.exists() and (prices or index.head.number):
            self.path.touch(mode=0o600)
        with self._opened() as file:
            if os.fstat(file).st_size:
                self._check_kind(file)
            state = State()
            with suppress(LedgerError, *_FAULTS):
                for line, head in lines_of(self.path):
                    state.add(line, head)
            aside = self._cut(file, state.head)
            facts = state.larger(index)
            for fact in facts:
                state.put(*fact)
            everybody = {*map(int, (*state.facts["client"], *state.facts["name"])), *clients}
            known = {key: state.get("price", key)[1] for key in state.facts["price"]}
            lost = {read(text): times - known.get(key_of(*sort_of(read(text))), 0) for text, times in prices}
            lost = {release: times for release, times in lost.items() if times > 0}
            did = f"{sum(lost.values())} missing messages were charged; the index had {len(facts)} larger totals"
            if witnessed.number > max(state.head.number, index.head.number):
                again = [one | _WAITS for one in state.all("request") if one["status"] == "approved"]
                facts += [("request", one["digest"], one) for one in again]
                did += f"; {len(again)} approved requests wait again"
            entry = Entry(message="ledger", reasons=[did + (f"; damaged lines are in {aside.name}" if aside else "")])
            added = [
                _charge_line(Charge("", 0, policy.dearest(release)), everybody, times)
                for release, times in lost.items()
            ]
            _states[self._key] = state
            self._add(
                file,
                *([] if state.head.number else [_begin()]),
                entry.line(Decision.REPAIRED) | {"facts": facts},
                *added,
                alone=True,
            )
            if (other := Witness(self._key)).path.exists():
                # That of commands that do not know the site's: lines that it knows may be gone.
                other.write(_states[self._key], alone=True)
        return entry.reasons[0]

    def _cut(self, file: int, head: Head) -> Path | None:
        """Cut off all after a line; return the path of a copy if that was more than an unfinished line."""
        rest = os.pread(file, os.fstat(file).st_size - head.size, head.size)
        aside = None
        if b"\n" in rest:
            aside = self.path.with_name(f"{self.path.stem}-damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}.jsonl")
            shutil.copy2(self.path, aside)
            sync(aside)
            sync(aside.parent)
        os.ftruncate(file, head.size)
        return aside

    @property
    def _state(self) -> State:
        return _states[self._key]

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Open the file with a lock against all others, and add up what they have added."""
        with self._opened() as file:
            self._catch_up(file)
            yield file

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            file = os.open(self.path, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield file
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile keeps the file open
                os.close(file)
        except FileNotFoundError as error:
            if error.filename != str(self.path):
                raise LedgerError(f"there is no {error.filename}; set witness-path", code="ledger.no-folder") from None
            if trace := self._trace:
                raise self._behind(trace) from None
            raise _missing(self.path) from None
        except OSError as error:
            if is_full(error):
                text = f"the disk is full ({free_text(self.path)}): nothing is charged in {self.path}, or answered"
                raise LedgerError(f"{text}; make room", code="ledger.disk-full") from error
            raise LedgerError(f"the ledger {self.path} cannot be used: {error}", code="ledger.unusable") from error

    def _catch_up(self, file: int) -> None:
        self._check_kind(file)
        fresh = self._key not in _states
        try:
            state = State.load(self.index) if fresh else self._state
            before = state.head
            if not _holds(file, before):
                raise self._behind(self.index)
            for line, head in lines_of(self.path, state.head):
                state.add(line, head)
            witnessed, _ = self.witness.read()
            if not _holds(file, witnessed):
                raise self._behind(self.witness.path)
        except _FAULTS as error:
            _states.pop(self._key, None)
            raise _damaged(self.path, error) from error
        _states[self._key] = state
        if witnessed != state.head:
            self.witness.write(state)
        if fresh and before != state.head:
            state.save(self.index)

    def _add(self, file: int, *contents: Line, room: int = 0, alone: bool = False) -> None:
        """Add lines, or nothing, and then tell the witness; `room` bytes more are kept free after them, or fewer."""
        state, head, added, text = self._state, self._state.head, [], b""
        start = head.size
        for content in contents:
            line, sealed, head = _sealed(content, head)
            added.append((line, head))
            text += sealed
        rest = os.pread(file, (size := os.fstat(file).st_size) - start, start)
        torn = len(rest.rstrip(b"\0"))  # a line that a killed process left unfinished
        end = head.size + min(max(len(rest) - torn + room, 0), _MOST_ROOM)
        try:
            if end > size:
                os.posix_fallocate(file, start, end - start)
            write_at(file, text.ljust(torn, b"\0"), start)
            os.fsync(file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, size)
                os.pwrite(file, bytes(min(len(text), size - start)), start)
            raise
        if end < size:
            os.ftruncate(file, end)
        for line, head in added:
            state.add(line, head)
        self.witness.write(state, alone)
        if alone or added[-1][0]["kind"] in ("message", "clients"):
            state.save(self.index)

    def _make(self) -> None:
        """Make a journal of one line in one step, so that no process ever opens a partial one."""
        if not self.path.parent.is_dir():
            raise LedgerError(
                f"there is no folder for {self.path}; make it, or set ledger-path", code="ledger.no-folder"
            )
        if self.path.exists():
            return
        if trace := self._trace:
            raise self._behind(trace)
        _, text, _ = _sealed(_begin(), Head())
        try:
            with suppress(FileExistsError), _scratch(self.path) as scratch:
                scratch.write_bytes(text)
                sync(scratch)
        except OSError as error:
            raise LedgerError(f"the ledger {self.path} cannot be made: {error}", code="ledger.unusable") from error

    @property
    def _trace(self) -> Path | None:
        """A file that tells of a journal here, also of one that is gone."""
        return next((file for file in (self.index, self.witness.path) if file.exists()), None)

    def _check_kind(self, file: int) -> None:
        """Raise unless the file begins as a journal of this version does."""
        start = os.pread(file, len(_FIRST) + 20, 0)
        version = start.removeprefix(_FIRST).partition(b",")[0]
        if not start:
            text = f"the ledger {self.path} is empty; put a backup in its place"
            raise LedgerError(f"{text}, and run umbel site check --repair", code="ledger.empty")
        if not start.startswith(_FIRST) or not version.isdigit():
            text = f"{self.path} is not a journal of umbel; set another ledger-path"
            raise LedgerError(text, code="ledger.another-file")
        if int(version) != VERSION:
            raise LedgerError(
                f"the ledger {self.path} has version {int(version)}, but this umbel reads version {VERSION}; use the "
                "umbel that wrote it, or set another ledger-path",
                code="ledger.version",
            )

    def _behind(self, other: Path) -> LedgerError:
        return LedgerError(
            f"the ledger {self.path} lacks lines that {other} knows: it is an older copy, or was cut off or deleted; "
            "have the missing messages charged: umbel site check --repair NODE_CONFIG",
            code="ledger.behind",
        )


def lines_of(path: Path, after: Head | None = None) -> Iterator[tuple[Line, Head]]:
    """Yield each line of a journal after a head, and its own head; raise `LedgerError` at one that has been changed.

    A last line that a killed process left unfinished is left out: nothing has left the site for it.
    """
    head = after or Head()
    if not path.exists():
        raise _missing(path)
    with path.open("rb") as file:
        file.seek(head.size)
        for text in file:
            if not text.endswith(b"\n"):
                return
            body, _, end = text.rpartition(_END)
            hash = sha256(body).hexdigest()
            if end != hash.encode() + b'"}\n':
                raise _damaged(path, f"line {head.number + 1} has been changed")
            line: Line = json.loads(text)
            if (line["number"], line["previous"]) != (head.number + 1, head.hash):
                raise _damaged(path, f"line {line['number']} does not follow line {head.number}")
            head = Head(head.number + 1, head.size + len(text), hash)
            yield line, head


def may_begin(site: Site) -> bool:
    """Return whether a site without a journal gets an empty one.

    A missing journal may be a lost one. So none is made where there was one before, nor, if there is a limit, if the
    site sets limits itself, or names the path, where a volume may be missing.
    """
    assert site.ledger_path is not None
    if Journal(site.ledger_path, witness=site.witness_folder, opened=False)._trace:
        return False
    return not ((site.policy.sets_limits or bool(site.policy.ledger_path)) and site.limits.any)


class Names(Journal):
    """The numbers of the clients in a site's table: the journal identifies clients by number."""

    def read(self) -> list[int | str]:
        """Return the clients in order of their numbers."""
        with self._locked():
            return self._state.all("name")

    def extend(self, known: Sequence[int | str], new: Sequence[int | str]) -> None:
        """Give new clients the next numbers; raise `LedgerError` if there are more than `known` by now."""
        with self._locked() as file:
            if len(self._state.facts["name"]) != len(known):
                raise LedgerError(
                    f"another process has just numbered clients in {self.path}; restart this one",
                    code="ledger.clients-changed",
                )
            self._add(file, {"kind": "clients", "names": [*new]})


class NamesOnTrial:
    """The numbers that `Names` would give a table's clients; nothing is written."""

    def __init__(self, path: Path, witness: Path | None = None) -> None:
        self._names: list[int | str] = []
        with suppress(LedgerError):  # which is for those to tell who look at the journal
            self._names = Names(path, witness=witness).read()

    def read(self) -> list[int | str]:
        """Return the clients in order of their numbers."""
        return [*self._names]

    def extend(self, known: Sequence[int | str], new: Sequence[int | str]) -> None:
        """Give new clients the next numbers, here only."""
        self._names = [*known, *new]


def _sealed(content: Line, after: Head) -> tuple[Line, bytes, Head]:
    """Return the line with that content after another one, its text, and its head."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    line = {"number": after.number + 1, **content, "at": at, "previous": after.hash}
    body = json.dumps(line, separators=(",", ":"), allow_nan=False).encode()[:-1]
    hash = sha256(body).hexdigest()
    text = body + _END + hash.encode() + b'"}\n'
    return line, text, Head(after.number + 1, after.size + len(text), hash)


def _begin() -> Line:
    return {"kind": "begin", "version": VERSION}


def _charge_line(charge: Charge, clients: Iterable[int], times: int = 1, limited: bool = False) -> Line:
    """Return the line of a charge; only one with a limit on a run's releases is counted by run."""
    release = {"release": written(charge.release), "clip_norm": charge.release.radius}
    about = {"run": charge.run, "round": charge.round, "limited": limited, "times": times}
    return {"kind": "charges"} | about | release | {"clients": in_ranges(clients)}


def _holds(file: int, head: Head) -> bool:
    """Return whether a line ends at a head in a file, and has its hash."""
    end = head.hash.encode() + b'"}\n'
    return not head.number or os.pread(file, len(end), max(0, head.size - len(end))) == end


def _missing(path: Path) -> LedgerError:
    text = f"there is no ledger {path}; name another, or make a new one: umbel site journal --create {path}"
    return LedgerError(text, code="ledger.missing")


def _damaged(path: Path, fault: object) -> LedgerError:
    text = f"the ledger {path} is damaged ({fault}); look into it, then run umbel site check --repair NODE_CONFIG"
    return LedgerError(text, code="ledger.damaged")


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """Yield an empty file that becomes `path` at the end, and never replaces another."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    scratch = Path(name)
    try:
        yield scratch
        os.link(scratch, path)
        sync(path.parent)
    finally:
        scratch.unlink(missing_ok=True)
