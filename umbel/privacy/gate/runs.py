"""What a site remembers of the runs that ask it, in its store, so that a restart does not forget it.

How often a run had clients report, what hypotheses it sent, whether it has told its end, and what runs
the site's people have approved.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from umbel.privacy.gate.policy import Policy
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.store import Store, request_of
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import LedgerError, Refused

# A server decides how many runs there are, and how much each sends; these are the newest of each kind.
_KEPT_RUNS, _KEPT_SENT = 10_000, 20_000
_MOST_WAITING, _LONGEST_REQUEST = 100, 1 << 16
SHOWN = 32
"""Hex digits by which a request is known: too many to find another request with the same digits."""
_ALL = ""  # the run that stands for all together


class Status(StrEnum):
    """What the site's people have said to a request."""

    WAITING = "waiting"
    APPROVED = "approved"
    REFUSED = "refused"


@dataclass(frozen=True)
class Request:
    """What a run asks of a site that wants to be asked: the digest of all that an approval covers, and that itself.

    `at` and `run` say when it was asked for the first time, and by which run.
    """

    digest: str
    at: str
    run: str
    status: Status
    asks: dict[str, Any]


class Runs(Store):
    """What a node of a site remembers; `node` says which of those that share the store it is."""

    def __init__(self, path: Path, node: str = "") -> None:
        super().__init__(path)
        self._node = node

    @classmethod
    def of(cls, site: Site) -> Self:
        """Return what a node of a site that serves data remembers."""
        runs = super().of(site)
        runs._node = sha256(site.identity.encode("utf-8", "surrogatepass")).hexdigest()
        return runs

    # --- what clients report

    def count_evaluation(self, run: str, policy: Policy) -> None:
        """Count a message that has clients report, before they do; raise `Refused` when there were enough."""
        with self._transaction(write=True) as connection:
            for name, key, most in (
                (run, "max-evaluations", policy.max_evaluations),
                (_ALL, "max-evaluations-in-all", policy.max_evaluations_in_all),
            ):
                (messages,) = connection.execute(
                    "INSERT INTO evaluations (node, run, messages) VALUES (?, ?, 1) "
                    "ON CONFLICT DO UPDATE SET messages = messages + 1 RETURNING messages",
                    (self._node, name),
                ).fetchone()
                if messages > most:
                    raise Refused(
                        f"the server has asked for evaluation {messages - 1} times; {key} is {most:g}",
                        code="refused.evaluations",
                    )
            _forget(connection, "evaluations", _KEPT_RUNS, f"AND run != '{_ALL}'")

    # --- what a run has found

    def note_sent(self, run: str, name: str, hypotheses: Arrays) -> None:
        """Remember hypotheses that a run sent."""
        with self._transaction(write=True) as connection:
            connection.execute(
                "INSERT OR IGNORE INTO sent (node, run, name, digest) VALUES (?, ?, ?, ?)",
                (self._node, run, name, digest_of(hypotheses)),
            )
            _forget(connection, "sent", _KEPT_SENT)

    def end(self, run: str, name: str, hypotheses: Arrays, evaluates: bool) -> None:
        """Note that a run has told what it found; raise `Refused` where it cannot be what that run found.

        A run's best hypotheses are some that were evaluated, so that a node whose clients report (`evaluates`) has
        seen them. One whose clients only train may not have been asked in that round: it knows the run alone, by
        Flower's number or by its own name, by which it goes on after an interruption under another number.
        """
        with self._transaction(write=True) as connection:
            known = connection.execute(
                "SELECT digest FROM sent WHERE node = ? AND (run = ? OR (name = ? AND name != ''))",
                (self._node, run, name),
            ).fetchall()
            if not known:
                raise Refused("the run has asked nothing of this site before", code="refused.unknown-run")
            if evaluates and (digest_of(hypotheses),) not in known:
                raise Refused("the run never sent these hypotheses to this site", code="refused.unknown-result")
            if connection.execute("SELECT 1 FROM ended WHERE node = ? AND run = ?", (self._node, run)).fetchone():
                raise Refused("the run has told what it found before", code="refused.told-before")
            connection.execute("INSERT INTO ended (node, run) VALUES (?, ?)", (self._node, run))
            _forget(connection, "ended", _KEPT_RUNS)

    # --- what the site's people approve

    def check_approved(self, run: str, asks: Mapping[str, Any]) -> None:
        """Raise `Refused` unless this was approved. A request that comes for the first time then waits."""
        digest, text = request_of(asks)
        if len(text) > _LONGEST_REQUEST:
            raise Refused(f"a request of {len(text)} characters, above {_LONGEST_REQUEST}", code="refused.long-request")
        look = f"umbel approvals list --ledger {self.path}"
        with self._transaction(write=True) as connection:
            known = connection.execute("SELECT status FROM requests WHERE digest = ?", (digest,)).fetchone()
            if known is None:
                [[waiting]] = connection.execute("SELECT count(*) FROM requests WHERE status = ?", (Status.WAITING,))
                # One that waits is never forgotten for another, which a server could send for that.
                if waiting >= _MOST_WAITING:
                    raise Refused(
                        f"{_MOST_WAITING} requests wait for approval, and no more are taken: {look}",
                        code="refused.too-many-wait",
                    )
                connection.execute(
                    "INSERT INTO requests (digest, at, run, status, asks) VALUES (?, ?, ?, ?, ?)",
                    (digest, datetime.now(UTC).isoformat(timespec="seconds"), run, Status.WAITING, text),
                )
        status = Status.WAITING if known is None else Status(known[0])
        name = digest[:SHOWN]
        if status is Status.REFUSED:
            raise Refused(f"request {name} of run {run} was refused by this site's people", code="refused.by-people")
        if status is Status.WAITING:
            raise Refused(
                f"request {name} of run {run} waits for approval: {look}, then say approve {name}, or refuse",
                code="refused.waits",
            )

    def requests(self) -> list[Request]:
        """Return all requests, oldest first."""
        return [
            Request(row["digest"], row["at"], row["run"], Status(row["status"]), json.loads(row["asks"]))
            for row in self.table("requests")
        ]

    def decide(self, beginning: str, status: Status) -> Request:
        """Approve or refuse the request whose digest begins so, with as many digits as are shown, or more."""
        if len(beginning) < SHOWN:
            raise LedgerError(f"give the {SHOWN} digits of a request, as the list has them", code="ledger.short-name")
        found = [request for request in self.requests() if request.digest.startswith(beginning)]
        if len(found) != 1:
            raise LedgerError(f"{len(found)} requests begin with {beginning!r}; name one", code="ledger.no-request")
        with self._transaction(write=True) as connection:
            connection.execute("UPDATE requests SET status = ? WHERE digest = ?", (status, found[0].digest))
        return replace(found[0], status=status)


def digest_of(hypotheses: Arrays) -> str:
    """Return what tells hypotheses from others."""
    digest = sha256()
    for name, value in hypotheses.items():
        digest.update(f"{name}\n{value.dtype.str}\n{value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _forget(connection: sqlite3.Connection, table: str, kept: int, only: str = "") -> None:
    """Keep the newest rows of a table."""
    connection.execute(f"DELETE FROM {table} WHERE id <= (SELECT max(id) FROM {table}) - ? {only}", (kept,))
