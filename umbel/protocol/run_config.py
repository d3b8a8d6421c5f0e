"""The run config: every key of ``[tool.flwr.app.config]``, with its default, its rule and its help."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from umbel.protocol.errors import ConfigError
from umbel.protocol.plugins import distrust
from umbel.protocol.release import LAPLACE, MAX_CHOICE_EPSILON, Clipping, ClipSchedule, Kind, NoisePer, Release
from umbel.protocol.rules import Settings
from umbel.protocol.tasks import TrainingSpec

# More than any experiment needs, and few enough that a node cannot be made to run out of memory.
MAX_HYPOTHESES = 1000
MAX_CLIENTS = 1_000_000
"""As many clients as a node may say it hosts, unless a run says otherwise."""
AUTO = 0
"""Stands for a number of hypotheses that the strategy chooses (`umbel.strategies.how_many`)."""
_AUTO_MOST, _RELEASES_EACH = 8, 4


def _number(value: Any) -> Any:
    # Flower hands 1 over where 1.0 is meant; a bool is no number.
    return float(value) if type(value) is int else value


def _hypotheses(value: Any) -> Any:
    return AUTO if value == "auto" else value


Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number)]
Clips = Annotated[Clipping, Field(strict=False)]
Noised = Annotated[NoisePer, Field(strict=False)]


class RunConfig(Settings):
    """What a run is asked to do; the server's word, which a site's policy overrules."""

    error = ConfigError
    source: ClassVar[str] = "the run config"
    SECTIONS: ClassVar[Mapping[str, str]] = {
        "strategy": "What is learnt, and from what",
        "rounds": "Rounds",
        "local-epochs": "What a client does",
        "noise-multiplier": "Privacy; a site's own policy wins over what is asked here",
        "max-clients-per-node": "What one node may do",
        "observers": "Watching",
        "min-nodes": "Waiting",
    }
    """By the first key of each section of pyproject.toml's table (`umbel.protocol.pyproject`)."""

    strategy: str = Field(
        "group-privacy",
        description="group-privacy, site-average, trimmed-mean, geometric-median, fedavg, fedavgm, fedadam, fedyogi, "
        "fedadagrad, ifca, cfl, recommender, flower:Class for one of Flower's own, or package.module:Class",
    )
    strategy_options: str = Field("", description='the strategy\'s own options, as "name=value name=value"')
    dataset: str = Field(
        "synthetic",
        description='a name under $UMBEL_HOME/data or in datasets/, or an absolute path; "" where every node '
        "serves its own data",
    )
    model: str = Field(
        "",
        description="linear, mlp, cnn, cnn10, cnn-sigmoid, cnn10-sigmoid, lenet, lenet10, package.module:factory or "
        "library:model; with a size as in linear inputs=3 outputs=1, mlp inputs=3 hidden=2 outputs=1, softmax "
        "features=100 classes=10, factors items=100 size=8, biased-factors items=100 size=8; "
        '"" for the dataset\'s own',
    )
    loss: str = Field(
        "",
        description='mse, rmse, cross-entropy, log, hinge, margin, or package.module:function; "" for the model\'s own',
    )
    metric: str = Field(
        "", description='rmse, accuracy, right-sign, or package.module:function; "" for the model\'s own'
    )
    pretrained: str = Field(
        "", description="weights to start from, safetensors or state dict: a file's path, or one in $UMBEL_HOME/models"
    )
    frozen: str = Field(
        "", description='parameters that are never trained and never sent, as patterns on names: "conv* fc1.*"'
    )
    local: str = Field(
        "", description='parameters that are trained and never leave the node, as patterns on names: "head.*"'
    )
    hypotheses: Annotated[int, BeforeValidator(_hypotheses)] = Field(
        2,
        ge=AUTO,
        le=MAX_HYPOTHESES,
        description='k, the number of models that are learnt at once; 0, or "auto", has it chosen from the releases',
    )

    rounds: int = Field(100, ge=1, description="maximum number of rounds")
    patience: int = Field(
        0, ge=0, description="stop after this many validations without a better loss; 0 to run all rounds"
    )
    clients_per_round: int = Field(20, ge=1, description="U, training clients asked in each round")
    max_participations: int = Field(
        2, ge=0, description="how often a client takes part at most, in turn with the others; 0 for a random draw"
    )
    validation_clients_per_round: int = Field(0, ge=0, description="validation clients asked each time; 0 for all")
    validate_every: int = Field(1, ge=1, description="rounds from one validation to the next")
    validate_by: Literal["mean", "median"] = Field(
        "mean", description="over clients; a loss far from all others is pulled in; median where many sites may lie"
    )
    min_releases: int = Field(1, ge=1, description="a round with fewer releases leaves the hypotheses as they are")
    restarts: int = Field(
        5, ge=1, description="random sets of initial hypotheses, of which validation clients pick the best"
    )
    start_from: str = Field(
        "",
        description="a run whose best hypotheses are the first ones here, for new data or new clients: its folder, or "
        "the folder's name; local parameters are not taken over",
    )
    resume: str = Field(
        "",
        description="an interrupted run to continue: its folder, or the folder's name; in simulation the nodes' own "
        "limits and local parameters are reset",
    )
    seed: int = Field(0, ge=0, description="seed of every draw in simulation; elsewhere only of the server's draws")

    local_epochs: int = Field(TrainingSpec.local_epochs, ge=0, description="E, passes over a client's rows in a round")
    local_steps: int = Field(
        TrainingSpec.local_steps,
        ge=0,
        description="above 0: this many minibatches, each drawn from all rows, in place of epochs",
    )
    step_size: Number = Field(TrainingSpec.step_size, gt=0, description="s, the step size of local training")
    batch_size: int = Field(TrainingSpec.batch_size, ge=0, description="B; 0 for all of a client's rows at once")
    optimizer: Literal["sgd", "momentum", "adam", "adamw"] = Field(
        "sgd", description="of torch.optim: sgd, momentum, adam, adamw; its state is reset in each round"
    )
    optimizer_options: str = Field(
        "", description='momentum, nesterov, weight-decay, beta1, beta2 or epsilon, as "name=value name=value"'
    )
    clip_gradient: Number = Field(0.0, ge=0, description="maximum gradient norm of a step; 0 for no limit")
    proximal: Number = Field(0.0, ge=0, description="mu of FedProx, which holds clients near where a round starts")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto uses the GPU if there is one; cpu, cuda")
    engine: Literal["auto", "loop", "batched"] = Field(
        "auto", description="how a cohort is computed; loop and batched are for debugging"
    )

    noise_multiplier: Number = Field(
        TrainingSpec.noise_multiplier,
        ge=0,
        description="nu, noise per unit of clip norm; 0 for no noise, in simulation only",
    )
    mechanism: str = Field(
        TrainingSpec.mechanism, description="the law of the noise: laplace, gaussian, or package.module:Class"
    )
    choice_epsilon: Number = Field(
        TrainingSpec.choice_epsilon,
        ge=0,
        le=MAX_CHOICE_EPSILON,
        description="epsilon of the randomised choice of a hypothesis; 0 for the paper's open choice",
    )
    noise_per: Noised = Field(
        TrainingSpec.noise_per,
        description="the unit that gets noise by itself: vector (all parameters as one), layer, row",
    )
    clipping: Clips = Field(
        TrainingSpec.clipping,
        description="update: the norm of the client's update (the paper); public: a schedule, to which clients clip",
    )
    clip_norm_floor: Number = Field(ClipSchedule.floor, gt=0, description="the smallest clip norm, or radius")
    clip_norm: Number = Field(ClipSchedule.start, gt=0, description="public: the clip norm of round 1")
    clip_norm_decay: Number = Field(
        ClipSchedule.decay, gt=0, description="public: its factor from one round to the next"
    )
    message_noise: Number = Field(
        TrainingSpec.message_noise,
        ge=0,
        description="sigma of the PAC paper's noisy messages; it bounds nothing that is counted",
    )

    max_clients_per_node: int = Field(
        MAX_CLIENTS, ge=1, description="a node that says it hosts more is left out; a simulation may have more"
    )
    max_node_share: Number = Field(
        1.0, gt=0, le=1, description="the largest share of a round's clients that one node may have, not in simulation"
    )
    max_update_norm: Number = Field(
        0.0,
        ge=0,
        description="longer updates are left out; 0 for the clip norm where it is public, and elsewhere for 1,000,000",
    )

    observers: str = Field(
        "", description='observers of the run, each as "package.module:Class name=value", separated by ;'
    )

    track: str = Field("", description='a tool in which to follow the run: mlflow, tensorboard, wandb; "" for none')
    track_options: str = Field(
        "", description='the tool\'s options, as "name=value": uri and experiment, folder, or project'
    )

    min_nodes: int = Field(1, ge=1, description="nodes that must be there before round 1")
    node_wait: Number = Field(
        300.0, gt=0, description="seconds to wait for them; a first answer takes as long as importing PyTorch does"
    )
    round_timeout: Number = Field(3600.0, gt=0, description="seconds to wait for a round's replies")
    quorum: Number = Field(1.0, gt=0, le=1, description="a round closes when this share of its clients has answered")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_releases > self.clients_per_round:
            text = f"min-releases = {self.min_releases} exceeds clients-per-round = {self.clients_per_round}; lower it"
            raise ValueError(text)
        if not self.clip_norm_bounded:
            made = f"makes the clip norm infinite in {self.rounds} rounds; lower it"
            raise ValueError(f"clip-norm-decay = {self.clip_norm_decay} {made}")
        if self.noise_per is not NoisePer.VECTOR and self.clipping is Clipping.PUBLIC:
            raise ValueError(f'noise-per = "{self.noise_per}" works only with clipping = "update"; change one of them')
        if self.mechanism != LAPLACE and self.clipping is Clipping.UPDATE and self.noise_multiplier:
            text = f'mechanism = "{self.mechanism}" bounds nothing with clipping = "update"; set clipping = "public"'
            raise ValueError(text)
        if self.max_participations and self.max_node_share < 1:
            text = "max-participations and max-node-share do not go together; set max-participations = 0"
            raise ValueError(f"{text}, or max-node-share = 1")
        if not (self.local_epochs or self.local_steps):
            raise ValueError("local-epochs = 0 and local-steps = 0 train nothing; set one of them")
        return self

    @property
    def most_hypotheses(self) -> int:
        """k, or the most that are tried where it is chosen: so few that each gets several of a round's releases."""
        if self.hypotheses != AUTO:
            return self.hypotheses
        return min(_AUTO_MOST, max(2, self.clients_per_round // _RELEASES_EACH))

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
        """Return the template of what the run asks of training clients in a round."""
        said = {entry.name: getattr(self, entry.name) for entry in fields(TrainingSpec) if hasattr(self, entry.name)}
        return TrainingSpec(**said | {"clip_norm": self.schedule.at(round)})

    def release(self, n: int, hypotheses: int) -> Release:
        """Return what a training client gives away of a model of n parameters each time that it takes part."""
        return Release(
            Kind.TRAIN,
            n,
            self.noise_multiplier,
            self.clipping,
            mechanism=self.mechanism,
            hypotheses=hypotheses,
            choice_epsilon=self.choice_epsilon if hypotheses > 1 else 0.0,
        )

    def entries(self) -> dict[str, Any]:
        """Return the config as Flower hands it to the app: kebab-case keys, plain values."""
        return {
            key: str(value) if isinstance(value, str) else value
            for key, value in self.model_dump(by_alias=True).items()
        }


def read_saved(text: str) -> dict[str, Any]:
    """Return what a run's ``config.toml`` holds; nothing that it names is trusted, as the folder may have been sent.

    Raises
    ------
    ConfigError
        When it holds signs that a terminal would act on.
    """
    saved = tomllib.loads(text)
    if isinstance(config := saved.get("config"), dict):
        distrust(*config.values())
        if odd := [one for one in config.values() if isinstance(one, str) and not one.isprintable()]:
            raise ConfigError(f"config.toml holds {odd[0]!r}, which no terminal can print", code="config.unprintable")
    return saved
