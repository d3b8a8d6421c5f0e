"""Flower's own strategies, one for each cluster: ``strategy = "flower:FedAdam"``, or ``"flower:package.module:Class"``.

Releases are clustered as in group privacy. The strategy then aggregates each cluster as if its releases were the
replies of that many clients; with one hypothesis it is plain Flower. Only its `aggregate_train` is used: umbel decides
which clients a round asks, for which task, and how clients are evaluated.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NoReturn

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from umbel.models.model import Model
from umbel.protocol.arrays import Arrays, Matrix, Vectors, flatten, unflatten
from umbel.protocol.errors import ConfigError
from umbel.protocol.flower import Run, identify
from umbel.protocol.logs import quiet
from umbel.protocol.plugins import import_by_name
from umbel.protocol.releases import Releases
from umbel.protocol.run_config import RunConfig
from umbel.strategies import PREFIX
from umbel.strategies.base import Outcome
from umbel.strategies.group_privacy import GroupPrivacy

_TRIAL = 16  # artificial releases that test a strategy before the run
_WEIGHT = "num-examples"
# Parameters that umbel decides, and names of records that umbel makes.
_OURS = ("fraction_", "min_", "_key", "_fn")
_SIMPLE = {kind.__name__: kind for kind in (int, float, bool, str)}
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_UNFIT = {
    "FedProx": 'its proximal term is a part of the clients\' training; use fedavg with optimizer = "sgd proximal=0.1"',
    "QFedAvg": "it weights clients by their training losses, which never leave a node",
    "FedXgbBagging": "it is for trees",
    "FedXgbCyclic": "it is for trees",
}


class Stock(GroupPrivacy):
    """Clusters as in group privacy, each aggregated by a strategy of Flower's.

    Every release has equal weight: a client does not disclose its number of examples, so ``num-examples`` is 1.
    """

    stock: ClassVar[type[Strategy]]
    """Flower's class."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._running: dict[int, Strategy] = {}
        self._round = 0

    def check(self, run: RunConfig, model: Model) -> None:
        """Let the strategy aggregate artificial releases, and refuse one that cannot."""
        like = {name: np.zeros((1, *shape), np.float32) for name, shape in model.shapes.items()}
        made_up = np.random.default_rng(0).normal(size=(_TRIAL, model.num_parameters))
        try:
            strategy = self._new()
            aggregated = _aggregate(strategy, 1, made_up, np.zeros(model.num_parameters), like)
            _to_state(strategy, self._new())
        except ConfigError as error:
            raise ConfigError.of(error, f"strategy {run.strategy!r} ") from error
        except Exception as error:
            raise _unfit(f"strategy {run.strategy!r} cannot aggregate releases: {error}") from error
        if aggregated is None:
            raise _unfit(f"strategy {run.strategy!r} returns nothing for {_TRIAL} releases; change its options")

    def learn(self, round: int, releases: Releases) -> Outcome:
        """Learn as group privacy does, and tell the strategy the round."""
        if not any(name.endswith("/form") for name in self.state):
            self._running.clear()  # the clusters may have changed
        self._round = round
        return super().learn(round, releases)

    def combine(self, group: Matrix, hypothesis: Matrix, index: int) -> Matrix:
        """Return this cluster's result from its strategy, or the hypothesis if there is none."""
        prefix = f"{index}/"
        if index not in self._running:
            state = {name.removeprefix(prefix): kept for name, kept in self.state.items() if name.startswith(prefix)}
            self._running[index] = _with_state(self._new(), state)
        strategy = self._running[index]
        following = _aggregate(strategy, self._round, group, hypothesis, self.sent)
        self.state |= {prefix + name: kept for name, kept in _to_state(strategy, self._new()).items()}
        return hypothesis if following is None else following

    def _new(self) -> Strategy:
        return self.stock(**dataclasses.asdict(self.options))


def adapted(name: str) -> type[Stock]:
    """Return the strategy for a class in ``flwr.serverapp.strategy``, or ``package.module:Class``."""
    chosen = import_by_name(name) if ":" in name else getattr(flower, name, None)
    if not (isinstance(chosen, type) and issubclass(chosen, Strategy)) or inspect.isabstract(chosen):
        known = {title: getattr(flower, title) for title in flower.__all__ if title not in _UNFIT}
        fit = ", ".join(title for title, kind in known.items() if issubclass(kind, flower.FedAvg))
        text = f"strategy {PREFIX + name!r} is not a strategy of Flower's; choose from {fit}"
        raise ConfigError(text, code="config.unknown-name")
    if name in _UNFIT:
        raise _unfit(f"strategy {PREFIX + name!r} does not work here: {_UNFIT[name]}")
    fields = []
    hints = _hints(chosen.__init__)
    for option, parameter in inspect.signature(chosen).parameters.items():
        if option.startswith(_OURS[:2]) or option.endswith(_OURS[2:]) or parameter.kind in _REST:
            continue
        simple, required = hints.get(option) in _SIMPLE.values(), parameter.default is parameter.empty
        if not simple and required:
            raise _unfit(f"strategy {PREFIX + name!r} needs {option}, which a run config cannot express")
        if simple:
            default = dataclasses.MISSING if required else parameter.default
            fields.append((option, hints[option], dataclasses.field(default=default)))
    options = dataclasses.make_dataclass("Options", fields, frozen=True, kw_only=True)
    return type(name.rpartition(":")[2], (Stock,), {"stock": chosen, "Options": options})


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a function's parameters; of types that cannot be found, their text."""
    try:
        return typing.get_type_hints(function)
    except NameError:  # a module may import some types for type checkers alone
        return {name: _SIMPLE.get(str(hint), hint) for name, hint in inspect.get_annotations(function).items()}


