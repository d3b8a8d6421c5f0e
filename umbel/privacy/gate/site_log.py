"""A site's log: a line for each message, for the people who are responsible for the data.

It lies beside the ledger, as JSON lines. Each line says what a message asked, what the site decided and why, and how
many clients were charged; it never contains data. Each line has the SHA-256 of the previous line and of itself, so
that a changed, moved or removed line is detected. There is no key: this detects no forger who can write the file.

Everything that leaves is on record: if a line cannot be written, the site refuses. If a killed process leaves an
incomplete line, nothing left the site for it: the next line replaces it. Before a client is charged, the site makes
sure that the disk has room for the line (`umbel.privacy.gate.store`).

Each line also has the ledger's number of charges and the hash of the last one. So a ledger from an older backup, or an
empty one, is detected before the next message is answered, and `restored` charges again what it has lost.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from itertools import pairwise
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any, Self

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from umbel.privacy.gate.charges import Charge, read, written
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.runs import SHOWN, Request, Runs, Status
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.store import LOG_SUFFIX, Reserve, Store, beside, has_charge
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import (
    ConfigError,
    DiskError,
    LedgerError,
    LogError,
    ProtocolError,
    Refused,
    SiteError,
)
from umbel.protocol.home import disk_error, is_full, make_home_of, sync, write_atomically
from umbel.protocol.log import log
from umbel.protocol.messages import PARTS
from umbel.protocol.records import unpack
from umbel.protocol.tasks import LONGEST_NAME, EvaluationSpec, TrainingSpec

FIRST = "0" * 64
"""Stands for the hash before the first line."""

_LONGEST_TEXT = 300  # of a text whose length a server or a path decides
_LONGEST_ENTRY = LONGEST_NAME  # of a task
_MOST_RANGES = 2000  # of clients in a line
_LONGEST_END = 1 << 20  # more than two of the longest possible lines
_KEYS = {"version"} | {entry.name for kind in (TrainingSpec, EvaluationSpec) for entry in fields(kind)}
# The text of these concerns the message or the site's set-up; the text of other errors may contain data.
_TOLD = (Refused, ProtocolError, ConfigError, SiteError, LedgerError, LogError, DiskError)
_END = b',"hash":"'

Line = dict[str, Any]
"""The content of one line."""


class Decision(StrEnum):
    """The outcome of a message."""

    ANSWERED = "answered"
    PARTLY = "partly"
    """Some of its clients, or one of its two parts, were refused."""
    REFUSED = "refused"
    SET_ASIDE = "set aside"
    """Not a message: the previous log was set aside."""
    RESTORED = "restored"
    """Not a message: the ledger had lost charges of this log, and has them again."""
    APPROVED = "approved"
    DENIED = "denied"
    """Not messages: the site's people approved a request, or refused it."""


@dataclass
class Entry:
    """A message of a run, by its type: its request in numbers, the number of charges, and why it was refused."""

    run: str = ""
    message: str = ""
    asked: dict[str, Any] = field(default_factory=dict)
    paid: int = 0
    reasons: list[str] = field(default_factory=list)
    charged: list[dict[str, Any]] = field(default_factory=list)
    request: str = ""
    """The request that people approved, or that a researcher signed."""

    @classmethod
    def of(cls, message: Message, context: Context) -> Self:
        """Return the entry of a message that has just arrived."""
        asked = outline(message.content) if message.has_content() else {}
        return cls(str(context.run_id), _text(message.metadata.message_type), asked)

    def asks(self, task: TrainingSpec | EvaluationSpec, hypotheses: Arrays | None = None) -> None:
        """Note the request of a message whose records are not those of `umbel.protocol.messages`."""
        name = "training" if isinstance(task, TrainingSpec) else "evaluation"
        self.asked = {name: _scalars(task.to_record())}
        if hypotheses:
            self.asked["hypotheses"] = _sizes(hypotheses)

    def charges(self, charge: Charge, clients: Sequence[ClientInDataset]) -> None:
        """Note a charge of clients."""
        self.paid += len(clients)
        if clients:
            about = {"round": charge.round, "release": written(charge.release), "clip_norm": charge.release.radius}
            self.charged.append(about | {"clients": in_ranges(clients)})

    def refuse(self, what: str, error: Exception) -> None:
        """Note why the message, or a part of it, is refused."""
        self.reasons.append(_text(f"{what}: {told(error)}"))

    def line(self, decision: Decision) -> Line:
        """Return the content of the line, without its position in the log."""
        return {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": self.run,
            "message": self.message,
            "asked": self.asked,
            "decision": str(decision),
            "reason": "; ".join(self.reasons),
            "paid": self.paid,
            "charged": self.charged,
            **({"request": self.request} if self.request else {}),
        }


