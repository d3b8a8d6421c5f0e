"""umbel's own app before the gate: a round's message becomes tasks, and what may leave becomes a reply.

A message may ask training clients to train and validation clients to report. If one part fails, the other continues.
The reply contains only the allowed fields. If the data are a site's own, everything that leaves is on record
(`umbel.privacy.gate.journal`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flwr.app import Context, Message, RecordDict

from umbel.privacy.gate.answer import Clients, Flags, Incoming, report, train
from umbel.privacy.gate.consent import check_admitted, most_participations, most_reports
from umbel.privacy.gate.entry import Entry
from umbel.privacy.gate.refusals import answered, explain, refusal
from umbel.privacy.gate.runs import digest_of
from umbel.privacy.gate.secure_sums import SecureSum
from umbel.privacy.gate.site import Site
from umbel.privacy.secure.wire import masked_record
from umbel.protocol import logs
from umbel.protocol.flower import filled
from umbel.protocol.messages import (
    SECURE,
    evaluation_in,
    evaluation_reply,
    hypotheses_in,
    run_names,
    share_reply,
    site_reply,
    training_in,
    training_reply,
)
from umbel.protocol.run_config import RunConfig

Find = Callable[[Site, RunConfig, RecordDict], Clients]
"""Returns the clients that a site and a run config describe, given the node's memory of the run; opens no data."""


def answer_round(msg: Message, context: Context, find: Find) -> Message:
    """Return a node's reply to a round's message: what its clients release, or "refused"."""

    def answer(site: Site, entry: Entry) -> Message:
        run, run_id, state = RunConfig.of(context.run_config), str(context.run_id), context.state
        logs.about(run=context.run_id)
        hypotheses = hypotheses_in(msg.content)
        most = most_participations(site, run), most_reports(site, run)
        clients = find(site, run, state)
        message = Incoming(site, run_id, site.seed(run), state, entry, clients, hypotheses, *most)
        n = sum(math.prod(value.shape[1:]) for value in hypotheses.values())
        entry.request = check_admitted(site, run_id, run, n, msg.content, hypotheses)
        if not site.simulated:
            # At the end of the run, the site must know the hypotheses that the run can have found.
            entry.sent = [(name, digest_of(hypotheses)) for name in run_names(msg.content)]
        return _reply(message, msg)

    return answered(msg, context, answer)


def _reply(message: Incoming, msg: Message) -> Message:
    """Return those results of both parts that may leave, or "refused"."""
    content: dict[str, Any] = {}
    first: Exception | None = None
    try:
        of = message.site, message.seed, message.state, message.hypotheses, msg.content
        secure = SecureSum(*of) if SECURE in msg.content else None
    except Exception as error:
        explain("train", error, message.entry)
        return refusal(msg, error)
    for what, part in (("train", _train), ("evaluate", _evaluate)):
        try:
            content.update(part(message, msg.content, secure))
        except Exception as error:  # fail closed for any error
            explain(what, error, message.entry)
            first = first or error
    if secure is not None and secure.leaves:
        content.update(share_reply(masked_record(secure.masked()), _flags(secure.paid), _flags(secure.reported)))
    return Message(filled(RecordDict(), content), reply_to=msg) if content else refusal(msg, first)


def _train(message: Incoming, content: RecordDict, secure: SecureSum | None) -> RecordDict:
    """Return what the asked training clients, if there are any, let leave outside a secure sum."""
    task = training_in(content)
    if task is None:
        return RecordDict()
    logs.about(round=task.round)
    released, paid = train(message, task, secure)
    if secure is not None:
        secure.paid = paid
        return RecordDict()
    if released.counts is not None:
        return site_reply(released.arrays, released.counts, _flags(paid))
    return training_reply(released.arrays, _flags(paid), released.choices, released.step)


def _evaluate(message: Incoming, content: RecordDict, secure: SecureSum | None) -> RecordDict:
    """Return loss and metric of the asked clients, if there are any, outside a secure sum."""
    task, policy = evaluation_in(content), message.site.policy
    if task is None:
        return RecordDict()
    (losses, metrics), reports = report(message, task, secure)
    if secure is not None and task.summed:
        secure.reported = reports
        return RecordDict()
    return evaluation_reply(losses, metrics, policy.report_noise, policy.reports.bound)


def _flags(clients: Flags | None) -> list[int]:
    return [] if clients is None else clients.astype(int).tolist()
