"""The channel of single clients: each releases its model, with separate noise.

`umbel.privacy.mechanisms.sanitise` clips updates and adds the noise, for vectors of numbers. Here are the rules of a
site around it: its floors, its hypotheses, and models too large to be sanitised at once. The server leaves out releases
that lie further from the hypotheses than valid ones can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from logging import WARNING
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from umbel.privacy import channels, mechanisms
from umbel.privacy.channels import Flags, Ids, Outgoing, Place, Sanitiser, answers_training, flags_in, released_record
from umbel.privacy.mechanisms.base import Matrix, Mechanism, NoiseSource
from umbel.privacy.mechanisms.randomness import noise_sources
from umbel.privacy.mechanisms.sanitise import (
    LARGEST,
    NOISE_STEPS,
    check_noise,
    columns_of,
    grid_step,
    min_radius,
    release_in_place,
    resolution,
)
from umbel.protocol.arrays import Arrays, Labels, Packed, Vectors, all_finite, as_matrix, flatten, in_blocks
from umbel.protocol.asked import Asked, read_replies
from umbel.protocol.cores import cores
from umbel.protocol.errors import ProtocolError, Refused
from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.log import log
from umbel.protocol.records import MOST_STEPS, in_steps, pack, record_in, times_step, unpack
from umbel.protocol.release import LEAST_CLIP_NORM, Clipping, NoisePer, Release
from umbel.protocol.releases import Releases
from umbel.protocol.tasks import TrainingSpec

if TYPE_CHECKING:
    from umbel.privacy.channels.on_gpu import ReleasesOnGpu

LARGEST_UPDATE = 1e6
"""Maximum norm of an update unless a run sets one: for a model of n parameters, sqrt(n) changes of about 1 are far."""
RARE = 27.7  # -log of the chance that noise is longer than its mechanism says: 1e-12

_BLOCK = 1 << 17  # numbers that are sanitised together
_AT_ONCE = 1 << 24  # numbers that threads sanitise at the same time, which bounds the memory
_FAR = 40.0  # in standard deviations; a number is farther away with a probability below 10^-20


# --- at a site


@dataclass(frozen=True)
class Released(Outgoing):
    r"""The models of the charged clients, each (m, \*shape), in the order asked.

    Attributes
    ----------
    choices : list of int, optional
        Those of the charged clients, if the task asks for them (`TrainingSpec.disclose_choice`).
    step : float
        A power of two, of which the models' numbers are multiples that fit 16 bits, and as which they travel; 0 if they
        travel unchanged.
    """

    choices: Sequence[int] | None = None
    step: float = 0.0

    def records(self) -> Mapping[str, Any]:
        """Return the models, and the public flags of who released."""
        entries = {} if self.choices is None else {"choices": list(self.choices)}
        arrays = in_steps(self.arrays, self.step) if self.step else self.arrays
        step = {"step": self.step} if self.step else {}
        return {"arrays": pack(arrays), "released": released_record(self.paid, **entries, **step)}


@dataclass(frozen=True)
class ClientSanitiser(Sanitiser):
    """A site's sanitisation of the updates for one task.

    Attributes
    ----------
    place : Place
    task : TrainingSpec
    hypotheses : ndarray, shape (k, n)
    mechanism : Mechanism or None
        None if the task asks for no noise.
    radius : float
        The task's clip norm, raised to the site's floor and, outside simulation, to the minimum for 32-bit numbers.
    finest : float
        See `resolution`.
    parts : sequence of slice, optional
        The columns that get separate noise; None for the whole vector.
    """

    place: Place
    task: TrainingSpec
    hypotheses: Matrix
    mechanism: Mechanism | None
    radius: float
    finest: float
    parts: Sequence[slice] | None

    @classmethod
    def of(cls, place: Place, hypotheses: Arrays, task: TrainingSpec) -> Self:
        """See `umbel.privacy.channels.Sanitiser.of`."""
        cls.check_hidden(place, task)
        site = place.site
        everything = flatten(hypotheses)
        finest, n = resolution(everything), everything.shape[1]
        parts = columns_of(task.noise_per, {name: value.shape[1:] for name, value in hypotheses.items()})
        radius, mechanism = max(task.clip_norm, site.policy.clipping.floor), None
        if task.noise_multiplier > 0:
            mechanism = mechanisms.load(task.mechanism)(task.noise_multiplier)
            if not site.simulated:
                radius = max(radius, min_radius(mechanism.deviation(n), finest))
            check_noise(mechanism, n, radius)
            if mechanism.public_only and task.clipping is not Clipping.PUBLIC:
                raise Refused(
                    f"mechanism {mechanism.name!r} works only with clipping = 'public'", code="refused.private-radius"
                )
        return cls(place, task, everything, mechanism, radius, finest, parts)

    @staticmethod
    def check_hidden(place: Place, task: TrainingSpec) -> None:
        """Raise `Refused` if nothing would hide what leaves a site."""
        if not (task.noise_multiplier > 0 or place.site.simulated):
            raise Refused("nothing leaves without noise", code="refused.unsanitised")

    @property
    def step(self) -> float:
        """The step of the public grid if a release's numbers, in steps, fit 16 bits; 0 if they may not.

        Only public values decide this, so that the length of a message reveals nothing about the data.
        """
        if self.mechanism is None or self.task.clipping is not Clipping.PUBLIC:
            return 0.0
        noise = self.mechanism.deviation(self.hypotheses.shape[1]) * self.radius
        step = grid_step(noise, self.finest)
        largest = float(np.abs(self.hypotheses).max()) + self.radius + _FAR * noise
        return step if largest <= min(MOST_STEPS * step, LARGEST) else 0.0

    @cached_property
    def release(self) -> Release:
        """The release with which clients are charged."""
        k, n = self.hypotheses.shape
        return self.task.release(n, k, self.radius)

    def leave(self, clients: Ids, results: Arrays, chosen: Labels, paid: Flags) -> Released:
        """Return what leaves of charged clients; without a seed the operating system draws the noise."""
        # A seed's sources share one generator, so only one client at a time can draw.
        seed = self.place.seed
        threads, sources = cores() if seed is None else 1, noise_sources(seed, self.task.round, clients)
        return self.released(self.sanitised(results, chosen, sources, threads), chosen, paid)

    def released(self, releases: Packed, chosen: Labels, paid: Flags) -> Released:
        """Return releases as they leave."""
        choices = chosen.tolist() if self.task.disclose_choice else None
        # Quantise only when the release crosses a network.
        step = 0.0 if self.place.site.simulated else self.step
        return Released(paid, releases, choices=choices, step=step)

    def on_gpu(self, clients: Ids, shapes: Mapping[str, tuple[int, ...]]) -> ReleasesOnGpu | None:
        """See `Sanitiser.on_gpu`."""
        from umbel.privacy.channels.on_gpu import ReleasesOnGpu  # it imports PyTorch, which a site's gate does without

        return ReleasesOnGpu.of(self, clients, shapes)

    def sanitised(self, trained: Arrays, chosen: Labels, sources: Iterator[NoiseSource], threads: int = 1) -> Packed:
        r"""Return the releases of charged clients, from what each trained, (clients, \*shape), and chose.

        `sources` has one for each client. With several threads, each must stay valid when the next is taken.
        """
        n = self.hypotheses.shape[1]
        shapes = {name: value.shape[1:] for name, value in trained.items()}
        releases = Packed(np.empty((len(chosen), n), np.float32), shapes)

        def fill(block: slice, own: Iterator[NoiseSource]) -> None:
            releases.matrix[block] = self._noisy(trained, block, chosen[block], own)

        parts, most = list(blocks(len(chosen), n)), _AT_ONCE // n
        own = (islice(sources, len(chosen[block])) for block in parts)
        if min(threads, len(parts), most) <= 1 or self.task.mechanism not in mechanisms.MECHANISMS:
            for block, some in zip(parts, own, strict=True):
                fill(block, some)
            return releases
        with ThreadPoolExecutor(min(threads, most)) as pool:
            # An iterator of sources may be advanced by one thread only.
            list(pool.map(fill, parts, [iter(list(some)) for some in own]))
        return releases

    def _noisy(self, trained: Arrays, block: slice, chosen: Labels, sources: Iterator[NoiseSource]) -> Matrix:
        """Return the releases (m, n) of a block of clients."""
        # For large models a block is one client, and its hypothesis need not be copied.
        start = self.hypotheses[chosen[0] : chosen[0] + 1] if len(chosen) == 1 else self.hypotheses[chosen]
        noisy = updates_in(trained, block, start)
        clipping = self.task.clipping
        release_in_place(self.mechanism, noisy, start, self.radius, clipping, sources, self.parts, self.finest)
        return noisy


def updates_in(trained: Arrays, block: slice, start: Matrix) -> Matrix:
    r"""Return the updates (m, n) of a block of the clients that trained `trained`, each (clients, \*shape).

    They began at `start` (m, n).

    Diverged training counts as no update. Whether training diverges depends on the data and on the server's task, so a
    missing release would reveal something about the data.
    """
    updates = flatten({name: value[block] for name, value in trained.items()})
    updates -= start
    updates[~all_finite(updates, axis=1)] = 0.0
    return updates


def blocks(clients: int, n: int, numbers: int = 0) -> Iterator[slice]:
    """Yield blocks of clients: as many models as have so many numbers, or fit into a cache, but at least one."""
    size = max(1, (numbers or _BLOCK) // n)
    for begin in range(0, clients, size):
        yield slice(begin, begin + size)


# --- at the server


def released_in(content: RecordDict, asked: int) -> tuple[Arrays, Flags, Labels | None]:
    """Check and return the releases, a flag for each asked client, and the choices if clients disclosed them."""
    flags, counts = flags_in(content, asked), record_in(content, "released", MetricRecord)
    arrays = unpack(record_in(content, "arrays", ArrayRecord))
    if "step" in counts:
        arrays = times_step(arrays, counts["step"])
    choices = np.asarray(counts["choices"]) if "choices" in counts else None
    if choices is not None and (choices.dtype.kind not in "iu" and choices.size):
        raise ProtocolError("it does not say what its clients chose", code="protocol.choices")
    return arrays, flags, None if choices is None else choices.astype(np.int64)


@dataclass
class _Releases:
    """One reply's releases (m, n), the positions of their clients in the sample, and the clients' choices."""

    reply: Message
    matrix: Vectors
    positions: NDArray[np.int64]
    choices: NDArray[np.int64]


def concatenated(parts: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return numbers of clients, or their positions, of several nodes together."""
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _releases_in(asked: Asked, node: int, reply: Message) -> _Releases | None:
    """Check a reply, and return its releases; None if it has no part about training clients."""
    if not answers_training(reply.content):
        return None
    arrays, released, choices = released_in(reply.content, len(asked.positions[node]))
    m, chosen = int(released.sum()), np.zeros(0, np.int64)
    matrix = checked_rows(arrays, m, asked.hypotheses)
    if asked.task.disclose_choice:
        if choices is None or choices.shape != (m,) or not np.isin(choices, range(asked.hypotheses.k)).all():
            raise ProtocolError("it does not say what its clients chose", code="protocol.choices")
        chosen = choices
    return _Releases(reply, matrix, asked.positions[node][released], chosen)