def told(error: Exception) -> str:
    """Return what the log says of an error: only its class if its text may contain data."""
    return str(error) if isinstance(error, _TOLD) else f"{type(error).__name__}; see the node's own log"


class SiteLog:
    """The log of a site in one file, which is made with the first line."""

    def __init__(self, path: Path, policy: str = "") -> None:
        self.path, self._policy = path, policy
        self.ledger = path.with_name(path.name.removesuffix(LOG_SUFFIX))
        self.reserve = Reserve(self.ledger)

    @classmethod
    def of(cls, site: Site) -> SiteLog | None:
        """Return the log of a site; None in simulation."""
        if site.simulated:
            return None
        ledger = Store.begin(site)  # before the log exists
        make_home_of(ledger)
        return cls(beside(ledger), site.policy.digest)

    def check_end(self) -> None:
        """Raise unless a line can be added.

        The log must be writable, its last line unchanged, and the ledger must have all charges of that line.
        """
        with self._locked() as file:
            line, _ = self._last(file)
        self.check_in_ledger(line)

    def check_in_ledger(self, line: Line | None) -> None:
        """Raise unless the ledger has the charges up to a line."""
        if not self._in_ledger(line):
            raise LogError(
                f"the ledger {self.ledger} lacks charges that {self.path} records: it may be an older copy; take the "
                f"log's word: umbel site journal --repair {self.ledger}",
                code="log.ledger-behind",
            )

    def lost(self) -> list[Line]:
        """Return the lines of which the ledger lacks charges.

        Raises
        ------
        LogError
            If the ledger also lacks charges from before the log began.
        """
        later: list[Line] = []
        lines = list(self.lines())
        for line in reversed(lines):
            if line["charges"] and self._in_ledger(line):
                return later[::-1]
            if line["paid"]:
                later.append(line)
        if lines and (before := lines[0]["charges"] - lines[0]["paid"]) > 0:
            raise LogError(
                f"{self.path} began when the ledger had {before} charges, and does not say which clients were charged; "
                "restore a newer backup",
                code="log.no-clients",
            )
        return later[::-1]

    def restored(self) -> int:
        """Charge again what the ledger has lost; return the number of charges. Refusals by people hold again."""
        lost, ledger, number = self.lost(), Ledger(self.ledger, whole=True), 0
        for line in lost:
            for one in line["charged"]:
                release = replace(read(one["release"]), radius=one["clip_norm"])
                clients = from_ranges(one["clients"])
                number += sum(ledger.charge(Charge(line["run"], one["round"], release), clients))
        self._refuse_again()
        reason = f"the ledger has {number} charges of this log again"
        self._append(Entry(message="ledger", reasons=[reason]).line(Decision.RESTORED))
        return number

    def _refuse_again(self) -> None:
        """Refuse each request whose last decision in this log is a refusal: the ledger may be older than that."""
        begin = len("request ")
        people = {
            line["reason"][begin : begin + SHOWN]: line
            for line in self.lines()
            if line["decision"] in (Decision.APPROVED, Decision.DENIED)
        }
        runs = Runs(self.ledger)
        known = {request.digest[:SHOWN]: request for request in runs.requests()}
        for name, line in people.items():
            request = known.get(name)
            if line["decision"] == Decision.APPROVED or (request and request.status is Status.REFUSED):
                continue
            if request is None:
                log(WARNING, "people refused request %s, which this ledger does not know: refuse it again", name)
                continue
            person, _, reason = line["reason"][begin + SHOWN :].removeprefix(", by ").partition(": ")
            runs.decide(request, Status.REFUSED, person, reason)

    def _in_ledger(self, line: Line | None) -> bool:
        """Return whether the ledger has the charges up to a line."""
        return line is None or not line["charges"] or has_charge(self.ledger, line["charges"], line["charge"])

    def answered(self, entry: Entry, answered: bool) -> None:
        """Add the line of a message; on return it is on disk."""
        partly = Decision.PARTLY if entry.reasons else Decision.ANSWERED
        self._append(entry.line(partly if answered else Decision.REFUSED))

    @contextmanager
    def deciding(self) -> Iterator[Callable[[Request, Status, str, str], None]]:
        """Yield what adds the line of a decision by the site's people; nothing else adds lines meanwhile.

        If the caller raises, the decision does not hold, and its line is removed.
        """
        with self._locked() as file:
            _, size = self._last(file)

            def decided(request: Request, status: Status, person: str, reason: str) -> None:
                said = f"request {request.digest[:SHOWN]}, by {person}" + (f": {reason}" if reason else "")
                decision = Decision.APPROVED if status is Status.APPROVED else Decision.DENIED
                self._add(file, Entry(request.run, "approval", reasons=[_text(said)]).line(decision))

            try:
                yield decided
            except BaseException:
                os.ftruncate(file, size)
                raise

    def lines(self) -> Iterator[Line]:
        """Yield every line, oldest first; raise at a line that has been changed.

        An incomplete last line is left out.
        """
        number, before = 0, FIRST
        with self._guarded(), self.path.open("rb") as file:
            for text in file:
                if _is_cut_off(text, number + 1):
                    return
                line = self._parsed(text)
                number += 1
                if (line["number"], line["previous"]) != (number, before):
                    raise self._damaged(f"line {number} does not follow the previous one")
                before = line["hash"]
                yield line

    def copy_to(self, path: Path) -> int:
        """Copy the log to a file, which is replaced, also while others add lines; return the number of lines."""
        with self._locked(make=False) as file:
            _, size = self._last(file)
            content = os.pread(file, size, 0)
        write_atomically(path, content, private=True)
        return sum(1 for _ in SiteLog(path).lines())

    def set_aside(self) -> Path:
        """Rename the log and begin another, which names it; return the path of the old one.

        Raises
        ------
        LogError
            If the ledger lacks charges of its last line: the new log would not know of them.
        """
        stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
        aside = self.path.with_name(f"{self.path.name.removesuffix(LOG_SUFFIX)}.log-until-{stamp}.jsonl")
        with self._locked(make=False) as file:
            last = None
            with suppress(LogError):  # a damaged end tells nothing
                last, _ = self._last(file)
            self.check_in_ledger(last)
            old = sha256(os.pread(file, os.fstat(file).st_size, 0)).hexdigest()
            entry = Entry(message="log", reasons=[f"the previous log is {aside.name}, SHA-256 {old}"])
            os.link(self.path, aside)
            try:
                # In one step: a log that does not name the previous one would know nothing of its charges.
                write_atomically(self.path, self._placed(entry.line(Decision.SET_ASIDE), None), private=True)
            finally:
                if os.path.samefile(self.path, aside):
                    aside.unlink()
            sync(self.path.parent)
        return aside

    @contextmanager
    def _locked(self, make: bool = True) -> Iterator[int]:
        """Open the file with a lock against all other processes that use it here."""
        with self._guarded():
            while True:
                there = self.path.exists()
                file = os.open(self.path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if make else 0), 0o600)
                try:
                    if not there:
                        sync(self.path.parent)
                    fcntl.flock(file, fcntl.LOCK_EX)
                    # Another process may have set it aside since it was opened.
                    if self.path.exists() and os.path.samestat(os.fstat(file), os.stat(self.path)):
                        yield file
                        return
                finally:
                    os.close(file)  # which unlocks it

    def _append(self, line: Line) -> None:
        with self._locked() as file:
            self._add(file, line)

    def _add(self, file: int, line: Line) -> None:
        last, size = self._last(file)
        if line["decision"] != Decision.RESTORED:
            # Otherwise this line, with the charges of an older ledger, would hide what the last one records.
            self.check_in_ledger(last)
        text = self._placed(line, last)
        if size < os.fstat(file).st_size:
            log(
                WARNING,
                "the last line of %s is incomplete, because its process was stopped; it is overwritten",
                self.path,
            )
            os.ftruncate(file, size)
        try:
            _write(file, text, size)
        except OSError as error:
            # Its clients have been charged: the line takes the room that was kept for it.
            if not (is_full(error) and self.reserve.drop()):
                raise
            _write(file, text, size)

    def _placed(self, line: Line, last: Line | None) -> bytes:
        """Return a line's text with its place in the log, after the `last` one, and in the ledger."""
        number, before = (last["number"], last["hash"]) if last else (0, FIRST)
        charges, charge = Store(self.ledger).hash_of() if self.ledger.exists() else (0, "")
        policy = {"policy": self._policy} if self._policy else {}
        placed = {"number": number + 1, **line, **policy, "charges": charges, "charge": charge, "previous": before}
        # Strict JSON: `outline` leaves no number that JSON lacks.
        body = json.dumps(placed, separators=(",", ":"), allow_nan=False).encode()[:-1]
        return body + _END + sha256(body).hexdigest().encode() + b'"}\n'

    def _last(self, file: int) -> tuple[Line | None, int]:
        """Return the last complete line, if there is one, and its end in the file."""
        size = os.fstat(file).st_size
        end = os.pread(file, _LONGEST_END, max(0, size - _LONGEST_END))
        whole, cut = end[: end.rfind(b"\n") + 1], end[end.rfind(b"\n") + 1 :]
        line = self._parsed(whole[whole.rfind(b"\n", 0, -1) + 1 :]) if whole else None
        if cut and not _is_cut_off(cut, (line["number"] if line else 0) + 1):
            raise self._damaged("a line has been changed")
        return line, size - len(cut)

    def _parsed(self, text: bytes) -> Line:
        body, _, end = text.rpartition(_END)
        if end != sha256(body).hexdigest().encode() + b'"}\n':
            raise self._damaged("a line has been changed")
        line: Line = json.loads(text)
        if "charges" not in line:
            raise self._damaged("a line does not say how many charges the ledger had")
        return line

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise LogError(f"there is no log {self.path}, or no folder for it", code="log.missing") from error
        except DiskError:
            raise
        except (OSError, ValueError) as error:
            if full := disk_error(error, self.path):
                raise full from error
            raise LogError(f"the log {self.path} cannot be read or written: {error}", code="log.unusable") from error

    def _damaged(self, fault: str) -> LogError:
        return LogError(
            f"the log {self.path} is damaged ({fault}); look into it, then set it aside: "
            "umbel site log --set-aside PATH",
            code="log.broken-chain",
        )


