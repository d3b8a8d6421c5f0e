"""The tasks that a server gives a node's clients in a round, and a node's account of itself.

A task is checked where it enters: when it is made, or read from a message. Each field says once what it may hold; the
run config's keys and the errors take it from there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any, ClassVar, Self

from flwr.app import ConfigRecord, MetricRecord
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from umbel.protocol.clients import ClientOnNode
from umbel.protocol.errors import ProtocolError
from umbel.protocol.flower import filled
from umbel.protocol.options import Options
from umbel.protocol.release import (
    CHANNELS,
    IMPLIED,
    LAPLACE,
    LEAST_CLIP_NORM,
    MAX_CHOICE_EPSILON,
    Clipping,
    NoisePer,
    Release,
    ReleaseBy,
    RowPrivacy,
    exact,
    participation,
)
from umbel.protocol.rules import explained, fields_of, once, raising

VERSION = 1

_VERSION = "version"
_STRICT = ConfigDict(strict=True, extra="forbid")
LONGEST_NAME = 200
LEAST_ROW_RATE = 1e-9
"""Random numbers have 53 bits: a row would be drawn more often than at a rate of fewer."""
ROW_CLIP_NORMS = 1e-6, 1e6
"""Range in which 32-bit numbers hold clipped gradients, their squares and their sums."""
MAX_ROW_STEPS = 1_000_000
"""Maximum number of training steps of a round that hide rows, if epochs decide it."""
ROWS = "row_clip_norm", "row_noise_multiplier", "row_rate", "row_batch"

# --- what a field may hold


def _distinct(clients: tuple[int, ...]) -> tuple[int, ...]:
    if min(clients, default=0) < 0 or len(set(clients)) < len(clients):
        raise ValueError("each client may be asked once, counted from 0")
    return clients


def _channel(name: Any) -> Any:
    """Return the name of a channel that a server may ask for, as a `ReleaseBy` if it is umbel's own."""
    if not isinstance(name, str) or name not in CHANNELS.keys() - IMPLIED:
        raise ValueError(f"it is one of {', '.join(sorted(CHANNELS.keys() - IMPLIED))}, not {name!r:.100}")
    return ReleaseBy(name) if name in {*ReleaseBy} else name


# A ledger writes each number as text, so that -0.0 is made 0.0. Whole numbers are fewer than any run needs.
_Float = Annotated[float, Field(allow_inf_nan=False), AfterValidator(lambda value: value + 0.0)]
Positive = Annotated[_Float, Field(gt=0)]
NotNegative = Annotated[_Float, Field(ge=0)]
Whole = Annotated[int, Field(ge=0, le=2**31)]
ChoiceEpsilon = Annotated[_Float, Field(ge=0, le=MAX_CHOICE_EPSILON)]
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Noised = Annotated[NoisePer, Field(strict=False)]
Clients = Annotated[
    tuple[ClientOnNode, ...],
    Field(fail_fast=True),  # an error takes a thousand times the memory of what a server sends
    BeforeValidator(lambda clients: tuple(clients) if isinstance(clients, list) else clients),
    AfterValidator(_distinct),
]
UNPRICED = "unpriced"
"""Marks a field that changes no price, so that people who approve a run need not see it."""


@raising(ProtocolError)
@dataclass(frozen=True)
class RowSettings(Options):
    """C, sigma, q and B of training that hides each row (`umbel.protocol.release.RowPrivacy`)."""

    clip: Annotated[float, Field(ge=ROW_CLIP_NORMS[0], le=ROW_CLIP_NORMS[1])]
    noise: Positive
    rate: Annotated[float, Field(ge=LEAST_ROW_RATE, le=1)]
    batch: Positive


# --- tasks