def _in_order(taken: list[_Releases], order: NDArray[np.int64], n: int) -> Vectors:
    """Return the rows (m, n) of all replies in order; the rows of a single reply, already in order, are not copied.

    Models may be large, so there is only one copy: a reply drops its arrays once they are copied.
    """
    if len(taken) == 1:
        return taken[0].matrix
    rows, start = np.argsort(order), 0
    vectors = np.empty((len(order), n), np.float32)
    for one in taken:
        stop = start + len(one.positions)
        vectors[rows[start:stop]] = one.matrix
        start, one.matrix = stop, vectors[:0]
        one.reply.content.pop("arrays", None)
    return vectors


def checked_rows(arrays: Arrays, rows: int, hypotheses: Hypotheses) -> Vectors:
    """Return arrays from a node as a matrix (rows, n) if they have that many rows and the hypotheses' shapes."""
    expected = {name: ((rows, *value.shape[1:]), value.dtype) for name, value in hypotheses.items()}
    if {name: (value.shape, value.dtype) for name, value in arrays.items()} != expected:
        raise ProtocolError("its arrays do not fit the hypotheses", code="protocol.arrays")
    matrix = as_matrix(arrays if list(arrays) == list(hypotheses) else {name: arrays[name] for name in hypotheses})
    if not all_finite(matrix):
        raise ProtocolError("its arrays are not finite", code="protocol.not-finite")
    return matrix


