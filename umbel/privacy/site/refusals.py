"""How a node fails closed: the server reads "refused", and the reason stays in the node's log and the site's.

If a site's policy, its people or its budgets decided, the server also reads the code, so that its operator knows what
to change. A code of anything that read the data would be a release without noise; it stays here.

`umbel.privacy.site.policy` names the places that decide on refusals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from logging import ERROR

import numpy as np
from flwr.app import Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable

from umbel.privacy.site.config import Site
from umbel.privacy.site.entry import Entry
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.policy import Policy
from umbel.protocol.arrays import Arrays, all_finite, as_matrix
from umbel.protocol.errors import Refused, UmbelError
from umbel.protocol.flower import ErrorCode
from umbel.protocol.log import log
from umbel.protocol.words import in_time, one_line

PUBLIC = frozenset(
    f"refused.{reason}"
    for reason in (
        "budget", "bundle-or-task", "by-people",
        "choice", "clipping", "disclose-choice", "evaluations",
        "hypotheses", "long-request", "mechanism", "message-type", "min-clients", "no-reports", "noise",
        "noise-out-of-range", "open-choice", "other-server", "private-radius",
        "ranges", "release", "role", "row-noise", "row-rate", "rows",
        "secure-parties", "secure-round", "secure-shares", "secure-survivors", "secure-terms",
        "signature", "strategy", "told-before", "too-late", "too-many-wait", "unbounded",
        "unbounded-rows", "unknown-result", "unknown-run", "unsanitised", "version", "waits", "work",
    )
)  # fmt: skip
"""Codes that a server reads. They depend on messages, policy, approvals and the clients' participations alone."""

REMEDIES = {
    "refused.no-reports": ": no metric leaves this node; ask for none (fraction_evaluate=0), or let both the app "
    "(umbel.Gate(reports=[...])) and its site report"
}
"""Texts that a server reads behind a code whose reason it would otherwise look for in vain; no data decide on them."""


def guard(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower Mod: when a handler fails, reply "refused" and keep the reason in the node's log.

    Flower itself would send the exception's text to the server. The error is replied, not
    raised, because in simulation a raised one also drops what the node has written to its state.
    """

    def answer(_site: Site, _entry: Entry) -> Message:
        reply = call_next(msg, context)
        if reply.has_error():
            raise Refused("the handler replied with an error", code="refused.handler")
        return reply

    return answer_or_refuse(msg, context, answer)


def refuse(msg: Message, context: Context, error: Exception) -> Message:
    """Return "refused" for a message that reaches no handler; the reason stays with the node."""

    def answer(_site: Site, _entry: Entry) -> Message:
        raise error

    return answer_or_refuse(msg, context, answer)


def answer_or_refuse(
    msg: Message, context: Context, answer: Callable[[Site, Entry], Message], own_data: bool = True
) -> Message:
    """Return the reply that `answer` makes to a message, once it is on record, or "refused" if anything goes wrong.

    `answer` is called once the journal is known to be intact. If the reply cannot be recorded, it does not leave.
    """
    try:
        site = Site.of(context.node_config, own_data)
        journal = None if site.simulated else Journal.of(site)
        entry = Entry.of(msg, context) if journal else Entry()
        try:
            if journal is not None:
                check_in_time(msg)
            reply = answer(site, entry)
        except Exception as error:  # fail closed for any error
            reply = _refused(msg, error, entry)
        if journal is not None:
            journal.record(entry, not reply.has_error())
        return reply
    except Exception as error:  # no site, or nowhere to record it: fail closed
        return _refused(msg, error)


def record_refusal(message: Message, context: Context, what: str, error: Exception) -> None:
    """Record a message that is refused before the app sees it; nothing leaves, on record or not."""
    try:
        site = Site.of(context.node_config)
        if not site.simulated:
            entry = Entry.of(message, context)
            entry.refuse(what, error)
            Journal.of(site).record(entry, False)
    except Exception as fault:  # Flower would send its text to the server
        log(ERROR, "a refusal could not be recorded: %s", fault)


def check_in_time(msg: Message) -> None:
    """Raise `Refused` if the server no longer takes the reply to a message, as after a node's sleep.

    Clients would train, and be charged, for nothing.
    """
    over = time.time() - msg.metadata.created_at - msg.metadata.ttl
    if over > 0:
        raise Refused(
            f"the message expired {in_time(over)} ago, so no client is charged for a reply", code="refused.too-late"
        )


def refusal(msg: Message, error: Exception | None = None) -> Message:
    """Return what a server reads: one word, a code of `PUBLIC`, and a remedy of `REMEDIES`."""
    code = getattr(error, "code", "")
    public = isinstance(error, Refused) and code in PUBLIC
    reason = f"refused [{code}]{REMEDIES.get(code, '')}" if public else "refused"
    return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=msg)


def explain(what: str, error: Exception, entry: Entry | None = None) -> None:
    """Write the reason to the node's log and the site's; nothing leaves even if that fails."""
    with suppress(Exception):
        if entry is not None:
            entry.refuse(what, error)
        reason = None if isinstance(error, UmbelError) else error
        log(ERROR, "umbel refused to answer (%s): %s", what, one_line(str(error)), exc_info=reason)


def _refused(msg: Message, error: Exception, entry: Entry | None = None) -> Message:
    """Explain an error to the node's people, and return the refusal."""
    explain(msg.metadata.message_type, error, entry)
    return refusal(msg, error)


def check_hypotheses(hypotheses: Arrays, policy: Policy) -> None:
    """Raise `Refused` unless these are finite float32 arrays with one common leading axis, of at most the site's k.

    Those without numbers would have no price, and people could not be told one.
    """
    if fault := _fault(hypotheses, policy):
        raise Refused(f"the hypotheses {fault}", code="refused.hypotheses")


def _fault(hypotheses: Arrays, policy: Policy) -> str:
    counts = {value.shape[0] if value.ndim else 0 for value in hypotheses.values()}
    if len(counts) != 1 or not 1 <= min(counts) <= policy.max_hypotheses:
        return f"are not 1 to {policy.max_hypotheses} stacked arrays of one length"
    for name, value in hypotheses.items():
        if value.dtype != np.float32:
            return f"{name!r} are {value.dtype}, not float32"
    if not any(value.size for value in hypotheses.values()):
        return "have no numbers"
    if all_finite(as_matrix(hypotheses)):
        return ""
    return f"{', '.join(repr(name) for name, value in hypotheses.items() if not all_finite(value))} are not finite"
