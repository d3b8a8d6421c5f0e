"""The batches and threads in which a site computes its clients.

The number of threads that compute a client may change its numbers, so it does not depend on the clients that are
asked. If a site hosts several clients for each core, each thread computes one client, and all cores work at once.
Otherwise all cores compute one client after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from queue import SimpleQueue

import numpy as np
import torch

from umbel.client.learner import LOOP, Learner, one_thread
from umbel.client.node import Node
from umbel.models.fit import CPU_CHUNK_BYTES, look, training_bytes
from umbel.privacy.gate.work import Places
from umbel.protocol.clients import ClientInDataset

_CLIENTS = 4  # hosted clients for each core: with fewer, some cores could be idle if a message asks only some clients


class Crew:
    """The learners of a node's threads. A network computes for one thread at a time, so each thread has its own.

    Without `together`, each client is computed alone, and no other client's rows take of its time.

    Attributes
    ----------
    batches : sequence of slice or list of int
        The places of the clients that a site computes together.
    size : int
        Number of batches that are computed at a time.
    """

    def __init__(self, node: Node, clients: Sequence[ClientInDataset], together: bool = True) -> None:
        self._single = _one_thread_each(node)
        batches: list[Places] = [slice(0, len(clients))]  # a simulation computes all clients at once
        learners = [node.learner]
        if not node.site.simulated:
            offsets, asked = node.dataset.offsets, np.asarray(clients, np.int64)
            lengths = offsets[asked + 1] - offsets[asked]
            batches = node.learner.batches(lengths) if together else [slice(c, c + 1) for c in range(len(asked))]
        if self._single:
            size = training_bytes(node.model, node.dataset.features.shape[1:], int(lengths.max(initial=1)))
            # The longest first, so that all threads end at about the same time.
            batches = sorted(batches, key=lambda batch: -int(lengths[batch].sum()))
            most = min(torch.get_num_threads(), len(batches), CPU_CHUNK_BYTES // size)
            # Copies alone: a thread that has not ended in the site's time still computes on its network.
            learners = (_copies(node.learner, most) if most > 1 else []) or learners
        self.batches, self.size = batches, len(learners)
        self._idle: SimpleQueue[Learner] = SimpleQueue()
        for learner in learners:
            self._idle.put(learner)

    @property
    def threads(self) -> AbstractContextManager[None]:
        """A context that sets the number of threads that compute a client."""
        return one_thread() if self._single else nullcontext()

    @contextmanager
    def learner(self) -> Iterator[Learner]:
        """Lend a learner to a thread."""
        learner = self._idle.get()
        try:
            yield learner
        finally:
            self._idle.put(learner)


def _copies(learner: Learner, count: int) -> list[Learner]:
    """Return so many learners with a network each; none if the network cannot be copied."""
    try:
        return [Learner(deepcopy(learner.model), learner.device) for _ in range(count)]
    except Exception:  # a module may hold anything
        return []


def _one_thread_each(node: Node) -> bool:
    """Return whether one thread computes each client, which depends on nothing that a message asks for.

    PyTorch has one generator for all threads, so clients of a network that draws take turns. Fresh local parameters may
    be drawn from it too.
    """
    model, learner, hosted = node.model, node.learner, max(len(node.training), len(node.validation))
    return (
        not node.site.simulated
        and learner.engine == LOOP
        and learner.device.type == "cpu"
        and hosted >= _CLIENTS * torch.get_num_threads()
        and not model.local_shapes
        and not look(model, node.dataset.features.shape[1:]).draws
    )