def furthest(task: TrainingSpec, hypotheses: Vectors, most: float = 0.0) -> float:
    """Return the maximum distance of a release from the nearest hypothesis.

    This is the maximum norm of an update plus the norm that the noise exceeds only once in 10^12 releases; infinite for
    a mechanism without such a bound.

    Parameters
    ----------
    hypotheses : ndarray, shape (k, n)
        The hypotheses that were sent.
    most : float
        Maximum norm of an update; 0 for the clip norm if it is public, and otherwise for `LARGEST_UPDATE`.
    """
    n, mechanism = hypotheses.shape[1], mechanism_of(task)
    public, whole_vector = task.clipping is Clipping.PUBLIC, task.noise_per is NoisePer.VECTOR
    # A site raises a clip norm to its own floor, which is this where it sets none, and until the noise spans enough
    # steps of 32-bit numbers.
    clip_norm = max(task.clip_norm, LEAST_CLIP_NORM)
    largest = float(max(hypotheses.max(), -hypotheses.min()))
    step = spacing(largest)
    if mechanism is not None:
        clip_norm = max(clip_norm, NOISE_STEPS * step / mechanism.deviation(n))
    if public:
        update = max(clip_norm, most)
    else:
        # Each layer or row has a separate floor.
        parts = 1 if whole_vector else n
        update = math.hypot(most or LARGEST_UPDATE, clip_norm * math.sqrt(parts))
    reach = update
    if mechanism is not None:
        # A part's noise is longest, in units of its radius, where the part is smallest or largest.
        sizes, rare = ((n,), RARE) if public or whole_vector else ((1, n), RARE + math.log(n))
        reach += update * max(mechanism.longest(size, rare) for size in sizes)
    return reach + rounding(mechanism, n, update, step, reach)


