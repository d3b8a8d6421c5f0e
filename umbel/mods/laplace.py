"""The Mod that adds Laplace noise to what a train function returns: Algorithm 2 of the group privacy paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from logging import ERROR, INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from umbel.mods.choose import choice_made, round_in, stacked_in
from umbel.privacy.mechanisms.base import Matrix
from umbel.privacy.mechanisms.laplace import Laplace
from umbel.privacy.mechanisms.randomness import noise_sources
from umbel.privacy.mechanisms.sanitise import check_noise, columns_of, min_radius, release_in_place, resolution
from umbel.protocol.errors import ConfigError, Refused
from umbel.protocol.log import log
from umbel.protocol.model_record import ModelRecord
from umbel.protocol.release import exact, quotient

_FLOOR = 0.01  # smallest norm to which the noise is scaled, where that is the update's own
_NORMS = "umbel-norms"  # in the node's own state
_GROWTH = (4, 4.0)  # so many updates, each longer than the one before, and the last longest of all and by such a factor


@dataclass(eq=False)
class LaplaceMod:
    """Flower Mod: what a train function returns leaves with Laplace noise, or not at all.

    ``ClientApp(mods=[LaplaceMod(noise_multiplier=3.0, clip_norm=0.5)])``. A node is one client. From the function's
    reply only the arrays leave: their difference from the arrays that came is clipped, and gets noise from the
    operating system's entropy. A function that fails, or returns other shapes or numbers that are not finite, counts as
    one that changed nothing. The Mod keeps no account: what a client spends adds up over rounds and runs.

    Parameters
    ----------
    noise_multiplier : float
        nu. With a clip norm, one participation has a pure epsilon of 2 n / nu between any two data sets of a client,
        for n numbers.
    clip_norm : float, optional
        The public Euclidean norm to which an update is clipped. By default noise is scaled to the norm of the update
        itself, at least .01, as in the paper, which proves no epsilon.
    per : {"vector", "layer", "row"}
        Without a clip norm, the unit that gets separate noise: all numbers, each layer, or each row of an array.
    weighted_by_key : str
        The metric by which the strategy weights clients; it becomes 1 for all.
    others : {"refuse", "pass"}
        Whether the app's answers to messages other than ``train`` leave as they are.
    seed : int, optional
        A seed of the noise, to repeat a simulation. A reader who knows it can subtract the noise.

    Raises
    ------
    ConfigError
        If an argument is invalid.
    """

    noise_multiplier: float
    clip_norm: float | None = None
    _: KW_ONLY
    per: str = "vector"
    weighted_by_key: str = "num-examples"
    others: str = "refuse"
    seed: int | None = None

    def __post_init__(self) -> None:
        clip_norm = _FLOOR if self.clip_norm is None else self.clip_norm
        for name, value in (("noise_multiplier", self.noise_multiplier), ("clip_norm", clip_norm)):
            number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
            _require(number, f"{name} must be a finite number above 0", value)
        units = ("vector", "layer", "row") if self.clip_norm is None else ("vector",)
        _require(self.per in units, "per must be vector, or without a clip norm layer or row", self.per)
        _require(self.others in ("refuse", "pass"), "others must be refuse or pass", self.others)
        if self.seed is not None:
            _say(WARNING, "whoever knows the seed can subtract the noise: what leaves is no release")
        if self.clip_norm is None:
            _say(WARNING, "noise scaled to the update's own norm proves no epsilon; a clip_norm does")

    @classmethod
    def of_config(cls, **arguments: Any) -> Mod:
        """Return a Mod that takes ``noise-multiplier``, ``clip-norm`` and ``per`` from the configuration.

        Each comes from the node config, which is the site's, or where that is silent from the run config. Mods are made
        before there is either. `arguments` are the other ones.
        """

        def configured(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
            config: Any = context.run_config | context.node_config
            noise_multiplier, clip_norm = config.get("noise-multiplier"), config.get("clip-norm")
            mod = cls(noise_multiplier, clip_norm, per=config.get("per", "vector"), **arguments)
            return mod(msg, context, call_next)

        return configured

    def __call__(self, msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Return a sanitised reply to a message that asks for training."""
        if msg.metadata.message_type.partition(".")[0] != "train":
            if self.others == "pass":
                return call_next(msg, context)
            text = "umbel.LaplaceMod answers to train alone; others='pass' lets the app's own answers leave as they are"
            raise Refused(text, code="refused.message-type")
        if stacked_in(msg.content):
            text = "umbel.LaplaceMod got stacked hypotheses, but adds noise to one model"
            fix = "write mods=[umbel.ChooseHypothesis(...), umbel.LaplaceMod(...)], in this order"
            raise ConfigError(f"{text}; {fix}", code="config.mods-order")
        model, mechanism = ModelRecord.of(msg.content), Laplace(self.noise_multiplier)
        start, finest = model.numbers, resolution(model.numbers)
        radius = max(self.clip_norm or _FLOOR, min_radius(mechanism.deviation(start.size), finest))
        check_noise(mechanism, start.size, radius)
        clipping, parts = "public" if self.clip_norm else "update", columns_of(self.per, model.shapes)
        client: Any = context.node_config.get("partition-id", context.node_id)
        sources = noise_sources(self.seed, round_in(msg.content), [client])
        reply = Message(RecordDict(), reply_to=msg)  # before the app can change what came
        update = _trained(lambda: call_next(msg, context), model) - start
        if self.clip_norm is None:
            _watch(float(np.linalg.norm(update)), context)
        elif self.seed is None:
            _tell(self.noise_multiplier, start.size)
        release_in_place(mechanism, update, start, radius, clipping, sources, parts, finest)
        metrics = MetricRecord({self.weighted_by_key: 1})
        reply.content = RecordDict({model.name: model.record(update), "metrics": metrics})
        return reply


