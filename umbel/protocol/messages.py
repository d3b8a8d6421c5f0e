"""The messages between server and clients: one message a node and round, not one a client.

============  ============================================================================
query         both ways the protocol version; back, how many clients the node hosts
train         the hypotheses, and the tasks of the node's clients for a round: `TrainingSpec`,
              `EvaluationSpec`, or both. Back, releases with public flags of who released, or the
              site's sums and counts with flags of the clients in them, and loss and metric of each
              client that reports. Releases on a public grid may travel as 16-bit multiples of its
              step
evaluate      the same for a round that only evaluates
query.secure  what a secure sum needs besides a round's training (`umbel.privacy.channels.secure.wire`)
query.keep    the best hypotheses at the end of a run, and how clients differ around each, as far
              as the server has estimated it from releases; back, nothing
============  ============================================================================

The records are Flower's. Arrays are a model's shared parameters with an extra leading axis: the hypotheses in the
server's message; in a node's reply the clients that released, or the hypotheses where it releases sums. They travel
packed (`umbel.protocol.records.pack`): as one matrix with a row for each hypothesis or client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ProtocolError
from umbel.protocol.flower import filled
from umbel.protocol.records import from_array_record, in_steps, pack, record_in, times_step, to_array_record, unpack
from umbel.protocol.release import ReleaseBy
from umbel.protocol.tasks import LONGEST_NAME, VERSION, EvaluationSpec, Hosting, TrainingSpec

_VERSION = "version"
_HYPOTHESES = "hypotheses"
_PRIOR = "prior"
_TRAINING = "training"
_EVALUATION = "evaluation"
_ARRAYS = "arrays"
_RELEASED = "released"
_STEP = "step"
_SCORES = "scores"
_NOISE, _BOUND = "noise-multiplier", "bound"
_HOSTING = "hosting"
_RUN = "run"
SECURE = "secure"
"""The record of a message about secure sums (`umbel.privacy.channels.secure.wire`)."""
# Bytes of an answer without its parameters: Flower's description of records, arrays or an error; and for each client
# whether it released, its choice, its loss and its metric.
_OF_FLOWER, _OF_A_CLIENT = 1 << 16, 32
PARTS = (_HYPOTHESES, _TRAINING, _EVALUATION, _VERSION, _RUN, SECURE)
"""The records that a message to a node may have; a node ignores all others."""


D = TypeVar("D", TrainingSpec, EvaluationSpec)

# --- messages of the server


def query() -> RecordDict:
    """Return the content of a query."""
    return RecordDict({_VERSION: ConfigRecord({_VERSION: VERSION})})


def round_request(hypotheses: ArrayRecord, *tasks: TrainingSpec | EvaluationSpec | None) -> RecordDict:
    """Return the content of a round's message to a node; all messages of a round may share the packed `hypotheses`."""
    records = {_TRAINING if isinstance(one, TrainingSpec) else _EVALUATION: one.to_record() for one in tasks if one}
    return filled(RecordDict(), {_HYPOTHESES: hypotheses, **records})


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
    return _number_asked(content.get(_TRAINING)), _number_asked(content.get(_EVALUATION))


def numbers_answered(content: RecordDict, reply: RecordDict) -> tuple[int, int]:
    """Return how many of the clients that a message asks have released, and reported, according to a reply."""
    training, evaluation = numbers_asked(content)
    [matrix] = record_in(content, _HYPOTHESES, ArrayRecord).values()
    sums = training and record_in(content, _TRAINING, ConfigRecord)["release_by"] != ReleaseBy.CLIENT
    return number_released(reply, training, matrix.shape[0] if sums else None), number_reported(reply, evaluation)


def largest_answer(content: RecordDict) -> int:
    """Return how many bytes the answer to a message may have: all its parts together, as Flower sends them."""
    hypotheses, training = content.get(_HYPOTHESES), content.get(_TRAINING)
    size = _OF_FLOWER + _OF_A_CLIENT * sum(numbers_asked(content))
    if isinstance(training, ConfigRecord) and isinstance(hypotheses, ArrayRecord):
        for name, matrix in hypotheses.items():
            k, *columns = matrix.shape
            rows = _number_asked(training) if training.get("release_by") == ReleaseBy.CLIENT else k
            # The name is JSON within JSON, and Flower names each 5 MiB of the array.
            size += 2 * len(name) + math.ceil(4 * rows * math.prod(columns) * (1 + 2**-10))
    if isinstance(secure := content.get(SECURE), ConfigRecord):
        names, length, bits = (secure.get(name) for name in ("names", "length", "bits"))
        if isinstance(names, list) and isinstance(length, int) and isinstance(bits, int):
            # Numbers of a sum, and a share and a proof for each pair of parties.
            size += length * bits // 8 + 128 * (len(names) + 1) ** 2
    return size


