"""A site's policy: every entry of a node's configuration, its meaning, and the tasks that it refuses.

`Policy.check` refuses a task. Other refusals are elsewhere: a client over budget in `umbel.privacy.gate.charges`, a
release without a price in `umbel.privacy.gate.site`, and a run without approval in `umbel.privacy.gate.consent`.
`umbel.privacy.gate.refusals` makes the reply. Each has a code of ``refused.``; docs/reference/errors.md lists them.
"""

from __future__ import annotations

import json
import math
import re
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from umbel.privacy.mechanisms import MECHANISMS
from umbel.privacy.secure.terms import Terms
from umbel.protocol.errors import Refused, SiteError
from umbel.protocol.plugins import parse_pairs, unknown_name
from umbel.protocol.release import (
    LAPLACE,
    Clipping,
    ClipSchedule,
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
    return str(value) if math.isnan(number) else number


def _unlimited(value: Any, entry: ValidationInfo) -> Any:
    """Return a number; it is infinite only if it is written as the text "inf".

    A number too large for a machine would be read as infinite: it was meant as a limit, and would be none.
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


Text = Annotated[str, BeforeValidator(str)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number)]
Unlimited = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_unlimited)]
Whole = Annotated[int, BeforeValidator(_whole)]

_COUNTS = "local_epochs", "local_steps", "examples", "participations", "evaluations", "evaluations_in_all"
"""Settings whose largest number is an integer or infinite."""
_LIMITS = "budget", "row_budget", "paper_budget", "max_participations"
_EXACT = "set a budget, leave exact-losses out, or limit reports with max-evaluations"
_REPORT_NOISE = 10.0
DIGEST = 16
"""Hex digits that identify a policy."""


class Policy(Settings):
    """The entries of a node's configuration."""

    error = SiteError
    source: ClassVar[str] = "this node's configuration"

    data_path: Text = Field("", description="absolute path of the site's data: a dataset, or a table")
    reader: Text = Field("", description="function that reads a table, as package.module:function")
    reader_options: Text = Field("", description='options of the reader, as "name=value name=value"')
    role: Annotated[Role, Field(strict=False)] = Field(
        Role.TRAIN,
        description="train: all clients train; validation: all report their loss; split: the data's manifest decides",
    )
    place: Text = Field(
        "0/1", description='"i/n": the node hosts clients i, i + n, ... of a dataset that n nodes share'
    )
    protect: Annotated[Protect, Field(strict=False)] = Field(
        Protect.CLIENTS,
        description="what each release must hide: clients: a client's whole data; rows: at least each row of a client, "
        "by noise in training; both: each by separate noise",
    )
    min_noise_multiplier: Number = Field(1.0, ge=0, description="smallest nu that the site accepts; above 0")
    clipping: Annotated[AcceptedRadius, Field(strict=False)] = Field(
        AcceptedRadius.PUBLIC,
        description="public: accept only a public clip norm; any: also the paper's clipping, which guarantees nothing",
    )
    clip_norm_floor: Number = Field(
        ClipSchedule.floor, ge=0, description="smallest clip norm; the site raises smaller ones to it; above 0"
    )
    release: Annotated[AcceptedRelease, Field(strict=False)] = Field(
        AcceptedRelease.CLIENT,
        description="client: each client's model, with separate noise; site: only sums over the site's clients, with "
        "noise added once, if the clients trust the site; secure: only sums over the sites in parties, to which each "
        "adds a share of the noise; any: as the run asks",
    )
    parties: Text = Field(
        "",
        description='public keys of the sites for secure sums, this one included, as "name=key name=key"',
    )
    party_key: Text = Field("", description="absolute path of this site's private SSH key in parties")
    least_parties: Whole = Field(
        3, ge=2, description="fewest sites asked for a secure sum; more than half of them must reply"
    )
    colluding_parties: Whole = Field(
        0,
        ge=0,
        description="sites that may tell the server everything: a secure sum has enough noise without theirs",
    )
    min_clients: Whole = Field(
        10, ge=1, description="fewest clients in a site's sums; a round with fewer is refused, and none is charged"
    )
    max_hypotheses: Whole = Field(
        10,
        ge=1,
        description="largest k that the site accepts; an open choice reveals up to log2 k bits each time",
    )
    max_choice_epsilon: Unlimited = Field(
        2.0,
        gt=0,
        description="largest choice-epsilon that the site accepts; a finite one refuses choices without randomisation",
    )
    mechanisms: Text = Field(
        LAPLACE,
        description="accepted noise mechanisms, separated by spaces: laplace, gaussian, discrete-gaussian, "
        "package.module:Class",
    )
    max_local_epochs: Unlimited = Field(100, ge=1, description="maximum local epochs of a round")
    max_local_steps: Unlimited = Field(1000, ge=1, description="maximum local steps of a round")
    max_examples: Unlimited = Field(
        10_000_000,
        ge=1,
        description="maximum rows that a client computes in a round, each pass counted; further passes are left out; "
        "training that hides rows has no such limit, since its steps may not depend on the number of rows",
    )
    max_rows: Whole = Field(
        2000,
        ge=1,
        description="largest number of rows of a client, where rows are protected: everybody may know it, a site with "
        "a larger client refuses everything, and each message must leave time for clients of this size",
    )
    max_seconds: Unlimited = Field(
        3600.0, gt=0, description="maximum seconds of computation for a message, shared equally among its clients"
    )
    budget: Unlimited = Field(
        8.0,
        ge=0,
        description="maximum epsilon between any two data sets of a client, over all its releases in all runs",
    )
    delta: Number = Field(0.0, ge=0, lt=1, description="delta of the budget; 0 for a pure epsilon")
    row_budget: Unlimited = Field(
        math.inf,
        ge=0,
        description="maximum epsilon for a row of a client that is added or removed, over all the client's releases",
    )
    row_delta: Number = Field(
        0.0, ge=0, lt=1, description="delta of row-budget; above 0 for noise in training, which has no pure epsilon"
    )
    min_row_noise_multiplier: Number = Field(
        0.5, ge=0, description="smallest row-noise-multiplier that the site accepts, if a run protects rows; above 0"
    )
    max_row_rate: Number = Field(
        1.0, gt=0, le=1, description="largest row-rate that the site accepts; a row-budget then counts less a step"
    )
    paper_budget: Unlimited = Field(
        math.inf, ge=0, description="maximum of a client's paper budget, the sum of n/nu over its releases: a heuristic"
    )
    max_participations: Unlimited = Field(math.inf, ge=0, description="maximum number of a client's releases")
    max_evaluations: Unlimited = Field(
        1000, ge=1, description="maximum evaluations for one run, which needs one a round and a few before round 1"
    )
    max_evaluations_in_all: Unlimited = Field(math.inf, ge=1, description="maximum evaluations for all runs together")
    ledger_path: Text = Field("", description="file of the ledger; by default $UMBEL_HOME/ledger.sqlite")
    approve: Annotated[Approval, Field(strict=False)] = Field(
        Approval.POLICY,
        description="policy: answer every run that the policy allows; ask: only runs that the site's people approved",
    )
    researchers: Text = Field(
        "",
        description='public keys of researchers, as "name=key name=key"; the site then answers signed runs of theirs, '
        "and every other run waits for approval",
    )
    strategies: Text = Field(
        "", description="strategies of a run that the site accepts, separated by spaces; all if empty"
    )
    policy_file: Text = Field(
        "", description="absolute path of a policy.toml with these entries, which all other entries may only narrow"
    )
    app: Text = Field(
        "",
        description="ClientApp that the site's executor runs, as package.module:app; by default umbel's",
    )
    app_keys: Text = Field(
        "",
        description="entries of the node's configuration that only that app reads, separated by spaces",
    )
    bundle: Text = Field(
        "",
        description="SHA-256 of the bundles that the site has reviewed, separated by spaces; by default that of the "
        "installed umbel",
    )
    exact_losses: Flag = Field(
        False,
        description="validation clients report exact losses, which no budget counts, as they always do without a "
        "budget; otherwise the site reports their mean, with noise, and charges each of them",
    )
    report_noise_multiplier: Number = Field(
        0.0,
        ge=0,
        description="nu of reports with noise; 0 means 10 for validation clients' mean, and no reports of training "
        "clients; above 0 these report too, each with separate noise",
    )
    report_bound: Number = Field(1.0, gt=0, description="reports with noise are clipped to lie between 0 and this")
    keep_model: Text = Field("", description="folder for each client's best hypothesis at the end of a run")
    personalise: Text = Field(
        Personal.NO.value,
        description="how the site personalises the kept models: no, calibrate, mixture, bayes, fine-tune, "
        "interpolate, package.module:function, or auto: the method that best suits the client's rows",
    )
    personalise_epochs: Whole = Field(10, ge=1, description="epochs of such a method, if it trains")
    noise_all_items: Flag = Field(
        False, description="in simulation: if a run has message-noise, add it to all rows, not only to changed ones"
    )
    balanced_batches: Flag = Field(
        False, description="fill each minibatch with equally many rows of label 1 (liked) and of label -1"
    )
    allow_unsanitised: Flag = Field(
        False, description="in simulation only: releases without noise, and chosen hypotheses, may leave the node"
    )
    insecure_seed: Flag = Field(
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
        for name in _COUNTS:
            value = getattr(self, f"max_{name}")
            if not (math.isinf(value) or float(value).is_integer()):
                raise ValueError(f"max-{name.replace('_', '-')} must be a whole number, got {value}")
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
        if self.delta > 0 and math.isinf(self.budget):
            raise ValueError("delta needs a budget: set budget, or leave delta out")
        if self.row_delta > 0 and math.isinf(self.row_budget):
            raise ValueError("row-delta needs a row-budget: set row-budget, or leave row-delta out")
        if self.protect is Protect.ROWS and math.isfinite(self.budget):
            text = 'protect = "rows" accepts models without a guarantee for the client, which no budget covers'
            raise ValueError(f'{text}: set budget = "inf", and row-budget')
        if ":" not in self.personalise and self.personalise not in {*Personal}:
            raise ValueError(unknown_name("personalise", self.personalise, Personal))
        if self.personalise != Personal.NO and not self.keep_model:
            raise ValueError("personalise needs kept models: set keep-model, or leave personalise out")
        if "personalise_epochs" in self.model_fields_set and self.personalise == Personal.NO:
            raise ValueError("personalise-epochs has no effect without personalise: set it, or leave both out")
        if self.report_noise_multiplier > 0 and self.reports_exactly and self.role is not Role.TRAIN:
            raise ValueError(f"report-noise-multiplier adds no noise to exact losses of role {self.role}: {_EXACT}")
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
        limits = {name for name in _LIMITS if getattr(self, name) < math.inf}
        return bool(limits & self.model_fields_set)

    @property
    def dearest_of_rows(self) -> Release | None:
        """The participation that reveals most of a row among all that the site accepts; None if there is none, or no
        row-budget."""
        if math.inf in (self.row_budget, self.max_local_steps) or not self.min_row_noise_multiplier > 0:
            return None
        chooses = self.max_hypotheses > 1
        if chooses and math.isinf(self.max_choice_epsilon):
            return None
        rows = RowPrivacy(1.0, self.min_row_noise_multiplier, self.max_row_rate, 1.0, int(self.max_local_steps))
        # The steps cost the same for any number of parameters, and a choice between two reveals most.
        return participation(1, 2 if chooses else 1, 0.0, choice_epsilon=self.max_choice_epsilon, rows=rows)

    @property
    def reports_exactly(self) -> bool:
        """Whether validation clients report exact losses, which no budget covers."""
        return self.exact_losses or (math.isinf(self.budget) and math.isinf(self.row_budget))

    @property
    def trainers_report(self) -> bool:
        """Whether training clients report, each with separate noise."""
        return self.report_noise_multiplier > 0 and self.role is Role.TRAIN

    @property
    def report_noise(self) -> float:
        """The nu of reports; 0 if they have no noise."""
        if self.role is Role.TRAIN:
            return self.report_noise_multiplier
        return 0.0 if self.reports_exactly else self.report_noise_multiplier or _REPORT_NOISE

    def check(self, task: TrainingSpec, hypotheses: int) -> None:
        """Raise `Refused` if the task, for so many hypotheses, violates the policy."""
        self._check_release(task)
        self._check_rows(task)
        if self.protect.clients or task.row_privacy is None:
            self._check_noise(task)
        if self.clipping is AcceptedRadius.PUBLIC and task.clipping is not Clipping.PUBLIC:
            raise Refused(
                f"the server asks for clipping {task.clipping.value!r}; this site accepts only a public clip norm",
                code="refused.clipping",
            )
        if task.noise_multiplier > 0 and task.mechanism not in self.mechanisms.split() and not self.allow_unsanitised:
            raise Refused(
                f"the server asks for mechanism {task.mechanism!r}; this site accepts {self.mechanisms or 'none'}",
                code="refused.mechanism",
            )
        limited = hypotheses > 1 and math.isfinite(self.max_choice_epsilon)
        # A site's release always covers the choice, or its mechanism says what it lacks.
        is_open = task.choice_epsilon == 0 and task.release_by is ReleaseBy.CLIENT
        if limited and (is_open or task.choice_epsilon > self.max_choice_epsilon):
            raise Refused(
                f"the server asks for choice-epsilon {task.choice_epsilon:g} among {hypotheses} hypotheses; "
                f"this site accepts at most {self.max_choice_epsilon:g}, and no open choice (0)",
                code="refused.choice",
            )
        for key, asked, most in (
            ("local-epochs", task.local_epochs, self.max_local_epochs),
            ("local-steps", rows.steps if (rows := task.row_privacy) else task.local_steps, self.max_local_steps),
        ):
            if asked > most:
                raise Refused(
                    f"the server asks for {key} = {asked}; the site's maximum is {most:g}", code="refused.work"
                )
        if task.disclose_choice and not self.allow_unsanitised:
            raise Refused("the server asks which hypothesis each client chose", code="refused.disclose-choice")

    def _check_noise(self, task: TrainingSpec) -> None:
        """Raise `Refused` if the task's noise does not hide a client."""
        if task.noise_multiplier == 0 and not self.allow_unsanitised:
            raise Refused("the server asks for an unsanitised release (noise multiplier 0)", code="refused.unsanitised")
        if task.noise_multiplier < self.min_noise_multiplier:
            raise Refused(
                f"the server asks for noise multiplier {task.noise_multiplier}; "
                f"this site accepts no less than {self.min_noise_multiplier}",
                code="refused.noise",
            )

    def _check_rows(self, task: TrainingSpec) -> None:
        """Raise `Refused` if the task's training does not hide rows as the site demands, or cannot."""
        if (rows := task.row_privacy) is None:
            # Noise that hides a client hides its rows, too.
            if self.protect is Protect.BOTH:
                text = 'the server asks for training without a guarantee for rows; this site has protect = "both"'
                raise Refused(text, code="refused.rows")
            return
        if rows.noise_multiplier < self.min_row_noise_multiplier:
            raise Refused(
                f"the server asks for row-noise-multiplier {rows.noise_multiplier}; "
                f"this site accepts no less than {self.min_row_noise_multiplier}",
                code="refused.row-noise",
            )
        if rows.rate > self.max_row_rate:
            text = f"the server asks for row-rate {rows.rate}; this site accepts no more than {self.max_row_rate}"
            raise Refused(text, code="refused.row-rate")
        if self.balanced_batches:
            text = "the server asks for training that hides rows; balanced-batches fills batches by their labels"
            raise Refused(text, code="refused.rows")

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

    def _check_release(self, task: TrainingSpec) -> None:
        """Raise `Refused` if the task's party may not add the noise here, or too few clients are asked."""
        self._check_accepts(task.release_by)
        if task.release_by is ReleaseBy.SITE and len(task.clients) < self.min_clients:
            raise Refused(
                f"the server asks for the sums of {len(task.clients)} clients; this site's sums need at least "
                f"{self.min_clients} (min-clients): ask for more clients a round",
                code="refused.min-clients",
            )

    def _check_accepts(self, release_by: ReleaseBy) -> None:
        """Raise `Refused` if a party may not add the noise here."""
        if self.release not in {AcceptedRelease.ANY, AcceptedRelease(release_by.value)}:
            asked = {
                ReleaseBy.CLIENT: "each client's own model",
                ReleaseBy.SITE: "sums over this site's clients",
                ReleaseBy.SECURE: "sums over several sites",
            }[release_by]
            text = f'the server asks for {asked}; this site has release = "{self.release}"'
            raise Refused(f"{text}: {_INSTEAD[self.release]}", code="refused.release")


_INSTEAD = {
    AcceptedRelease.CLIENT: 'set release = "site", or "any", if clients trust the site',
    AcceptedRelease.SITE: "use strategy site-average",
    AcceptedRelease.SECURE: "use strategy secure-average",
}
