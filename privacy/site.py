"""A site: what a node knows about itself, and what it allows.

Everything comes from where the node runs, from its own node configuration and from its environment,
where ``min-noise-multiplier`` is ``UMBEL_MIN_NOISE_MULTIPLIER``; the node configuration wins. Nothing here
reads a message: a server must not be able to tell a site that it is simulated. The site's policy wins
over the server's demand.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from privacy.charges import Limits
from protocol.demands import Training
from protocol.errors import Refused, SiteError
from protocol.home import umbel_home
from protocol.release import RadiusMode
from protocol.rules import Settings
from protocol.run_config import MAX_HYPOTHESES, RunConfig

DATA_PATH = "data-path"

# What Flower puts into the node configuration of a simulated node, and may put into another's.
_PARTITION = ("partition-id", "num-partitions")
_PREFIX = "UMBEL_"
_HOME = "UMBEL_HOME"

_in_process: ContextVar[bool] = ContextVar("umbel_in_process", default=False)


class Role(StrEnum):
    """What a site's clients do."""

    TRAIN = "train"
    """All train, and none reports without noise."""
    VALIDATION = "validation"
    """All report, and none trains."""
    SPLIT = "split"
    """As the data's manifest says."""


class AcceptedRadius(StrEnum):
    """Which radius a site accepts."""

    ANY = "any"
    """The paper's as well, a heuristic."""
    PUBLIC = "public"
    """Demands with a formal guarantee alone."""


class Approval(StrEnum):
    """What a run needs before the site answers it."""

    POLICY = "policy"
    """Nothing but that the policy allows what it asks."""
    ASK = "ask"
    """That the site's people have approved it."""


def _text(value: Any) -> Any:
    """Return what an entry of text, as the environment has it, or TOML's own types stand for."""
    return str(value)


def _flag(value: Any) -> Any:
    return {"true": True, "false": False}.get(str(value).lower(), value)


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return value
    return str(value) if math.isnan(number) else number


def _unlimited(value: Any, entry: ValidationInfo) -> Any:
    """Return a number, which is infinite where that is written as a word and nowhere else.

    A number too large for a machine is read as infinite. It was meant as a limit, and would be none.
    """
    if isinstance(value, str) and value.strip().lower() == "inf":
        return math.inf
    number = _number(value)
    if number in (math.inf, -math.inf):
        name = str(entry.field_name).replace("_", "-")
        raise ValueError(f'{name} must be a number that this machine can hold, or the text "inf", got {value!r}')
    return number


def _whole(value: Any) -> Any:
    number = _number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else value


Text = Annotated[str, BeforeValidator(_text)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number)]
Unlimited = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_unlimited)]
Whole = Annotated[int, BeforeValidator(_whole)]


