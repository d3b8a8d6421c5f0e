"""The tasks that a server gives a node's clients in a round, and a node's account of itself; both are checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from typing import Any, ClassVar, Self

from flwr.app import ConfigRecord, MetricRecord

from umbel.protocol.clients import ClientOnNode
from umbel.protocol.errors import ProtocolError
from umbel.protocol.flower import filled
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

VERSION = 1

_VERSION = "version"
_MAX_WHOLE = 2**31  # more than any run needs, and a ledger can hold it
LONGEST_NAME = 200

# The allowed types of each field of a message; a bool is not a number here.
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "tuple[ClientOnNode, ...]": (list,),
    "Clipping": (str,),
    "NoisePer": (str,),
    "ReleaseBy": (str,),
}


@dataclass(frozen=True)
class _Spec:
    """A server's task for some clients of a node in a round."""

    FIRST_ROUND: ClassVar[int]

    round: int = 0
    clients: tuple[ClientOnNode, ...] = ()

    def asking(self, round: int, clients: Sequence[ClientOnNode]) -> Self:
        """Return the same task for other clients, in another round."""
        spec = object.__new__(type(self))
        spec.__dict__.update(self.__dict__, round=round, clients=tuple(clients))
        spec._check_asked()  # the other fields have been checked
        return spec

    def _check_asked(self) -> None:
        _whole("round", self.round, 0)
        _clients(self.clients)

    def to_record(self) -> ConfigRecord:
        """Return the spec as a ConfigRecord with a key for each field."""
        entries = {name: str(value) if isinstance(value, str) else value for name, value in vars(self).items()}
        return filled(ConfigRecord(), entries | {"clients": list(self.clients)})

    @classmethod
    @cache
    def _fields(cls) -> dict[str, tuple[type, ...]]:
        """Return the fields with their allowed types."""
        return {entry.name: _KINDS[str(entry.type)] for entry in fields(cls)}

    @classmethod
    def from_record(cls, record: ConfigRecord) -> Self:
        """Return the spec in a ConfigRecord from the network, checked: it must have every field, a round and a
        client."""
        entries = dict(record.items())  # look-ups are much faster than in a record
        if missing := [name for name in cls._fields() if name not in entries]:
            raise ProtocolError(f"the task lacks {missing[0]}", code="protocol.missing-field")
        spec = cls.of_config(entries)
        _whole("round", spec.round, cls.FIRST_ROUND)
        if not spec.clients:
            raise _no_clients()
        return spec

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the spec in the config of a strategy's hook; a missing field gets its default, other keys are ignored.

        Raises
        ------
        ProtocolError
            If a field has the wrong type or is out of range.
        """
        kinds, values = cls._fields(), dict(config.items())
        values = {name: values[name] for name in kinds if name in values}
        for name, value in values.items():
            if type(value) not in kinds[name]:
                raise ProtocolError(f"{name} of the task is a {type(value).__name__}", code="protocol.wrong-type")
        round, clients = values.pop("round", 0), values.pop("clients", ())
        # The other fields stay the same in all rounds, so they are checked once.
        return cls._template(tuple(values.items())).asking(round, clients)

    @classmethod
    @lru_cache(maxsize=16)
    def _template(cls, entries: tuple[tuple[str, Any], ...]) -> Self:
        return cls(**dict(entries))


@dataclass(frozen=True)
class TrainingSpec(_Spec):
    """The server's task for the training clients of one node in one round.

    One object from the run config to the noise: `umbel.protocol.run_config.RunConfig.training` makes a template without
    round and clients. The strategy replaces the fields that it decides (`HypothesisStrategy.task`).
    `umbel.nodes.fleet` sets round and clients, and the gate sanitises by the task
    by its channel (`umbel.privacy.channels`). Fields not listed here are the run config's keys of the same names.

    Attributes
    ----------
    round : int
        Round, from 1; 0 in a template.
    clients : tuple of ClientOnNode
        The asked clients, each at most once; empty in a template.
    clipping : Clipping
        ``update``: the noise hides the norm of the client's own update, at least `clip_norm`.
        ``public``: the client clips its update to `clip_norm`, and the noise hides that norm.
    clip_norm : float
        ``public``: the norm to which the client clips. ``update``: the smallest radius.
    disclose_choice : bool
        Ask clients for the hypothesis that they chose (IFCA); any site that sanitises refuses.
    local_steps : int
        R of Protocol 1 (PAC paper): above 0, this many minibatches are each drawn from all of a
        client's rows, instead of epochs. Without steps and epochs there is no training.
    message_noise : float
        sigma of the PAC paper's noisy messages (Eq. 3). It is added before the gate, and the account does not
        count it.
    run : str
        Name of the run, the same after it resumes: clients keep their local parameters under it.
    frozen_digest : str
        Digest of the model's frozen parameters, which do not travel; empty if there are none.
    choice_epsilon : float
        Epsilon of the mechanism that hides which hypothesis a client chose: randomised response, or the noise
        on a site's counts; 0 for the paper's open choice.
    explore : float
        Share of a site's clients that train a hypothesis drawn at random, so that none stays without
        clients; only where the site releases.
    release_by : ReleaseBy
        ``client``: each client's model, with separate noise. ``site``: for each hypothesis the sum of the updates of
        the node's asked clients and their number, with noise once. ``secure``: the same over several nodes.
    moments : bool
        Whether a secure sum also has the second moments of updates (`umbel.privacy.channels.secure.layout`).
    row_clip_norm, row_noise_multiplier, row_rate, row_batch : float
        C, sigma, q and B of `umbel.protocol.release.RowPrivacy`; all above 0, or all 0 for training without a
        guarantee for rows.
    """

    FIRST_ROUND = 1

    local_epochs: int = 10
    step_size: float = 0.1
    batch_size: int = 10
    noise_multiplier: float = 2.0
    clipping: Clipping = Clipping.PUBLIC
    clip_norm: float = LEAST_CLIP_NORM
    noise_per: NoisePer = NoisePer.VECTOR
    disclose_choice: bool = False
    local_steps: int = 0
    message_noise: float = 0.0
    run: str = ""
    frozen_digest: str = ""
    mechanism: str = LAPLACE
    choice_epsilon: float = 2.0
    explore: float = 0.0
    release_by: ReleaseBy = ReleaseBy.CLIENT
    moments: bool = False
    row_clip_norm: float = 0.0
    row_noise_multiplier: float = 0.0
    row_rate: float = 0.0
    row_batch: float = 0.0

    def __post_init__(self) -> None:
        _as_floats(self, "step_size", "noise_multiplier", "clip_norm", "message_noise", "choice_epsilon", "explore")
        _as_floats(self, *ROWS)
        self._check_asked()
        for name in ("local_epochs", "local_steps", "batch_size"):
            _whole(name.replace("_", "-"), getattr(self, name), 0)
        _finite(self, "step_size", "clip_norm", above_0=True)
        _finite(self, "noise_multiplier", "message_noise", "choice_epsilon")
        if self.choice_epsilon > MAX_CHOICE_EPSILON:
            raise _range(f"choice-epsilon must be at most {MAX_CHOICE_EPSILON}, got {self.choice_epsilon}")
        for name, kind in (("clipping", Clipping), ("noise_per", NoisePer)):
            object.__setattr__(self, name, _one_of(name.replace("_", "-"), kind, getattr(self, name)))
        object.__setattr__(self, "release_by", _channel(self.release_by))
        if self.noise_per is not NoisePer.VECTOR and self.clipping is Clipping.PUBLIC:
            text = f"noise-per {self.noise_per} needs clipping update: a public clip norm is that of the whole vector"
            raise ProtocolError(text, code="protocol.noise-per-clipping")
        if not 0 <= self.explore <= 1:
            raise _range(f"explore must be between 0 and 1, got {self.explore}")
        if self.release_by is not ReleaseBy.CLIENT:
            _check_sums(self)
        if self.moments and self.release_by is not ReleaseBy.SECURE:
            raise ProtocolError("only a secure sum has second moments", code="protocol.site-sums")
        _short("the run's name", self.run)
        _short("the mechanism's name", self.mechanism)
        _finite(self, *ROWS)
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


@dataclass(frozen=True)
class EvaluationSpec(_Spec):
    """The server's task for the validation clients of one node in one round.

    Attributes
    ----------
    round : int
        Round, from 1; 0 before the first.
    clients : tuple of ClientOnNode
        The asked clients, each at most once; empty in a template.
    step_size : float
        s of Algorithm 1, for the local parameters of clients that have none yet.
    run, frozen_digest : str
        As in `TrainingSpec`.
    report_noise_multiplier : float
        Above 0, the round's secure sum also adds up loss and metric, with noise of so many diagonals of the square in
        which a report lies. At 0 they leave the site as its policy says.
    report_bound : float
        In a secure sum, loss and metric are clipped to lie between 0 and this.
    """

    FIRST_ROUND = 0

    step_size: float = TrainingSpec.step_size
    run: str = ""
    frozen_digest: str = ""
    report_noise_multiplier: float = 0.0
    report_bound: float = 1.0

    def __post_init__(self) -> None:
        _as_floats(self, "step_size", "report_noise_multiplier", "report_bound")
        self._check_asked()
        _finite(self, "step_size", "report_bound", above_0=True)
        _finite(self, "report_noise_multiplier")
        _short("the run's name", self.run)

    @property
    def channel(self) -> str:
        """Name of the channel by which reports leave."""
        return "secure" if self.summed else "reports"

    @property
    def summed(self) -> bool:
        """Whether reports leave in the round's secure sum alone."""
        return self.report_noise_multiplier > 0