def _is_cut_off(text: bytes, number: int) -> bool:
    """Return whether a text is an incomplete line with that number, as a killed process leaves it."""
    begins = b'{"number":%d,' % number
    return not text.endswith(b"\n") and text[: len(begins)] == begins[: len(text)]


def outline(content: RecordDict) -> dict[str, Any]:
    """Return a message's request in few words, however much a server has put into it."""
    asked: dict[str, Any] = {}
    for name in PARTS:
        record = content.get(name)
        if isinstance(record, ConfigRecord):
            asked[name] = _scalars(record)
        elif isinstance(record, ArrayRecord):
            asked[name] = {}
            with suppress(ProtocolError):
                asked[name] = _sizes(unpack(record))
    if others := len(set(content) - {*PARTS}):
        asked["others"] = others
    return asked


def _scalars(record: ConfigRecord) -> dict[str, Any]:
    """Return the known entries of a record; for a list its length."""
    known = {key: value for key, value in record.items() if key in _KEYS}
    return {key: len(value) if isinstance(value, list) else _scalar(value) for key, value in known.items()}


def _sizes(arrays: Arrays) -> dict[str, Any]:
    """Return k and n of hypotheses."""
    return {
        "k": max((len(value) for value in arrays.values()), default=0),
        "n": sum(math.prod(value.shape[1:]) for value in arrays.values()),
    }


