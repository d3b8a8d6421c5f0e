"""A run's configuration, checked before any work starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord

import models
import strategies
from attacks.leak_meter import LeakMeter
from federation import Federation, Manifest, find_federation, open_federation
from models.base import Model
from protocol.errors import ConfigError
from protocol.messages import DEVICES, ENGINES, MAX_HYPOTHESES, NOISE_UNITS, RADIUS_MODES
from strategies import HypothesisStrategy, RadiusSchedule
from strategies.options import Options


@dataclass(frozen=True)
class Settings:
    """What the server needs of the run config.

    Attributes
    ----------
    strategy : HypothesisStrategy
    model : Model
    manifest : Manifest or None
        Of the federation; None where every node serves its own.
    seed, rounds, patience, validate_every, restarts : int
    round_timeout : float
        Seconds to wait for a round's replies.
    train_config : ConfigRecord
        What every `protocol.Demand` of the run has in common.
    leak_meter : LeakMeter or None
    """

    strategy: HypothesisStrategy
    model: Model
    manifest: Manifest | None
    seed: int
    rounds: int
    patience: int
    validate_every: int
    restarts: int
    round_timeout: float
    train_config: ConfigRecord
    leak_meter: LeakMeter | None = None

    @classmethod
    def parse(cls, run_config: Mapping[str, Any]) -> Settings:
        """Check a run config and return the settings in it.

        Raises
        ------
        ConfigError
            For the first entry that cannot be used.
        """
        read = Options(run_config)
        seed = read.whole("seed", 0)
        radius = RadiusSchedule(
            read.choice("radius", RADIUS_MODES),
            read.number("radius-floor", above=0),
            read.number("radius-start", above=0),
            read.number("radius-decay", above=0),
        )
        read.choice("device", DEVICES)
        read.choice("engine", ENGINES)
        read.text("resume")
        try:
            strategy_class = strategies.load(read.text("strategy"))
            federation = _federation(read.text("federation"))
            manifest = federation.manifest if federation else None
            model = models.load_for(
                read.text("model"),
                read.text("loss"),
                manifest.model if manifest else "",
                manifest.loss if manifest else "",
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        rounds, asked = read.whole("rounds", 1), read.whole("clients-per-round", 1)
        if (least := read.whole("min-releases", 1)) > asked:
            raise ConfigError(f"min-releases = {least} is more than clients-per-round = {asked}; lower it")
        if not _bounded(radius, rounds):
            raise ConfigError(f"radius-decay = {radius.decay} makes the radius infinite in {rounds} rounds; lower it")
        strategy = strategy_class(
            hypotheses=read.whole("hypotheses", 1, MAX_HYPOTHESES),
            clients_per_round=asked,
            validation_clients_per_round=read.whole("validation-clients-per-round", 0),
            min_releases=least,
            quorum=_quorum(read),
            radius=radius,
            seed=seed,
            min_nodes=read.whole("min-nodes", 1),
            node_wait=read.number("node-wait", above=0),
        )
        if model.local_size and strategy.hypotheses > 1:
            raise ConfigError(f"model {model.name!r} has a local part and comes as one hypothesis; set hypotheses = 1")
        strategy.prepare(read, model)
        message_noise = read.number("message-noise", least=0)
        if message_noise and not model.local_size:
            raise ConfigError(f"message-noise is for factor models, not {model.name!r}; set it to 0")
        noise_per = read.choice("noise-per", NOISE_UNITS)
        if noise_per != "vector" and radius.mode == "public":
            raise ConfigError(f'noise-per = "{noise_per}" goes with radius = "update" alone; set one of them otherwise')
        local_epochs, local_steps = read.whole("local-epochs", 0), read.whole("local-steps", 0)
        if not (local_epochs or local_steps):
            raise ConfigError("local-epochs = 0 and local-steps = 0 train nothing; set one of them")
        train_config = ConfigRecord(
            {
                "local_epochs": local_epochs,
                "local_steps": local_steps,
                "step_size": read.number("step-size", above=0),
                "batch_size": read.whole("batch-size", 0),
                "noise_multiplier": read.number("noise-multiplier", least=0),
                "noise_per": noise_per,
                "message_noise": message_noise,
            }
        )
        every = read.whole("leak-meter", 0)
        if every and federation is None:
            raise ConfigError("leak-meter is for simulation; name a federation or set it to 0")
        return cls(
            strategy=strategy,
            model=model,
            manifest=manifest,
            seed=seed,
            rounds=rounds,
            patience=read.whole("patience", 0),
            validate_every=read.whole("validate-every", 1),
            restarts=read.whole("restarts", 1),
            round_timeout=read.number("round-timeout", above=0),
            train_config=train_config,
            leak_meter=LeakMeter(every, strategy, model, federation, train_config, seed)
            if every and federation
            else None,
        )


def _federation(name: str) -> Federation | None:
    # Opened, and with that checked, here too: a simulation should fail before its nodes start to.
    return open_federation(find_federation(name)) if name else None


def _quorum(read: Options) -> float:
    if (quorum := read.number("quorum", above=0)) > 1:
        raise ConfigError(f"quorum is a share of the clients asked, at most 1, got {quorum:g}")
    return quorum


def _bounded(radius: RadiusSchedule, rounds: int) -> bool:
    try:
        return math.isfinite(radius.at(rounds))
    except OverflowError:
        return False
