"""A site's policy: every entry of a node's configuration, its meaning, and the tasks that it refuses.

`Policy.check` refuses a task. Other refusals are elsewhere: a client over budget in `umbel.privacy.site.charges`, a
release without a price in `umbel.privacy.site.config`, and a run without approval in `umbel.privacy.site.consent`.
`umbel.privacy.site.refusals` makes the reply. Each has a code of ``refused.``; docs/reference/errors.md lists them.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from umbel.privacy.accounting.guarantee import DELTA, guarantee, released_by, stated
from umbel.privacy.channels.secure.terms import Terms
from umbel.privacy.mechanisms import MECHANISMS
from umbel.privacy.site.charges import dearer
from umbel.protocol.errors import Refused, SiteError
from umbel.protocol.options import AS_TEXT, Options, parse_pairs
from umbel.protocol.plugins import unknown_name
from umbel.protocol.ranges import ALL, NONE, names_in
from umbel.protocol.release import (
    LAPLACE,
    LEAST_CLIP_NORM,
    MAX_CHOICE_EPSILON,
    Clipping,
    Kind,
    Protect,
    Release,
    ReleaseBy,
    RowPrivacy,
    participation,
)
from umbel.protocol.rules import Settings
from umbel.protocol.signatures import public_key, same_key
from umbel.protocol.tasks import TrainingSpec


class Role(StrEnum):
    """The role of a site's clients: all train, all report without noise, or the data's manifest decides."""

    TRAIN = "train"
    VALIDATION = "validation"
    SPLIT = "split"


class AcceptedRelease(StrEnum):
    """The party that may add the noise: each client to its release, the site once for all clients, listed sites
    together, or any of them; at a site, the last goes with no other."""

    CLIENT = "client"
    SITE = "site"
    SECURE = "secure"
    ANY = "any"


class AcceptedRadius(StrEnum):
    """The clipping that a site accepts: only a public clip norm, or also the paper's clipping, a heuristic."""

    ANY = "any"
    PUBLIC = "public"


class Approval(StrEnum):
    """The condition for answering a run: only that it fits the policy, or also approval by the site's people."""

    POLICY = "policy"
    ASK = "ask"


class Personal(StrEnum):
    """The method that personalises the hypotheses for each client before the site keeps them
    (`umbel.client.personal`)."""

    NO = "no"
    FINE_TUNE = "fine-tune"
    INTERPOLATE = "interpolate"
    CALIBRATE = "calibrate"
    MIXTURE = "mixture"
    BAYES = "bayes"
    AUTO = "auto"


def _flag(value: Any) -> Any:
    return {"true": True, "yes": True, "false": False, "no": False}.get(str(value).lower(), value)


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return value
    if math.isnan(number):
        raise ValueError("must be a number")
    return number


def _unlimited(value: Any) -> Any:
    """Return a number; it is infinite only if it is written as the text "inf".

    A number too large for a machine would be read as infinite: it was meant as a limit, and would be none.
    """
    if isinstance(value, str) and value.strip().lower() == "inf":
        return math.inf
    number = _number(value)
    if number in (math.inf, -math.inf):
        raise ValueError('must be a number that this machine can hold, or the text "inf"')
    return number


def _whole(value: Any) -> Any:
    number = _number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else value


def _countable(value: float) -> float:
    if not (math.isinf(value) or value.is_integer()):
        raise ValueError("must be a whole number")
    return value


Text = Annotated[str, BeforeValidator(str)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number)]
Unlimited = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_unlimited)]
Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Unlimited, AfterValidator(_countable)]

_EXACT = "set a budget, leave exact out of reports, or limit reports with max-evaluations"
_REPORT_NOISE = 10.0
DIGEST = 16
"""Hex digits that identify a policy."""


@dataclass(frozen=True)
class Narrows:
    """Marks an entry of a policy file that a node's own may narrow."""

    stricter: Callable[[Any, Any], bool]
    """Whether the node's value is as strict as the file's, or stricter."""


@dataclass(frozen=True)
class Bounds:
    """Marks an entry that bounds a key of the run config."""

    key: str


