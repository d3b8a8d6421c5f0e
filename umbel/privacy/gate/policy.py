"""A site's policy: every entry of a node's configuration, what it means, and what it refuses.

`Policy.check` refuses a task. Other refusals are elsewhere: a client over budget in `umbel.privacy.gate.charges`, a
release without a price in `umbel.privacy.gate.site`, and a run without approval in `umbel.privacy.gate.consent`.
`umbel.privacy.gate.refusals` makes the reply. Each has a code of ``refused.``; docs/errors.md lists them.
"""

from __future__ import annotations

import math
import re
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from umbel.privacy.mechanisms import MECHANISMS
from umbel.protocol.errors import Refused, SiteError
from umbel.protocol.release import LAPLACE, Clipping, ClipSchedule, ReleaseBy
from umbel.protocol.rules import Settings
from umbel.protocol.tasks import TrainingSpec


class Role(StrEnum):
    """What a site's clients do: all train, all report without noise, or as the data's manifest says."""

    TRAIN = "train"
    VALIDATION = "validation"
    SPLIT = "split"


class AcceptedRelease(StrEnum):
    """Who may add the noise: each client to its own, the site once for all of them, or either, as a run asks."""

    CLIENT = "client"
    SITE = "site"
    ANY = "any"


class AcceptedRadius(StrEnum):
    """Which clipping a site accepts: only a clip norm that everybody knows, or the paper's as well, a heuristic."""

    ANY = "any"
    PUBLIC = "public"


class Approval(StrEnum):
    """What a run needs before the site answers it: only to fit the policy, or that the site's people approve it."""

    POLICY = "policy"
    ASK = "ask"


class Personal(StrEnum):
    """What a site makes of a client's best hypothesis before it keeps it.

    Nothing, or it is trained further on the client's rows, or that is mixed with it as suits rows kept apart.
    """

    NO = "no"
    FINE_TUNE = "fine-tune"
    INTERPOLATE = "interpolate"


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


Text = Annotated[str, BeforeValidator(str)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number)]
Unlimited = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_unlimited)]
Whole = Annotated[int, BeforeValidator(_whole)]

_COUNTS = "local_epochs", "local_steps", "examples", "participations", "evaluations", "evaluations_in_all"
"""Of which the largest number is a whole number, or infinite."""
_LIMITS = "budget", "paper_budget", "max_participations"
_EXACT = "set a budget, leave exact-losses out, or limit reports with max-evaluations"
_REPORT_NOISE = 10.0


