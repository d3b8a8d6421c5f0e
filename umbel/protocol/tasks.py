"""What a server asks of a node's clients in a round, and what a node says about itself; both are checked."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, Self

from flwr.app import ConfigRecord, MetricRecord

from umbel.protocol.errors import ProtocolError
from umbel.protocol.release import LAPLACE, MAX_CHOICE_EPSILON, Clipping, NoisePer, ReleaseBy

VERSION = 5

_VERSION = "version"
_MAX_WHOLE = 2**31  # more than any run needs, and nothing that a ledger cannot hold
LONGEST_NAME = 200

# What each field of a message may come as; a bool is no number here.
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "tuple[int, ...]": (list,),
    "Clipping": (str,),
    "NoisePer": (str,),
    "ReleaseBy": (str,),
}


class _Asked:
    """What is asked of some clients of a node, as a ConfigRecord."""

    clients: tuple[int, ...]

    def to_record(self) -> ConfigRecord:
        """Return what is asked as a ConfigRecord."""
        record = ConfigRecord()
        for name in self._fields():
            value = getattr(self, name)
            record[name] = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, str) else value
        return record

    @classmethod
    @cache
    def _fields(cls) -> dict[str, tuple[type, ...]]:
        """Return the fields, each with what it may come as."""
        kind: Any = cls  # a dataclass, as all that is built on this
        return {entry.name: _KINDS[str(entry.type)] for entry in fields(kind)}

    @classmethod
    @cache
    def shared(cls) -> frozenset[str]:
        """Return the names of the fields in which the tasks on all nodes in a round are alike."""
        return frozenset(cls._fields()) - {"round", "clients"}

    @classmethod
    def from_record(cls, record: ConfigRecord) -> Self:
        """Check a ConfigRecord from the network and return what it asks."""
        there, values = dict(record.items()), {}
        for name, kinds in cls._fields().items():
            if name not in there:
                raise ProtocolError(f"the task lacks {name}")
            value: Any = there[name]
            if type(value) not in kinds:
                raise ProtocolError(f"{name} of the task is a {type(value).__name__}")
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


@dataclass(frozen=True)
class TrainingSpec(_Asked):
    """What the server asks of the training clients of one node in a round.

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
    clipping : Clipping
        ``update``: the radius is the norm of the client's update, at least `radius`.
        ``public``: the radius is `radius`, and the client clips its update to it.
    radius : float
        See `clipping`.
    noise_per : NoisePer
        What is noised by itself, within a radius of its own.
    disclose_choice : bool
        Ask clients for the hypothesis they chose (IFCA); refused by any site that sanitises.
    local_steps : int
        R of Protocol 1 (PAC paper): above 0, so many minibatches are each drawn from all of a
        client's rows, in place of epochs. With neither steps nor epochs nothing is trained.
    message_noise : float
        sigma of the PAC paper's noisy messages (Eq. 3); it comes before the gate, and bounds nothing
        that the account counts.
    run : str
        Name of the run, the same when it goes on after an interruption: clients keep their local
        parameters by it.
    frozen_digest : str
        Of the model's frozen parameters, which do not travel; empty if there are none.
    mechanism : str
        The law of the noise, by name (`mechanisms.load`).
    choice_epsilon : float
        Epsilon of what hides which hypothesis a client chose: randomised response, or the noise on a site's
        counts; 0 asks for the paper's open choice.
    explore : float
        Share of a site's clients that train a hypothesis drawn at random, so that none is left without
        clients; only where the site releases.
    release_by : ReleaseBy
        ``client``: each client's model, with noise of its own. ``site``: of all asked clients of the node
        together the sum of the updates of each hypothesis and how many there are, with noise once.
    """

    round: int
    clients: tuple[int, ...]
    local_epochs: int
    step_size: float
    batch_size: int
    noise_multiplier: float
    clipping: Clipping = Clipping.UPDATE
    radius: float = 0.01
    noise_per: NoisePer = NoisePer.VECTOR
    disclose_choice: bool = False
    local_steps: int = 0
    message_noise: float = 0.0
    run: str = ""
    frozen_digest: str = ""
    mechanism: str = LAPLACE
    choice_epsilon: float = 0.0
    explore: float = 0.0
    release_by: ReleaseBy = ReleaseBy.CLIENT

    def __post_init__(self) -> None:
        _as_floats(self, "step_size", "noise_multiplier", "radius", "message_noise", "choice_epsilon", "explore")
        _whole("round", self.round, 1)
        _clients(self.clients)
        _whole("local-epochs", self.local_epochs, 0)
        _whole("local-steps", self.local_steps, 0)
        _whole("batch-size", self.batch_size, 0)
        _positive("step-size", self.step_size)
        _not_negative("noise-multiplier", self.noise_multiplier)
        _not_negative("message-noise", self.message_noise)
        _not_negative("choice-epsilon", self.choice_epsilon)
        if self.choice_epsilon > MAX_CHOICE_EPSILON:
            raise ProtocolError(f"choice-epsilon must be at most {MAX_CHOICE_EPSILON}, got {self.choice_epsilon}")
        object.__setattr__(self, "clipping", _one_of("clipping", Clipping, self.clipping))
        _positive("the radius", self.radius)
        object.__setattr__(self, "noise_per", _one_of("noise-per", NoisePer, self.noise_per))
        if self.noise_per is not NoisePer.VECTOR and self.clipping is Clipping.PUBLIC:
            raise ProtocolError(
                f"noise-per {self.noise_per} works only with clipping update; a public radius is for the whole vector"
            )
        if not 0 <= self.explore <= 1:
            raise ProtocolError(f"explore must be between 0 and 1, got {self.explore}")
        object.__setattr__(self, "release_by", _one_of("release-by", ReleaseBy, self.release_by))
        if self.release_by is ReleaseBy.SITE:
            _fit_for_a_site(self)
        _short("the run's name", self.run)
        _short("the mechanism's name", self.mechanism)


@dataclass(frozen=True)
class EvaluationSpec(_Asked):
    """What the server asks of the validation clients of one node in a round.

    Attributes
    ----------
    round : int
        Round, from 1; 0 before the first.
    clients : tuple of int
        The asked clients, counted within the node; each at most once.
    step_size : float
        s of Algorithm 1, for the local parameters of clients that have none yet.
    run, frozen_digest : str
        As in `TrainingSpec`.
    """

    round: int
    clients: tuple[int, ...]
    step_size: float = 0.1
    run: str = ""
    frozen_digest: str = ""

    def __post_init__(self) -> None:
        _as_floats(self, "step_size")
        _whole("round", self.round, 0)
        _clients(self.clients)
        _positive("step-size", self.step_size)
        _short("the run's name", self.run)


@dataclass(frozen=True)
class Hosting:
    """What a node says of itself when asked.

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
        """Check a node's reply and return what it says.

        Raises
        ------
        ProtocolError
            When the node speaks another version, or counts are missing or negative.
        """
        version = record.get(_VERSION)
        if type(version) is not int or version != VERSION:
            raise ProtocolError(
                f"speaks protocol {version!r}, this server speaks {VERSION}; install the same umbel everywhere"
            )
        values: dict[str, Any] = {entry.name: record.get(entry.name) for entry in fields(cls)}
        if any(type(value) is not int for value in values.values()) or min(values["train"], values["validation"]) < 0:
            raise ProtocolError(f"reports counts that cannot be: {values}")
        if (values["first"], values["step"]) != (-1, -1) and not 0 <= values["first"] < values["step"]:
            raise ProtocolError(f"reports a share of a dataset that cannot be: {values}")
        return cls(**values)

    @property
    def simulated(self) -> bool:
        """Whether the node says it hosts a part of the run config's dataset."""
        return self.step > 0