@dataclass(frozen=True)
class Hosting:
    """A node's account of the clients that it hosts.

    Attributes
    ----------
    train, validation : int
        Number of clients of each kind; training clients are counted first.
    first, step : int
        In simulation, the node hosts the clients ``first, first + step, ...`` of the
        dataset; elsewhere both are -1.
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


LEAST_ROW_RATE = 1e-9
"""Random numbers have 53 bits: a row would be drawn more often than at a rate of fewer."""
ROW_CLIP_NORMS = 1e-6, 1e6
"""Range in which 32-bit numbers hold clipped gradients, their squares and their sums."""
ROWS = "row_clip_norm", "row_noise_multiplier", "row_rate", "row_batch"


def _check_rows(spec: TrainingSpec) -> None:
    """Raise if the rows of a task's clients would have no guarantee."""
    _finite(spec, *ROWS, above_0=True)
    if not LEAST_ROW_RATE <= spec.row_rate <= 1:
        raise _range(f"row-rate must be between {LEAST_ROW_RATE:g} and 1, got {spec.row_rate}")
    least, most = ROW_CLIP_NORMS
    if not least <= spec.row_clip_norm <= most:
        raise _range(f"row-clip-norm must be between {least:g} and {most:g}, got {spec.row_clip_norm}")
    _whole("the number of steps, local-epochs / row-rate,", spec._row_steps, 1)
    if not spec.noise_multiplier and spec.release_by is not ReleaseBy.CLIENT:
        text = "sums need noise too where rows are protected; set a noise-multiplier"
        raise ProtocolError(text, code="protocol.rows")
    if spec.message_noise:
        text = "message-noise depends on which rows have changed, and reveals it; set it to 0"
        raise ProtocolError(text, code="protocol.rows")


