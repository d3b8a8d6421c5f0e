"""A site's memory of runs, in its store, so that it survives a restart.

It holds how often a run asked clients to report, the hypotheses that it sent, and whether it has announced its end. It
also holds the runs that the site's people have approved.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from umbel.privacy.gate.policy import Policy
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.store import Store, digest_of_request, request_of
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import LedgerError, Refused

# A server decides the number of runs and how much each sends, so only the newest of each kind are kept.
_KEPT_RUNS, _KEPT_SENT = 10_000, 20_000
_MOST_WAITING, _LONGEST_REQUEST = 100, 1 << 16
SHOWN = 32
"""Hex digits that identify a request: too many to find another request with the same digits."""
_DECIDED = "UPDATE requests SET status = ?, decided = ?, person = ?, reason = ? WHERE digest = ?"
_SIGNED = "signed"  # the reason of an approval by a researcher's signature alone


class Status(StrEnum):
    """The decision of the site's people on a request."""

    WAITING = "waiting"
    APPROVED = "approved"
    REFUSED = "refused"


@dataclass(frozen=True)
class Request:
    """A run's request to a site that requires approval: everything that an approval covers, and its digest.

    `at` and `run` say when it first arrived, and from which run; `decided`, `person` and `reason` who decided when and
    why. They are empty while it waits. `policy` is the site's (`Policy.digest`) when it was asked last before that.
    """

    digest: str
    at: str
    run: str
    status: Status
    asks: dict[str, Any]
    decided: str = ""
    person: str = ""
    reason: str = ""
    policy: str = ""


