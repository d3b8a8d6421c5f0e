"""The Mod that shows a train or evaluate function the one hypothesis that fits its client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy, deepcopy
from logging import WARNING

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from umbel.privacy.mechanisms.choice import OWN, draw
from umbel.privacy.mechanisms.randomness import SecureGenerator
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError, Interrupted, ProtocolError
from umbel.protocol.hypotheses import NUMBER, ROUND
from umbel.protocol.log import log
from umbel.protocol.release import MAX_CHOICE_EPSILON

Loss = Callable[[ArrayRecord, Context], float]
"""The loss of one model on the client's own rows."""

_LAST_ROUND = 2**31
_choice: ContextVar[float | None] = ContextVar("umbel_choice", default=None)
_under_way: list[float] = []  # in any thread of this process


def choice_made() -> float | None:
    """Return the epsilon of the choice in which this code runs, infinite for an open one; None outside of any.

    It is told within the process, and not by the message, which a server could forge. A Mod between `ChooseHypothesis`
    and this code may continue in another thread, where it is not known: then the choice counts as open.
    """
    epsilon = _choice.get()
    return math.inf if epsilon is None and _under_way else epsilon


@contextmanager
def choosing(k: int, epsilon: float) -> Iterator[None]:
    """Tell the code inside that its model was chosen among k, openly where epsilon is 0.

    A choice within another costs both.
    """
    made = (_choice.get() or 0.0) + (0.0 if k == 1 else epsilon or math.inf)
    token = _choice.set(made)
    _under_way.append(made)
    try:
        yield
    finally:
        _under_way.remove(made)
        _choice.reset(token)


def shown(msg: Message, content: RecordDict) -> Message:
    """Return a message with other content for an app, which may change it without a trace in the one that came."""
    light = copy(msg)  # strategies put one content into the messages of all nodes
    light.content = RecordDict()
    inner = deepcopy(light)
    inner.content = content
    return inner


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
        if not (stacked := stacked_in(msg.content)):
            return call_next(msg, context)
        k = len(next(iter(stacked.values())))
        assigned = int(draw(self._epsilon, k, [SecureGenerator()])[0]) if self._epsilon else OWN
        chosen = choose_hypothesis(self._loss, stacked, context, assigned)
        with choosing(k, self._epsilon):
            return call_next(with_one(msg, stacked, chosen), context)


def stacked_in(content: RecordDict) -> Arrays:
    r"""Return the k hypotheses of a message, each array (k, \*shape); none for an ordinary message of Flower's."""
    numbers = [record[NUMBER] for record in content.config_records.values() if NUMBER in record]
    if not numbers:
        return {}
    records = list(content.array_records.values())
    arrays = {name: array.numpy() for name, array in records[0].items()} if len(records) == 1 else {}
    k = numbers[0] if len(numbers) == 1 else None
    if type(k) is not int or k < 1 or not arrays or any(value.shape[:1] != (k,) for value in arrays.values()):
        text = "the message's config has k, the number of hypotheses, but its arrays are not k stacked ones"
        raise ProtocolError(f"{text}; give your entry another name", code="protocol.hypotheses")
    return arrays


def round_in(content: RecordDict) -> int:
    """Return a message's round, for the record; 1 if it has no valid one."""
    for record in content.config_records.values():
        number = record.get(ROUND)
        if type(number) is int and 1 <= number <= _LAST_ROUND:
            return number
    return 1


def with_one(msg: Message, stacked: Arrays, j: int) -> Message:
    """Return a message with hypothesis j of its stacked ones alone, as an ordinary record, and without k."""
    records = dict(msg.content)
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            records[name] = _one(stacked, j)
        elif isinstance(record, ConfigRecord):
            records[name] = ConfigRecord({key: value for key, value in record.items() if key != NUMBER})
    return shown(msg, RecordDict(records))


def choose_hypothesis(loss: Loss, stacked: Arrays, context: Context, assigned: int) -> int:
    """Return the assigned hypothesis, or for OWN that of the lowest loss; one at random if no loss can be computed.

    All losses are computed in any case: time must not tell what was assigned.
    """
    k = len(next(iter(stacked.values())))
    losses = [_loss_of(loss, _one(stacked, j), context) for j in range(k)]
    if assigned != OWN:
        return assigned
    return int(np.argmin(losses)) if min(losses) < math.inf else int(draw(0.0, k, [SecureGenerator()])[0])


def _loss_of(loss: Loss, hypothesis: ArrayRecord, context: Context) -> float:
    try:
        value = float(loss(hypothesis, context))
    except (KeyboardInterrupt, Interrupted):  # a user ends the node, or its site allows no more time
        raise
    except BaseException as error:  # also SystemExit: that a process ends would tell something about the data
        log(WARNING, "the loss of a hypothesis failed, and counts as infinite", exc_info=error)
        return math.inf
    return value if math.isfinite(value) else math.inf


def _one(stacked: Arrays, j: int) -> ArrayRecord:
    """Return one hypothesis as a separate record, which its reader may change."""
    return ArrayRecord({name: Array(np.asarray(value[j])) for name, value in stacked.items()})
