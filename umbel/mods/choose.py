"""The Mod that shows a train or evaluate function the one hypothesis that fits its client."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from logging import getLogger

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from umbel.privacy.gate.randomness import SecureGenerator
from umbel.privacy.mechanisms.choice import OWN, draw
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError, OutOfTime, ProtocolError
from umbel.protocol.release import MAX_CHOICE_EPSILON

Loss = Callable[[ArrayRecord, Context], float]
"""The loss of one model on the client's own rows."""

_log = getLogger("flwr")


@dataclass(frozen=True)
class Choice:
    """How the model that a function sees was chosen: among k, under an epsilon, or openly where that is 0."""

    k: int
    epsilon: float

    @property
    def is_open(self) -> bool:
        """Whether a reader of the choice learns about the data without a bound."""
        return self.k > 1 and not self.epsilon


_NONE = Choice(1, 0.0)
_choice: ContextVar[Choice] = ContextVar("umbel_choice", default=_NONE)


def choice_made() -> Choice:
    """Return the choice in which this code runs, as a Mod inside `ChooseHypothesis`.

    It is told within the process, and not by the message, which a server could forge.
    """
    return _choice.get()


def hypotheses_in(content: RecordDict) -> int:
    """Return how many hypotheses a message has, stacked in its arrays; 0 for an ordinary message of Flower's."""
    config = content.get("config")
    if not isinstance(config, ConfigRecord) or "k" not in config:
        return 0
    k = config["k"]
    if type(k) is not int or k < 1:
        raise ProtocolError("the message's k is not a number of hypotheses", code="protocol.hypotheses")
    return k


class ChooseHypothesis:
    """Flower Mod: an app's functions see the one of the server's hypotheses that fits their client best.

    ``ClientApp(mods=[ChooseHypothesis(loss), ...])``. It comes before a Mod that adds noise. The functions see an
    ordinary message, with one model and without ``k``. A message without hypotheses is passed on as it is.

    Parameters
    ----------
    loss : callable
        ``loss(arrays, context)`` returns the loss of one model on the client's own rows. Where it fails, or is not
        finite, the model does not fit at all; where it fails for all, one of them is drawn.
    epsilon : float
        Epsilon of the choice, by randomised response; 0 for an open choice, as in the paper. With an open choice no
        later noise has a guarantee between any two data sets of a client.

    Raises
    ------
    ConfigError
        If epsilon is not between 0 and 30.
    """

    def __init__(self, loss: Loss, epsilon: float = 0.0) -> None:
        if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 <= epsilon <= MAX_CHOICE_EPSILON:
            text = f"umbel.ChooseHypothesis: epsilon must be from 0 to {MAX_CHOICE_EPSILON:g}, got {epsilon!r}"
            raise ConfigError(text, code="config.choice-epsilon")
        self._loss, self._epsilon = loss, float(epsilon)

    def __call__(self, msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Return the app's own reply, to a message with one model."""
        k = hypotheses_in(msg.content)
        if not k:
            return call_next(msg, context)
        fit = best_fit(self._loss, stacked_in(msg.content, k), context)  # always: time must not tell what was drawn
        drawn = int(draw(self._epsilon, k, [SecureGenerator()])[0]) if self._epsilon else OWN
        inner = with_one(msg, fit if drawn == OWN else drawn)
        token = _choice.set(Choice(k, self._epsilon if k > 1 else 0.0))
        try:
            return call_next(inner, context)
        finally:
            _choice.reset(token)


def stacked_in(content: RecordDict, k: int) -> Arrays:
    r"""Return the k hypotheses of a message, each array (k, \*shape); raise unless they are stacked."""
    record = content.get("arrays")
    arrays = {name: array.numpy() for name, array in record.items()} if isinstance(record, ArrayRecord) else {}
    if not arrays or any(value.shape[:1] != (k,) for value in arrays.values()):
        raise ProtocolError(f"the message's arrays are not {k} stacked hypotheses", code="protocol.hypotheses")
    return arrays


def with_one(msg: Message, j: int) -> Message:
    """Return a message with hypothesis j alone, as an ordinary record, and without k."""
    stacked = stacked_in(msg.content, hypotheses_in(msg.content))
    config = ConfigRecord({key: value for key, value in msg.content.config_records["config"].items() if key != "k"})
    inner = copy(msg)  # strategies put one content into the messages of all nodes
    inner.content = RecordDict({**msg.content, "arrays": _one(stacked, j), "config": config})
    return inner


def best_fit(loss: Loss, stacked: Arrays, context: Context) -> int:
    """Return the number of the hypothesis with the lowest loss; one at random if no loss can be computed."""
    k = len(next(iter(stacked.values())))
    losses = [_loss_of(loss, _one(stacked, j), context) for j in range(k)]
    return int(np.argmin(losses)) if min(losses) < math.inf else int(draw(0.0, k, [SecureGenerator()])[0])


def _loss_of(loss: Loss, hypothesis: ArrayRecord, context: Context) -> float:
    try:
        found = float(loss(hypothesis, context))
    except (KeyboardInterrupt, OutOfTime):  # a user ends the node, or its site allows no more time
        raise
    except BaseException as error:  # also SystemExit: that a process ends would tell something about the data
        _log.warning("the loss of a hypothesis failed, and counts as infinite", exc_info=error)
        return math.inf
    return found if math.isfinite(found) else math.inf


def _one(stacked: Arrays, j: int) -> ArrayRecord:
    """Return one hypothesis as a separate record, which its reader may change."""
    return ArrayRecord({name: Array(np.asarray(value[j])) for name, value in stacked.items()})