class Policy(Settings):
    """The entries of a node's configuration, and what each means."""

    error = SiteError
    source: ClassVar[str] = "this node's configuration"
    renamed: ClassVar[Mapping[str, str]] = {
        "least-noise-multiplier": "min-noise-multiplier",
        "most-hypotheses": "max-hypotheses",
        "most-participations": "max-participations",
    }

    data_path: Text = Field("", description="the site's data: a federation, or a table; an absolute path")
    reader: Text = Field("", description="for a table: the function that reads it, as package.module:function")
    reader_options: Text = Field("", description='the reader\'s options, as "name=value name=value"')
    role: Annotated[Role, Field(strict=False)] = Field(
        Role.TRAIN,
        description="train: all clients train; validation: all report their loss; split: as the data's manifest says",
    )
    place: Text = Field(
        "0/1", description='"i/n": the node hosts clients i, i + n, ... of a federation that other nodes host too'
    )
    min_noise_multiplier: Number = Field(1.0, ge=0, description="the lowest nu it accepts; above 0")
    radius_mode: Annotated[AcceptedRadius, Field(strict=False)] = Field(
        AcceptedRadius.ANY, description="public: accept only demands with a formal guarantee; any: the heuristic too"
    )
    radius_floor: Number = Field(
        0.01, ge=0, description="the smallest radius within which an update is hidden, whatever is asked; above 0"
    )
    max_hypotheses: Whole = Field(
        10,
        ge=1,
        description="the largest k it accepts; the noise does not hide which was chosen: log2 k bits an answer",
    )
    max_local_epochs: Unlimited = Field(100, ge=1, description="the most epochs a round that it accepts")
    max_local_steps: Unlimited = Field(1000, ge=1, description="the most steps a round that it accepts")
    max_examples: Unlimited = Field(
        10_000_000,
        ge=1,
        description="how often rows are computed on in a client's round; passes beyond it are left out",
    )
    max_seconds: Unlimited = Field(
        3600.0, gt=0, description="how long it computes for a message; an update that takes longer counts as none"
    )
    budget: Unlimited = Field(math.inf, ge=0, description="the most a client may spend, as a sum of n/nu")
    max_participations: Unlimited = Field(math.inf, ge=0, description="the most often a client may release")
    max_evaluations: Unlimited = Field(
        1000, ge=1, description="how often a run may have clients report; one asks once a round, and a few times before"
    )
    max_evaluations_in_all: Unlimited = Field(
        math.inf, ge=1, description="how often all runs together may have clients report"
    )
    ledger_path: Text = Field("", description="the file where charges are kept; by default $UMBEL_HOME/ledger.sqlite")
    approve: Annotated[Approval, Field(strict=False)] = Field(
        Approval.POLICY,
        description="policy: answer whatever the policy allows; ask: only runs that the site's people have approved",
    )
    bundle: Text = Field(
        "",
        description="SHA-256 of the bundles it has reviewed, separated by spaces; by default that of its own umbel",
    )
    report_noise_multiplier: Number = Field(
        0.0, ge=0, description="above 0: training clients also report loss and metric, with noise of this multiplier"
    )
    report_bound: Number = Field(
        1.0, gt=0, description="numbers that are reported with noise are clipped to lie between 0 and this"
    )
    keep_model: Text = Field("", description="folder for each client's best hypothesis at the end of a run")
    tripwire: Flag = Field(
        False, description="refuse to train models that no honest server would send: degenerate, or sent before"
    )
    noise_all_items: Flag = Field(
        False, description="in simulation: where the run adds noise to rows that changed (message-noise), add it to all"
    )
    balanced_batches: Flag = Field(
        False, description="fill minibatches with as many liked items as others (labels of -1 and 1)"
    )
    allow_unsanitised: Flag = Field(
        False, description="whether releases without noise, and the chosen hypothesis, may leave; in simulation only"
    )
    insecure_seed: Flag = Field(
        False,
        description="draw everything from the run's seed, also the noise: for tests with data that need no protection, "
        "since the server knows that seed and can subtract the noise",
    )

    @property
    def bundles(self) -> list[str]:
        """The bundles that the site names; none where its own umbel's is the one."""
        return self.bundle.lower().split()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if strange := [one for one in self.bundles if not re.fullmatch("[0-9a-f]{64}", one)]:
            raise ValueError(
                f"bundle must be SHA-256 sums of 64 hexadecimal digits, separated by spaces, got {strange[0]!r}"
            )
        for name in (
            "max_local_epochs",
            "max_local_steps",
            "max_examples",
            "max_participations",
            "max_evaluations",
            "max_evaluations_in_all",
        ):
            value = getattr(self, name)
            if not (math.isinf(value) or float(value).is_integer()):
                raise ValueError(f"{name.replace('_', '-')} must be a whole number, got {value}")
        if self.report_noise_multiplier > 0 and self.role is not Role.TRAIN:
            raise ValueError(f"report-noise-multiplier is for role train; role {self.role} reports without noise")
        if self.role is Role.VALIDATION and min(self.budget, self.max_participations) < math.inf:
            # It would look like a limit on what the site's clients tell.
            raise ValueError(
                "budget and max-participations are for clients that train; role validation reports without noise, "
                "which has no price: set max-evaluations"
            )
        return self

    def check(self, demand: Training) -> None:
        """Raise `Refused` when the demand goes below the policy."""
        if demand.noise_multiplier == 0 and not self.allow_unsanitised:
            raise Refused(
                "the server asks for an unsanitised release (noise multiplier 0); this site does not allow it"
            )
        if demand.noise_multiplier < self.min_noise_multiplier:
            raise Refused(
                f"the server asks for noise multiplier {demand.noise_multiplier}; "
                f"this site accepts no less than {self.min_noise_multiplier}"
            )
        if self.radius_mode is AcceptedRadius.PUBLIC and demand.radius_mode is not RadiusMode.PUBLIC:
            raise Refused(
                f"the server asks for radius {demand.radius_mode.value!r}; this site accepts only a public radius"
            )
        for key, asked, most in (
            ("local-epochs", demand.local_epochs, self.max_local_epochs),
            ("local-steps", demand.local_steps, self.max_local_steps),
        ):
            if asked > most:
                raise Refused(f"the server asks for {key} = {asked}; this site accepts {most:g} at most")
        if demand.disclose_choice and not self.allow_unsanitised:
            raise Refused("the server asks which hypothesis each client chose; this site does not disclose it")