def _aggregate(strategy: Strategy, round: int, group: Matrix, hypothesis: Matrix, like: Arrays) -> Matrix | None:
    """Return a Flower strategy's result for releases (g, n) that started from a hypothesis (n,)."""
    identify()
    config, sent = ConfigRecord(), _records(hypothesis[None], like)[0]
    with quiet():  # Flower's strategies tell about each cluster and round
        messages = list(strategy.configure_train(round, sent, config, _TwoNodes()))
    if asked := sorted(set(config) - {"server-round"}):
        raise _unfit(f"asks clients for {', '.join(asked)}, which umbel's clients do not know")
    if not messages:
        raise _unfit("asks no client to train")
    replies = [
        Message(RecordDict({"arrays": record, "metrics": MetricRecord({_WEIGHT: 1})}), reply_to=messages[0])
        for record in _records(group, like)
    ]
    with quiet():
        following = strategy.aggregate_train(round, replies)[0]
    if following is None:
        return None
    if {name: array.shape for name, array in following.items()} != {name: v.shape[1:] for name, v in like.items()}:
        raise _unfit("returns other arrays than it was given")
    vector: Matrix = flatten({name: following[name].numpy()[None] for name in like})[0]
    return vector


def _records(matrix: Vectors, like: Arrays) -> list[ArrayRecord]:
    """Return vectors (m, n) as one record each, with the model's arrays."""
    arrays = unflatten(matrix, like).items()
    return [ArrayRecord({name: Array(np.asarray(value[i])) for name, value in arrays}) for i in range(len(matrix))]


class _TwoNodes(Grid):
    """The nodes that a strategy sees: two, since Flower's strategies wait for that many. It cannot send anything."""

    _LOOKS = 4  # a strategy that looks more often waits for more nodes

    def __init__(self) -> None:
        self._looks = 0

    def get_node_ids(self) -> Iterable[int]:
        self._looks += 1
        if self._looks > self._LOOKS:
            raise _unfit("waits for more than two nodes; here a release is a reply, and min-releases sets their number")
        return [1, 2]

    def get_nodes(self) -> Iterable[Any]:
        return []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return []

    def set_run(self, run: Run) -> None:
        """Do nothing."""

    @property
    def run(self) -> Run:
        raise _unfit("reads the run, which is not available to it")

    def push_messages(self, *_: Any, **__: Any) -> NoReturn:
        raise _unfit("makes or sends messages")

    create_message = send_and_receive = push_messages


def _unfit(text: str) -> ConfigError:
    return ConfigError(text, code="config.flower-strategy")


# --- the state of a strategy of Flower's, as arrays


def _to_state(strategy: Strategy, new: Strategy) -> Arrays:
    """Return a strategy's state beyond that of a new one as arrays: its attributes in a tree, and the tree's form."""
    arrays: Arrays = {}
    form = {
        name: _store(value, name, arrays)
        for name, value in vars(strategy).items()
        if name not in vars(new) or not _same(value, vars(new)[name])
    }
    return arrays | {"form": np.frombuffer(json.dumps(form).encode(), np.uint8)}


def _with_state(strategy: Strategy, kept: Arrays) -> Strategy:
    """Return a new strategy with the state that `_to_state` kept of another."""
    if kept:
        form = json.loads(kept["form"].tobytes())
        for name, value in form.items():
            setattr(strategy, name, _restore(value, kept))
    return strategy


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, (int, float, str, bool)) or callable(value):
        return bool(value == other)
    return value is None and other is None


def _store(value: Any, name: str, arrays: Arrays) -> Any:
    """Store the arrays of a value under their names, and return the rest as JSON."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if isinstance(value, (np.ndarray, np.generic)):
        arrays[name] = np.array(value)
        return {"array": name}
    if isinstance(value, ArrayRecord):
        return {"record": {key: _store(one.numpy(), f"{name}/{key}", arrays) for key, one in value.items()}}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _store(one, f"{name}/{key}", arrays) for key, one in value.items()}}
    if isinstance(value, (list, tuple)):
        return {"list": [_store(one, f"{name}/{i}", arrays) for i, one in enumerate(value)]}
    raise _unfit(f"keeps a {type(value).__name__} as {name}, which a run cannot save")


def _restore(form: Any, arrays: Arrays) -> Any:
    """Return the value whose form `_store` kept."""
    ((kind, inner),) = form.items()
    if kind == "value":
        return inner
    if kind == "array":
        return arrays[inner]
    if kind == "record":
        return ArrayRecord({key: Array(_restore(one, arrays)) for key, one in inner.items()})
    if kind == "dict":
        return {key: _restore(one, arrays) for key, one in inner.items()}
    return [_restore(one, arrays) for one in inner]