def _number_asked(task: object) -> int:
    clients = task.get("clients") if isinstance(task, ConfigRecord) else None
    return len(clients) if isinstance(clients, list) else 0


def keep_request(hypotheses: ArrayRecord, run: str = "", prior: Arrays | None = None) -> RecordDict:
    """Return the content of a message that sends a run's best hypotheses to nodes, with the run's name.

    A prior says how clients differ around each hypothesis (`umbel.models.prior.Prior.arrays`).
    """
    content = RecordDict({_HYPOTHESES: hypotheses, _RUN: ConfigRecord({_RUN: run})})
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
    names = (record.get(_RUN) for name, record in content.items() if name in (_TRAINING, _EVALUATION))
    return {name for name in names if isinstance(name, str) and len(name) <= LONGEST_NAME}


def hypotheses_in(content: RecordDict) -> Arrays:
    """Return the hypotheses of a message."""
    return unpack(record_in(content, _HYPOTHESES, ArrayRecord))


def training_in(content: RecordDict) -> TrainingSpec | None:
    """Check and return the task of a message's training clients; None if it has none."""
    return _task_in(content, _TRAINING, TrainingSpec)


def evaluation_in(content: RecordDict) -> EvaluationSpec | None:
    """Check and return the task of a message's validation clients; None if it has none."""
    return _task_in(content, _EVALUATION, EvaluationSpec)


def _task_in(content: RecordDict, name: str, kind: type[D]) -> D | None:
    return kind.from_record(record_in(content, name, ConfigRecord)) if name in content else None


# --- replies of a node


def hosting_reply(hosting: Hosting) -> RecordDict:
    """Return the content of the reply to a query."""
    return RecordDict({_HOSTING: hosting.to_record()})


def training_reply(
    releases: Arrays, released: Sequence[int], choices: Sequence[int] | None = None, step: float = 0.0
) -> RecordDict:
    """Return the part of a round's reply that holds releases.

    Parameters
    ----------
    releases : dict of ndarray, each (m, \\*shape)
        The sanitised parameters of the clients that released, in the order asked.
    released : sequence of int
        1 for each asked client that released, 0 for each that did not.
    choices : sequence of int, optional
        The hypothesis of each client that released (`TrainingSpec.disclose_choice`).
    step : float
        A power of two. If set, the releases are multiples of it that fit 16 bits, and they travel as these multiples.
        If 0, they travel unchanged.
    """
    counts: dict[str, int | float | list[int] | list[float]] = {"clients": list(released)}
    if choices is not None:
        counts["choices"] = list(choices)
    if step:
        releases, counts[_STEP] = in_steps(releases, step), step
    return filled(RecordDict(), {_ARRAYS: pack(releases), _RELEASED: filled(MetricRecord(), counts)})


def site_reply(sums: Arrays, counts: Sequence[float], released: Sequence[int]) -> RecordDict:
    """Return the part of a round's reply that holds a site's sums.

    The sums, with noise, are the updates of each hypothesis (k, \\*shape) and the number of clients that trained each.
    `released` is 1 for each asked client that took part, 0 for each that did not.
    """
    record = MetricRecord({"clients": list(released), "counts": list(counts)})
    return RecordDict({_ARRAYS: pack(sums), _RELEASED: record})


def share_reply(masked: ConfigRecord, released: Sequence[int], reported: Sequence[int] = ()) -> RecordDict:
    """Return the part of a round's reply that holds a site's part of a secure sum.

    `released` is as in `site_reply`; `reported` is 1 for each asked validation client that is in the sum.
    """
    flags = MetricRecord({"clients": list(released), "reported": list(reported)})
    return RecordDict({SECURE: masked, _RELEASED: flags})


def evaluation_reply(
    losses: NDArray[Any], metrics: NDArray[Any], noise_multiplier: float = 0.0, bound: float = 0.0
) -> RecordDict:
    """Return the part of a round's reply that holds loss and metric of each asked client, in order.

    With noise it also holds their nu, and the bound to which they were clipped before.
    """
    both = {"loss": np.asarray(losses, float).tolist(), "metric": np.asarray(metrics, float).tolist()}
    if noise_multiplier:
        both |= {_NOISE: noise_multiplier, _BOUND: bound}
    return filled(RecordDict(), {_SCORES: filled(MetricRecord(), both)})


# --- reading them on the server


def hosting_in(content: RecordDict) -> Hosting:
    """Check and return a node's account of its clients."""
    record = content.get(_HOSTING)
    if not isinstance(record, MetricRecord):
        raise ProtocolError("does not say what it hosts", code="protocol.hosting")
    return Hosting.from_record(record)