_KNOWN = {*Policy.names(), *Policy.renamed}

# A simulated node holds nobody's data, and allows what a run asks for.
_SIMULATED: dict[str, Any] = {
    "role": "split",
    "min-noise-multiplier": 0.0,
    "radius-floor": 0.0,
    "max-hypotheses": MAX_HYPOTHESES,
    **dict.fromkeys(("max-local-epochs", "max-local-steps", "max-examples", "max-seconds"), "inf"),
    "allow-unsanitised": True,
}


@contextmanager
def in_process() -> Iterator[None]:
    """Mark what runs inside as a simulation in this process (for `simulation.grid` alone)."""
    token = _in_process.set(True)
    try:
        yield
    finally:
        _in_process.reset(token)


def runs_in_simulation() -> bool:
    """Return whether this code runs in a Ray worker or in the in-process grid."""
    if _in_process.get():
        return True
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


@dataclass(frozen=True)
class Site:
    """A node, as far as privacy is concerned.

    Attributes
    ----------
    policy : Policy
        What it allows.
    data_path : Path or None
        The data this node's own configuration names; None in simulation, where the node serves
        a part of the run config's federation.
    first, step : int
        The node hosts the federation's clients ``first, first + step, ...``: in simulation, and
        where the site's own ``place`` says so.
    """

    policy: Policy
    data_path: Path | None
    first: int = 0
    step: int = 1

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Site:
        """Return the site that a node configuration and the environment describe.

        Raises
        ------
        SiteError
            When the node is no simulation and names no data of its own, or an entry cannot be
            used: a slip of the pen never weakens a policy.
        """
        own = {key: value for key, value in node_config.items() if key not in _PARTITION}
        environment = _environment()
        # The site's own path is asked for first: real nodes may have a partition-id as well.
        if own.get(DATA_PATH):
            if DATA_PATH in environment:
                raise SiteError(f"{DATA_PATH} is for the node's own configuration alone; unset UMBEL_DATA_PATH")
            policy = Policy.parse(environment | own)
            first, step = _place(policy)
            site = cls(policy, _path(DATA_PATH, policy.data_path), first, step)
            site._check_own()
            return site
        if not runs_in_simulation():
            raise SiteError(f"this node serves no data: start it with --node-config '{DATA_PATH}=\"/path/to/data\"'")
        # What else a user has in the environment is no policy of a simulated node.
        policy = Policy.parse(
            _SIMULATED | {key: environment[key] for key in _KNOWN & environment.keys() - {DATA_PATH}} | own
        )
        return cls(policy, None, int(node_config["partition-id"]), int(node_config["num-partitions"]))

    def _check_own(self) -> None:
        """Raise unless the policy is fit for data of one's own."""
        policy = self.policy
        if policy.allow_unsanitised:
            raise SiteError("allow-unsanitised is for simulation; a site with data of its own cannot set it")
        for key, value in (
            ("min-noise-multiplier", policy.min_noise_multiplier),
            ("radius-floor", policy.radius_floor),
        ):
            if not value > 0:
                raise SiteError(f"{key} must be a number above 0 where the data are a site's own, got {value:g}")
        if self.placed and policy.role is not Role.SPLIT:
            raise SiteError(
                f"place is for role split, where clients are numbered over the whole federation; not {policy.role}"
            )
        _ = self.ledger_path, self.keep_model

    @cached_property
    def ledger_path(self) -> Path | None:
        """Where charges are kept; None, for the run's memory alone, in simulation."""
        if not self.policy.ledger_path:
            if self.simulated:
                return None
            if "ledger_path" in self.policy.model_fields_set:
                # Written down as empty it may be a slip, and another ledger has forgotten what was spent.
                raise SiteError("ledger-path must be an absolute path, got ''; leave it out for the default")
            return umbel_home() / "ledger.sqlite"
        return _path("ledger-path", self.policy.ledger_path)

    @cached_property
    def keep_model(self) -> Path | None:
        """Folder for each client's best hypothesis at the end of a run."""
        return _path("keep-model", self.policy.keep_model)

    @cached_property
    def limits(self) -> Limits:
        """The most a client may give."""
        budget, participations = self.policy.budget, self.policy.max_participations
        return Limits(
            None if math.isinf(budget) else Fraction(budget),
            None if math.isinf(participations) else int(participations),
        )

    @property
    def identity(self) -> str:
        """What tells the node from others that share its ledger: its data, and which of the clients it hosts."""
        return f"{self.data_path}\n{self.first}/{self.step}"

    @property
    def simulated(self) -> bool:
        """Whether the node holds no data of its own."""
        return self.data_path is None

    @property
    def placed(self) -> bool:
        """Whether the node hosts a part of a federation whose other clients other nodes host."""
        return self.simulated or self.step > 1

    @property
    def insecure_seed(self) -> bool:
        """Whether a site with data of its own draws from the run's seed all the same."""
        return self.policy.insecure_seed and not self.simulated

    def client_ids(self, clients: tuple[int, ...]) -> list[int]:
        """Return the federation-wide numbers of clients counted within the node."""
        return [self.first + self.step * client for client in clients]

    def local_ids(self, clients: Sequence[int]) -> list[int]:
        """Return the numbers within the node of clients counted over the federation."""
        return [(client - self.first) // self.step for client in clients]

    def seed(self, run: RunConfig) -> int | None:
        """Return the run's seed in simulation, None where the data are the site's own."""
        return run.seed if self.simulated or self.insecure_seed else None


def _environment() -> dict[str, Any]:
    """Return the entries that the environment sets."""
    entries: dict[str, Any] = {}
    for name in os.environ:
        if name[: len(_PREFIX)].upper() != _PREFIX or name == _HOME:
            continue
        # What is written otherwise would be no limit, or of two limits one.
        if name != name.upper() or "-" in name:
            raise SiteError(f"{name}: write it as {name.upper().replace('-', '_')}")
        entries[name.removeprefix(_PREFIX).replace("_", "-").lower()] = os.environ[name]
    return entries


def _place(policy: Policy) -> tuple[int, int]:
    """Return i and n of ``place = "i/n"``."""
    first, _, step = policy.place.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise SiteError(f'place must be "i/n" with i from 0 to n - 1, got {policy.place!r}')
    return int(first), int(step)


def _path(key: str, text: str) -> Path | None:
    """Return an entry that must be an absolute path, because a Flower process may work anywhere."""
    if not text:
        return None
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise SiteError(f"{key} must be an absolute path, got {text!r}")
    return path
