"""What travels between server and clients: one message a node, not one a client.

===========  ==========================================================================
query        both ways the protocol version; back, how many clients the node hosts
train        `Demand` and the hypotheses, to a node; back, releases and public counts
evaluate     the hypotheses and the asked validation clients; back, their loss and metric
query.local  in simulation alone: the asked clients; back, their local models
query.keep   the best hypotheses, when a run is over; back, nothing
===========  ==========================================================================

The records are Flower's own. Arrays are a model's state dict with one more axis in front: the
hypotheses in what the server sends, the clients that released in what a node sends back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from protocol.arrays import Arrays
from protocol.errors import ProtocolError
from protocol.records import to_array_record

VERSION = 1
HYPOTHESES = "hypotheses"
CONFIG = "config"
ARRAYS = "arrays"
COUNTS = "counts"
SCORES = "scores"
LOCAL = "local"
# More than any experiment needs, and few enough that a node cannot be made to run out of memory.
MAX_HYPOTHESES = 1000
# Choices that both sides check in the run config.
RADIUS_MODES = ("update", "public")
NOISE_UNITS = ("vector", "layer", "row")
ENGINES = ("auto", "loop", "batched")
DEVICES = ("auto", "cpu", "cuda")
# What each field of a Demand may come as; a bool is no number here.
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "tuple[int, ...]": (list,),
}


@dataclass(frozen=True)
class Demand:
    """What the server asks of the clients of one node in a round of training.

    Attributes
    ----------
    round : int
        Round, from 1.
    clients : tuple of int
        The asked clients, counted within the node; each at most once.
    local_epochs, batch_size : int
        E and B of Algorithm 1; a batch size of 0 takes all of a client's rows at once.
    step_size : float
        s of Algorithm 1.
    noise_multiplier : float
        The paper's nu: noise per unit of radius; 0 asks for an unsanitised release.
    radius_mode : str
        ``update``: the radius is the norm of the client's update, at least `radius`.
        ``public``: the radius is `radius`, and the client clips its update to it.
    radius : float
        See `radius_mode`.
    noise_per : str
        What is noised by itself, within a radius of its own: ``vector``, all parameters as one;
        ``layer`` (Sec. 5.3); ``row``, each row of each array, as an item of a recommender.
    disclose_choice : bool
        Ask clients for the hypothesis they chose (IFCA); refused by any site that sanitises.
    local_steps : int
        R of Protocol 1 (PAC paper): above 0, so many minibatches are each drawn from all of a
        client's rows, in place of epochs. With neither steps nor epochs nothing is trained.
    message_noise : float
        sigma of the PAC paper's noisy messages (Eq. 3), for models with a local part; it comes
        before the gate, which does not count it.
    """

    round: int
    clients: tuple[int, ...]
    local_epochs: int
    step_size: float
    batch_size: int
    noise_multiplier: float
    radius_mode: str = "update"
    radius: float = 0.01
    noise_per: str = "vector"
    disclose_choice: bool = False
    local_steps: int = 0
    message_noise: float = 0.0

    def __post_init__(self) -> None:
        _whole("round", self.round, 1)
        _clients(self.clients)
        _whole("local-epochs", self.local_epochs, 0)
        _whole("local-steps", self.local_steps, 0)
        _whole("batch-size", self.batch_size, 0)
        _positive("step-size", self.step_size)
        _not_negative("noise-multiplier", self.noise_multiplier)
        _not_negative("message-noise", self.message_noise)
        if self.radius_mode not in RADIUS_MODES:
            raise ProtocolError(f"radius must be one of {', '.join(RADIUS_MODES)}, got {self.radius_mode!r}")
        _positive("the radius", self.radius)
        if self.noise_per not in NOISE_UNITS:
            raise ProtocolError(f"noise-per must be one of {', '.join(NOISE_UNITS)}, got {self.noise_per!r}")
        if self.noise_per != "vector" and self.radius_mode == "public":
            raise ProtocolError(
                f"noise-per {self.noise_per} goes with radius update alone; a public one is of the whole vector"
            )

    def to_record(self) -> ConfigRecord:
        """Return the demand as a ConfigRecord."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return ConfigRecord({key: list(value) if isinstance(value, tuple) else value for key, value in values.items()})

    @classmethod
    def from_record(cls, record: ConfigRecord) -> Demand:
        """Check a ConfigRecord from the network and return the demand in it."""
        values: dict[str, Any] = {}
        for entry in fields(cls):
            if entry.name not in record:
                raise ProtocolError(f"the demand lacks {entry.name}")
            value = record[entry.name]
            if type(value) not in _KINDS[str(entry.type)]:
                raise ProtocolError(f"{entry.name} of the demand is a {type(value).__name__}")
            values[entry.name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


@dataclass(frozen=True)
class Hosting:
    """What a node says of itself when asked.

    Attributes
    ----------
    train, validation : int
        Number of clients of each kind; training clients are counted first.
    first, step : int
        In simulation, the node hosts the clients ``first, first + step, ...`` of the
        federation; elsewhere both are -1.
    """

    train: int
    validation: int
    first: int = -1
    step: int = -1

    def to_record(self) -> MetricRecord:
        """Return the reply's MetricRecord."""
        return MetricRecord({"version": VERSION, **asdict(self)})

    @classmethod
    def from_record(cls, record: MetricRecord) -> Hosting:
        """Check a node's reply and return what it says.

        Raises
        ------
        ProtocolError
            When the node speaks another version, or counts are missing or negative.
        """
        if record.get("version") != VERSION:
            raise ProtocolError(f"speaks protocol {record.get('version')!r}, this server speaks {VERSION}")
        values: dict[str, Any] = {entry.name: record.get(entry.name) for entry in fields(cls)}
        if any(type(value) is not int for value in values.values()) or min(values["train"], values["validation"]) < 0:
            raise ProtocolError(f"reports counts that cannot be: {values}")
        return cls(**values)

    @property
    def simulated(self) -> bool:
        """Whether the node says it hosts a part of the run config's federation."""
        return self.step > 0


@lru_cache(maxsize=64)
def price(n: int, noise_multiplier: float) -> Fraction | None:
    """Return what one participation costs a client, exactly.

    That is n / nu within the radius (group privacy paper, Sec. 4.1.3), or None, for no bound at
    all, when nu is 0.
    """
    return Fraction(n) / Fraction(noise_multiplier) if noise_multiplier > 0 else None


def query() -> RecordDict:
    """Return the content of a query."""
    return RecordDict({CONFIG: ConfigRecord({"version": VERSION})})


def train_request(hypotheses: ArrayRecord, demand: Demand) -> RecordDict:
    """Return the content of a train message; `hypotheses` may be shared by all of a round's."""
    return RecordDict({HYPOTHESES: hypotheses, CONFIG: demand.to_record()})


def train_reply(releases: Arrays, released: Sequence[int], choices: Sequence[int] | None = None) -> RecordDict:
    """Return the content of a train reply.

    Parameters
    ----------
    releases : dict of ndarray, each (m, \\*shape)
        The sanitised parameters of the clients that released, in the order asked.
    released : sequence of int
        1 for each asked client that released, 0 for each that did not.
    choices : sequence of int, optional
        For each client that released, its hypothesis (`Demand.disclose_choice`).
    """
    counts: dict[str, int | float | list[int] | list[float]] = {"released": list(released)}
    if choices is not None:
        counts["choices"] = list(choices)
    return RecordDict({ARRAYS: to_array_record(releases), COUNTS: MetricRecord(counts)})


def evaluate_request(hypotheses: ArrayRecord, round: int, clients: Sequence[int]) -> RecordDict:
    """Return the content of an evaluate message to some validation clients of a node."""
    return RecordDict({HYPOTHESES: hypotheses, CONFIG: ConfigRecord({"round": round, "clients": list(clients)})})


def asked_clients(record: ConfigRecord) -> tuple[int, ...]:
    """Check the ConfigRecord of an evaluate or query.local message and return the asked clients."""
    listed: Any = record.get("clients")
    if not isinstance(listed, list):
        raise ProtocolError("the message names no clients")
    clients = tuple(listed)
    _clients(clients)
    return clients


def evaluate_reply(losses: NDArray[Any], metrics: NDArray[Any]) -> RecordDict:
    """Return the content of an evaluate reply: loss and metric of each asked client, in order."""
    scores = MetricRecord({"loss": np.asarray(losses, float).tolist(), "metric": np.asarray(metrics, float).tolist()})
    return RecordDict({SCORES: scores})


def keep_request(hypotheses: ArrayRecord) -> RecordDict:
    """Return the content of a message that tells nodes what a run has found."""
    return RecordDict({HYPOTHESES: hypotheses})


def local_request(clients: Sequence[int]) -> RecordDict:
    """Return the content of a message that asks simulated clients for their local models."""
    return RecordDict({CONFIG: ConfigRecord({"clients": list(clients)})})


def local_reply(models: NDArray[Any]) -> RecordDict:
    """Return the local models (clients, k) of the asked clients, in order."""
    return RecordDict({ARRAYS: to_array_record({LOCAL: models})})


def _clients(clients: tuple[Any, ...]) -> None:
    if set(map(type, clients)) != {int}:
        raise ProtocolError("clients must be a list of whole numbers with at least one entry")
    if min(clients) < 0 or len(set(clients)) < len(clients):
        raise ProtocolError("each client may be asked once, counted from 0")


def _whole(name: str, value: int, least: int) -> None:
    if value < least:
        raise ProtocolError(f"{name} must be a whole number of at least {least}, got {value}")


def _not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ProtocolError(f"{name} must be a finite number of at least 0, got {value}")


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ProtocolError(f"{name} must be a finite number above 0, got {value}")
