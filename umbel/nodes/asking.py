"""Messages that ask the clients of umbel's nodes to train or to evaluate: one message a node."""

from __future__ import annotations

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from umbel.nodes.roster import TRAIN, VALIDATION, Roster
from umbel.protocol.asked import Asked
from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.messages import round_request
from umbel.protocol.records import pack
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec


def ask(
    roster: Roster,
    clients: NDArray[np.int64],
    round: int,
    hypotheses: Hypotheses,
    task: TrainingSpec | EvaluationSpec,
    group: str = "",
) -> Asked:
    """Return who is asked to do a task, with a message to each of their nodes; nothing is sent here.

    The clients (m,) are counted over all nodes, in increasing order. The messages' group is by default the round.
    """
    role, kind = (TRAIN, "train") if isinstance(task, TrainingSpec) else (VALIDATION, "evaluate")
    placed, packed, group = roster.place(role, clients), pack(hypotheses), group or str(round)
    messages = [
        Message(round_request(packed, task.asking(round, numbers)), node, kind, group_id=group)
        for node, (_, numbers) in placed.items()
    ]
    positions = {node: np.array(its) for node, (its, _) in placed.items()}
    return Asked(hypotheses, clients, positions, messages, task, roster.names)
