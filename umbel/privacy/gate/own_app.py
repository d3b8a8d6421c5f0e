"""The gate of umbel's own app: a Flower Mod around the handler of a round's message.

A message may ask training clients to train and validation clients to report. Both parts pass the gate in turn, and if
one fails, the other continues. The reply contains only the allowed fields. If the data are a site's own, everything
that leaves is on record (`umbel.privacy.gate.journal`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from umbel.privacy.gate.consent import check_admitted, most_participations, most_reports
from umbel.privacy.gate.entry import Entry
from umbel.privacy.gate.gate import LocalReport, LocalResult, Passage, SanitisedSums, Share
from umbel.privacy.gate.refusals import answered, explain, refusal
from umbel.privacy.gate.runs import digest_of
from umbel.privacy.gate.site import Site
from umbel.privacy.secure.wire import Request, masked_record
from umbel.protocol import logs
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientOnNode
from umbel.protocol.errors import Refused
from umbel.protocol.flower import filled, with_content
from umbel.protocol.messages import (
    SECURE,
    evaluation_in,
    evaluation_only,
    evaluation_reply,
    hypotheses_in,
    run_names,
    share_reply,
    site_reply,
    training_in,
    training_only,
    training_reply,
)
from umbel.protocol.records import Held, held_in
from umbel.protocol.release import RowPrivacy
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

_RESULT, _NODE = "result", "node"

T = TypeVar("T")


class Trains(Protocol):
    """The gate's view of the node behind it."""

    def check_training(self, hypotheses: Arrays, task: TrainingSpec) -> None:
        """Raise if the node cannot carry out a training task, independently of its data."""


def local_result(trained: Arrays, chosen: NDArray[np.int64], rows: RowPrivacy | None = None) -> RecordDict:
    """Return the handler's message to the gate about training clients, as a `LocalResult`; it goes no further."""
    return filled(RecordDict(), {_RESULT: Held(LocalResult(trained, np.asarray(chosen), rows))})


def local_report(
    losses: NDArray[np.float64], metrics: NDArray[np.float64], clients: Sequence[ClientOnNode], trains: bool
) -> RecordDict:
    """Return the handler's message to the gate about reporting clients, as a `LocalReport`: losses, metrics (m,)."""
    scores = np.stack([losses, metrics], dtype=np.float64)
    return filled(RecordDict(), {_RESULT: Held(LocalReport(scores, tuple(clients), trains))})


def node_in(content: RecordDict, kind: type[T]) -> T:
    """Return the node that the gate found for a message, from the part that it passed on."""
    return held_in(content, _NODE, kind)


class RoundGate:
    """Flower Mod: sanitise the results of the handler of a round's message.

    Parameters
    ----------
    find : callable
        Returns the node that a site and a run config describe. The gate calls it once for each message, and passes the
        node to the handler (`node_in`).
    """

    def __init__(self, find: Callable[[Site, RunConfig], Trains]) -> None:
        self._find = find

    def __call__(self, msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Return a sanitised reply, or "refused"."""

        def answer(site: Site, entry: Entry) -> Message:
            run, run_id = RunConfig.of(context.run_config), str(context.run_id)
            logs.about(run=context.run_id)
            hypotheses = hypotheses_in(msg.content)
            handler = _Handler(msg, context, call_next, hypotheses, lambda: self._find(site, run))
            most = most_participations(site, run), most_reports(site, run)
            passage = Passage(site, run_id, site.seed(run), context.state, entry, handler, hypotheses, *most)
            n = sum(math.prod(value.shape[1:]) for value in hypotheses.values())
            entry.request = check_admitted(site, run_id, run, n, msg.content, hypotheses)
            if not site.simulated:
                # At the end of the run, the site must know the hypotheses that the run can have found.
                entry.sent = [(name, digest_of(hypotheses)) for name in run_names(msg.content)]
            return _reply(passage, msg)

        return answered(msg, context, answer)


def _reply(passage: Passage, msg: Message) -> Message:
    """Return those results of both parts that may leave, or "refused"."""
    content: dict[str, Any] = {}
    first: Exception | None = None
    try:
        share = _share(passage, msg.content) if SECURE in msg.content else None
    except Exception as error:
        explain("train", error, passage.entry)
        return refusal(msg, error)
    for what, part in (("train", _train), ("evaluate", _evaluate)):
        try:
            content.update(part(passage, msg.content, share))
        except Exception as error:  # fail closed for any error
            explain(what, error, passage.entry)
            first = first or error
    if share is not None and share.leaves:
        paid, reported = share.paid.astype(int).tolist(), share.reported.astype(int).tolist()
        content.update(share_reply(masked_record(share.masked()), paid, reported))
    return Message(filled(RecordDict(), content), reply_to=msg) if content else refusal(msg, first)


def _share(passage: Passage, content: RecordDict) -> Share:
    """Return the site's part of a secure sum, to which nothing is added yet."""
    return Share(passage, Request.read(content), training_in(content), evaluation_in(content))


def _train(passage: Passage, content: RecordDict, share: Share | None) -> RecordDict:
    """Return what the asked training clients, if there are any, let leave outside a secure sum."""
    task = training_in(content)
    if task is None:
        return RecordDict()
    logs.about(round=task.round)
    if share is not None:
        share.train(task)
        return RecordDict()
    found = passage.train(task)
    paid = found.paid.astype(int).tolist()
    if isinstance(found, SanitisedSums):
        return site_reply(found.sums, found.counts, paid)
    return training_reply(found.releases, paid, found.choices, found.step)


def _evaluate(passage: Passage, content: RecordDict, share: Share | None) -> RecordDict:
    """Return loss and metric of the asked clients, if there are any, outside a secure sum."""
    task = evaluation_in(content)
    if task is None:
        return RecordDict()
    if share is not None and task.summed:
        share.report(task)
        return RecordDict()
    losses, metrics = passage.evaluate(task)
    policy = passage.site.policy
    return evaluation_reply(losses, metrics, policy.report_noise, policy.report_bound)


@dataclass
class _Handler:
    """The clients behind the gate, asked by a message with only one part."""

    msg: Message
    context: Context
    call_next: ClientAppCallable
    hypotheses: Arrays
    find: Callable[[], Trains]

    @cached_property
    def node(self) -> Trains:
        """The node, looked up for the first part that needs it."""
        return self.find()

    def check(self, task: TrainingSpec) -> None:
        self.node.check_training(self.hypotheses, task)

    def train(self, task: TrainingSpec, assigned: NDArray[np.int64]) -> LocalResult:
        return self._ask_handler(training_only(self.hypotheses, task, assigned), LocalResult)

    def report(self, task: EvaluationSpec) -> LocalReport:
        return self._ask_handler(evaluation_only(self.hypotheses, task), LocalReport)

    def _ask_handler(self, content: RecordDict, kind: type[T]) -> T:
        """Return the handler's reply to a part of the message; raise if it is an error."""
        content = filled(content, {_NODE: Held(self.node)})
        reply = self.call_next(with_content(self.msg, content), self.context)
        if reply.has_error():
            raise Refused("the handler replied with an error", code="refused.handler")
        return held_in(reply.content, _RESULT, kind)