def released_in(content: RecordDict, asked: int) -> tuple[Arrays, NDArray[np.bool_], NDArray[np.int64] | None]:
    """Check and return the releases, a flag for each asked client, and the choices if clients disclosed them."""
    counts = record_in(content, _RELEASED, MetricRecord)
    flags = _flags(counts, asked)
    arrays = unpack(record_in(content, _ARRAYS, ArrayRecord))
    if _STEP in counts:
        arrays = times_step(arrays, counts[_STEP])
    choices = np.asarray(counts["choices"]) if "choices" in counts else None
    if choices is not None and (choices.dtype.kind not in "iu" and choices.size):
        raise ProtocolError("it does not say what its clients chose", code="protocol.choices")
    return arrays, flags, None if choices is None else choices.astype(np.int64)


def site_sums_in(content: RecordDict, asked: int) -> tuple[Arrays, NDArray[np.float64], NDArray[np.bool_]]:
    """Check and return a site's sums, its counts, and a flag for each asked client."""
    record = record_in(content, _RELEASED, MetricRecord)
    flags = _flags(record, asked)
    arrays = unpack(record_in(content, _ARRAYS, ArrayRecord))
    counts = np.asarray(record.get("counts", ()), np.float64)
    if counts.shape != (len(next(iter(arrays.values()))),) or not np.isfinite(counts).all():
        raise ProtocolError("it does not say how many clients trained each hypothesis", code="protocol.counts")
    return arrays, counts, flags


def shared_in(content: RecordDict, asked: int, reporting: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Check and return a flag for each asked training client, and for each validation client: whether it is in the
    site's part of a secure sum."""
    record = record_in(content, _RELEASED, MetricRecord)
    return _flags(record, asked), _flags(record, reporting, "reported")


def _flags(record: MetricRecord, asked: int, whose: str = "clients") -> NDArray[np.bool_]:
    flags = np.asarray(record.get(whose, ()))
    if flags.shape != (asked,) or not ((flags == 0) | (flags == 1)).all():
        raise ProtocolError("it does not say who released", code="protocol.released")
    return flags.astype(bool)


def number_released(content: RecordDict, asked: int, rows: int | None = None) -> int:
    """Return how many of the asked clients released according to a reply; 0 for an inconsistent reply.

    Its matrix must have `rows` rows: k where a site was asked for sums, by default one for each client that released.
    """
    record = content.get(_RELEASED)
    flags = record.get("clients") if isinstance(record, MetricRecord) else None
    if not isinstance(flags, list) or len(flags) != asked or not set(flags) <= {0, 1}:
        return 0
    arrays, released = content.get(_ARRAYS), sum(flag == 1 for flag in flags)
    if SECURE in content:
        return released
    shape = (released if rows is None else rows,)
    there = isinstance(arrays, ArrayRecord) and [value.shape[:1] for value in arrays.values()] == [shape]
    return released if there else 0


def let_go(content: RecordDict) -> None:
    """Remove the arrays from a reply once they are kept elsewhere, to free their memory."""
    content.pop(_ARRAYS, None)


def answers_training(content: RecordDict) -> bool:
    """Return whether a reply has a part about training clients."""
    return _RELEASED in content


def number_reported(content: RecordDict, asked: int) -> int:
    """Return how many of the asked validation clients reported according to a reply; 0 for an inconsistent reply."""
    record = content.get(_RELEASED)
    if SECURE not in content or not isinstance(record, MetricRecord) or "reported" not in record:
        return 0 if scores_in(content, asked) is None else asked
    flags = record["reported"]
    return flags.count(1) if isinstance(flags, list) and len(flags) == asked else 0


def scores_in(content: RecordDict, asked: int) -> NDArray[np.float64] | None:
    """Return loss and metric (2, asked) of the asked clients; None where a reply has none of that shape."""
    record = content.get(_SCORES)
    if not isinstance(record, MetricRecord):
        return None
    values = [np.asarray(record.get(name, ()), np.float64) for name in ("loss", "metric")]
    return np.stack(values) if all(value.shape == (asked,) for value in values) else None


def reports_exactly(content: RecordDict) -> bool:
    """Return whether loss and metric in a reply came without noise, according to the reply."""
    return not record_in(content, _SCORES, MetricRecord).get(_NOISE)


def noise_of_reports(content: RecordDict) -> tuple[float, float]:
    """Return nu of loss and metric in a reply, and their bound, according to the reply; 0 for none or another value."""
    record, most = record_in(content, _SCORES, MetricRecord), float(np.finfo(np.float32).max)  # squares are finite
    found = [record.get(name, 0.0) for name in (_NOISE, _BOUND)]
    nu, bound = (float(one) if isinstance(one, int | float) and 0 <= one <= most else 0.0 for one in found)
    return nu, bound
