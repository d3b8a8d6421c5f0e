"""The totals of a site's journal, and the index that keeps them.

The index lies beside the journal (`umbel.privacy.site.journal`), which alone counts: all that the index has lost is
added up again. So it is written without waiting for the disk. Its first line says up to which line of the journal it
goes, each other one has a fact, and the last one is a hash of all before it, by which damage is found.

In simulation there is neither journal nor index: `Totals` are part of the node's state.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from umbel.privacy.site.charges import NO_LIMITS, Account, Charge, Limits, dearer, read, sort_of, written
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.flower import filled
from umbel.protocol.release import Release

# A server decides the number of runs and how much each sends, so only the newest of each kind are kept.
_KEPT = {"evaluations": 10_000, "ended": 10_000, "taken": 10_000, "sent": 20_000}

Line = dict[str, Any]
"""The content of a line of a journal."""


class Head(NamedTuple):
    """The end of a line in a journal: its number, the bytes of the file up to there, and its hash."""

    number: int = 0
    size: int = 0
    hash: str = "0" * 64


class State:
    """The totals of a journal's lines up to `head`.

    `facts` has by kind and key, as JSON: ``client`` how often a client made each release, in the order of their first,
    ``release`` what these are, ``price`` the dearest charge of each sort and how many there were, ``name`` of each
    client, ``request``, ``signed``, and of each run ``evaluations``, ``sent``, ``ended`` and ``taken``.
    """

    def __init__(self) -> None:
        self.head = Head()
        self.facts: defaultdict[str, dict[str, str]] = defaultdict(dict)

    @classmethod
    def load(cls, index: Path) -> State:
        """Return the state in an index; an empty one if there is none, or it is damaged."""
        state = cls()
        with suppress(FileNotFoundError, ValueError):
            text, _, hash = index.read_bytes().rpartition(b"\n")
            if hash == sha256(text).hexdigest().encode():
                head, *facts = text.decode().split("\n")
                for kind, key, value in (fact.split("\t") for fact in facts):
                    state.facts[kind][key] = value
                state.head = Head(*json.loads(head))
        return state

    def save(self, index: Path) -> None:
        """Write an index; a fault, such as a full disk, leaves the one before, which then is behind the journal."""
        scratch = index.with_name(f".{index.name}.tmp")  # of one process at a time, which has locked the journal
        facts = [f"{kind}\t{key}\t{value}" for kind, found in self.facts.items() for key, value in found.items()]
        text = "\n".join([_text(self.head), *facts]).encode()  # JSON has neither tabs nor ends of lines
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
            try:
                with open(scratch, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                    file.write(text + b"\n" + sha256(text).hexdigest().encode())
                scratch.replace(index)
            finally:
                scratch.unlink(missing_ok=True)

    def get(self, kind: str, key: str, default: Any = None) -> Any:
        """Return a fact."""
        return json.loads(text) if (text := self.facts[kind].get(key)) else default

    def all(self, kind: str) -> list[Any]:
        """Return all facts of a kind, the oldest first."""
        return [*map(json.loads, self.facts[kind].values())]

    def put(self, kind: str, key: str, value: Any) -> None:
        """Set a fact; of some kinds the oldest is forgotten."""
        facts = self.facts[kind]
        facts[key] = _text(value)
        if len(facts) > _KEPT.get(kind, len(facts)):
            del facts[next(iter(facts))]

    def add(self, line: Line, head: Head) -> None:
        """Add a line, which ends at `head`."""
        match line["kind"]:
            case "charges":
                self._charge(line)
            case "clients":
                for name in line["names"]:
                    self.put("name", str(len(self.facts["name"])), name)
            case "evaluations":
                key = key_of(line["node"], line["run"])
                self.put("evaluations", key, self.get("evaluations", key, 0) + 1)
            case "ended":
                self.put("ended", key_of(line["node"], line["run"]), True)
            case "requests":
                self.put("request", line["request"]["digest"], line["request"])
            case "signed":
                self.put("signed", line["digest"], line["run"])
            case "message":
                for sent in line.get("sent", ()):
                    self.put("sent", key_of(*sent), True)
                for kind, key, value in line.get("facts", ()):
                    self.put(kind, key, value)
                if decided := line.get("decided"):
                    digest = decided["digest"]
                    self.put("request", digest, self.get("request", digest) | decided)
        self.head = head

    def _charge(self, line: Line) -> None:
        text, times, clients = line["release"], line["times"], from_ranges(line["clients"])
        number = sha256(text.encode()).hexdigest()[:12]
        self.put("release", number, text)

        @cache  # many clients have released the same
        def charged(spent: str) -> str:
            account = json.loads(spent)
            return _text(account | {number: account.get(number, 0) + times})

        own = self.facts["client"]
        own |= {client: charged(own.get(client, "{}")) for client in map(str, clients)}
        release = read(text)
        if line["limited"]:
            key = key_of(line["run"], release.kind)
            self.put("taken", key, _once_more(self.get("taken", key, ()), clients))
        sort = key_of(*sort_of(release))
        known, often = self.get("price", sort, (text, 0))
        self.put("price", sort, [written(dearer(release, read(known))), often + times])

    def spent(self, client: ClientInDataset) -> str:
        """Return a client's releases as text, which is the same for clients that released the same."""
        return self.facts["client"].get(str(client), "{}")

    def account(self, spent: str) -> dict[Release, int]:
        """Return the releases in such a text."""
        return {read(self.get("release", number)): times for number, times in json.loads(spent).items()}

    def taken(self, charge: Charge, clients: Sequence[ClientInDataset]) -> list[int]:
        """Return how often each of these clients has made releases of a charge's kind in its run."""
        counts = [int(bits, 16) for bits in self.get("taken", key_of(charge.run, charge.release.kind), ())]
        return [sum((bits >> client & 1) << place for place, bits in enumerate(counts)) for client in clients]

    def larger(self, other: State) -> list[tuple[str, str, Any]]:
        """Return the facts to set so that each is the larger of this state's and another's."""
        found = []
        for kind, facts in other.facts.items():
            for key, text in facts.items():
                if text != self.facts[kind].get(key):
                    own, value = self.get(kind, key), json.loads(text)
                    larger = value if own is None else _larger(kind, own, value)
                    if larger != own:
                        found.append((kind, key, larger))
        return found