@raising(ProtocolError)
@dataclass(frozen=True, config=_STRICT)
class _Spec:
    """A server's task for some clients of a node in a round."""

    FIRST_ROUND: ClassVar[int] = 0

    round: Whole = 0
    clients: Clients = ()  # like the round filled in for each message; a template has neither

    def asking(self, round: int, clients: Iterable[ClientOnNode]) -> Self:
        """Return the same task for other clients, in another round; a node checks what a server asks."""
        spec = object.__new__(type(self))
        spec.__dict__.update(self.__dict__, round=round, clients=tuple(clients))
        return spec

    def to_record(self) -> ConfigRecord:
        """Return the spec as a ConfigRecord with a key for each field."""
        entries = {name: str(value) if isinstance(value, str) else value for name, value in vars(self).items()}
        return filled(ConfigRecord(), entries | {"clients": list(self.clients)})

    @classmethod
    def from_record(cls, record: ConfigRecord) -> Self:
        """Return the spec in a ConfigRecord from the network, checked: it must have every field, a round and a
        client."""
        entries = dict(record.items())  # look-ups are much faster than in a record
        if missing := [name for name in fields_of(cls) if name not in entries]:
            raise ProtocolError(f"the task lacks {missing[0]}", code="protocol.missing-key")
        spec = cls.of_config(entries)
        if spec.round < cls.FIRST_ROUND or not spec.clients:
            text = f"a task is for at least one client, in a round from {cls.FIRST_ROUND} on"
            raise ProtocolError(text, code="protocol.wrong-value")
        return spec

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the spec in the config of a strategy's hook; a missing field gets its default, other keys are ignored.

        Raises
        ------
        ProtocolError
            If a field has the wrong type or is out of range.
        """
        values = {name: config[name] for name in fields_of(cls) if name in config}
        asked = _Spec(values.pop("round", 0), values.pop("clients", ()))
        template = once(cls._of, values)  # the other fields stay the same in all rounds
        return template.asking(asked.round, asked.clients)

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)

    def with_texts(self, texts: Mapping[str, str]) -> Self:
        """Return the same task with other fields, which are written as text; other names are ignored."""
        values = {name: str(value) for name, value in vars(self).items() if name != "clients"}
        try:
            return TypeAdapter(type(self)).validate_strings(
                {name: texts.get(name, own) for name, own in values.items()}
            )
        except ValidationError as error:
            raise explained(error, ProtocolError, fields_of(type(self))) from None

    @classmethod
    def priced(cls) -> Iterator[str]:
        """Yield the names of the fields that a price, or what people approve, depends on."""
        return (name for name, field in fields_of(cls).items() if UNPRICED not in field.metadata)


@raising(ProtocolError)
@dataclass(frozen=True, config=_STRICT)
class TrainingSpec(_Spec):
    """The server's task for the training clients of one node in one round.

    One object from the run config to the noise: `umbel.protocol.run_config.RunConfig.training` makes a template without
    round and clients. `umbel.nodes.fleet` sets the round's clip norm and what the strategy decides
    (`HypothesisStrategy.decisions`), and `umbel.nodes.asking` round and clients. The gate releases by its channel
    (`umbel.privacy.channels`). Fields without a word here are the run config's keys of the same names.
    """

    FIRST_ROUND: ClassVar[int] = 1

    local_epochs: Whole = 10
    step_size: Positive = 0.1
    batch_size: Whole = 10
    noise_multiplier: NotNegative = 2.0
    clipping: Annotated[Clipping, Field(strict=False)] = Clipping.PUBLIC
    clip_norm: Positive = LEAST_CLIP_NORM  # to which the client clips; for ``update`` the smallest radius
    noise_per: Noised = NoisePer.VECTOR
    disclose_choice: bool = False  # as IFCA asks; any site that sanitises refuses
    # R of Protocol 1 (PAC paper): so many minibatches, each drawn from all rows. Without epochs too, no training.
    local_steps: Whole = 0
    message_noise: NotNegative = 0.0  # sigma of the PAC paper's Eq. 3, added before the gate, which does not count it
    run: Annotated[Name, UNPRICED] = ""  # the same after it resumes: clients keep their local parameters under it
    frozen_digest: Annotated[Name, UNPRICED] = ""  # of parameters that do not travel; empty if there are none
    mechanism: Name = LAPLACE
    # The epsilon of randomised response, or of the noise on a site's counts; 0 leaves the choice open, as in the paper.
    choice_epsilon: ChoiceEpsilon = 2.0
    # Share of a site's clients that train a hypothesis drawn at random, so that none stays without clients.
    explore: Annotated[_Float, Field(ge=0, le=1), UNPRICED] = 0.0
    release_by: Annotated[ReleaseBy, PlainValidator(_channel)] = ReleaseBy.CLIENT
    moments: Annotated[bool, UNPRICED] = False  # whether a secure sum also has the second moments of updates
    # C, sigma, q and B of `RowPrivacy`: all above 0, or all 0 for training without a guarantee for rows.
    row_clip_norm: NotNegative = 0.0
    row_noise_multiplier: NotNegative = 0.0
    row_rate: NotNegative = 0.0
    row_batch: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.noise_per is not NoisePer.VECTOR and self.clipping is Clipping.PUBLIC:
            text = f'noise-per = "{self.noise_per}" needs clipping = "update": a public clip norm is that of the vector'
            raise ProtocolError(text, code="protocol.noise-per-clipping")
        if self.release_by is not ReleaseBy.CLIENT:
            _check_sums(self)
        if self.moments and self.release_by is not ReleaseBy.SECURE:
            raise ProtocolError("only a secure sum has second moments", code="protocol.site-sums")
        if any(getattr(self, name) for name in ROWS):
            _check_rows(self)

    @property
    def channel(self) -> str:
        """Name of the channel by which the clients' results leave (`umbel.privacy.channels`)."""
        alone = self.release_by is ReleaseBy.CLIENT and not self.noise_multiplier and self.row_privacy is not None
        return "rows" if alone else str(self.release_by)

    @property
    def row_privacy(self) -> RowPrivacy | None:
        """How clients train with a guarantee for each row; None if they train without."""
        if not self.row_rate:
            return None
        return RowPrivacy(self.row_clip_norm, self.row_noise_multiplier, self.row_rate, self.row_batch, self._row_steps)

    def release(self, n: int, hypotheses: int, radius: float | None = None) -> Release:
        """Return a client's release of a model of n parameters, one of so many hypotheses, within a public radius."""
        return participation(
            n,
            hypotheses,
            self.noise_multiplier,
            self.clipping,
            radius,
            self.mechanism,
            self.choice_epsilon,
            self.row_privacy,
        )

    def hides_rows(self, hypotheses: int) -> bool:
        """Return whether each row is hidden in all that a client gets by training, its local parameters included.

        A client that chooses among several hypotheses, in the open or in a site's sums, chooses by all its rows.
        """
        hidden = hypotheses == 1 or (self.release_by is ReleaseBy.CLIENT and self.choice_epsilon > 0)
        return self.row_privacy is not None and hidden

    @property
    def _row_steps(self) -> int:
        """T: as many steps as draw each row once an epoch, on average, unless the task says how many."""
        return self.local_steps or math.ceil(self.local_epochs / exact(self.row_rate))

    @property
    def evaluation(self) -> EvaluationSpec:
        """The template of the same run's evaluations."""
        return EvaluationSpec(step_size=self.step_size, run=self.run, frozen_digest=self.frozen_digest)