def mechanism_of(task: TrainingSpec) -> Mechanism | None:
    nu = task.noise_multiplier
    return mechanisms.load(task.mechanism)(nu) if nu > 0 else None


def spacing(largest: float) -> float:
    return float(np.spacing(np.float32(min(largest, 3e38))))


def rounding(mechanism: Mechanism | None, n: int, radius: float, step: float, reach: float) -> float:
    """Return the effect on a norm of rounding to 32 bits, and to a grid of at most 1/16 of a coordinate's noise."""
    grid = 0.0 if mechanism is None else mechanism.deviation(n) * radius / NOISE_STEPS
    return math.sqrt(n) * (grid + 2 * (step + reach * 2.0**-23))


def near(vectors: Vectors, hypotheses: NDArray[np.float64], reach: float) -> NDArray[np.bool_]:
    """Return which of the vectors (m, n) lie within reach of one of the hypotheses (k, n)."""
    # A matrix product avoids a copy of vectors that may be large; if rounding could matter, the result is exact.
    squares = np.zeros((len(vectors), len(hypotheses)))
    for columns, block in in_blocks(vectors):
        squares += np.einsum("ij,ij->i", block, block)[:, None] - 2 * (block @ hypotheses[:, columns].T)
    squares += np.einsum("ij,ij->i", hypotheses, hypotheses)
    inside: NDArray[np.bool_] = squares.min(axis=1, initial=math.inf) <= reach**2
    for i in np.flatnonzero(~inside).tolist():
        inside[i] = np.linalg.norm(hypotheses - vectors[i], axis=1).min() <= reach
    return inside


# --- the channel


class Client(channels.Channel):
    """Each client's model, with separate noise."""

    sanitiser = ClientSanitiser

    def read(self, asked: Asked, replies: Iterable[Message]) -> Releases:
        """Return the releases in nodes' replies, except those too far from the hypotheses.

        With several replies, each drops its arrays once they are copied.
        """
        taken = list(read_replies(asked, replies, partial(_releases_in, asked)).values())
        sent, outside = flatten(asked.hypotheses), []
        reach = furthest(asked.task, asked.hypotheses.matrix, self.nodes.run.per_node.update_norm)
        for one in taken:
            inside = near(one.matrix, sent, reach)
            if not inside.all():
                text = (
                    "left out %d of %d releases of %s, further than %.3g from the hypotheses; if its floor of clipping "
                    "or its data explain such long updates, raise the update-norm of per-node"
                )
                name = asked.names[one.reply.metadata.src_node_id]
                log(WARNING, text, (~inside).sum(), len(inside), name, reach)
                outside.append(one.positions[~inside])
                one.matrix, one.positions = one.matrix[inside], one.positions[inside]
                one.choices = one.choices[inside[: len(one.choices)]]
        positions = concatenated(one.positions for one in taken)
        order = np.argsort(positions)
        choices = concatenated(one.choices for one in taken)[order] if asked.task.disclose_choice else None
        lost = len(asked.positions) - len(taken)
        vectors = _in_order(taken, order, sent.shape[1])
        vectors.flags.writeable = False  # for one reply as for several
        clients = asked.clients[positions[order]]
        return Releases(vectors, clients, choices, len(asked.clients), lost, asked.clients[concatenated(outside)])
