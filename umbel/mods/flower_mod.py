"""Any Flower app before the gate: a strategy's message becomes a task of one client, and the app's function its work.

A node is one client. The server's arrays are its single hypothesis, or several that are stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from umbel.mods.choose import Loss, choose_hypothesis, choosing, round_in, stacked_in, with_one
from umbel.privacy.gate.answer import Incoming, report, train
from umbel.privacy.gate.policy import Role
from umbel.privacy.gate.work import Places, Results, Work
from umbel.privacy.mechanisms.choice import OWN
from umbel.privacy.mechanisms.sanitise import LARGEST
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientOnNode
from umbel.protocol.errors import ProtocolError, Refused
from umbel.protocol.records import from_array_record, to_array_record
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

ONLY = (ClientOnNode(0),)
"""The one client of the node."""
METRICS = "metrics"


@dataclass
class FlowerClient:
    """An app's functions as the only client of its node (`umbel.privacy.gate.answer.Clients`).

    `task` is the client's in each round; the app alone decides how it trains. For `frozen`, `reports` and `choose` see
    `umbel.Gate`.
    """

    msg: Message
    context: Context
    call_next: ClientAppCallable
    task: TrainingSpec
    frozen: Sequence[str]
    reports: Sequence[str]
    choose: Loss | None

    def __post_init__(self) -> None:
        what, content = self.msg.metadata.message_type.partition(".")[0], self.msg.content
        if what not in ("train", "evaluate"):
            text = f"an app behind umbel's gate answers to train and evaluate, not to {what[:50]!r}"
            raise Refused(text, code="refused.message-type")
        self.name, record = _only(content, ArrayRecord)
        if self.name.startswith(("fitins", "evaluateins")):
            text = "the app is a NumPyClient; umbel.Gate is for the Message API"
            raise Refused(text, code="refused.numpy-client")
        stacked = stacked_in(content)
        if stacked and self.choose is None:
            text = "the message has several hypotheses: give umbel.Gate a loss to choose by, choose=loss"
            raise Refused(text, code="refused.hypotheses")
        self.choose = self.choose if stacked else None
        self.sent: Arrays = stacked or {name: value[None] for name, value in from_array_record(record).items()}
        self.answers = self._train if what == "train" else self._evaluate

    def _train(self, message: Incoming) -> RecordDict:
        """Return the arrays that came, with the releases in place."""
        names = self._released()
        if message.site.policy.role is Role.VALIDATION:
            raise Refused("clients of role validation do not train; set role to train to let them", code="refused.role")
        task = replace(self.task, round=round_in(self.msg.content))
        with np.errstate(over="ignore"):  # a value too large for 32 bits becomes infinite, which the gate refuses
            start = {name: self.sent[name].astype(np.float32) for name in names}
        message.entry.asks(task, start)
        released = train(replace(message, hypotheses=start), task).arrays
        arrays = {
            name: _as(released[name][0], value.dtype) if name in start else value[0]
            for name, value in self.sent.items()
        }
        return RecordDict({self.name: to_array_record(arrays), METRICS: MetricRecord({})})

    def _evaluate(self, message: Incoming) -> RecordDict:
        """Return the metrics that may leave."""
        if not self.reports:
            raise Refused("no metric may leave; name some: umbel.Gate(reports=[...])", code="refused.no-reports")
        if message.site.policy.role is Role.SPLIT:
            text = 'clients here do not report; set reports = "noise=NU" and role = train, or role = validation'
            fix = "in simulation UMBEL_REPORTS and UMBEL_ROLE"
            raise Refused(f"{text} ({fix})", code="refused.no-reports")
        task = EvaluationSpec(round_in(self.msg.content), ONLY)
        message.entry.asks(task)
        reported = report(message, task)
        if not reported.paid.all():
            raise Refused("the client is over budget for another report", code="refused.budget")
        return RecordDict(
            {METRICS: MetricRecord(dict(zip(self.reports, reported.scores[:, 0].tolist(), strict=False)))}
        )

    def _released(self) -> list[str]:
        """Return the names of arrays that get noise; raise for others that are not frozen."""
        sent = self.sent
        frozen = {pattern: [name for name in sent if fnmatchcase(name, pattern)] for pattern in self.frozen}
        if idle := [pattern for pattern, names in frozen.items() if not names]:
            raise Refused(f"umbel.Gate's frozen names {idle[0]!r}, but no array matches it", code="refused.arrays")
        released = [name for name in sent if name not in set().union(*frozen.values())]
        for name in released:
            dtype = sent[name].dtype
            if dtype.kind != "f" or dtype.itemsize > 8:
                raise Refused(
                    f"array {name!r} is of type {dtype}, which takes no noise. Name it in umbel.Gate's frozen to "
                    "return it unchanged; for BatchNorm, whose statistics then never change, use GroupNorm",
                    code="refused.arrays",
                )
        if self.choose and any((value != value[:1]).any() for name, value in sent.items() if name not in released):
            text = "frozen arrays differ between hypotheses, so that to return a client's would tell its choice"
            raise Refused(text, code="refused.arrays")
        if not sum(sent[name].size for name in released):
            raise Refused("the message has no array that could be released", code="refused.arrays")
        return released

    # --- as the gate calls it

    def check(self, task: TrainingSpec | EvaluationSpec, hypotheses: Arrays) -> Sequence[ClientOnNode]:
        """Find nothing wrong: only the app's function knows what it can train."""
        return task.clients

    def train(self, task: TrainingSpec, hypotheses: Arrays, assigned: NDArray[np.int64]) -> Work:
        """Return how the app's function trains the arrays that are released."""

        def compute(_: Places) -> Results:
            chosen, reply = self._call_app(int(assigned[0]))
            arrays = from_array_record(_only(reply, ArrayRecord)[1])
            floats = {name for name, value in arrays.items() if value.dtype.kind == "f"}
            if strange := {*hypotheses} - floats | {*arrays} - {*self.sent}:
                text = f"arrays {sorted(strange)} were not sent, or did not come back as floating-point numbers"
                raise ProtocolError(text, code="protocol.arrays")
            with np.errstate(over="ignore"):  # diverged training counts as no update
                return [np.array([chosen]), *(arrays[name].astype(np.float32)[None] for name in hypotheses)]

        return Work(compute, interrupts=True)

    def score(self, task: EvaluationSpec, hypotheses: Arrays) -> Work:
        """Return how the app's function scores; a missing second metric is 0."""

        def compute(_: Places) -> Results:
            record = _only(self._call_app(OWN)[1], MetricRecord)[1]
            values = [record.get(name) for name in self.reports]
            # NumPy's float64, as of a mean, is a float; Flower's records hold no other numbers of NumPy's.
            if missing := [
                name for name, one in zip(self.reports, values, strict=True) if not isinstance(one, int | float)
            ]:
                raise ProtocolError(
                    f"the app's function returns no number called {missing[0]!r}", code="protocol.metric"
                )
            scores = np.zeros((1, 2))
            scores[0, : len(values)] = values
            return [np.where(np.isnan(scores), np.inf, scores)]

        return Work(compute, interrupts=True)

    def _call_app(self, assigned: int) -> tuple[int, RecordDict]:
        """Return the hypothesis that the app's function gets, alone in its message, and what it replies."""
        chosen, message = 0, self.msg
        if self.choose is not None:
            chosen = choose_hypothesis(self.choose, self.sent, self.context, assigned)
            message = with_one(self.msg, self.sent, chosen)
        try:
            with choosing(len(next(iter(self.sent.values()), (0,))), self.task.choice_epsilon):
                reply = self.call_next(message, self.context)
        except SystemExit:
            raise Refused("the app's function ended the process", code="refused.handler") from None
        if reply.has_error():
            raise Refused(f"the app's function replied with an error: {reply.error.reason}", code="refused.handler")
        return chosen, reply.content


def _only(content: RecordDict, kind: type[Any]) -> tuple[str, Any]:
    found = [(name, record) for name, record in content.items() if isinstance(record, kind)]
    if len(found) != 1:
        raise ProtocolError(f"{len(found)} records of type {kind.__name__}, not one", code="protocol.records")
    return found[0]


def _as(released: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a release in the type of the server's array, finite there too."""
    largest = min(float(np.finfo(dtype).max), LARGEST)
    # asarray, because NumPy's scalars have no byte order.
    return np.asarray(np.clip(released, -largest, largest)).astype(dtype)