def _tell(noise_multiplier: float, n: int) -> None:
    """Log what a participation costs, if that is known."""
    choice = choice_made() or 0.0
    if math.isinf(choice):
        _say(INFO, "the choice of a hypothesis is open, so no epsilon is proven")
        return
    epsilon = float(quotient(2 * n, noise_multiplier) + exact(choice))
    text = f"a pure epsilon of {epsilon:.4g} a participation, between any two data sets of a client"
    _say(INFO, f"what training returns has {text}")


@lru_cache(maxsize=64)
def _say(level: int, text: str) -> None:
    """Log a line, once in this process: Flower's simulation makes an app's Mods again for each message."""
    log(level, "umbel.LaplaceMod: %s", text)


def _require(holds: bool, rule: str, given: Any) -> None:
    if not holds:
        raise ConfigError(f"umbel.LaplaceMod: {rule}, got {given!r}", code="config.laplace-mod")


def _trained(train: Callable[[], Message], model: ModelRecord) -> Matrix:
    """Return the numbers of the model after training; those before if it fails."""
    try:
        return model.trained(train())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit: that a process ends would tell something about the data
        log(ERROR, "umbel.LaplaceMod: training failed, and leaves as if it had changed nothing", exc_info=error)
        return model.numbers


def _watch(norm: float, context: Context) -> None:
    """Warn when a client's updates grow from round to round, and with them the noise that is scaled to them."""
    times, factor = _GROWTH
    with suppress(Exception):  # an app may have put anything in place of the state
        record: Any = context.state.get(_NORMS, {})
        before = list(record.get("norms", []))
        context.state[_NORMS] = MetricRecord({"norms": [*before, norm]})
        latest = [*before, norm][-times:]
        if len(latest) == times and latest == sorted(latest) and norm > max(*before, factor * latest[0]):
            text = "a client's updates grow from round to round, and the noise with them"
            _say(WARNING, f"{text}; use less noise, fewer local epochs, or a clip_norm")
