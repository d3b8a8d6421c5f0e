"""The memory that a run takes: estimated before it starts, and refused where the machine has less."""

from __future__ import annotations

from dataclasses import dataclass
from logging import INFO
from pathlib import Path

import psutil
import torch

from umbel.client.engines import engine_asked
from umbel.models.fit import CPU_CHUNK_BYTES, look, training_bytes
from umbel.protocol.errors import ConfigError
from umbel.protocol.flower import log
from umbel.protocol.release import ReleaseBy
from umbel.server.setup import Setup

# Copies of a hypothesis at the same time: the next, the best, a message's, a node's, and the average in 64 bits.
_COPIES = 6
_RESTART_COPIES = 2  # of each random set of initial hypotheses: the set, and its message
_CHECKPOINT_COPIES = 2  # the file's content, and the hypotheses that it is written from
_SIZABLE = 0.25  # of the machine's memory, from which on the log contains the estimate
_GIB = 2**30
# Limits of a container: of cgroups 2, and of cgroups 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Estimate:
    """Bytes that a run takes on the server's machine, above its programs.

    Attributes
    ----------
    hypotheses, releases, training, checkpoints : int
    """

    hypotheses: int
    releases: int
    training: int
    checkpoints: int

    @property
    def whole(self) -> int:
        """All of it."""
        return self.hypotheses + self.releases + self.training + self.checkpoints

    def __str__(self) -> str:
        parts = ("hypotheses", "releases", "training", "checkpoints")
        told = ", ".join(f"{name} {getattr(self, name) / _GIB:.1f}" for name in parts)
        return f"about {self.whole / _GIB:.1f} GiB ({told})"


def estimate(setup: Setup, clients: int, nodes: int, local: bool) -> Estimate:
    """Estimate the memory of rounds.

    Parameters
    ----------
    setup : Setup
    clients : int
        Clients of a round.
    nodes : int
    local : bool
        Whether the nodes train on this machine too.
    """
    run, k = setup.config, setup.strategy.hypotheses
    vector = 4 * setup.model.num_parameters
    of_a_node, training = -(-clients // nodes), 0
    released = nodes * k if setup.strategy.release_by is not ReleaseBy.CLIENT else clients
    # Of a single node the server keeps the releases as they came; of several it makes one matrix.
    copies = released + (of_a_node if local else released if nodes > 1 else 0)
    if local:
        # A node's chunk is there before its releases.
        training = max(0, _chunk(setup, of_a_node) - of_a_node * vector)
    copies_of_k = max(_COPIES, _RESTART_COPIES * run.restarts)
    return Estimate(copies_of_k * k * vector, copies * vector, training, _CHECKPOINT_COPIES * k * vector)


def check_memory(setup: Setup, nodes: int, local: bool) -> None:
    """Log the estimate if it is a sizable part of the machine's memory.

    Raises
    ------
    ConfigError
        If the run needs more memory than the machine has.
    """
    there, clients = machine_memory(), setup.config.clients_per_round
    found = estimate(setup, clients, nodes, local)
    if found.whole <= _SIZABLE * there:
        return
    told = f"The run takes {found} of this machine's {there / _GIB:.1f} GiB of memory"
    if found.whole <= there:
        log(INFO, "%s", told)
        return
    raise ConfigError(f"{told}; {_fix(setup, clients, nodes, local, there)}", code="config.memory")


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of the container."""
    limits = [file.read_text(encoding="utf-8").strip() for file in _LIMITS if file.is_file()]
    return min([psutil.virtual_memory().total, *(int(limit) for limit in limits if limit.isdigit())])


def _fix(setup: Setup, clients: int, nodes: int, local: bool, there: int) -> str:
    """Return what makes a run fit."""
    fits, too_many = 0, clients
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if estimate(setup, middle, nodes, local).whole <= there:
            fits = middle
        else:
            too_many = middle
    if fits:
        return f"set clients-per-round={fits}"
    fewer = "hypotheses=1, " if setup.strategy.hypotheses > 1 else ""
    return f"set {fewer}restarts=1 or a smaller batch-size, freeze a part of the model (frozen), or train an adapter"


def _chunk(setup: Setup, clients: int) -> int:
    """Return the bytes that training a node's clients takes beside their parameters; 0 on a GPU."""
    run, dataset = setup.config, setup.open_dataset(part=True)
    if dataset is None or run.device == "cuda" or (run.device == "auto" and torch.cuda.is_available()):
        return 0
    longest = int(dataset.lengths.max())
    model, shape = setup.model, tuple(dataset.features.shape[1:])
    one = training_bytes(model, shape, min(run.batch_size or longest, longest))
    alone = engine_asked() == "loop" or model.convolves or model.batch_dependent or look(model, shape).draws
    together = 1 if alone else min(clients, max(1, CPU_CHUNK_BYTES // one))
    # A client's parameters lie where its release will be.
    return together * (one - 4 * model.num_parameters)
