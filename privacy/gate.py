"""The gate: the one door through which a client's training result leaves its node.

A Flower Mod around the train handler. It checks the demand against the site's policy before
anything is trained, charges the ledger, adds the noise, and builds a new reply from the allowed
fields alone. It fails closed: whatever goes wrong inside, no release leaves, the server reads
"refused", and the reason stays in the node's own log.
"""

from __future__ import annotations

from collections.abc import Sequence
from logging import ERROR

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode
from flwr.supercore import log
from numpy.typing import NDArray

from privacy.laplace import sanitise
from privacy.ledger import StateLedger
from privacy.policy import Policy, Refused
from privacy.randomness import streams
from privacy.site import Site
from protocol import (
    ARRAYS,
    CONFIG,
    HYPOTHESES,
    Arrays,
    Demand,
    flatten,
    from_array_record,
    price,
    to_array_record,
    train_reply,
    unflatten,
)

_PRIVATE = "private"


def local_result(trained: Arrays, chosen: NDArray[np.int64]) -> RecordDict:
    """Return what a train handler hands to the gate; it never travels further.

    Parameters
    ----------
    trained : dict of ndarray, each (clients, \\*shape)
        Parameters of each asked client, in the order asked.
    chosen : ndarray of int, shape (clients,)
        The hypothesis each started from.
    """
    return RecordDict({ARRAYS: to_array_record(trained), _PRIVATE: ConfigRecord({"chosen": [int(j) for j in chosen]})})


def guard(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower Mod: when a handler fails, reply "refused" and keep the reason in the node's log.

    Flower itself would send the exception's text to the server. The error is replied, not
    raised, because in simulation a raised one also drops what the node has written to its state.
    """
    try:
        reply = call_next(msg, context)
        if not reply.has_error():
            return reply
        log(ERROR, "umbel refused a %s message: the handler replied an error", msg.metadata.message_type)
    except Exception as error:  # anything at all: fail closed
        log(ERROR, "umbel refused a %s message: %s", msg.metadata.message_type, error, exc_info=error)
    return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason="refused"), reply_to=msg)


class Gate:
    """Flower Mod: sanitise what a train handler returns (Algorithm 2)."""

    def __call__(self, msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Return a sanitised reply, or "refused"."""
        return guard(msg, context, lambda m, c: self._pass(m, c, call_next))

    def _pass(self, msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
        site = Site.of(context.node_config)
        policy = Policy.of(site)
        demand = Demand.from_record(_config(msg.content, CONFIG))
        policy.check(demand)
        hypotheses = from_array_record(_arrays(msg.content, HYPOTHESES))
        _check_hypotheses(hypotheses)

        result = call_next(msg, context)
        if result.has_error():
            raise Refused("the train handler replied an error")
        trained = from_array_record(_arrays(result.content, ARRAYS))
        chosen = _check_result(trained, _config(result.content, _PRIVATE), hypotheses, len(demand.clients))

        start = flatten(hypotheses)[chosen]
        updates = flatten(trained) - start
        finite = np.asarray(np.isfinite(updates).all(axis=1))
        releasing = [client for client, fit in zip(demand.clients, finite, strict=True) if fit]
        n = updates.shape[1]

        # The charge comes before the noise: a crash may waste budget, it never hides a release.
        StateLedger(context.state).charge(releasing, price(n, demand.noise_multiplier))
        noised = sanitise(
            updates[finite],
            demand.noise_multiplier,
            max(demand.radius, policy.radius_floor),
            demand.radius_mode,
            streams(site.seed(context.run_config), "noise", demand.round, site.client_ids(tuple(releasing))),
            _layers(hypotheses) if demand.per_layer else None,
        )
        releases = start[finite] + noised
        with np.errstate(over="ignore"):
            fits = np.isfinite(releases.astype(np.float32)).all(axis=1)
        released = finite.copy()
        released[finite] = fits
        choices = chosen[released].tolist() if demand.disclose_choice else None
        reply = train_reply(unflatten(releases[fits], hypotheses), released.astype(int).tolist(), choices)
        return Message(reply, reply_to=msg)


def _arrays(content: RecordDict, name: str) -> ArrayRecord:
    if name not in content.array_records:
        raise Refused(f"there is no ArrayRecord {name!r}")
    return content.array_records[name]


def _config(content: RecordDict, name: str) -> ConfigRecord:
    if name not in content.config_records:
        raise Refused(f"there is no ConfigRecord {name!r}")
    return content.config_records[name]


def _check_hypotheses(hypotheses: Arrays) -> None:
    """Raise unless these are float32 arrays with one common leading axis and finite values."""
    counts = {value.shape[0] if value.ndim else 0 for value in hypotheses.values()}
    if len(counts) != 1 or counts == {0}:
        raise Refused("the hypotheses are not stacked arrays of one length")
    for name, value in hypotheses.items():
        if value.dtype != np.float32:
            raise Refused(f"hypotheses {name!r} are {value.dtype}, not float32")
        if not np.isfinite(value).all():
            raise Refused(f"hypotheses {name!r} are not finite")


def _check_result(trained: Arrays, private: ConfigRecord, hypotheses: Arrays, clients: int) -> NDArray[np.int64]:
    """Raise unless the handler's result fits the hypotheses; return the chosen ones."""
    if list(trained) != list(hypotheses):
        raise Refused(f"trained arrays {sorted(trained)} do not match hypotheses {sorted(hypotheses)}")
    for name, value in trained.items():
        if value.dtype != np.float32 or value.shape != (clients, *hypotheses[name].shape[1:]):
            raise Refused(f"trained {name!r} is {value.dtype} of shape {value.shape}")
    chosen = private.get("chosen")
    k = len(next(iter(hypotheses.values())))
    if (
        not isinstance(chosen, list)
        or len(chosen) != clients
        or not all(isinstance(j, int) and 0 <= j < k for j in chosen)
    ):
        raise Refused("the handler does not say which hypothesis each client chose")
    return np.asarray(chosen, dtype=np.int64)


def _layers(hypotheses: Arrays) -> Sequence[slice]:
    """Return the columns of each layer: parameters that share a prefix, as weight and bias do."""
    layers: dict[str, slice] = {}
    start = 0
    for name, value in hypotheses.items():
        stop = start + int(np.prod(value.shape[1:]))
        layer = name.rpartition(".")[0]
        if layer in layers and layers[layer].stop != start:
            raise Refused(f"the parameters of layer {layer!r} are not next to each other")
        layers[layer] = slice(layers[layer].start if layer in layers else start, stop)
        start = stop
    return list(layers.values())