class Policy(Settings):
    """The entries of a node's configuration, and what each means."""

    error = SiteError
    source: ClassVar[str] = "this node's configuration"

    data_path: Text = Field("", description="the site's data: a dataset, or a table; an absolute path")
    reader: Text = Field("", description="for a table: the function that reads it, as package.module:function")
    reader_options: Text = Field("", description='the reader\'s options, as "name=value name=value"')
    role: Annotated[Role, Field(strict=False)] = Field(
        Role.TRAIN,
        description="train: all clients train; validation: all report their loss; split: as the data's manifest says",
    )
    place: Text = Field(
        "0/1", description='"i/n": the node hosts clients i, i + n, ... of a dataset that other nodes host too'
    )
    min_noise_multiplier: Number = Field(1.0, ge=0, description="the lowest nu it accepts; above 0")
    clipping: Annotated[AcceptedRadius, Field(strict=False)] = Field(
        AcceptedRadius.PUBLIC,
        description="public: accept only a public clip norm; any: the paper's as well, a heuristic",
    )
    clip_norm_floor: Number = Field(
        ClipSchedule.floor, ge=0, description="the smallest clip norm, whatever the server asks; above 0"
    )
    release: Annotated[AcceptedRelease, Field(strict=False)] = Field(
        AcceptedRelease.CLIENT,
        description="client: each client's model, with noise of its own; site: sums over the site's clients, which "
        "trust it, with noise once; any: as a run asks",
    )
    min_clients: Whole = Field(
        10, ge=1, description="a site's sums are of no fewer clients; where fewer can pay, none is charged"
    )
    max_hypotheses: Whole = Field(
        10, ge=1, description="the largest k it accepts; an open choice among them tells log2 k bits an answer"
    )
    max_choice_epsilon: Unlimited = Field(
        2.0,
        gt=0,
        description="the largest choice-epsilon it accepts; below inf it refuses an open choice among hypotheses",
    )
    mechanisms: Text = Field(
        LAPLACE, description="what noise it accepts: laplace, gaussian, package.module:Class, separated by spaces"
    )
    max_local_epochs: Unlimited = Field(100, ge=1, description="the most epochs a round that it accepts")
    max_local_steps: Unlimited = Field(1000, ge=1, description="the most steps a round that it accepts")
    max_examples: Unlimited = Field(
        10_000_000,
        ge=1,
        description="how often rows are computed on in a client's round; passes beyond it are left out",
    )
    max_seconds: Unlimited = Field(
        3600.0, gt=0, description="how long it computes for a message, of which each client has its share"
    )
    budget: Unlimited = Field(
        8.0,
        ge=0,
        description="the largest epsilon between any two data sets of a client, over all it ever released",
    )
    delta: Number = Field(0.0, ge=0, lt=1, description="with which the budget holds; 0 for a pure epsilon")
    paper_budget: Unlimited = Field(
        math.inf, ge=0, description="the most a client may spend by the paper's count, a sum of n/nu: a heuristic"
    )
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
    app: Text = Field(
        "",
        description="the ClientApp with which the site's executor answers, as package.module:app; by default umbel's "
        "own",
    )
    app_keys: Text = Field(
        "",
        description="entries of the node's configuration that are for that app, and none of these; separated by spaces",
    )
    bundle: Text = Field(
        "", description="SHA-256 of the bundles it has reviewed, separated by spaces; by default that of its own umbel"
    )
    exact_losses: Flag = Field(
        False,
        description="whether validation clients report exact losses, outside the budget; where there is no budget they "
        "do. Otherwise the site reports their mean, with noise, and each of them is charged",
    )
    report_noise_multiplier: Number = Field(
        0.0,
        ge=0,
        description="nu of reports with noise. 0: of validation clients' mean 10, and training clients report nothing; "
        "above 0 each of them reports, with separate noise",
    )
    report_bound: Number = Field(
        1.0, gt=0, description="numbers that are reported with noise are clipped to lie between 0 and this"
    )
    keep_model: Text = Field("", description="folder for each client's best hypothesis at the end of a run")
    personalise: Annotated[Personal, Field(strict=False)] = Field(
        Personal.NO,
        description="what becomes of it first, here: fine-tune: it is trained on the client's rows; interpolate: and "
        "mixed with the result as suits rows kept apart",
    )
    personalise_epochs: Whole = Field(10, ge=1, description="for how long that training goes on")
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
        for name in _COUNTS:
            value = getattr(self, f"max_{name}")
            if not (math.isinf(value) or float(value).is_integer()):
                raise ValueError(f"max-{name.replace('_', '-')} must be a whole number, got {value}")
        if unknown := [name for name in self.mechanisms.split() if name not in MECHANISMS and ":" not in name]:
            raise ValueError(
                f"mechanisms must be {', '.join(MECHANISMS)} or package.module:Class, separated by spaces, "
                f"got {unknown[0]!r}"
            )
        if not self.mechanisms.split():
            raise ValueError("mechanisms must name one at least")
        if self.delta > 0 and math.isinf(self.budget):
            raise ValueError("delta is of a budget, and there is none: set budget, or leave delta out")
        if self.personalise is not Personal.NO and not self.keep_model:
            raise ValueError("personalise is of the models that a site keeps: set keep-model, or leave it out")
        if "personalise_epochs" in self.model_fields_set and self.personalise is Personal.NO:
            raise ValueError('personalise-epochs trains nothing: set personalise = "fine-tune" or "interpolate"')
        if self.report_noise_multiplier > 0 and self.reports_exactly and self.role is not Role.TRAIN:
            raise ValueError(f"report-noise-multiplier adds no noise to exact losses of role {self.role}: {_EXACT}")
        if self.reports_exactly and self.role is Role.VALIDATION and self.sets_limits:
            # It would look like a limit on what the site's clients tell.
            raise ValueError(f"budget, paper-budget and max-participations bound no exact losses: {_EXACT}")
        return self

    @property
    def sets_limits(self) -> bool:
        """Whether the site itself limits what a client may give, and not the defaults alone."""
        limits = {name for name in _LIMITS if getattr(self, name) < math.inf}
        return bool(limits & self.model_fields_set)

    @property
    def reports_exactly(self) -> bool:
        """Whether validation clients report exact losses, which no budget covers."""
        return self.exact_losses or math.isinf(self.budget)

    @property
    def trainers_report(self) -> bool:
        """Whether training clients report, each with separate noise."""
        return self.report_noise_multiplier > 0 and self.role is Role.TRAIN

    @property
    def report_noise(self) -> float:
        """The nu of reports; 0 where they have none."""
        if self.role is Role.TRAIN:
            return self.report_noise_multiplier
        return 0.0 if self.reports_exactly else self.report_noise_multiplier or _REPORT_NOISE

    def check(self, task: TrainingSpec, hypotheses: int) -> None:
        """Raise `Refused` when the task, among so many hypotheses, goes below the policy."""
        self._check_release(task)
        if task.noise_multiplier == 0 and not self.allow_unsanitised:
            raise Refused("the server asks for an unsanitised release (noise multiplier 0)", code="refused.unsanitised")
        if task.noise_multiplier < self.min_noise_multiplier:
            raise Refused(
                f"the server asks for noise multiplier {task.noise_multiplier}; "
                f"this site accepts no less than {self.min_noise_multiplier}",
                code="refused.noise",
            )
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
        # A site's release covers the choice by itself, or its mechanism says what it lacks.
        is_open = task.choice_epsilon == 0 and task.release_by is ReleaseBy.CLIENT
        if limited and (is_open or task.choice_epsilon > self.max_choice_epsilon):
            raise Refused(
                f"the server asks for choice-epsilon {task.choice_epsilon:g} among {hypotheses} hypotheses; "
                f"this site accepts {self.max_choice_epsilon:g} at most, and none that is open (0)",
                code="refused.choice",
            )
        for key, asked, most in (
            ("local-epochs", task.local_epochs, self.max_local_epochs),
            ("local-steps", task.local_steps, self.max_local_steps),
        ):
            if asked > most:
                raise Refused(f"the server asks for {key} = {asked}; the site's most is {most:g}", code="refused.work")
        if task.disclose_choice and not self.allow_unsanitised:
            raise Refused("the server asks which hypothesis each client chose", code="refused.disclose-choice")

    def _check_release(self, task: TrainingSpec) -> None:
        """Raise `Refused` where another would add the noise than the site says, or too few clients are asked."""
        if task.release_by is ReleaseBy.CLIENT:
            if self.release is AcceptedRelease.SITE:
                raise Refused(
                    "the server asks for each client's own model; this site releases sums over its clients alone "
                    '(release = "site"): use strategy site-average',
                    code="refused.release",
                )
        elif self.release is AcceptedRelease.CLIENT:
            raise Refused(
                "the server asks for sums over this site's clients; here each client releases its own model: set "
                'release = "site", or "any", if they trust the site',
                code="refused.release",
            )
        elif len(task.clients) < self.min_clients:
            raise Refused(
                f"the server asks for the sums of {len(task.clients)} clients; this site's are of {self.min_clients} "
                "at least (min-clients): ask for more clients a round",
                code="refused.min-clients",
            )