class Runs(Store):
    """A node's memory of runs; `node` identifies it among the nodes that share the store."""

    def __init__(self, path: Path, node: str = "") -> None:
        super().__init__(path)
        self._node = node

    @classmethod
    def of(cls, site: Site) -> Self:
        """Return the memory of a node of a site that serves data."""
        runs = super().of(site)
        runs._node = sha256(site.identity.encode("utf-8", "surrogatepass")).hexdigest()
        return runs

    # --- clients' reports

    def count_evaluation(self, run: str, policy: Policy) -> None:
        """Count a message that asks clients to report, before they do; raise `Refused` above the limit."""
        with self._transaction(write=True) as connection:
            (messages,) = connection.execute(
                "INSERT INTO evaluations (node, run, messages) VALUES (?, ?, 1) "
                "ON CONFLICT DO UPDATE SET messages = messages + 1 RETURNING messages",
                (self._node, run),
            ).fetchone()
            if messages > (most := policy.max_evaluations):
                text = f"the server has asked for evaluation {messages - 1} times; max-evaluations is {most:g}"
                raise Refused(text, code="refused.evaluations")
            _forget(connection, "evaluations", _KEPT_RUNS)

    # --- results of a run

    def note_sent(self, run: str, name: str, hypotheses: Arrays) -> None:
        """Remember hypotheses that a run sent."""
        with self._transaction(write=True) as connection:
            connection.execute(
                "INSERT OR IGNORE INTO sent (node, run, name, digest) VALUES (?, ?, ?, ?)",
                (self._node, run, name, digest_of(hypotheses)),
            )
            _forget(connection, "sent", _KEPT_SENT)

    def end(self, run: str, name: str, hypotheses: Arrays, evaluates: bool) -> None:
        """Note that a run has announced its result; raise `Refused` if it cannot be that run's result.

        A run's best hypotheses have been evaluated, so a node whose clients report (`evaluates`) has seen them. A node
        whose clients only train may have been left out of that round, and need not know them. It must know the run, by
        Flower's number or by the run's name: a run that resumes has another number, and the same name.
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
                raise Refused("the run has already announced its result", code="refused.told-before")
            connection.execute("INSERT INTO ended (node, run) VALUES (?, ?)", (self._node, run))
            _forget(connection, "ended", _KEPT_RUNS)

    # --- who asks

    def use_signature(self, run: str, digest: str) -> None:
        """Note the run that a signature of this digest was made for: the first that shows it; raise `Refused` for
        another one."""
        if (first := self.first_of(digest, run)) != run:
            text = f"run {first} has used this signature already; sign each run separately"
            raise Refused(text, code="refused.signature")

    def first_of(self, digest: str, what: str) -> str:
        """Note what a digest is used for; return what it was used for first, as far back as this store knows."""
        with self._transaction(write=True) as connection:
            connection.execute("INSERT OR IGNORE INTO signed (digest, run) VALUES (?, ?)", (digest, what))
            [(first,)] = connection.execute("SELECT run FROM signed WHERE digest = ?", (digest,)).fetchall()
        return str(first)

    # --- approvals by the site's people

    def check_approved(self, run: str, asks: Mapping[str, Any], policy: str, signed_by: str = "") -> str:
        """Return the beginning of a request's digest; raise `Refused` unless the request was approved.

        A new request waits, under a policy of this digest. One that a listed researcher signed (`signed_by`) is
        approved at once, unless people have refused it. If the site's policy asks its people by now, it waits for them.
        """
        digest, text = request_of(asks)
        if len(text) > _LONGEST_REQUEST:
            raise Refused(
                f"the request has {len(text)} characters, above the maximum of {_LONGEST_REQUEST}",
                code="refused.long-request",
            )
        with self._transaction(write=True) as connection:
            known = connection.execute(
                "SELECT status, person, reason FROM requests WHERE digest = ?", (digest,)
            ).fetchone()
            if known is None:
                if not signed_by:
                    self._check_room(connection)
                connection.execute(
                    "INSERT INTO requests (digest, at, run, status, asks, policy) VALUES (?, ?, ?, ?, ?, ?)",
                    (digest, _now(), run, Status.WAITING, text, policy),
                )
            status = Status.WAITING if known is None else Status(known[0])
            if known == (Status.APPROVED, asks.get("researcher"), _SIGNED) and not signed_by:
                status = Status.WAITING
                connection.execute(_DECIDED, (status, "", "", "", digest))
            if status is Status.WAITING:
                # The policy may have changed since it was asked first.
                connection.execute("UPDATE requests SET policy = ? WHERE digest = ?", (policy, digest))
                if signed_by:
                    status = Status.APPROVED
                    connection.execute(_DECIDED, (status, _now(), signed_by, _SIGNED, digest))
        name = digest[:SHOWN]
        if status is Status.REFUSED:
            raise Refused(f"request {name} of run {run} was refused by this site's people", code="refused.by-people")
        if status is Status.WAITING:
            raise Refused(
                f"request {name} of run {run} waits for approval: {self._look}, then approve or refuse {name}",
                code="refused.waits",
            )
        return name

    def check_allowed(self, run: str, config: Mapping[str, Any], fault: str) -> None:
        """Raise `Refused` unless people approved a request with this run config; `fault` is why the run cannot be."""
        if any(one.status is Status.APPROVED and one.asks["config"] == config for one in self.requests()):
            return
        with self._transaction() as connection:
            self._check_room(connection)
        raise Refused(f"run {run} waits for approval, and cannot be approved here: {fault}", code="refused.waits")

    @property
    def _look(self) -> str:
        return f"umbel site requests --ledger {self.path}"

    def _check_room(self, connection: sqlite3.Connection) -> None:
        """Raise `Refused` if too many requests wait."""
        [[waiting]] = connection.execute("SELECT count(*) FROM requests WHERE status = ?", (Status.WAITING,))
        # A waiting request is never dropped for another: a server could send one for that purpose.
        if waiting >= _MOST_WAITING:
            raise Refused(
                f"{_MOST_WAITING} requests wait for approval, so the site accepts no more: {self._look}",
                code="refused.too-many-wait",
            )

    def requests(self) -> list[Request]:
        """Return all requests, oldest first."""
        return [self._request(row) for row in self.table("requests")]

    def _request(self, row: Mapping[str, Any]) -> Request:
        """Return the request in a row; its digest stands for all that people read in it."""
        entries = {entry.name: row[entry.name] for entry in fields(Request)}
        if digest_of_request(row["asks"]) != row["digest"] or row["status"] not in [*Status]:
            raise self._damaged(f"request {row['digest'][:SHOWN]} has been changed")
        return Request(**entries | {"status": Status(row["status"]), "asks": json.loads(row["asks"])})

    def request(self, beginning: str) -> Request:
        """Return the request whose digest begins with `beginning`, at least as many digits as are shown."""
        if len(beginning) < SHOWN:
            raise LedgerError(
                f"give the {SHOWN} digits of a request, as umbel site requests prints them", code="ledger.short-name"
            )
        found = [request for request in self.requests() if request.digest.startswith(beginning)]
        if len(found) != 1:
            raise LedgerError(f"{len(found)} requests begin with {beginning!r}; name one", code="ledger.no-request")
        return found[0]

    def decide(self, request: Request, status: Status, person: str, reason: str) -> Request:
        """Approve or refuse a request; `person` and `reason` say who decided, and why."""
        decided = replace(request, status=status, decided=_now(), person=person, reason=reason)
        with self._transaction(write=True) as connection:
            connection.execute(_DECIDED, (status, decided.decided, person, reason, decided.digest))
        return decided


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def digest_of(hypotheses: Arrays) -> str:
    """Return a digest that distinguishes hypotheses."""
    digest = sha256()
    for name, value in hypotheses.items():
        digest.update(f"{name}\n{value.dtype.str}\n{value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _forget(connection: sqlite3.Connection, table: str, kept: int) -> None:
    """Keep the newest rows of a table."""
    connection.execute(f"DELETE FROM {table} WHERE id <= (SELECT max(id) FROM {table}) - ?", (kept,))
