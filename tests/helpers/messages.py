"""Messages to a node, and what came back as it arrives at the server."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from numpy.typing import NDArray

from umbel.privacy.site.answer import Clients
from umbel.privacy.site.refusals import PUBLIC, REMEDIES
from umbel.privacy.site.umbel_app import answer_round
from umbel.privacy.site.work import Work
from umbel.protocol.arrays import Arrays
from umbel.protocol.messages import round_request
from umbel.protocol.records import pack, record_in, times_step, to_array_record, unpack
from umbel.protocol.release import RowPrivacy
from umbel.protocol.simulated import in_process
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

Layout = Mapping[str, tuple[int, ...]]
Compute = Callable[[TrainingSpec, NDArray[np.int64]], Any]
"""What clients train for a task, given the hypotheses that the gate assigns: all that `Work.compute` returns."""

SIMULATED: dict[str, Any] = {"partition-id": 0, "num-partitions": 1}
"""The configuration of the only node of a simulation."""


def task_of(clients: tuple[int, ...] = (0,), **changes: Any) -> TrainingSpec:
    """Return a task that every site accepts, with changes."""
    accepted: dict[str, Any] = {
        "round": 1,
        "local_epochs": 1,
        "step_size": 0.1,
        "batch_size": 10,
        "noise_multiplier": 5.0,
        "clipping": "update",
        "clip_norm": 0.1,
        "choice_epsilon": 0.0,
    }
    return TrainingSpec(clients=clients, **(accepted | changes))


def stacked(matrix: NDArray[Any], layout: Layout) -> Arrays:
    """Return rows of parameters as named float32 arrays of a layout."""
    sizes = [int(np.prod(shape)) for shape in layout.values()]
    parts = np.split(np.asarray(matrix), np.cumsum(sizes)[:-1], axis=1)
    return {
        name: part.reshape(len(matrix), *shape).astype(np.float32)
        for (name, shape), part in zip(layout.items(), parts, strict=True)
    }


def to_node(content: RecordDict, message_type: str = "train") -> Message:
    """Return a message as it arrives at a node."""
    return Message(content, 100, message_type, group_id="1")


def of_node(node_config: dict[str, Any], **run_config: Any) -> Context:
    """Return what a node keeps, at the start of a run whose seed is 3."""
    return Context(1, 100, node_config, RecordDict(), {"seed": 3} | run_config)


class Behind:
    """Clients behind the gate, all computed together also at a site.

    `trains` and `scores` get a task, and `trains` the assigned hypotheses; they return all clients' results, or fail.
    `rows` says how training hides rows.
    """

    def __init__(
        self,
        trains: Compute | None = None,
        scores: Callable[[EvaluationSpec], Any] | None = None,
        rows: RowPrivacy | None = None,
    ) -> None:
        self._trains, self._scores, self._rows = trains, scores, rows

    def check(self, task: Any, hypotheses: Arrays) -> Any:
        """Find nothing wrong with what a task asks."""
        return task.clients

    def train(self, task: TrainingSpec, hypotheses: Arrays, assigned: NDArray[np.int64]) -> Work:
        assert self._trains is not None
        return Work(lambda _: self._trains(task, assigned), [slice(0, len(task.clients))], rows=self._rows)

    def score(self, task: EvaluationSpec, hypotheses: Arrays) -> Work:
        assert self._scores is not None
        return Work(lambda _: self._scores(task), [slice(0, len(task.clients))])


def through_gate(
    content: RecordDict, context: Context, clients: Clients | Compute, message_type: str = "train"
) -> Message:
    """Return what the gate lets out, on a node of the in-process grid unless it has data of its own."""
    behind = clients if hasattr(clients, "train") else Behind(clients)
    with in_process():
        return answer_round(to_node(content, message_type), context, lambda *_: behind)


def sent(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Return arrays as they travel; such as cannot, each by itself."""
    try:
        return pack(arrays)
    except (TypeError, ValueError):
        return to_array_record(arrays)


def instead(value: Any, like: ArrayRecord) -> ArrayRecord:
    """Return any array in the place of the matrix that travels, under its name."""
    (name,) = like
    return ArrayRecord({name: value if isinstance(value, Array) else Array(np.asarray(value))})


def asked(
    hypotheses: ArrayRecord | Mapping[str, Any],
    training: TrainingSpec | ConfigRecord | None = None,
    evaluation: EvaluationSpec | ConfigRecord | None = None,
) -> RecordDict:
    """Return the content of a round's message; records stand for what a server of another mind would send."""
    record = hypotheses if isinstance(hypotheses, ArrayRecord) else sent(hypotheses)
    content = round_request(record)
    for name, task in (("training", training), ("evaluation", evaluation)):
        if task is not None:
            content[name] = task if isinstance(task, ConfigRecord) else task.to_record()
    return content


def wire(reply: Message) -> bytes:
    """Return a reply as the bytes that travel."""
    data: bytes = message_to_proto(reply).SerializeToString()
    return data


def arrived(reply: Message) -> Message:
    """Return a reply after a round trip through bytes."""
    return message_from_proto(ProtoMessage.FromString(wire(reply)))


def records(reply: Message) -> dict[str, dict[str, Any]]:
    """Return the records of a reply as they arrive."""
    return {name: dict(record) for name, record in arrived(reply).content.items()}


def refused(reply: Message) -> bool:
    """Return whether a reply is the one word, with a public code or none, and no words but a remedy of the gate's."""
    words = {"refused", *(f"refused [{code}]{REMEDIES.get(code, '')}" for code in PUBLIC)}
    return reply.has_error() and not reply.has_content() and reply.error.reason in words


def released(reply: Message) -> list[int]:
    """Return the flags of who released."""
    flags: Any = reply.content.metric_records["released"]["clients"]
    return [int(flag) for flag in flags]


def bare(record: ArrayRecord) -> ArrayRecord:
    """Return arrays that left a node, and check that nothing hides behind their numbers."""
    for array in record.values():
        data = io.BytesIO(array.data)
        np.load(data)
        assert not data.read(), "something hides behind the numbers"
    return record


def releases(reply: Message) -> Arrays:
    """Return the arrays of a reply, and check that nothing hides behind their numbers."""
    record = bare(record_in(reply.content, "arrays", ArrayRecord))
    arrays, flags = unpack(record), reply.content.metric_records.get("released", {})
    return times_step(arrays, flags["step"]) if "step" in flags else arrays


def scores(reply: Message) -> tuple[list[float], list[float]]:
    """Return loss and metric of each client that reported."""
    record: Any = reply.content.metric_records["scores"]
    assert {"loss", "metric"} <= set(record) <= {"loss", "metric", "noise-multiplier", "bound"}
    return list(record["loss"]), list(record["metric"])
