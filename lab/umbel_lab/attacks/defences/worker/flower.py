"""Flower's Mods, which clients run, and its strategy wrappers, which the server runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from . import identify
from .kinds import Asked, Kind, Left, Named, Refusal, maker

_CANARY, _RUN = 100, 1  # node id of the first client, and the run's id
_CLIENTS = 4  # of a wrapper that does not say how many it samples
_SMALL = 2.0**-10  # each value of the update of a client that is not the canary: 0 could crash a Mod


def _identify() -> None:
    with suppress(ImportError, AttributeError):  # older versions need none
        identify()


def _record(arrays: Named) -> Any:
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def _request(received: Named, round: int, node: int, config: Mapping[str, Any]) -> Any:
    """Return a message as stock strategies send it."""
    from flwr.app import ConfigRecord, Message, RecordDict

    entries = ConfigRecord({"server-round": round, "lr": 0.1, **config})
    return Message(RecordDict({"arrays": _record(received), "config": entries}), node, "train")


def _context(node: int) -> Any:
    from flwr.app import Context, RecordDict

    config: dict[str, Any] = {"partition-id": node - _CANARY, "num-partitions": _CLIENTS}
    return Context(_RUN, node, config, RecordDict(), {})


def _trained(asked: Asked, config: bool = False) -> Callable[[Any, Any], Any]:
    """Return an ordinary train function; with `config`, its reply also has a record of the client's configuration."""
    from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

    def train(msg: Any, _context: Any) -> Any:
        metrics = MetricRecord({"train_loss": asked.loss, "num-examples": asked.examples})
        content = RecordDict({"arrays": _record(asked.update), "metrics": metrics})
        if config:
            content["client"] = ConfigRecord({"rows": asked.examples})
        return Message(content, reply_to=msg)

    return train


def _told(reply: Any) -> Any:
    """Return a reply's content, unless it is an error."""
    if reply.has_error():
        raise Refusal(str(reply.error.reason))
    return reply.content


def _others(content: Any) -> dict[str, float]:
    """Return the numbers of a message's metric and config records."""
    found = {}
    for records in (content.metric_records, content.config_records):
        for record, entries in records.items():
            for key, value in entries.items():
                if isinstance(value, int | float):
                    found[f"{record}.{key}"] = float(value)
    return found


def _arrays(record: Any) -> Named:
    return {name: array.numpy() for name, array in record.items()}


class Mod(Kind):
    """A Mod: it sees the server's message and the train function's reply, on the client."""

    name = "Flower Mod"

    def begin(self) -> None:
        _identify()
        super().begin()
        self._context = _context(_CANARY)

    def release(self, asked: Asked) -> Left:
        # Mods for a wrapper read the clip norm from the message.
        norm = self.options.get("clip_norm")
        config = {} if norm is None else {"clipping_norm": float(norm)}
        message = _request(asked.received, asked.round, _CANARY, config)
        content = _told(self.target(message, self._context, _trained(asked, config=True)))
        found: Named = {}
        for record in content.array_records.values():
            found |= _arrays(record)
        # `ArrayRecord(list)` names its arrays 0, 1, …, as apps do whose model is a list of arrays.
        if list(found) == [str(at) for at in range(len(asked.update))]:
            found = dict(zip(asked.update, found.values(), strict=True))
        return Left(found, _others(content))

    def deviation(self) -> float | None:
        one = self.target
        if type(one).__name__ != "LocalDpMod":
            return None
        with suppress(ZeroDivisionError, AttributeError):
            return float(one.sensitivity * np.sqrt(2 * np.log(1.25 / one.delta)) / one.epsilon)
        return None


class _Nodes:
    """A grid that only names its nodes; their answers do not pass it."""

    def __init__(self, clients: int) -> None:
        self._ids = range(_CANARY, _CANARY + clients)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._ids)


def plain_strategy() -> Any:
    """Return Flower's FedAvg, for a wrapper to wrap."""
    from flwr.serverapp.strategy import FedAvg

    # All nodes that are there: FedAvg waits for others without end.
    return FedAvg(fraction_train=1.0, min_train_nodes=1, min_available_nodes=1)


class Wrapper(Kind):
    """A strategy wrapper: of its clients one is the canary, and the others have a small update.

    With a Mod, the clients run it. Otherwise the clients of a wrapper that sends them a clip norm are taken to keep it.
    """

    name = "Flower strategy wrapper"

    def begin(self) -> None:
        _identify()
        super().begin()
        self._mod = maker(*self.options["mod"])[0]() if self.options.get("mod") else None
        self._clients = int(getattr(self.target, "num_sampled_clients", _CLIENTS))
        self.share = 1 / self._clients
        self.baseline = (1 - self.share) * _SMALL
        # A strategy waits without end for nodes that it is told to need.
        inner = getattr(self.target, "strategy", self.target)
        self._nodes = max(self._clients, int(getattr(inner, "min_available_nodes", 0)))
        self._contexts = {_CANARY + i: _context(_CANARY + i) for i in range(self._nodes)}

    def release(self, asked: Asked) -> Left:
        from flwr.app import ConfigRecord, RecordDict

        received = _record(asked.received)
        others = Asked({name: np.full_like(value, _SMALL) for name, value in asked.update.items()}, asked.round)
        replies, told = [], {}
        messages = self.target.configure_train(asked.round, received, ConfigRecord({}), _Nodes(self._nodes))
        for message in list(messages):
            node = message.metadata.dst_node_id
            told = _others(message.content)
            train = _trained(asked if node == _CANARY else others)
            # The message that arrives is another than the one that was sent.
            context = self._contexts[node]
            reply = self._mod(message, context, train) if self._mod else train(message, context)
            replies.append(reply)
        self.clips = self._mod is not None or "config.clipping_norm" not in told
        arrays, metrics = self.target.aggregate_train(asked.round, replies)
        if arrays is None:
            raise Refusal(next((str(one.error.reason) for one in replies if one.has_error()), "no arrays come back"))
        kept = RecordDict({} if metrics is None else {"metrics": metrics})
        return Left(_arrays(arrays), _others(kept))

    def facts(self) -> dict[str, Any]:
        found = super().facts()
        # Whether clients are told to clip shows in the first round's messages.
        self.release(Asked({"w": np.full(2, 0.5, np.float32)}, 1))
        found["clips"] = self.clips
        self.begin()
        return found

    def deviation(self) -> float | None:
        multiplier, norm = (getattr(self.target, name, None) for name in ("noise_multiplier", "clipping_norm"))
        return None if multiplier is None or norm is None else float(multiplier * norm / self._clients)
