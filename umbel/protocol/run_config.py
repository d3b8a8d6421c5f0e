"""The run config: every key of ``[tool.flwr.app.config]``, with its default, its rule and its help."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from umbel.protocol.errors import ConfigError, ProtocolError
from umbel.protocol.plugins import distrust
from umbel.protocol.release import (
    LAPLACE,
    MAX_CHOICE_EPSILON,
    Clipping,
    ClipSchedule,
    NoisePer,
    Protect,
    Release,
)
from umbel.protocol.rules import Settings
from umbel.protocol.signatures import SIGNATURE
from umbel.protocol.tasks import ROWS, TrainingSpec

# More than any experiment needs, and few enough to fit a node's memory.
MAX_HYPOTHESES = 1000
MAX_CLIENTS = 1_000_000
"""Maximum number of clients that a node may report, unless a run sets another."""
MAX_ROW_STEPS = 1_000_000
"""Maximum number of training steps of a round that hide rows, if epochs decide it."""
AUTO = 0
"""Placeholder for a number of hypotheses that the strategy chooses (`umbel.strategies.how_many`)."""
_AUTO_MOST, _RELEASES_EACH = 8, 4
_OF_ROWS = (name.replace("_", "-") for name in ROWS)
_LATER = frozenset(("anonymous-least", "relay", "relay-ca", "protect", "delta", *_OF_ROWS))
"""Settings that runs had no need to name before there were relays, or guarantees for rows."""


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


class RunConfig(Settings):
    """The configuration of a run. The server sets it, and a site's policy overrules it."""

    error = ConfigError
    source: ClassVar[str] = "the run config"
    SECTIONS: ClassVar[Mapping[str, str]] = {
        "strategy": "Model, data and strategy",
        "rounds": "Rounds",
        "local-epochs": "Local training",
        "protect": "Privacy; a site's own policy overrules these settings",
        "max-clients-per-node": "Limits for one node",
        "observers": "Watching",
        "min-nodes": "Waiting",
    }
    """Titles of the sections of pyproject.toml's table, by first key (`umbel.protocol.pyproject`)."""

    strategy: str = Field(
        "group-privacy",
        description="group-privacy, site-average, secure-average, trimmed-mean, geometric-median, fedavg, ifca, cfl, "
        "r-dpcfl, recommender, flower:Class for a strategy of Flower, or package.module:Class",
    )
    strategy_options: str = Field("", description='options of the strategy, as "name=value name=value"')
    dataset: str = Field(
        "synthetic",
        description='a name under $UMBEL_HOME/data or in datasets/, or an absolute path; "" if every node '
        "serves its own data",
    )
    model: str = Field(
        "",
        description="linear, mlp, cnn, cnn10, cnn-dropout, cnn-sigmoid, cnn10-sigmoid, lenet, lenet10, "
        "package.module:factory or library:model; sizes follow the name, as in linear inputs=3 outputs=1, "
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
    optimizer: Literal["sgd", "momentum", "adam", "adamw"] = Field(
        "sgd", description="sgd, momentum, adam or adamw, as in torch.optim; each round starts with a new state"
    )
    optimizer_options: str = Field(
        "", description='momentum, nesterov, weight-decay, beta1, beta2 or epsilon, as "name=value name=value"'
    )
    clip_gradient: Number = Field(0.0, ge=0, description="maximum gradient norm of a step; 0 for no limit")
    proximal: Number = Field(0.0, ge=0, description="mu of FedProx, which keeps clients near the round's hypotheses")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="cpu, cuda, or auto: the GPU if there is one")
    engine: Literal["auto", "loop", "batched"] = Field(
        "auto", description="how a simulated node computes its clients; loop and batched are for debugging"
    )

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

    row_clip_norm: Number = Field(
        TrainingSpec.row_clip_norm, ge=0, description="C, the norm to which the gradient of each row is clipped"
    )
    row_noise_multiplier: Number = Field(
        TrainingSpec.row_noise_multiplier,
        ge=0,
        description="sigma, the noise of each training step per unit of row-clip-norm",
    )
    row_rate: Number = Field(
        TrainingSpec.row_rate,
        ge=0,
        le=1,
        description="q, probability of each row to be drawn in a training step; steps are local-steps, or "
        "local-epochs / row-rate, and batch-size has no effect",
    )
    row_batch: Number = Field(
        TrainingSpec.row_batch,
        ge=0,
        description="B, the public number by which a step's sum of gradients is divided, such as row-rate times the "
        "rows of a typical client",
    )

    anonymous_least: int = Field(
        0,
        ge=0,
        description="fewest releases in a batch that a relay hands on without their senders; 0 for releases that name "
        "their client",
    )
    relay: str = Field("", description="address of that relay, as https://HOST:PORT; not in simulation")
    relay_ca: str = Field("", description="absolute path of the CA certificate of the relay's operator")

    max_clients_per_node: int = Field(
        MAX_CLIENTS, ge=1, description="nodes that report more clients are left out; not in simulation"
    )
    max_node_share: Number = Field(
        1.0, gt=0, le=1, description="maximum share of a round's clients on one node; not in simulation"
    )
    max_update_norm: Number = Field(
        0.0,
        ge=0,
        description="longer updates are left out; 0 means the clip norm if clipping is public, otherwise 1,000,000",
    )

    observers: str = Field("", description='observers of the run, as "package.module:Class name=value", separated by ;')

    track: str = Field("", description='tool that records the run: mlflow, tensorboard or wandb; "" for none')
    track_options: str = Field(
        "", description='options of that tool, as "name=value": uri and experiment, folder, or project'
    )

    min_nodes: int = Field(1, ge=1, description="nodes that must be connected before round 1")
    node_wait: Number = Field(
        300.0, gt=0, description="maximum seconds to wait for nodes; a node imports PyTorch before its first reply"
    )
    pause_below: int = Field(
        1, ge=1, description="a later round waits while fewer nodes than this can be asked; not in simulation"
    )
    max_pause: Number = Field(86400.0, ge=0, description="maximum seconds of such a pause; then the run fails")
    round_timeout: Number = Field(3600.0, gt=0, description="seconds to wait for a round's replies")
    quorum: Number = Field(1.0, gt=0, le=1, description="share of a round's clients whose replies close the round")
    signature: str = Field(
        "", description="signature of these settings, from umbel sign, for sites that list researchers"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
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
        if self.anonymous_least > self.clients_per_round:
            text = f"anonymous-least = {self.anonymous_least} exceeds clients-per-round = {self.clients_per_round}"
            raise ValueError(f"{text}; lower it, or ask more clients")
        if self.anonymous_least and self.clipping is not Clipping.PUBLIC:
            raise ValueError('anonymous-least needs a public clip norm; set clipping = "public"')
        if self.max_participations and self.max_node_share < 1:
            text = "max-participations and max-node-share cannot be combined; set max-participations = 0"
            raise ValueError(f"{text}, or max-node-share = 1")
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
        keys = {name.replace("_", "-"): getattr(self, name) for name in ROWS}
        if not self.protect.rows:
            if some := [key for key, value in keys.items() if value]:
                text = f'{some[0]} has no effect with protect = "clients"; set protect = "rows" or "both"'
                raise ValueError(f"{text}, or leave it out")
            return
        if missing := [key for key, value in keys.items() if not value]:
            text = f'protect = "{self.protect}" needs {", ".join(missing)} above 0'
            raise ValueError(f"{text}; umbel plan --rows finds them")
        if self.protect is Protect.ROWS and self.noise_multiplier:
            text = f'protect = "rows" adds no noise to models, and noise-multiplier is {self.noise_multiplier:g}'
            raise ValueError(f'{text}; set noise-multiplier = 0, or protect = "both"')
        if self.protect is Protect.BOTH and not self.noise_multiplier:
            raise ValueError('protect = "both" needs noise on models; set a noise-multiplier, or protect = "rows"')
        if self.message_noise:
            raise ValueError("message-noise reveals facts about rows, which protect hides; set it to 0")
        if self.anonymous_least:
            raise ValueError('anonymous-least is for protect = "clients" alone; set it to 0')
        if self.local_epochs > MAX_ROW_STEPS * self.row_rate and not self.local_steps:
            text = f"local-epochs / row-rate makes more than {MAX_ROW_STEPS:,} steps a round"
            raise ValueError(f"{text}; raise row-rate, or set local-steps")

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
        """Return the entries without the signature: what it covers, and what people approve.

        Later settings are left out while they have their defaults: earlier signatures and approvals still hold.
        """
        defaults = {field.alias: field.default for field in type(self).model_fields.values()}
        return {
            key: value
            for key, value in self.entries().items()
            if key != SIGNATURE and not (key in _LATER and value == defaults[key])
        }


def read_saved(text: str) -> dict[str, Any]:
    """Return the content of a run's ``config.toml``. Its names are not trusted: the folder may come from others.

    Raises
    ------
    ConfigError
        If it holds control characters, which a terminal would act on.
    """
    try:
        saved = tomllib.loads(text)
    except RecursionError:
        raise ConfigError("config.toml is nested too deep; restore an intact copy", code="config.unreadable") from None
    if isinstance(config := saved.get("config"), dict):
        distrust(*config.values())
        if odd := [one for one in (*config, *config.values()) if isinstance(one, str) and not one.isprintable()]:
            raise ConfigError(
                f"config.toml holds {odd[0]!r}, which no terminal can print; remove it", code="config.unprintable"
            )
    return saved
