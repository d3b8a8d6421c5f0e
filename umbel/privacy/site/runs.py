"""The runs in a site's journal: how often each asked clients to report, which hypotheses it sent, who used a signature,
and which requests the site's people approved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from typing import Any

from umbel.privacy.site.entry import Decision, Entry, shortened
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.policy import Policy
from umbel.privacy.site.totals import key_of
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import LedgerError, Refused

_MOST_WAITING, _LONGEST_REQUEST = 100, 1 << 16
SHOWN = 32
"""Hex digits that identify a request: too many to find another request with the same digits."""
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


class Runs(Journal):
    """A journal's memory of runs."""

    # --- clients' reports

    def count_evaluation(self, run: str, policy: Policy) -> None:
        """Count a message that asks clients to report, before they do; raise `Refused` above the limit."""
        with self._locked() as file:
            messages = self._state.get("evaluations", key_of(self._node, run), 0)
            if messages >= (most := policy.max_evaluations):
                text = f"the server has asked for evaluation {messages} times; max-evaluations is {most:g}"
                raise Refused(text, code="refused.evaluations")
            self._add(file, {"kind": "evaluations", "node": self._node, "run": run})

    # --- results of a run

    def end(self, run: str, name: str, hypotheses: Arrays, evaluates: bool) -> None:
        """Note that a run has announced its result; raise `Refused` if it cannot be that run's result.

        A run's best hypotheses have been evaluated, so a node whose clients report (`evaluates`) has seen them. A node
        whose clients only train may have been left out of that round, and need not know them. It must know the run, by
        Flower's number or by the run's name: a run that resumes has another number, and the same name.
        """
        with self._locked() as file:
            known = {
                digest
                for node, number, title, digest in map(json.loads, self._state.facts["sent"])
                if node == self._node and (number == run or (title == name != ""))
            }
            if not known:
                raise Refused("the run has asked nothing of this site before", code="refused.unknown-run")
            if evaluates and digest_of(hypotheses) not in known:
                raise Refused("the run never sent these hypotheses to this site", code="refused.unknown-result")
            if key_of(self._node, run) in self._state.facts["ended"]:
                raise Refused("the run has already announced its result", code="refused.told-before")
            self._add(file, {"kind": "ended", "node": self._node, "run": run})

    # --- who asks

    def use_signature(self, run: str, digest: str) -> None:
        """Note the run that a signature of this digest was made for: the first that shows it; raise `Refused` for
        another one."""
        if (first := self.first_of(digest, run)) != run:
            text = f"run {first} has used this signature already; sign each run separately"
            raise Refused(text, code="refused.signature")

    def first_of(self, digest: str, use: str) -> str:
        """Note what a digest is used for; return what it was used for first."""
        with self._locked() as file:
            if digest not in self._state.facts["signed"]:
                self._add(file, {"kind": "signed", "digest": digest, "run": use})
            return str(self._state.get("signed", digest))

    # --- approvals by the site's people

    def check_approved(self, run: str, asks: Mapping[str, Any], policy: str, signed_by: str = "") -> str:
        """Return the beginning of a request's digest; raise `Refused` unless the request was approved.

        A new request waits, under a policy of this digest. One that a listed researcher signed (`signed_by`) is
        approved at once, unless people have refused it. If the site's policy asks its people by now, it waits for them.
        """
        text = json.dumps(asks, sort_keys=True, default=str)
        digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if len(text) > _LONGEST_REQUEST:
            raise Refused(
                f"the request has {len(text)} characters, above the maximum of {_LONGEST_REQUEST}",
                code="refused.long-request",
            )
        with self._locked() as file:
            known = self._state.get("request", digest)
            if known is None and not signed_by:
                self._check_room()
            request = _request(known) if known else Request(digest, _now(), run, Status.WAITING, json.loads(text))
            by_signature = (request.status, request.person, request.reason)
            if by_signature == (Status.APPROVED, asks.get("researcher"), _SIGNED) and not signed_by:
                request = replace(request, status=Status.WAITING, decided="", person="", reason="")
            if request.status is Status.WAITING:
                # The policy may have changed since it was asked first.
                request = replace(request, policy=policy)
                if signed_by:
                    request = replace(request, status=Status.APPROVED, decided=_now(), person=signed_by, reason=_SIGNED)
            if asdict(request) != known:
                self._add(file, {"kind": "requests", "request": asdict(request)})
        name = digest[:SHOWN]
        if request.status is Status.REFUSED:
            raise Refused(f"request {name} of run {run} was refused by this site's people", code="refused.by-people")
        if request.status is Status.WAITING:
            raise Refused(
                f"request {name} of run {run} waits for approval: {self._look}, then approve or refuse {name}",
                code="refused.waits",
            )
        return name

    def check_allowed(self, run: str, config: Mapping[str, Any], fault: str) -> None:
        """Raise `Refused` unless people approved a request with this run config; `fault` is why the run cannot be."""
        if any(one.status is Status.APPROVED and one.asks["config"] == config for one in self.requests()):
            return
        with self._locked():
            self._check_room()
        raise Refused(f"run {run} waits for approval, and cannot be approved here: {fault}", code="refused.waits")

    @property
    def _look(self) -> str:
        return f"umbel site requests --ledger {self.path}"

    def _check_room(self) -> None:
        """Raise `Refused` if too many requests wait."""
        waiting = sum(request["status"] == Status.WAITING for request in self._state.all("request"))
        # A waiting request is never dropped for another: a server could send one for that purpose.
        if waiting >= _MOST_WAITING:
            raise Refused(
                f"{_MOST_WAITING} requests wait for approval, so the site accepts no more: {self._look}",
                code="refused.too-many-wait",
            )

    def requests(self) -> list[Request]:
        """Return all requests, oldest first."""
        with self._locked():
            return [*map(_request, self._state.all("request"))]

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

    def decide(self, beginning: str, status: Status, person: str, reason: str = "") -> Request:
        """Approve or refuse the request whose digest has this beginning; `person` and `reason` say who, and why."""
        # Bytes of a terminal that are no text could not be shown.
        person, reason = (text.encode("utf-8", "replace").decode() for text in (person, reason))
        request = replace(self.request(beginning), status=status, decided=_now(), person=person, reason=reason)
        told = f"request {request.digest[:SHOWN]}, by {person}" + (f": {reason}" if reason else "")
        entry = Entry(request.run, "approval", reasons=[shortened(told)])
        decided = {name: getattr(request, name) for name in ("digest", "status", "decided", "person", "reason")}
        with self._locked() as file:
            decision = Decision.APPROVED if status is Status.APPROVED else Decision.DENIED
            self._add(file, entry.line(decision) | {"decided": decided})
        return request


def _request(known: Mapping[str, Any]) -> Request:
    return Request(**{**known, "status": Status(known["status"])})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def digest_of(hypotheses: Arrays) -> str:
    """Return a digest that distinguishes hypotheses."""
    digest = sha256()
    for name, value in hypotheses.items():
        digest.update(f"{name}\n{value.dtype.str}\n{value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()
