"""The run config: every key of ``[tool.flwr.app.config]``, with its default, its rule and its help."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from umbel.protocol.errors import ConfigError, ProtocolError
from umbel.protocol.plugins import distrust, parse_options
from umbel.protocol.release import LAPLACE, MAX_CHOICE_EPSILON, Clipping, ClipSchedule, NoisePer, Protect, Release
from umbel.protocol.rules import Settings
from umbel.protocol.signatures import SIGNATURE
from umbel.protocol.tasks import TrainingSpec

# More than any experiment needs, and few enough to fit a node's memory.
MAX_HYPOTHESES = 1000
MAX_CLIENTS = 1_000_000
"""Maximum number of clients that a node may report, unless a run sets another."""
MAX_ROW_STEPS = 1_000_000
"""Maximum number of training steps of a round that hide rows, if epochs decide it."""
AUTO = 0
"""Placeholder for a number of hypotheses that the strategy chooses (`umbel.strategies.how_many`)."""
_AUTO_MOST, _RELEASES_EACH = 8, 4
FOLDER_VERSION = 1
"""The version of the run folders that this umbel writes, and the only one that it reads."""


def _number(value: Any) -> Any:
    # Flower passes 1 where 1.0 is meant; a bool is not a number.
    try:
        return float(value) if type(value) is int else value
    except OverflowError:
        return math.inf  # which no setting accepts


def _hypotheses(value: Any) -> Any:
    return AUTO if value == "auto" else value


Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number)]
Clips = Annotated[Clipping, Field(strict=False)]
Noised = Annotated[NoisePer, Field(strict=False)]
Protected = Annotated[Protect, Field(strict=False)]


@dataclass(frozen=True)
class RowSettings:
    """C, sigma, q and B of the key ``rows`` (`umbel.protocol.release.RowPrivacy`)."""

    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    noise: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    rate: Annotated[float, Field(gt=0, le=1)]
    batch: Annotated[float, Field(gt=0, allow_inf_nan=False)]

    def __str__(self) -> str:
        return f"clip={self.clip!r} noise={self.noise!r} rate={self.rate!r} batch={self.batch!r}"


@dataclass(frozen=True)
class NodeLimits:
    """Limits for one node, of the key ``per-node``."""

    clients: Annotated[int, Field(ge=1)] = MAX_CLIENTS
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    update_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


@dataclass(frozen=True)
class Pause:
    """When a later round waits, of the key ``pause``."""

    below: Annotated[int, Field(ge=1)] = 1
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 86400.0


class RunConfig(Settings):
    """The configuration of a run. The server sets it, and a site's policy overrules it."""

    error = ConfigError
    source: ClassVar[str] = "the run config"
    SECTIONS: ClassVar[Mapping[str, str]] = {
        "strategy": "Model, data and strategy",
        "rounds": "Rounds",
        "local-epochs": "Local training",
        "protect": "Privacy; a site's own policy overrules these settings",
        "per-node": "Limits for one node",
        "observers": "Watching",
        "min-nodes": "Waiting",
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
    metric: str = Field("", description='rmse, accuracy, right-sign, or package.module:function; "" for the default')
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
    validation_clients_per_round: int = Field(0, ge=0, description="clients asked in each validation; 0 for all")
    validate_every: int = Field(1, ge=1, description="rounds from one validation to the next")
    validate_by: Literal["mean", "median"] = Field(
        "mean",
        description="how clients' losses are combined: mean, with outliers clipped, or median, if many sites may lie",
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

    local_epochs: int = Field(TrainingSpec.local_epochs, ge=0, description="E, passes over a client's rows in a round")
    local_steps: int = Field(
        TrainingSpec.local_steps,
        ge=0,
        description="minibatches of a round, each drawn from all rows; 0 trains by epochs instead",
    )
    step_size: Number = Field(TrainingSpec.step_size, gt=0, description="s, the step size of local training")
    batch_size: int = Field(TrainingSpec.batch_size, ge=0, description="B; 0 for all of a client's rows at once")
    optimizer: str = Field(
        "sgd",
        description="sgd, momentum, adam or adamw, as in torch.optim; each round starts with a new state. Options "
        'follow the name, as in "momentum nesterov=true": momentum, nesterov, weight-decay, beta1, beta2, epsilon; '
        "clip-gradient, the maximum gradient norm of a step; proximal, mu of FedProx, which keeps clients near the "
        "round's hypotheses",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="cpu, cuda, or auto: the GPU if there is one")

    protect: Protected = Field(
        Protect.CLIENTS,
        description="clients: noise on what leaves hides a client's whole data; rows: noise in each training step "
        "hides each of its rows (DP-SGD), and noise-multiplier is 0; both",
    )
    noise_multiplier: Number = Field(
        TrainingSpec.noise_multiplier,
        ge=0,
        description="nu, noise per unit of clip norm; 0 for no noise, in simulation or if protect is rows",
    )
    mechanism: str = Field(
        TrainingSpec.mechanism,
        description="noise mechanism: laplace, gaussian, discrete-gaussian, or package.module:Class",
    )
    choice_epsilon: Number = Field(
        TrainingSpec.choice_epsilon,
        ge=0,
        le=MAX_CHOICE_EPSILON,
        description="epsilon of the randomised choice of a hypothesis; 0 for no randomisation, as in the paper",
    )
    delta: Number = Field(
        1e-5,
        ge=0,
        lt=1,
        description="delta at which the run states its guarantee; 0 for a pure epsilon",
    )
    noise_per: Noised = Field(
        TrainingSpec.noise_per,
        description="unit that gets separate noise: vector (all parameters together), layer or row",
    )
    clipping: Clips = Field(
        TrainingSpec.clipping,
        description="update: clip to the norm of the client's update, as in the paper; public: to a public schedule",
    )
    clip_norm_floor: Number = Field(ClipSchedule.floor, gt=0, description="smallest clip norm, or radius")
    clip_norm: Number = Field(ClipSchedule.start, gt=0, description="with public clipping: the clip norm of round 1")
    clip_norm_decay: Number = Field(
        ClipSchedule.decay, gt=0, description="with public clipping: its factor from one round to the next"
    )
    message_noise: Number = Field(
        TrainingSpec.message_noise,
        ge=0,
        description="sigma of the PAC paper's noisy messages; the guarantee does not count it",
    )

    rows: str = Field(
        "",
        description='with protect = "rows" or "both", as in "clip=1 noise=1.1 rate=0.1 batch=256": C, the norm to '
        "which the gradient of each row is clipped; sigma, the noise of each training step per unit of C; q, the "
        "probability of each row to be drawn in a step; B, the public number by which a step's sum of gradients is "
        "divided, such as q times the rows of a typical client. Steps are local-steps, or local-epochs / q, and "
        "batch-size has no effect",
    )

    per_node: str = Field(
        "",
        description='limits for one node, as in "clients=500 share=0.2 update-norm=5": nodes that report more clients '
        "(by default 1,000,000) are left out; share is a node's maximum share of a round's clients (by default 1); "
        "longer updates are left out (by default those beyond the clip norm if clipping is public, otherwise "
        "1,000,000). The first two not in simulation",
    )

    observers: str = Field("", description='callbacks of the run, as "package.module:Class name=value", separated by ;')

    track: Literal["", "mlflow", "tensorboard"] = Field(
        "", description='tool that records the run: mlflow or tensorboard; "" for none'
    )

    min_nodes: int = Field(1, ge=1, description="nodes that must be connected before round 1")
    node_wait: Number = Field(
        300.0, gt=0, description="maximum seconds to wait for nodes; a node imports PyTorch before its first reply"
    )
    pause: str = Field(
        "",
        description='when a later round waits, as in "below=3 seconds=3600": while fewer nodes than this can be asked '
        "(by default 1), and so many seconds at most (by default 86400), after which the run fails; not in simulation",
    )
    round_timeout: Number = Field(3600.0, gt=0, description="seconds to wait for a round's replies")
    quorum: Number = Field(1.0, gt=0, le=1, description="share of a round's clients whose replies close the round")
    signature: str = Field(
        "", description="signature of these settings, from umbel sign, for sites that list researchers"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        try:
            _ = self.of_rows, self.limits, self.pauses
        except ConfigError as error:
            raise ValueError(error.text) from None
        if self.min_releases > self.clients_per_round:
            text = f"min-releases = {self.min_releases} exceeds clients-per-round = {self.clients_per_round}; lower it"
            raise ValueError(text)
        if not self.clip_norm_bounded:
            made = f"makes the clip norm infinite within {self.rounds} rounds; lower it"
            raise ValueError(f"clip-norm-decay = {self.clip_norm_decay} {made}")
        if self.noise_per is not NoisePer.VECTOR and self.clipping is Clipping.PUBLIC:
            raise ValueError(f'noise-per = "{self.noise_per}" works only with clipping = "update"; change one of them')
        if self.mechanism != LAPLACE and self.clipping is Clipping.UPDATE and self.noise_multiplier:
            text = f'mechanism = "{self.mechanism}" needs a public clip norm; set clipping = "public"'
            raise ValueError(text)
        if self.max_participations and self.limits.share < 1:
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
        if self.protect is Protect.ROWS and self.noise_multiplier:
            text = f'protect = "rows" adds no noise to models, and noise-multiplier is {self.noise_multiplier:g}'
            raise ValueError(f'{text}; set noise-multiplier = 0, or protect = "both"')
        if self.protect is Protect.BOTH and not self.noise_multiplier:
            raise ValueError('protect = "both" needs noise on models; set a noise-multiplier, or protect = "rows"')
        if self.message_noise:
            raise ValueError("message-noise reveals facts about rows, which protect hides; set it to 0")
        rows = self.of_rows
        if rows and self.local_epochs > MAX_ROW_STEPS * rows.rate and not self.local_steps:
            text = f"local-epochs / rate makes more than {MAX_ROW_STEPS:,} steps a round"
            raise ValueError(f"{text}; raise the rate of rows, or set local-steps")

    @property
    def strategy_name(self) -> str:
        """The strategy without its options."""
        return self.strategy.partition(" ")[0]

    @property
    def strategy_options(self) -> str:
        """The strategy's options, as ``name=value name=value``."""
        return self.strategy.partition(" ")[2]

    @property
    def of_rows(self) -> RowSettings | None:
        """How clients train if `protect` hides rows."""
        return parse_options(RowSettings, self.rows, "rows") if self.rows else None

    @property
    def limits(self) -> NodeLimits:
        """Limits for one node."""
        return parse_options(NodeLimits, self.per_node, "per-node")

    @property
    def pauses(self) -> Pause:
        """When a later round waits."""
        return parse_options(Pause, self.pause, "pause")

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

    @property
    def clip_norm_bounded(self) -> bool:
        """Whether the clip norm stays finite in all rounds."""
        try:
            return math.isfinite(self.schedule.at(self.rounds))
        except OverflowError:
            return False

    @property
    def schedule(self) -> ClipSchedule:
        """The clip norm of each round."""
        return ClipSchedule(self.clipping, self.clip_norm_floor, self.clip_norm, self.clip_norm_decay)

    def training(self, round: int = 1) -> TrainingSpec:
        """Return the template of a round's task for training clients."""
        said = {entry.name: getattr(self, entry.name) for entry in fields(TrainingSpec) if hasattr(self, entry.name)}
        if rows := self.of_rows:
            said |= {
                "row_clip_norm": rows.clip,
                "row_noise_multiplier": rows.noise,
                "row_rate": rows.rate,
                "row_batch": rows.batch,
            }
        return TrainingSpec(**said | {"clip_norm": self.schedule.at(round)})

    def release(self, n: int, hypotheses: int) -> Release:
        """Return a training client's release of a model of n parameters, one for each participation."""
        return self.training().release(n, hypotheses)

    def entries(self) -> dict[str, Any]:
        """Return the config as Flower passes it to the app: kebab-case keys, plain values."""
        return {
            key: str(value) if isinstance(value, str) else value
            for key, value in self.model_dump(by_alias=True).items()
        }

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