def _fit_for_a_site(asked: TrainingSpec) -> None:
    """Raise where a site cannot make one release of what is asked."""
    # Each client's part of a sum must be bounded by a number that does not depend on its data.
    if asked.clipping is not Clipping.PUBLIC:
        raise ProtocolError(f'a site releases sums only with clipping "public", not {asked.clipping.value!r}')
    if asked.noise_per is not NoisePer.VECTOR:
        raise ProtocolError(f'a site releases sums only with noise-per "vector", not {asked.noise_per.value!r}')
    if asked.disclose_choice:
        raise ProtocolError("a site that releases sums does not disclose what each client chose")


def _clients(clients: tuple[Any, ...]) -> None:
    if set(map(type, clients)) != {int}:
        raise ProtocolError("clients must be a list of whole numbers with at least one entry")
    if min(clients) < 0 or len(set(clients)) < len(clients):
        raise ProtocolError("each client may be asked once, counted from 0")


def _whole(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ProtocolError(f"{name} must be a whole number of at least {minimum}, got {value}")
    if value > _MAX_WHOLE:
        raise ProtocolError(f"{name} must be at most {_MAX_WHOLE}, got {value}")


def _as_floats(asked: Any, *names: str) -> None:
    """Have whole numbers that stand for real ones be real, and no zero negative: no ledger can hold some of them."""
    for name in names:
        object.__setattr__(asked, name, float(getattr(asked, name)) + 0.0)


def _not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ProtocolError(f"{name} must be a finite number of at least 0, got {value}")


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ProtocolError(f"{name} must be a finite number above 0, got {value}")


def _one_of(name: str, kind: Any, value: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ProtocolError(f"{name} must be one of {', '.join(kind)}, got {value!r}") from None


def _short(what: str, name: str) -> None:
    if len(name) > LONGEST_NAME:
        raise ProtocolError(f"{what} is {len(name)} characters long, more than {LONGEST_NAME}")
