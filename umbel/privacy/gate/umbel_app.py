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

from umbel.privacy import channels
from umbel.privacy.gate.answer import Clients, Incoming, place_of, report, train
from umbel.privacy.gate.consent import check_admitted, most_participations, most_reports
from umbel.privacy.gate.entry import Entry
from umbel.privacy.gate.refusals import answer_or_refuse, explain, refusal
from umbel.privacy.gate.runs import digest_of
from umbel.privacy.gate.site import Site
from umbel.protocol import logs
from umbel.protocol.errors import Refused
from umbel.protocol.flower import filled
from umbel.protocol.messages import evaluation_in, hypotheses_in, run_names, training_in
from umbel.protocol.release import CHANNELS
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

    return answer_or_refuse(msg, context, answer)


def answer_stage(msg: Message, site: Site, seed: int | None, state: RecordDict) -> Message:
    """Return a node's reply to a message that a channel needs besides a round's."""
    names = [name for name in msg.content if name in CHANNELS]
    if len(names) != 1:
        raise Refused("the message is about no channel", code="refused.message-type")
    return Message(channels.load(names[0]).answer(place_of(site, seed, state), msg.content), reply_to=msg)


def _reply(message: Incoming, msg: Message) -> Message:
    """Return those results of both parts that may leave, or "refused"."""
    content: dict[str, Any] = {}
    first: Exception | None = None
    try:  # a message's record about a channel is named after it
        opened = {name: message.open_channel(name, msg.content) for name in msg.content if name in CHANNELS}
    except Exception as error:
        explain("train", error, message.entry)
        return refusal(msg, error)
    parts: tuple[tuple[str, Any, Any], ...] = ("train", training_in, train), ("evaluate", evaluation_in, report)
    for what, read, answer in parts:
        try:
            if (task := read(msg.content)) is not None:
                logs.about(round=task.round)
                if task.channel not in opened:
                    opened[task.channel] = message.open_channel(task.channel, msg.content)
                content.update(answer(message, task, opened[task.channel]).records())
        except Exception as error:  # fail closed for any error
            explain(what, error, message.entry)
            first = first or error
    for channel in opened.values():
        content.update(channel.rest())
    return Message(filled(RecordDict(), content), reply_to=msg) if content else refusal(msg, first)