def _clients(clients: tuple[Any, ...]) -> None:
    if set(map(type, clients)) - {int}:
        raise _no_clients()
    if not _different(clients):
        raise ProtocolError("each client may be asked once, counted from 0", code="protocol.clients")


@lru_cache(maxsize=4)  # in a simulation, server and node check the same clients
def _different(clients: tuple[int, ...]) -> bool:
    return min(clients, default=0) >= 0 and len(set(clients)) == len(clients)


def _no_clients() -> ProtocolError:
    return ProtocolError("clients must be a list of whole numbers with at least one entry", code="protocol.clients")


def _range(text: str) -> ProtocolError:
    return ProtocolError(text, code="protocol.out-of-range")


def _whole(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise _range(f"{name} must be a whole number of at least {minimum}, got {value}")
    if value > _MAX_WHOLE:
        raise _range(f"{name} must be at most {_MAX_WHOLE}, got {value}")


def _as_floats(spec: Any, *names: str) -> None:
    """Convert integers to floats, and -0.0 to 0.0: a ledger writes each number as text."""
    for name in names:
        object.__setattr__(spec, name, float(getattr(spec, name)) + 0.0)


def _finite(spec: Any, *names: str, above_0: bool = False) -> None:
    for name in names:
        value = getattr(spec, name)
        if not (math.isfinite(value) and (value > 0 if above_0 else value >= 0)):
            rule = "above 0" if above_0 else "of at least 0"
            raise _range(f"{name.replace('_', '-')} must be a finite number {rule}, got {value}")


def _one_of(name: str, kind: Any, value: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise _range(f"{name} must be one of {', '.join(kind)}, got {value!r}") from None


def _channel(name: str) -> Any:
    """Return the name of a channel, as a `ReleaseBy` if it is umbel's own."""
    if name not in (known := [one for one in CHANNELS if one not in IMPLIED]):
        raise _range(f"release-by must be one of {', '.join(known)}, got {name!r}")
    return ReleaseBy(name) if name in {*ReleaseBy} else name


def _short(what: str, name: str) -> None:
    if len(name) > LONGEST_NAME:
        raise _range(f"{what} is {len(name)} characters long, more than {LONGEST_NAME}")
