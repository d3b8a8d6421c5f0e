"""The messages between server and clients: one message a node and round, not one a client.

=============  ============================================================================
query          both ways the protocol version; back, how many clients the node hosts
train          the hypotheses, and the tasks of the node's clients for a round: `TrainingSpec`,
               `EvaluationSpec`, or both; back, what their channels let leave
               (`umbel.privacy.channels`)
evaluate       the same for a round that only evaluates
query.channel  what a channel needs besides a round's message, as the keys of a secure sum
query.keep     the best hypotheses at the end of a run, and how clients differ around each, as far
               as the server has estimated it from releases; back, nothing
=============  ============================================================================

The records are Flower's. Arrays are a model's shared parameters with an extra leading axis: the hypotheses in the
server's message; in a node's reply the clients that released, or the hypotheses where it releases sums. They travel
packed (`umbel.protocol.records.pack`): as one matrix with a row for each hypothesis or client.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ProtocolError
from umbel.protocol.flower import filled
from umbel.protocol.records import from_array_record, record_in, to_array_record, unpack
from umbel.protocol.tasks import LONGEST_NAME, VERSION, EvaluationSpec, Hosting, TrainingSpec

_VERSION = "version"
HYPOTHESES, TRAINING = "hypotheses", "training"
_PRIOR = "prior"
_EVALUATION = "evaluation"
_HOSTING = "hosting"
_RUN = "run"
TASKS = {TRAINING: TrainingSpec, _EVALUATION: EvaluationSpec}
PARTS = (HYPOTHESES, *TASKS, _VERSION, _RUN)
"""The records that a message to a node may have, besides those of channels; a node ignores all others."""


D = TypeVar("D", TrainingSpec, EvaluationSpec)

# --- messages of the server


def query() -> RecordDict:
    """Return the content of a query."""
    return RecordDict({_VERSION: ConfigRecord({_VERSION: VERSION})})


def round_request(hypotheses: ArrayRecord, *tasks: TrainingSpec | EvaluationSpec | None) -> RecordDict:
    """Return the content of a round's message to a node; all messages of a round may share the packed `hypotheses`."""
    records = {TRAINING if isinstance(one, TrainingSpec) else _EVALUATION: one.to_record() for one in tasks if one}
    return filled(RecordDict(), {HYPOTHESES: hypotheses, **records})


def merged(messages: Iterable[Message]) -> list[Message]:
    """Merge those of a round's messages that go to the same node and start from the same hypotheses."""
    by_node: dict[int, Message] = {}
    for message in messages:
        first = by_node.setdefault(message.metadata.dst_node_id, message)
        if first is not message:
            filled(first.content, {**message.content, **first.content})
    return list(by_node.values())


def numbers_asked(content: RecordDict) -> tuple[int, int]:
    """Return how many clients a round's message asks for training, and for evaluation."""
    return _number_asked(content.get(TRAINING)), _number_asked(content.get(_EVALUATION))


def _number_asked(task: object) -> int:
    clients = task.get("clients") if isinstance(task, ConfigRecord) else None
    return len(clients) if isinstance(clients, list) else 0


def keep_request(hypotheses: ArrayRecord, run: str = "", prior: Arrays | None = None) -> RecordDict:
    """Return the content of a message that sends a run's best hypotheses to nodes, with the run's name.

    A prior says how clients differ around each hypothesis (`umbel.models.prior.Prior.arrays`).
    """
    content = RecordDict({HYPOTHESES: hypotheses, _RUN: ConfigRecord({_RUN: run})})
    if prior is not None:
        content[_PRIOR] = to_array_record(prior)
    return content


# --- reading them on a node


def version_in(content: RecordDict) -> Any:
    """Return the protocol version in a query."""
    return record_in(content, _VERSION, ConfigRecord).get(_VERSION)


def run_in(content: RecordDict) -> str:
    """Return the name of the run in a message."""
    name = record_in(content, _RUN, ConfigRecord).get(_RUN)
    if not isinstance(name, str):
        raise ProtocolError("the message does not name its run", code="protocol.run-name")
    return name


def prior_in(content: RecordDict) -> Arrays | None:
    """Return the arrays of the prior in a message; None where it has none."""
    return from_array_record(record_in(content, _PRIOR, ArrayRecord)) if _PRIOR in content else None


def run_names(content: RecordDict) -> set[str]:
    """Return the names of the run in a round's message, from the parts that can be read."""
    names = (record.get(_RUN) for name, record in content.items() if name in TASKS)
    return {name for name in names if isinstance(name, str) and len(name) <= LONGEST_NAME}


def hypotheses_in(content: RecordDict) -> Arrays:
    """Return the hypotheses of a message."""
    return unpack(record_in(content, HYPOTHESES, ArrayRecord))


def training_in(content: RecordDict) -> TrainingSpec | None:
    """Check and return the task of a message's training clients; None if it has none."""
    return _task_in(content, TRAINING, TrainingSpec)


def evaluation_in(content: RecordDict) -> EvaluationSpec | None:
    """Check and return the task of a message's validation clients; None if it has none."""
    return _task_in(content, _EVALUATION, EvaluationSpec)


def _task_in(content: RecordDict, name: str, kind: type[D]) -> D | None:
    return kind.from_record(record_in(content, name, ConfigRecord)) if name in content else None


# --- replies of a node


def hosting_reply(hosting: Hosting) -> RecordDict:
    """Return the content of the reply to a query."""
    return RecordDict({_HOSTING: hosting.to_record()})


# --- reading them on the server


def hosting_in(content: RecordDict) -> Hosting:
    """Check and return a node's account of its clients."""
    record = content.get(_HOSTING)
    if not isinstance(record, MetricRecord):
        raise ProtocolError("does not say what it hosts", code="protocol.hosting")
    return Hosting.from_record(record)