def _scalar(value: Any) -> Any:
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    # As ASCII, since other characters take up to twelve times as much space in a line.
    return _text(value if str(value).isascii() else ascii(value), _LONGEST_ENTRY)


def _text(value: Any, longest: int = _LONGEST_TEXT) -> str:
    text = str(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def in_ranges(clients: Sequence[int]) -> str:
    """Return clients as text, such as ``0-3,7``; where that is long, with others in between."""
    ordered = sorted(set(clients))
    gaps = [after - before for before, after in pairwise(ordered)]
    widest = sorted(range(len(gaps)), key=gaps.__getitem__, reverse=True)[: _MOST_RANGES - 1]
    between = {i for i in widest if gaps[i] > 1}
    ranges = [[ordered[0], ordered[0]]]
    for i, client in enumerate(ordered[1:]):
        if i in between:
            ranges.append([client, client])
        ranges[-1][1] = client
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ranges)


def from_ranges(text: str) -> list[ClientInDataset]:
    """Return the clients in a text of `in_ranges`."""
    ranges = [one.partition("-")[::2] for one in text.split(",")]
    return [ClientInDataset(one) for first, last in ranges for one in range(int(first), int(last or first) + 1)]


def _write(file: int, text: bytes, size: int) -> None:
    """Append a line to a file of that size, or nothing."""
    try:
        if os.write(file, text) != len(text):  # a full disk takes a part without an error
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)
    except OSError:
        os.ftruncate(file, size)
        raise


def record_refusal(message: Message, context: Context, what: str, error: Exception) -> None:
    """Record a message that is refused before the app sees it; nothing leaves, on record or not."""
    try:
        if (site_log := SiteLog.of(Site.of(context.node_config))) is not None:
            entry = Entry.of(message, context)
            entry.refuse(what, error)
            site_log.answered(entry, False)
    except Exception as fault:  # Flower would send its text to the server
        log(ERROR, "a refusal could not be recorded: %s", fault)
