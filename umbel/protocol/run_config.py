"""The run config: every key of ``[tool.flwr.app.config]``, with its default, its rule and its help."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from umbel.protocol.errors import ConfigError, ProtocolError
from umbel.protocol.options import AS_TEXT, Options
from umbel.protocol.plugins import distrust
from umbel.protocol.ranges import RangesBefore
from umbel.protocol.release import LAPLACE, LEAST_CLIP_NORM, Clipping, Protect, Release
from umbel.protocol.rules import Settings, key_of
from umbel.protocol.signatures import SIGNATURE
from umbel.protocol.tasks import (
    ROWS,
    ChoiceEpsilon,
    Name,
    Noised,
    NotNegative,
    Positive,
    RowSettings,
    TrainingSpec,
    Whole,
)

# More than any experiment needs, and few enough to fit a node's memory.
MAX_HYPOTHESES = 1000
MAX_CLIENTS = 1_000_000
"""Maximum number of clients that a node may report, unless a run sets another."""
AUTO = 0
"""Placeholder for a number of hypotheses that the strategy chooses (`umbel.strategies.how_many`)."""
_AUTO_MOST, _RELEASES_EACH = 8, 4
FOLDER_VERSION = 1
"""The version of the run folders that this umbel writes, and the only one that it reads."""


def _hypotheses(value: Any) -> Any:
    return AUTO if value == "auto" else value


Protected = Annotated[Protect, Field(strict=False)]


@dataclass(frozen=True)
class ClipSchedule(Options):
    """The clip norm of round t, of the key ``clipping``.

    Mode ``update``: `floor`. Mode ``public``: ``norm * decay**(t - 1)``, at least `floor`.
    """

    FIRST: ClassVar[str] = "mode"
    mode: Clipping = Clipping.PUBLIC
    norm: Positive = 2.0
    decay: Positive = 0.85
    floor: Positive = LEAST_CLIP_NORM

    def at(self, round: int) -> float:
        """Return the clip norm of a round, counted from 1; infinite if no number is as large."""
        if self.mode is Clipping.UPDATE:
            return self.floor
        try:
            return max(self.norm * self.decay ** (round - 1), self.floor)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Validation(Options):
    """Validations of a run, of the key ``validation``."""

    clients: Whole = 0
    every: Annotated[int, Field(ge=1)] = 1
    by: Literal["mean", "median"] = "mean"


@dataclass(frozen=True)
class NodeLimits(Options):
    """Limits for one node, of the key ``per-node``."""

    clients: Annotated[int, Field(ge=1)] = MAX_CLIENTS
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    update_norm: NotNegative = 0.0


@dataclass(frozen=True)
class Wait(Options):
    """When a run waits for nodes, of the key ``wait``."""

    nodes: Annotated[int, Field(ge=1)] = 1
    seconds: Positive = 300.0
    below: Annotated[int, Field(ge=1)] = 1
    pause: NotNegative = 86400.0


class RunConfig(Settings):
    """The configuration of a run. The server sets it, and a site's policy overrules it."""

    error = ConfigError
    source: ClassVar[str] = "the run config"
    listed: ClassVar[str] = "umbel config"
    SECTIONS: ClassVar[Mapping[str, str]] = {
        "strategy": "Model, data and strategy",
        "rounds": "Rounds",
        "local-epochs": "Local training",
        "protect": "Privacy; a site's own policy overrules these settings",
        "per-node": "Limits for one node",
        "observers": "Watching",
        "wait": "Waiting",
    }
    """Titles of the sections of pyproject.toml's table, by first key (`tools/defaults.py`)."""

    strategy: str = Field(
        "group-privacy",
        description="group-privacy, site-average, secure-average, trimmed-mean, geometric-median, fedavg, ifca, "
        "recommender, flower:Class for a strategy of Flower, or package.module:Class; options follow the name, as in "
        "group-privacy respawn=3",
    )
    dataset: str = Field(
        "synthetic",
        description='a name under $UMBEL_HOME/data or in datasets/, or an absolute path; "" if every node '
        "serves its own data",
    )
    model: str = Field(
        "",
        description="linear, mlp, cnn, cnn10, cnn-dropout, cnn-sigmoid, cnn10-sigmoid, lenet, lenet10, "
        "package.module:factory; sizes follow the name, as in linear inputs=3 outputs=1, "
        "mlp inputs=3 hidden=2 outputs=1, softmax features=100 classes=10, "
        "tanh-cnn filters=16,32 hidden=32 outputs=10, factors items=100 size=8, "
        "biased-factors items=100 size=8; "
        '"" for the model that the dataset names',
    )
    loss: str = Field(
        "",
        description='mse, rmse, cross-entropy, log, hinge, margin, or package.module:function; "" for the default',
    )
    metric: str = Field("", description='rmse, accuracy, or package.module:function; "" for the default')
    pretrained: str = Field(
        "",
        description="file with initial weights, safetensors or a state dict: a path, or a name in $UMBEL_HOME/models",
    )
    frozen: str = Field(
        "", description='name patterns of parameters that are neither trained nor sent, such as "conv* fc1.*"'
    )
    local: str = Field(
        "", description='name patterns of parameters that are trained but never leave the node, such as "head.*"'
    )
    hypotheses: Annotated[int, BeforeValidator(_hypotheses)] = Field(
        2,
        ge=AUTO,
        le=MAX_HYPOTHESES,
        description='k, the number of hypotheses; 0 or "auto" chooses it from the releases',
    )

    rounds: int = Field(100, ge=1, description="maximum number of rounds")
    patience: int = Field(
        0, ge=0, description="stop after this many validations without a better loss; 0 to run all rounds"
    )
    clients_per_round: int = Field(20, ge=1, description="U, training clients asked in each round")
    max_participations: int = Field(
        2,
        ge=0,
        description="maximum participations of a client; clients take turns; 0 for random draws without a maximum",
    )
    validation: Annotated[Validation, AS_TEXT] = Field(
        Validation(),
        description="clients asked in each validation, 0 for all; rounds from one to the next; by, how clients' losses "
        "are combined: mean, with outliers clipped, or median, if many sites may lie",
    )
    min_releases: int = Field(1, ge=1, description="a round with fewer releases does not change the hypotheses")
    restarts: int = Field(5, ge=1, description="random sets of initial hypotheses; validation clients pick the best")
    start_from: str = Field(
        "",
        description="run whose best hypotheses this one starts from, for new data or clients: its folder, or the "
        "folder's name; local parameters are new",
    )
    resume: str = Field(
        "",
        description="interrupted run to continue: its folder, or the folder's name; in simulation, counts for "
        "the nodes' limits and local parameters start again",
    )
    seed: int = Field(0, ge=0, description="seed of every draw in simulation; elsewhere only of the server's draws")

    local_epochs: Whole = Field(TrainingSpec.local_epochs, description="E, passes over a client's rows in a round")
    local_steps: Whole = Field(
        TrainingSpec.local_steps,
        description="minibatches of a round, each drawn from all rows; 0 trains by epochs instead",
    )
    step_size: Positive = Field(TrainingSpec.step_size, description="s, the step size of local training")
    batch_size: Whole = Field(TrainingSpec.batch_size, description="B; 0 for all of a client's rows at once")
    optimizer: str = Field(
        "sgd",
        description="sgd, momentum, adam or adamw, as in torch.optim; each round starts with a new state. Options "
        'follow the name, as in "momentum nesterov=true": momentum, nesterov, weight-decay, beta1, beta2, epsilon; '
        "clip-gradient, the maximum gradient norm of a step; proximal, mu of FedProx, which keeps clients near the "
        "round's hypotheses",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="cpu, cuda, or auto: the GPU if there is one")
    precision: Literal["float32", "tf32", "bf16"] = Field(
        "float32",
        description="in which a network computes: float32, or for large networks tf32 (on a GPU) or bf16, whose "
        "products are less exact; hypotheses, steps and updates are float32",
    )

    protect: Protected = Field(
        Protect.CLIENTS,
        description="clients: noise on what leaves hides a client's whole data; rows: noise in each training step "
        "hides each of its rows (DP-SGD), and noise-multiplier is 0; both",
    )
    noise_multiplier: NotNegative = Field(
        TrainingSpec.noise_multiplier,
        description="nu, noise per unit of clip norm; 0 for no noise, in simulation or if protect is rows",
    )
    mechanism: Name = Field(
        TrainingSpec.mechanism,
        description="noise mechanism: laplace, gaussian, discrete-gaussian, or package.module:Class",
    )
    choice_epsilon: ChoiceEpsilon = Field(
        TrainingSpec.choice_epsilon,
        description="epsilon of the randomised choice of a hypothesis; 0 for no randomisation, as in the paper",
    )
    delta: float = Field(
        1e-5,
        ge=0,
        lt=1,
        allow_inf_nan=False,
        description="delta at which the run states its guarantee; 0 for a pure epsilon",
    )
    noise_per: Noised = Field(
        TrainingSpec.noise_per,
        description="unit that gets separate noise: vector (all parameters together), layer or row",
    )
    clipping: Annotated[ClipSchedule, AS_TEXT] = Field(
        ClipSchedule(),
        description="public: clip to a public norm, which begins with norm and is multiplied by decay from one round "
        "to the next; update: to the norm of the client's update, as in the paper; the clip norm, or radius, is never "
        "below floor",
    )
    message_noise: NotNegative = Field(
        TrainingSpec.message_noise,
        description="sigma of the PAC paper's noisy messages; the guarantee does not count it",
    )

    rows: Annotated[Annotated[RowSettings, AS_TEXT] | None, BeforeValidator(lambda value: value or None)] = Field(
        None,
        description='with protect = "rows" or "both", as in "clip=1 noise=1.1 rate=0.1 batch=256": C, the norm to '
        "which the gradient of each row is clipped; sigma, the noise of each training step per unit of C; q, the "
        "probability of each row to be drawn in a step; B, the public number by which a step's sum of gradients is "
        "divided, such as q times the rows of a typical client. Steps are local-steps, or local-epochs / q, and "
        "batch-size has no effect",
    )

    per_node: Annotated[NodeLimits, AS_TEXT] = Field(
        NodeLimits(),
        description="limits for one node: nodes that report more clients are left out; share is a node's maximum share "
        "of a round's clients; longer updates than update-norm are left out (0: those beyond the clip norm if clipping "
        "is public, otherwise 1,000,000). The first two not in simulation",
    )

    ranges: Annotated[Annotated[RangesBefore, AS_TEXT] | None, BeforeValidator(lambda value: value or None)] = Field(
        None,
        description="the release that answered a question about ranges before the run (umbel ranges), as in "
        '"parameters=348 noise=14 mechanism=gaussian by=site"; the stated guarantee counts it',
    )

    observers: str = Field(
        "",
        description='mlflow, tensorboard, or callbacks of the run, as "package.module:Class name=value", separated '
        "by ;",
    )

    wait: Annotated[Wait, AS_TEXT] = Field(
        Wait(),
        description="nodes that must be connected before round 1, and maximum seconds to wait for them; a node imports "
        "PyTorch before its first reply. A later round waits while nodes below a number can be asked, and pause "
        "seconds at most, after which the run fails; not in simulation",
    )
    round_timeout: Positive = Field(3600.0, description="seconds to wait for a round's replies")
    quorum: Positive = Field(1.0, le=1, description="share of a round's clients whose replies close the round")
    signature: str = Field(
        "", description="signature of these settings, from umbel sign, for sites that list researchers"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_releases > self.clients_per_round:
            text = f"min-releases = {self.min_releases} exceeds clients-per-round = {self.clients_per_round}; lower it"
            raise ValueError(text)
        if math.isinf(self.clipping.at(self.rounds)):
            made = f"makes the clip norm infinite within {self.rounds} rounds; lower it"
            raise ValueError(f"clipping: decay = {self.clipping.decay} {made}")
        if self.mechanism != LAPLACE and self.clipping.mode is Clipping.UPDATE and self.noise_multiplier:
            text = f'mechanism = "{self.mechanism}" needs a public clip norm; set clipping = "public"'
            raise ValueError(text)
        if self.max_participations and self.per_node.share < 1:
            text = "max-participations and the share of per-node cannot be combined; set max-participations = 0"
            raise ValueError(f"{text}, or leave share out")
        if not (self.local_epochs or self.local_steps):
            raise ValueError("local-epochs = 0 and local-steps = 0 train nothing; set one of them")
        self._check_protection()
        try:
            self.training()  # which a node would refuse after the run has begun
        except ProtocolError as error:
            raise ValueError(error.text) from None
        return self

    def _check_protection(self) -> None:
        """Raise `ValueError` if settings of rows and `protect` do not fit together."""
        if not self.protect.rows:
            if self.rows:
                text = 'rows has no effect with protect = "clients"; set protect = "rows" or "both"'
                raise ValueError(f"{text}, or leave it out")
            return
        if not self.rows:
            text = f'protect = "{self.protect}" needs rows = "clip=C noise=sigma rate=q batch=B"'
            raise ValueError(f"{text}; umbel plan --row-epsilon finds them")
        if self.precision != "float32":
            text = f'protect = "{self.protect}" clips the gradient of each row in 32 bits'
            raise ValueError(f'{text}; leave precision = "{self.precision}" out')
        if self.protect is Protect.ROWS and self.noise_multiplier:
            text = f'protect = "rows" adds no noise to models, and noise-multiplier is {self.noise_multiplier:g}'
            raise ValueError(f'{text}; set noise-multiplier = 0, or protect = "both"')
        if self.protect is Protect.BOTH and not self.noise_multiplier:
            raise ValueError('protect = "both" needs noise on models; set a noise-multiplier, or protect = "rows"')

    @property
    def strategy_name(self) -> str:
        """The strategy without its options."""
        return self.strategy.partition(" ")[0]

    @property
    def strategy_options(self) -> str:
        """The strategy's options, as ``name=value name=value``."""
        return self.strategy.partition(" ")[2]

    @property
    def most_hypotheses(self) -> int:
        """k, or the largest k tried where it is chosen: small enough that each hypothesis gets several releases a
        round."""
        if self.hypotheses != AUTO:
            return self.hypotheses
        return min(_AUTO_MOST, max(2, self.clients_per_round // _RELEASES_EACH))

    @property
    def most_participations(self) -> int:
        """Maximum number of a client's participations: at most one in each round."""
        return min(self.rounds, self.max_participations or self.rounds)

    @property
    def most_reports(self) -> int:
        """Maximum number of a client's reports: for each set of initial hypotheses, in each round, and after the
        last."""
        return self.restarts + self.rounds + 1

    def training(self, round: int = 1) -> TrainingSpec:
        """Return the template of a round's task for training clients."""
        said = {entry.name: getattr(self, entry.name) for entry in fields(TrainingSpec) if hasattr(self, entry.name)}
        said |= {"clipping": self.clipping.mode, "clip_norm": self.clipping.at(round)}
        if rows := self.rows:
            said |= zip(ROWS, vars(rows).values(), strict=True)
        return TrainingSpec(**said)

    @property
    def before(self) -> Release | None:
        """The release that answered a question about ranges before the run, if there was one."""
        return self.ranges.release if self.ranges else None

    def release(self, n: int, hypotheses: int) -> Release:
        """Return a training client's release of a model of n parameters, one for each participation."""
        return self.training().release(n, hypotheses)

    def entries(self) -> dict[str, Any]:
        """Return the config as Flower passes it to the app: kebab-case keys, plain values."""
        plain = {key_of(name): str(value) if isinstance(value, str | Options) else value for name, value in self}
        return {key: "" if value is None else value for key, value in plain.items()}

    def unsigned(self) -> dict[str, Any]:
        """Return the entries without the signature: what it covers, and what people approve."""
        return {key: value for key, value in self.entries().items() if key != SIGNATURE}


def read_saved(text: str) -> dict[str, Any]:
    """Return the content of a run's ``config.toml``. Its names are not trusted: the folder may come from others.

    Raises
    ------
    ConfigError
        If its folder is of another version, or it holds control characters, which a terminal would act on.
    """
    try:
        saved = tomllib.loads(text)
    except RecursionError:
        raise ConfigError("config.toml is nested too deep; restore an intact copy", code="config.unreadable") from None
    if isinstance(config := saved.get("config"), dict):
        if (version := saved.get("version")) != FOLDER_VERSION:
            raise ConfigError(
                f"the run's folder has version {version!r}, but this umbel reads version {FOLDER_VERSION}; read it "
                "with the umbel that made it, or run it again",
                code="config.version",
            )
        distrust(*config.values())
        if odd := [one for one in (*config, *config.values()) if isinstance(one, str) and not one.isprintable()]:
            raise ConfigError(
                f"config.toml holds {odd[0]!r}, which no terminal can print; remove it", code="config.unprintable"
            )
    return saved