class Mark(Enum):
    """Marks of an entry."""

    FREE = "a node may set it where the policy file does not, since it changes nothing of what may leave"
    OURS = "only umbel's own app heeds it, so that another's must not have it"


LESS, MORE = Narrows(operator.le), Narrows(operator.ge)
OURS, FREE = Mark.OURS, Mark.FREE


_FROM_ANY = Narrows(lambda _, file: file is AcceptedRelease.ANY)


def _to(strictest: StrEnum) -> Narrows:
    return Narrows(lambda own, _: own is strictest)


def _names_fewer(own: str, file: str) -> bool:
    # An empty file accepts all names, and an empty entry would.
    return not file or (bool(own) and {*own.split()} <= {*file.split()})


_FEWER = Narrows(_names_fewer)
_ASKS_FEWER = Narrows(
    lambda own, file: own == NONE or file == ALL or (own != ALL and {*names_in(own)} <= {*names_in(file)})
)


@dataclass(frozen=True)
class Budget(Options):
    """A maximum epsilon at a delta, 0 for a pure epsilon, written as in ``8`` or ``8 delta=1e-5``."""

    FIRST: ClassVar[str] = "epsilon"
    epsilon: Annotated[Unlimited, Field(ge=0), LESS]
    delta: Annotated[Number, Field(ge=0, lt=1), LESS] = 0.0

    def __post_init__(self) -> None:
        if self.delta > 0 and math.isinf(self.epsilon):
            raise ValueError("delta needs a budget: set an epsilon before it, or leave delta out")

    def __str__(self) -> str:
        return f"{self.epsilon} delta={self.delta}" if self.delta else str(self.epsilon)


@dataclass(frozen=True)
class AcceptedClipping(Options):
    """The clipping that a site accepts, and the smallest clip norm."""

    FIRST: ClassVar[str] = "mode"
    mode: Annotated[AcceptedRadius, _to(AcceptedRadius.PUBLIC)] = AcceptedRadius.PUBLIC
    floor: Annotated[Number, Field(ge=0), MORE] = LEAST_CLIP_NORM


@dataclass(frozen=True)
class MaxWork(Options):
    """The most that a client computes in a round."""

    epochs: Annotated[Count, Field(ge=1), LESS] = 100
    steps: Annotated[Count, Field(ge=1), LESS] = 1000
    examples: Annotated[Count, Field(ge=1), LESS] = 10_000_000


@dataclass(frozen=True)
class AcceptedRows(Options):
    """The least noise and the largest rate of training that hides rows, and a client's largest number of rows."""

    noise: Annotated[Number, Field(ge=0), MORE] = 0.5
    rate: Annotated[Number, Field(gt=0, le=1), LESS] = 1.0
    largest: Annotated[Whole, Field(ge=1), LESS] = 2000


def _method(name: str) -> str:
    if ":" not in name and name not in {*Personal}:
        raise ValueError(unknown_name("method", name, Personal))
    return name


@dataclass(frozen=True)
class Personalise(Options):
    """The method that personalises kept models, a name or an import path."""

    FIRST: ClassVar[str] = "method"
    method: Annotated[str, AfterValidator(_method)] = Personal.NO.value
    epochs: Annotated[int, Field(ge=1)] = 10


@dataclass(frozen=True)
class Reports(Options):
    """How clients report."""

    exact: Annotated[bool, LESS] = False
    noise: Annotated[Number, Field(ge=0)] = 0.0
    bound: Annotated[Number, Field(gt=0), LESS] = 1.0


@dataclass(frozen=True)
class AcceptedRanges(Options):
    """The columns whose ranges a run may ask for, the fewest of a site's clients asked, and the largest price."""

    FIRST: ClassVar[str] = "columns"
    columns: Annotated[str, _ASKS_FEWER] = NONE
    clients: Annotated[Whole, Field(ge=1), MORE] = 1
    epsilon: Annotated[Number, Field(gt=0), LESS] = 1.0

    def cover(self, columns: Iterable[str]) -> bool:
        """Return whether a question may be about these columns."""
        return self.columns == ALL or (self.columns != NONE and {*columns} <= {*names_in(self.columns)})