@raising(ProtocolError)
@dataclass(frozen=True, config=_STRICT)
class EvaluationSpec(_Spec):
    """The server's task for the validation clients of one node in one round; before the first it is of round 0."""

    step_size: Positive = TrainingSpec.step_size  # for the local parameters of clients that have none yet
    run: Annotated[Name, UNPRICED] = ""
    frozen_digest: Annotated[Name, UNPRICED] = ""
    # Above 0, the round's secure sum also adds up loss and metric, each clipped to lie between 0 and the bound, with
    # noise of so many diagonals of the square in which a report lies. At 0 they leave the site as its policy says.
    report_noise_multiplier: NotNegative = 0.0
    report_bound: Positive = 1.0

    @property
    def channel(self) -> str:
        """Name of the channel by which reports leave."""
        return "secure" if self.summed else "reports"

    @property
    def summed(self) -> bool:
        """Whether reports leave in the round's secure sum alone."""
        return self.report_noise_multiplier > 0


@dataclasses.dataclass(frozen=True)
class Hosting:
    """A node's account of the clients that it hosts; training clients are counted first.

    In simulation they are the clients ``first, first + step, ...`` of the dataset; elsewhere both are -1.
    """

    train: int
    validation: int
    first: int = -1
    step: int = -1

    def to_record(self) -> MetricRecord:
        """Return the reply's MetricRecord."""
        return MetricRecord({_VERSION: VERSION, **asdict(self)})

    @classmethod
    def from_record(cls, record: MetricRecord) -> Hosting:
        """Return a node's reply, checked; `ProtocolError` for another protocol version or impossible counts."""
        version = record.get(_VERSION)
        if type(version) is not int or version != VERSION:
            text = f"speaks protocol {version!r}, and this run {VERSION}; use the same umbel on both sides"
            raise ProtocolError(text, code="protocol.version")
        values: dict[str, Any] = {entry.name: record.get(entry.name) for entry in fields(cls)}
        if any(type(value) is not int for value in values.values()) or min(values["train"], values["validation"]) < 0:
            raise ProtocolError(f"reports impossible counts: {values}", code="protocol.hosting")
        if (values["first"], values["step"]) != (-1, -1) and not 0 <= values["first"] < values["step"]:
            raise ProtocolError(f"reports an impossible share of a dataset: {values}", code="protocol.hosting")
        return cls(**values)

    @property
    def simulated(self) -> bool:
        """Whether the node says that it hosts a part of the run config's dataset."""
        return self.step > 0


def _check_sums(spec: TrainingSpec) -> None:
    """Raise if a site cannot make the sums of this spec."""
    # The bound on each client's part of a sum must not depend on the client's data.
    if spec.clipping is not Clipping.PUBLIC:
        reason = f'only with clipping "public", not {spec.clipping.value!r}'
    elif spec.noise_per is not NoisePer.VECTOR:
        reason = f'only with noise-per "vector", not {spec.noise_per.value!r}'
    elif spec.disclose_choice:
        reason = "and does not disclose which hypothesis each client chose"
    else:
        return
    raise ProtocolError(f"a site releases sums {reason}", code="protocol.site-sums")


def _check_rows(spec: TrainingSpec) -> None:
    """Raise if the rows of a task's clients would have no guarantee."""
    RowSettings(*(getattr(spec, name) for name in ROWS))
    if not spec._row_steps:
        raise ProtocolError("training that hides rows takes a step; set local-epochs", code="protocol.rows")
    if spec._row_steps > MAX_ROW_STEPS and not spec.local_steps:
        text = f"local-epochs / rate makes more than {MAX_ROW_STEPS:,} steps a round"
        raise ProtocolError(f"{text}; raise the rate of rows, or set local-steps", code="protocol.rows")
    if not spec.noise_multiplier and spec.release_by is not ReleaseBy.CLIENT:
        text = "sums need noise too where rows are protected; set a noise-multiplier"
        raise ProtocolError(text, code="protocol.rows")
    if spec.message_noise:
        text = "message-noise depends on which rows have changed, and reveals it; set it to 0"
        raise ProtocolError(text, code="protocol.rows")