def _larger(kind: str, one: Any, other: Any) -> Any:
    """Return the larger of two values of a fact; of decisions a refusal, and of what has no order the first."""
    match kind:
        case "client":
            return one | {name: max(times, one.get(name, 0)) for name, times in other.items()}
        case "taken":  # or a little more
            return [f"{int(a, 16) | int(b, 16):x}" for a, b in zip_longest(one, other, fillvalue="0")]
        case "price":
            return [written(dearer(read(one[0]), read(other[0]))), max(one[1], other[1])]
        case "evaluations":
            return max(one, other)
        case "request" if other["status"] == "refused" or one["status"] == "waiting":
            return other
    return one


def _once_more(counts: Sequence[str], clients: Iterable[int]) -> list[str]:
    """Return counts by client with one more for each of these; the n-th number has the n-th bit of each count.

    So they are short: a site has many clients, and a server can make many runs.
    """
    found, carry = [], sum(1 << client for client in clients)
    for bits in (*(int(text, 16) for text in counts), 0):
        found.append(f"{bits ^ carry:x}")
        carry &= bits
    return found if found[-1] != "0" else found[:-1]


def key_of(*parts: Any) -> str:
    """Return the key of a fact with several parts, in ASCII."""
    return _text(parts)


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def in_ranges(clients: Iterable[int]) -> str:
    """Return clients as text, such as ``0-3,7``."""
    ranges: list[list[int]] = []
    for client in sorted({*clients}):
        if ranges and client == ranges[-1][1] + 1:
            ranges[-1][1] = client
        else:
            ranges.append([client, client])
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ranges)


def from_ranges(text: str) -> list[ClientInDataset]:
    """Return the clients in a text of `in_ranges`."""
    ranges = [one.partition("-")[::2] for one in text.split(",")] if text else []
    return [ClientInDataset(one) for first, last in ranges for one in range(int(first), int(last or first) + 1)]


_RECORD = "umbel.ledger"


class Totals:
    """How often each of a simulated node's clients was charged in a run, with `Journal`'s methods for charges.

    It lies in the node's ``context.state``, which never leaves the node. For each kind of release it holds pairs of
    int64 (client, times), sorted by client.
    """

    def __init__(self, state: RecordDict) -> None:
        self._state = state
        record = state.get(_RECORD)  # `RecordDict.config_records` makes a new dictionary of all records each time
        self._record = record if isinstance(record, ConfigRecord) else ConfigRecord()

    def charge(
        self,
        charge: Charge,
        clients: Sequence[ClientInDataset],
        limits: Limits = NO_LIMITS,
        at_least: int = 1,
        most: float = math.inf,
    ) -> list[bool]:
        """Charge all clients within their limits, and return these; none if there are fewer than `at_least`.

        `most` is infinite: only the people of a real site approve a run.
        """
        paying = limits.paying(clients, lambda one: tuple(self.account(one).items()), dict, charge.release, at_least)
        paid = np.array(clients, np.int64)[paying]
        key = written(charge.release)
        filled(self._record, {key: _paid_once_more(self._paid(key), paid).tobytes()})
        filled(self._state, {_RECORD: self._record})
        return paying

    def account(self, client: ClientInDataset) -> Account:
        """Return the releases of a client."""
        times = {key: self._times(key, client) for key in self._record}
        return {read(key): often for key, often in times.items() if often}

    def _paid(self, key: str) -> NDArray[np.int64]:
        packed = self._record.get(key, b"")
        assert isinstance(packed, bytes)
        return np.frombuffer(packed, np.int64).reshape(-1, 2)

    def _times(self, key: str, client: int) -> int:
        clients, times = self._paid(key).T
        place = bisect_left(clients, client)  # NumPy's search would first copy the clients, perhaps a million
        return int(times[place]) if place < len(clients) and clients[place] == client else 0


def _paid_once_more(paid: NDArray[np.int64], paying: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return pairs (client, times) after one more charge of some clients."""
    paying = paying if (paying[1:] > paying[:-1]).all() else np.unique(paying)
    clients, times = paid.T.copy()
    place = clients.searchsorted(paying)
    known = place < len(clients)
    known[known] = clients[place[known]] == paying[known]
    times[place[known]] += 1
    new = paying[~known]
    rows = place[~known] + np.arange(len(new))
    old = np.ones(len(paid) + len(new), bool)
    old[rows] = False
    following = np.empty((len(old), 2), np.int64)
    following[rows, 0], following[rows, 1] = new, 1
    following[old, 0], following[old, 1] = clients, times
    return following