class Policy(Settings):
    """The entries of a node's configuration."""

    error = SiteError
    source: ClassVar[str] = "this node's configuration"
    listed: ClassVar[str] = "umbel config --site"

    data_path: Annotated[Text, FREE] = Field("", description="absolute path of the site's data: a dataset, or a table")
    reader: Annotated[Text, OURS, FREE] = Field(
        "", description="function that reads a table, and its options, as in package.module:function name=value"
    )
    role: Annotated[Role, Field(strict=False)] = Field(
        Role.TRAIN,
        description="train: all clients train; validation: all report their loss; split: the data's manifest decides",
    )
    place: Annotated[Text, OURS, FREE] = Field(
        "0/1", description='"i/n": the node hosts clients i, i + n, ... of a dataset that n nodes share'
    )
    protect: Annotated[Protect, Field(strict=False), _to(Protect.BOTH)] = Field(
        Protect.CLIENTS,
        description="what each release must hide: clients: a client's whole data; rows: at least each row of a client, "
        "by noise in training; both: each by separate noise",
    )
    min_noise_multiplier: Annotated[Number, MORE, Bounds("noise-multiplier")] = Field(
        1.0, ge=0, description="smallest nu that the site accepts; above 0"
    )
    clipping: Annotated[AcceptedClipping, AS_TEXT, Bounds("clipping")] = Field(
        AcceptedClipping(),
        description="public: accept only a public clip norm; any: also the paper's clipping, which guarantees nothing; "
        "floor is the smallest clip norm: the site raises smaller ones to it; above 0",
    )
    release: Annotated[AcceptedRelease, Field(strict=False), _FROM_ANY] = Field(
        AcceptedRelease.CLIENT,
        description="client: each client's model, with separate noise; site: only sums over the site's clients, with "
        "noise added once, if the clients trust the site; secure: only sums over the sites in parties, to which each "
        "adds a share of the noise; any: as the run asks",
    )
    parties: Annotated[Text, OURS] = Field(
        "",
        description='public keys of the sites for secure sums, this one included, as "name=key name=key"',
    )
    party_key: Annotated[Text, OURS, FREE] = Field(
        "", description="absolute path of this site's private SSH key in parties"
    )
    least_parties: Annotated[Whole, OURS, MORE] = Field(
        3, ge=2, description="fewest sites asked for a secure sum; more than half of them must reply"
    )
    colluding_parties: Annotated[Whole, OURS, MORE] = Field(
        0,
        ge=0,
        description="sites that may tell the server everything: a secure sum has enough noise without theirs",
    )
    min_clients: Annotated[Whole, MORE] = Field(
        10, ge=1, description="fewest clients in a site's sums; a round with fewer is refused, and none is charged"
    )
    max_hypotheses: Annotated[Whole, LESS, Bounds("hypotheses")] = Field(
        10,
        ge=1,
        description="largest k that the site accepts; an open choice reveals up to log2 k bits each time",
    )
    max_choice_epsilon: Annotated[Unlimited, LESS, Bounds("choice-epsilon")] = Field(
        2.0,
        gt=0,
        description="largest choice-epsilon that the site accepts; a finite one refuses choices without randomisation",
    )
    mechanisms: Annotated[Text, _FEWER, Bounds("mechanism")] = Field(
        LAPLACE,
        description="accepted noise mechanisms, separated by spaces: laplace, gaussian, discrete-gaussian, "
        "package.module:Class",
    )
    max_work: Annotated[MaxWork, AS_TEXT, OURS, Bounds("local-epochs"), Bounds("local-steps")] = Field(
        MaxWork(),
        description="maximum epochs or steps of a round, and maximum rows that a client computes in it, each pass "
        "counted; further passes are left out; training that hides rows has no such limit of examples, since its steps "
        "may not depend on the number of rows",
    )
    max_seconds: Annotated[Unlimited, LESS] = Field(
        3600.0, gt=0, description="maximum seconds of computation for a message, shared equally among its clients"
    )
    budget: Annotated[Budget, AS_TEXT] = Field(
        Budget(8.0),
        description="maximum epsilon between any two data sets of a client, over all its releases in all runs; a delta "
        'follows it, as in "8 delta=1e-5"',
    )
    row_budget: Annotated[Budget, AS_TEXT] = Field(
        Budget(math.inf),
        description="maximum epsilon for a row of a client that is added or removed, over all the client's releases; "
        'noise in training needs a delta, as in "8 delta=1e-5"',
    )
    rows: Annotated[AcceptedRows, AS_TEXT, OURS, Bounds("rows")] = Field(
        AcceptedRows(),
        description="if rows are protected, which a run may ask of every site that sets this: the smallest noise that "
        "the site accepts, above 0; the largest rate, with which a row-budget counts less a step; the largest number "
        "of rows of a client: everybody may know it, a site with a larger client refuses everything, and each message "
        "must leave time for clients of this size",
    )
    paper_budget: Annotated[Unlimited, LESS] = Field(
        math.inf, ge=0, description="maximum of a client's paper budget, the sum of n/nu over its releases: a heuristic"
    )
    max_participations: Annotated[Count, LESS] = Field(
        math.inf, ge=0, description="maximum number of a client's releases"
    )
    max_evaluations: Annotated[Count, LESS] = Field(
        1000, ge=1, description="maximum evaluations for one run, which needs one a round and a few before round 1"
    )
    ledger_path: Annotated[Text, FREE] = Field(
        "", description="file of the journal; by default $UMBEL_HOME/ledger.jsonl"
    )
    witness_path: Annotated[Text, FREE] = Field(
        "",
        description="folder outside the journal's, for the journal's head, which shows a restored or lost journal; by "
        "default umbel in $XDG_STATE_HOME",
    )
    approve: Annotated[Approval, Field(strict=False), OURS, _to(Approval.ASK)] = Field(
        Approval.POLICY,
        description="policy: answer every run that the policy allows; ask: only runs that the site's people approved",
    )
    researchers: Annotated[Text, OURS] = Field(
        "",
        description='public keys of researchers, as "name=key name=key"; the site then answers signed runs of theirs, '
        "and every other run waits for approval",
    )
    strategies: Annotated[Text, OURS, _FEWER] = Field(
        "", description="strategies of a run that the site accepts, separated by spaces; all if empty"
    )
    ranges: Annotated[AcceptedRanges, AS_TEXT, OURS] = Field(
        AcceptedRanges(),
        description="questions about ranges that the site answers: no, all, or columns, as in age,blood%20pressure; "
        "clients, the fewest of the site's clients that are asked; epsilon, the largest price of a question at the "
        "budget's delta, by default 1e-5",
    )
    policy_file: Text = Field(
        "", description="absolute path of a policy.toml with these entries, which all other entries may only narrow"
    )
    app: Text = Field(
        "",
        description="ClientApp that the site's executor runs, as package.module:app; by default umbel's",
    )
    app_keys: Annotated[Text, FREE] = Field(
        "",
        description="entries of the node's configuration that only that app reads, separated by spaces",
    )
    bundle: Text = Field(
        "",
        description="SHA-256 of the bundles that the site has reviewed, separated by spaces; by default that of the "
        "installed umbel",
    )
    reports: Annotated[Reports, AS_TEXT] = Field(
        Reports(),
        description="exact: validation clients report exact losses, which no budget counts, as they always do without "
        "a budget; otherwise the site reports their mean, with noise, and charges each of them. noise is nu; 0 means "
        "10 for validation clients' mean, and no reports of training clients; above 0 these report too, each with "
        "separate noise. Reports with noise are clipped to lie between 0 and bound",
    )
    keep_model: Annotated[Text, OURS, FREE] = Field(
        "", description="folder for each client's best hypothesis at the end of a run"
    )
    personalise: Annotated[Personalise, AS_TEXT, OURS, FREE] = Field(
        Personalise(),
        description="how the site personalises the kept models: no, calibrate, mixture, bayes, fine-tune, "
        "interpolate, package.module:function, or auto: the method that best suits the client's rows; epochs follow, "
        "as in fine-tune epochs=10",
    )
    allow_unsanitised: Flag = Field(
        False, description="in simulation only: releases without noise, and chosen hypotheses, may leave the node"
    )
    insecure_seed: Annotated[Flag, OURS] = Field(
        False,
        description="draw everything, noise included, from the run's seed; the server knows that seed and can subtract "
        "the noise, so only for tests with data that need no protection",
    )

    @property
    def digest(self) -> str:
        """Identifies the policy: a hash of every entry except the file's own path."""
        entries = self.model_dump(mode="json", exclude={"policy_file"})
        return sha256(json.dumps(entries, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST]

    @property
    def keys(self) -> dict[str, str]:
        """The researchers' public keys, by name."""
        return parse_pairs(self.researchers, "researchers")

    @property
    def party_keys(self) -> dict[str, str]:
        """The public keys of the sites for secure sums, by name."""
        return parse_pairs(self.parties, "parties")

    @property
    def bundles(self) -> list[str]:
        """The bundles that the site names; none if it accepts its own umbel's."""
        return self.bundle.lower().split()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if strange := [one for one in self.bundles if not re.fullmatch("[0-9a-f]{64}", one)]:
            raise ValueError(
                f"bundle must be SHA-256 sums of 64 hexadecimal digits, separated by spaces, got {strange[0]!r}"
            )
        if strange := [name for name in self.mechanisms.split() if name not in MECHANISMS and ":" not in name]:
            raise ValueError(
                f"mechanisms must be {', '.join(MECHANISMS)} or package.module:Class, separated by spaces, "
                f"got {strange[0]!r}"
            )
        if not self.mechanisms.split():
            raise ValueError("mechanisms must name at least one")
        self._check_researchers()
        if same := same_key({name: public_key(name, key) for name, key in self.party_keys.items()}):
            # One site would count as two.
            raise ValueError(f"parties {' and '.join(same)} have the same key; list each site once")
        if self.release is AcceptedRelease.SECURE and not (self.parties and self.party_key):
            raise ValueError(
                'release = "secure" needs the sites to add with, and this one\'s key: set parties, party-key'
            )
        if self.colluding_parties > self.least_parties - 2:
            few = f"colluding-parties = {self.colluding_parties} needs more sites in a sum"
            raise ValueError(f"{few}: set least-parties to {self.colluding_parties + 2} or more")
        if self.protect is Protect.ROWS and math.isfinite(self.budget.epsilon):
            text = 'protect = "rows" accepts models without a guarantee for the client, which no budget covers'
            raise ValueError(f'{text}: set budget = "inf", and row-budget')
        if self.personalise.method != Personal.NO and not self.keep_model:
            raise ValueError("personalise needs kept models: set keep-model, or leave personalise out")
        if self.reports.noise > 0 and self.reports_exactly and self.role is not Role.TRAIN:
            raise ValueError(f"noise in reports changes nothing about exact losses of role {self.role}: {_EXACT}")
        if self.reports_exactly and self.role is Role.VALIDATION and self.sets_limits:
            # It would look like a limit on the clients' reports.
            raise ValueError(f"budget, paper-budget and max-participations do not bound exact losses: {_EXACT}")
        return self

    def _check_researchers(self) -> None:
        """Raise `ValueError` unless each researcher has a key, and each key one researcher."""
        keys = {name: public_key(name, key) for name, key in self.keys.items()}
        if not keys and "researchers" in self.model_fields_set:
            # Without researchers the site answers all runs: whoever removes the last one means none.
            raise ValueError('researchers names no one: set approve = "ask", so that each run waits, or leave it out')
        if same := same_key(keys):
            raise ValueError(f"researchers {' and '.join(same)} have the same key, so no signature says who signed")

    @property
    def sets_limits(self) -> bool:
        """Whether the site itself sets limits for its clients, beside the defaults."""
        limits = {
            "budget": self.budget.epsilon,
            "row_budget": self.row_budget.epsilon,
            "paper_budget": self.paper_budget,
            "max_participations": self.max_participations,
        }
        return any(limits[name] < math.inf for name in limits.keys() & self.model_fields_set)

    @property
    def declares_rows(self) -> bool:
        """Whether everybody may know how many rows a client has at most."""
        return "rows" in self.model_fields_set or self.protect.rows or self.row_budget.epsilon < math.inf

    @property
    def dearest_of_rows(self) -> Release | None:
        """The participation that reveals most of a row among all that the site accepts; None if there is none, or no
        row-budget."""
        if math.inf in (self.row_budget.epsilon, self.max_work.steps) or not self.rows.noise > 0:
            return None
        chooses = self.max_hypotheses > 1
        if chooses and math.isinf(self.max_choice_epsilon):
            return None
        rows = RowPrivacy(1.0, self.rows.noise, self.rows.rate, 1.0, int(self.max_work.steps))
        # The steps cost the same for any number of parameters, and a choice between two reveals most.
        return participation(1, 2 if chooses else 1, 0.0, choice_epsilon=self.max_choice_epsilon, rows=rows)

    def dearest(self, release: Release) -> Release:
        """Return the release that reveals most among one and all of its sort that the site accepts, of as many
        values."""
        least = self.report_noise if release.kind is Kind.REPORT else self.min_noise_multiplier
        accepted = replace(release, noise_multiplier=least or release.noise_multiplier)
        if release.choice_epsilon > 0:
            accepted = replace(accepted, choice_epsilon=min(self.max_choice_epsilon, MAX_CHOICE_EPSILON))
        if release.by_rows:
            steps = release.row_steps if math.isinf(self.max_work.steps) else int(self.max_work.steps)
            noise, rate = self.rows.noise, self.rows.rate
            accepted = replace(accepted, row_noise_multiplier=noise, row_rate=rate, row_steps=steps)
        return dearer(release, accepted)

    @property
    def has_budget(self) -> bool:
        """Whether an epsilon is limited, for clients or for their rows."""
        return min(self.budget.epsilon, self.row_budget.epsilon) < math.inf

    @property
    def reports_exactly(self) -> bool:
        """Whether validation clients report exact losses, which no budget covers."""
        return self.reports.exact or not self.has_budget

    @property
    def trainers_report(self) -> bool:
        """Whether training clients report, each with separate noise."""
        return self.reports.noise > 0 and self.role is Role.TRAIN

    @property
    def report_noise(self) -> float:
        """The nu of reports; 0 if they have no noise."""
        if self.role is Role.TRAIN:
            return self.reports.noise
        return 0.0 if self.reports_exactly else self.reports.noise or _REPORT_NOISE

    def check(self, task: TrainingSpec, hypotheses: int) -> None:
        """Raise `Refused` if the task, for so many hypotheses, violates the policy."""
        self._check_accepts(task.release_by)
        for refusal in self._violations(task, hypotheses):
            raise refusal

    def _violations(self, task: TrainingSpec, hypotheses: int) -> Iterator[Refused]:
        """Yield the refusal of each entry that a task violates."""
        rows = task.row_privacy
        if task.release_by is ReleaseBy.SITE and len(task.clients) < self.min_clients:
            few = f"the server asks for the sums of {len(task.clients)} clients; this site's sums need at least"
            yield Refused(f"{few} {self.min_clients} (min-clients): ask for more", code="refused.min-clients")
        if rows is None and self.protect is Protect.BOTH:
            # Otherwise noise that hides a client hides its rows, too.
            text = 'the server asks for training without a guarantee for rows; this site has protect = "both"'
            yield Refused(text, code="refused.rows")
        if rows and rows.noise_multiplier < self.rows.noise:
            least = f"this site accepts no less than {self.rows.noise}"
            yield Refused(
                f"the server asks for noise of rows {rows.noise_multiplier}; {least}", code="refused.row-noise"
            )
        if rows and rows.rate > self.rows.rate:
            text = f"the server asks for a rate of rows of {rows.rate}; this site accepts no more than {self.rows.rate}"
            yield Refused(text, code="refused.row-rate")
        if self.protect.clients or rows is None:
            nu = task.noise_multiplier
            if nu == 0 and not self.allow_unsanitised:
                text = "the server asks for an unsanitised release (noise multiplier 0)"
                yield Refused(text, code="refused.unsanitised")
            if nu < self.min_noise_multiplier:
                least = f"this site accepts no less than {self.min_noise_multiplier}"
                yield Refused(f"the server asks for noise multiplier {nu}; {least}", code="refused.noise")
        if self.clipping.mode is AcceptedRadius.PUBLIC and task.clipping is not Clipping.PUBLIC:
            text = f"the server asks for clipping {task.clipping.value!r}; this site accepts only a public clip norm"
            yield Refused(text, code="refused.clipping")
        if task.noise_multiplier > 0 and task.mechanism not in self.mechanisms.split() and not self.allow_unsanitised:
            text = f"the server asks for mechanism {task.mechanism!r}; this site accepts {self.mechanisms}"
            yield Refused(text, code="refused.mechanism")
        # A site's release always covers the choice, or its mechanism says what it lacks.
        is_open = task.choice_epsilon == 0 and task.release_by not in (ReleaseBy.SITE, ReleaseBy.SECURE)
        limited, most = hypotheses > 1 and math.isfinite(self.max_choice_epsilon), self.max_choice_epsilon
        if limited and (is_open or task.choice_epsilon > most):
            text = f"the server asks for choice-epsilon {task.choice_epsilon:g} among {hypotheses} hypotheses"
            yield Refused(f"{text}; this site accepts at most {most:g}, and no open choice (0)", code="refused.choice")
        steps = rows.steps if rows else task.local_steps
        if task.local_epochs > self.max_work.epochs or steps > self.max_work.steps:
            text = f"the server asks for local-epochs = {task.local_epochs} and local-steps = {steps}"
            yield Refused(f'{text}; the site\'s maximum is max-work = "{self.max_work}"', code="refused.work")
        if rows and not self.declares_rows:  # and a refusal of too many would say so
            text = "the server asks for training that hides rows; this site does not say how many a client has at most"
            yield Refused(f"{text}: set rows", code="refused.rows")
        if task.disclose_choice and not self.allow_unsanitised:
            yield Refused("the server asks which hypothesis each client chose", code="refused.disclose-choice")

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise `Refused` unless the site answers a question about the ranges of these columns."""
        if not self.ranges.cover(columns):
            text = f'the run asks for the ranges of {", ".join(columns)}; this site\'s ranges = "{self.ranges}"'
            raise Refused(f"{text} names other columns, or none", code="refused.ranges")

    def check_question(self, task: TrainingSpec, n: int, k: int) -> None:
        """Raise `Refused` if a question asks too few clients, or costs them too much."""
        if task.mechanism not in self.mechanisms.split():
            return  # `check` refuses it; a name may lead to any installed code
        if len(task.clients) < self.ranges.clients:
            few = f'the question asks {len(task.clients)} clients; this site\'s ranges = "{self.ranges}" wants more'
            raise Refused(few, code="refused.min-clients")
        cost = guarantee({released_by(task.release_by, task.release(n, k)): 1}, self.budget.delta or DELTA)
        if cost is None or cost.epsilon > self.ranges.epsilon:
            told = "has no price" if cost is None else f"costs {stated(cost)}"
            raise Refused(f'the question {told}; this site\'s ranges = "{self.ranges}"', code="refused.ranges")

    def check_terms(self, terms: Terms) -> None:
        """Raise `Refused` if the site takes no part in secure sums, or if sums on these terms may have too few sites,
        or too little noise without some."""
        self._check_accepts(ReleaseBy.SECURE)
        for name, asked, least in (
            ("least-parties", terms.least, self.least_parties),
            ("colluding-parties", terms.colluding, self.colluding_parties),
        ):
            if asked < least:
                raise Refused(
                    f"the server asks for a secure sum with {name} = {asked}; this site accepts no less than {least}",
                    code="refused.secure-terms",
                )

    def _check_accepts(self, release_by: str) -> None:
        """Raise `Refused` if results may not leave by a channel here."""
        if self.release is not AcceptedRelease.ANY and self.release != release_by:
            asked = {  # type: ignore[call-overload]
                ReleaseBy.CLIENT: "each client's own model",
                ReleaseBy.SITE: "sums over this site's clients",
                ReleaseBy.SECURE: "sums over several sites",
            }.get(release_by, release_by)
            text = f'the server asks for {asked}; this site has release = "{self.release}"'
            raise Refused(f"{text}: {_INSTEAD[self.release]}", code="refused.release")


_INSTEAD = {
    AcceptedRelease.CLIENT: 'set release = "site", or "any", if clients trust the site',
    AcceptedRelease.SITE: "use strategy site-average",
    AcceptedRelease.SECURE: "use strategy secure-average",
}
