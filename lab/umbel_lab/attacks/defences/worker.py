"""The end of an audit that runs the target: in its own process, and in the environment that the target ships for.

It is run as a file and imports only NumPy and the target's own packages, since umbel may not be installed there. A
request is a line of JSON, and so is its answer. The kind of a target follows from what it can do, and each kind is
asked for a release as its framework does.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import logging
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Named = dict[str, NDArray[Any]]
Numbers = dict[str, float]

EPSILONS = ("epsilon", "budget", "target_epsilon", "max_epsilon")
DELTAS = ("delta", "target_delta")
_CLAIMS = {
    "epsilon": EPSILONS,
    "delta": DELTAS,
    "clip_norm": ("clipping_norm", "clip_norm", "max_grad_norm"),
    "box": ("gamma",),
    "order": ("clip_order",),
}
"""The attributes in which a target tells what it claims, its clip norm, the bound of each value, and the norm's
order."""
_ACCOUNTS = ("privacy_spent", "get_privacy_spent")

_REPORTED = 8  # canaries whose other records are reported
_ROWS = 4  # of an optimizer's batch; one is the canary
_CANARY, _RUN = 100, 1  # node id of the first client, and the run's id
_CLIENTS = 4  # of a wrapper that does not say how many it samples
_SMALL = 2.0**-10  # each value of the update of a client that is not the canary: 0 could crash a Mod


class Refusal(Exception):
    """The target sends nothing this time."""


@dataclass
class Asked:
    """One release that is asked for: of trained arrays less the received ones, in a round from 1 on.

    Only the client knows its training loss and its number of rows.
    """

    update: Named
    round: int = 1
    loss: float = 0.5
    examples: int = 1

    @property
    def received(self) -> Named:
        """The server's arrays, which are 0."""
        return {name: np.zeros_like(value) for name, value in self.update.items()}


class Kind:
    """A kind of target.

    A release moves by `share` for each unit of distance between two updates; an update of 0 leads to `baseline`, by the
    updates of others. `clips` says whether the target limits updates itself; otherwise each update already has at most
    the clip norm. `rows` says whether it protects a row of a batch, not a client's update.
    """

    name = ""
    share = 1.0
    baseline = 0.0
    clips = True
    rows = False

    def __init__(self, make: Callable[[], Any], mod: Any = None, clip_norm: float | None = None) -> None:
        self.make, self.target, self.mod, self.clip_norm = make, make(), mod, clip_norm
        self.begin()

    def begin(self) -> None:
        """Prepare for another client: a new target, if it can be made."""
        self.target = self.make()

    def release(self, asked: Asked) -> tuple[Named, Numbers]:
        """Return what leaves: arrays, and the other numbers of a message, by record and key."""
        raise NotImplementedError

    def deviation(self) -> float | None:
        """Return the deviation of the noise in each value, as the target's attributes tell; None if they do not."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return what the target's attributes tell."""
        claims = {name: first_number(self.target, attributes) for name, attributes in _CLAIMS.items()}
        own = {name: getattr(self, name) for name in ("share", "baseline", "clips", "rows")}
        return {"kind": self.name, "deviation": self.deviation(), **claims, **own}

    def spent(self) -> list[float] | None:
        """Return the epsilon and delta that the target itself accounts for so far; None if it has no account."""
        for name in _ACCOUNTS:
            account = getattr(self.target, name, None)
            if callable(account) and (spent := account()) is not None:
                return [float(getattr(spent, "epsilon", spent)), float(getattr(spent, "delta", 0.0))]
        return None


def first_number(target: Any, attributes: tuple[str, ...]) -> float | None:
    """Return the first of some attributes that is a number."""
    for name in attributes:
        value = getattr(target, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


class Function(Kind):
    """A function of a client's update: a list of arrays, a dictionary of arrays, or one flat array."""

    name = "function of arrays"

    def __init__(self, make: Callable[[], Any], mod: Any = None, clip_norm: float | None = None) -> None:
        super().__init__(make, mod, clip_norm)
        trial = Asked({"w": np.full((2, 3), 0.25, np.float32), "b": np.full(2, 0.25, np.float32)})
        errors: list[Exception] = []
        for self._form in ("list", "dict", "flat"):
            try:
                arrays, _ = self.release(trial)
                if {name: np.shape(value) for name, value in arrays.items()} == {"w": (2, 3), "b": (2,)}:
                    self.begin()
                    return
            except Exception as error:  # the target may raise anything
                errors.append(error)
        raise TypeError(
            "it takes neither a list of arrays, nor a dictionary of arrays, nor one flat array, "
            f"and returns the like: {next(iter(errors), 'other shapes come back')}"
        ) from next(iter(errors), None)

    def release(self, asked: Asked) -> tuple[Named, Numbers]:
        update = {name: value.copy() for name, value in asked.update.items()}
        if self._form == "dict":
            return {name: np.asarray(value) for name, value in self.target(update).items()}, {}
        if self._form == "list":
            arrays = self.target(list(update.values()))
            if not isinstance(arrays, list | tuple):
                raise TypeError("it returns no list")
            return dict(zip(update, map(np.asarray, arrays), strict=True)), {}
        flat = np.asarray(self.target(np.concatenate([value.ravel() for value in update.values()])))
        return shaped(flat, [(name, value.shape, flat.dtype) for name, value in update.items()]), {}


class Filter(Kind):
    """A filter of NVFlare's: `process` takes and returns a Shareable that holds a DXO, a difference of weights."""

    name = "NVFlare filter"

    def release(self, asked: Asked) -> tuple[Named, Numbers]:
        from nvflare.apis.dxo import DXO, DataKind, from_shareable
        from nvflare.apis.fl_context import FLContext

        dxo = DXO(DataKind.WEIGHT_DIFF, data={name: value.copy() for name, value in asked.update.items()})
        shareable = self.target.process(dxo.to_shareable(), FLContext())
        if shareable is None:
            raise Refusal("the filter returns nothing")
        return {name: np.asarray(value) for name, value in from_shareable(shareable).data.items()}, {}


class Optimizer(Kind):
    """An optimizer of Opacus's, with gradients of rows (`grad_sample`): the gradient with which it steps leaves."""

    name = "optimizer with per-row gradients"
    rows = True

    def begin(self) -> None:
        super().begin()
        mean = getattr(self.target, "loss_reduction", "sum") == "mean"
        self.share = 1 / float(self.target.expected_batch_size) if mean else 1.0

    def release(self, asked: Asked) -> tuple[Named, Numbers]:
        import torch

        parameters = []
        for value in asked.update.values():
            parameter = torch.nn.Parameter(torch.zeros(value.shape, dtype=torch.from_numpy(np.atleast_1d(value)).dtype))
            rows = np.zeros((_ROWS, *value.shape), value.dtype)
            rows[0] = value
            parameter.grad_sample = torch.from_numpy(rows)  # type: ignore[attr-defined]
            parameter.summed_grad = None  # type: ignore[attr-defined]
            parameters.append(parameter)
        self.target.param_groups[0]["params"] = parameters
        self.target.step()
        return {name: np.asarray(each.grad) for name, each in zip(asked.update, parameters, strict=True)}, {}

    def deviation(self) -> float | None:
        return float(self.target.noise_multiplier * self.target.max_grad_norm * self.share)


def _identify() -> None:
    """Set this process's identity, without which recent versions of Flower make no Message."""
    # The audit's end puts umbel's own function among the globals; older versions need none.
    with suppress(KeyError, ImportError, AttributeError):
        globals()["identify"]()


def _record(arrays: Named) -> Any:
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


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


def _numbers(content: Any) -> Numbers:
    """Return the numbers of a message's metric and config records."""
    records = [*content.metric_records.items(), *content.config_records.items()]
    return {
        f"{record}.{key}": float(value)
        for record, entries in records
        for key, value in entries.items()
        if isinstance(value, int | float)
    }


class Mod(Kind):
    """A Mod of Flower's: it sees the server's message and the train function's reply, on the client."""

    name = "Flower Mod"

    def begin(self) -> None:
        _identify()
        super().begin()
        self._context = _context(_CANARY)

    def release(self, asked: Asked) -> tuple[Named, Numbers]:
        from flwr.app import ConfigRecord, Message, RecordDict

        # As stock strategies send it; Mods for a wrapper read the clip norm from the message.
        norm = {} if self.clip_norm is None else {"clipping_norm": float(self.clip_norm)}
        entries = ConfigRecord({"server-round": asked.round, "lr": 0.1, **norm})
        content = RecordDict({"arrays": _record(asked.received), "config": entries})
        message = Message(content, _CANARY, "train")
        reply = self.target(message, self._context, _trained(asked, config=True))
        if reply.has_error():
            raise Refusal(str(reply.error.reason))
        records = reply.content.array_records.values()
        arrays: Named = {name: array.numpy() for record in records for name, array in record.items()}
        # `ArrayRecord(list)` names its arrays 0, 1, …, as apps do whose model is a list of arrays.
        if list(arrays) == [str(at) for at in range(len(asked.update))]:
            arrays = dict(zip(asked.update, arrays.values(), strict=True))
        return arrays, _numbers(reply.content)

    def deviation(self) -> float | None:
        mod = self.target
        if type(mod).__name__ != "LocalDpMod":
            return None
        with suppress(ZeroDivisionError, AttributeError):
            return float(mod.sensitivity * np.sqrt(2 * np.log(1.25 / mod.delta)) / mod.epsilon)
        return None


class _Nodes:
    """A grid that only names its nodes; their answers do not pass it."""

    def __init__(self, clients: int) -> None:
        self._ids = range(_CANARY, _CANARY + clients)

    def get_node_ids(self) -> list[int]:
        return list(self._ids)


class Wrapper(Kind):
    """A strategy wrapper of Flower's: of its clients one is the canary, and the others have a small update.

    With a Mod, the clients run it. Otherwise the clients of a wrapper that sends them a clip norm are taken to keep it.
    """

    name = "Flower strategy wrapper"

    def begin(self) -> None:
        _identify()
        super().begin()
        self._made_mod = maker(*self.mod)[0]() if self.mod else None
        self._clients = int(getattr(self.target, "num_sampled_clients", _CLIENTS))
        self.share = 1 / self._clients
        self.baseline = (1 - self.share) * _SMALL
        # A strategy waits without end for nodes that it is told to need.
        inner = getattr(self.target, "strategy", self.target)
        self._nodes = max(self._clients, int(getattr(inner, "min_available_nodes", 0)))
        self._contexts = {_CANARY + i: _context(_CANARY + i) for i in range(self._nodes)}

    def release(self, asked: Asked) -> tuple[Named, Numbers]:
        from flwr.app import ConfigRecord, RecordDict

        others = Asked({name: np.full_like(value, _SMALL) for name, value in asked.update.items()}, asked.round)
        replies, sent = [], {}
        record = _record(asked.received)
        for message in self.target.configure_train(asked.round, record, ConfigRecord({}), _Nodes(self._nodes)):
            node = message.metadata.dst_node_id
            sent = _numbers(message.content)
            train = _trained(asked if node == _CANARY else others)
            context = self._contexts[node]
            reply = self._made_mod(message, context, train) if self._made_mod else train(message, context)
            replies.append(reply)
        self.clips = self._made_mod is not None or "config.clipping_norm" not in sent
        arrays, metrics = self.target.aggregate_train(asked.round, replies)
        if arrays is None:
            raise Refusal(next((str(each.error.reason) for each in replies if each.has_error()), "no arrays come back"))
        content = RecordDict({} if metrics is None else {"metrics": metrics})
        return {name: array.numpy() for name, array in arrays.items()}, _numbers(content)

    def facts(self) -> dict[str, Any]:
        # Whether clients are told to clip shows in the first round's messages.
        self.release(Asked({"w": np.full(2, 0.5, np.float32)}))
        clips = self.clips
        self.begin()
        return super().facts() | {"clips": clips}

    def deviation(self) -> float | None:
        multiplier, norm = (getattr(self.target, name, None) for name in ("noise_multiplier", "clipping_norm"))
        return None if multiplier is None or norm is None else float(multiplier * norm / self._clients)


def kind_of(make: Callable[[], Any], mod: Any = None, clip_norm: float | None = None) -> Kind:
    """Return the kind of target that `make` makes."""
    target = make()
    if hasattr(target, "configure_train") and hasattr(target, "aggregate_train"):
        kind: type[Kind] = Wrapper
    elif hasattr(target, "process_dxo") or (hasattr(target, "process") and not callable(target)):
        kind = Filter
    elif hasattr(target, "max_grad_norm") and hasattr(target, "step"):
        kind = Optimizer
    elif callable(target):
        kind = Mod if required(target) == 3 else Function
    else:
        raise TypeError(f"{type(target).__name__} is no Mod, strategy, filter, optimizer or function of arrays")
    return kind(make, mod, clip_norm)


def required(function: Callable[..., Any]) -> int:
    """Return how many positional arguments a function needs."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(each.kind in kinds and each.default is each.empty for each in parameters)


def _plain_strategy() -> Any:
    from flwr.serverapp.strategy import FedAvg

    # All nodes that are there: FedAvg waits for others without end.
    return FedAvg(fraction_train=1.0, min_train_nodes=1, min_available_nodes=1)


def _plain_optimizer() -> Any:
    import torch

    # Each release gives it other parameters.
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


_WRAPPED: Mapping[str, Callable[[], Any]] = {"strategy": _plain_strategy, "optimizer": _plain_optimizer}
"""Arguments that are made here where none is given: what a wrapper wraps."""


def maker(
    target: str, arguments: list[Any] | None, named: dict[str, Any], changed: Mapping[str, Any] | None = None
) -> tuple[Callable[[], Any], list[str]]:
    """Return a function that makes a target again and again, and the names of its given arguments.

    A class is called each time, as is a factory if there are arguments or an empty pair of brackets; other objects
    are what they are. Some arguments may be changed.
    """
    module, _, name = target.partition(":")
    thing: Any = importlib.import_module(module)
    for part in name.split("."):
        thing = getattr(thing, part)
    if arguments is None and not inspect.isclass(thing):
        return lambda: thing, []
    signature = inspect.signature(thing)
    given = signature.bind_partial(*(arguments or []), **named)
    given.arguments.update(changed or {})
    made = {key: by for key, by in _WRAPPED.items() if key in signature.parameters and key not in given.arguments}

    def make() -> Any:
        whole = signature.bind_partial()
        whole.arguments.update({key: by() for key, by in made.items()} | given.arguments)
        return thing(*whole.args, **whole.kwargs)

    return make, list(given.arguments)


class Bench:
    """The target that is open, if any, and the answers to requests about it."""

    kind: Kind | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request: to open a target, or to run it for canaries. An error is an answer too."""
        try:
            if "target" not in request:
                assert self.kind is not None, "a target is opened first"
                return run(self.kind, **request)
            name, arguments, named = request["target"]
            make, given = maker(name, arguments, named, request["changed"])
            self.kind = kind_of(make, request["mod"], request["clip_norm"])
            return {**self.kind.facts(), "package": _package(name), "given": given}
        except Exception as error:  # the target may raise anything
            return {"error": _in_words(error), "missing": isinstance(error, ImportError)}


def run(
    kind: Kind,
    updates: list[list[float]],
    which: list[int],
    rounds: int,
    layout: list[list[Any]],
    seed: int | None,
    losses: list[float],
    examples: list[int],
) -> dict[str, Any]:
    """Return what leaves (canaries, rounds, n); NaN in its place where nothing does, with the first errors."""
    vectors = np.asarray(updates, np.float64)
    left = np.full((len(which), rounds, vectors.shape[1]), np.nan)
    gone = np.zeros((len(which), rounds), np.bool_)
    answer: dict[str, Any] = {"errors": [], "others": [], "lacking": [], "spent": None}
    for canary, choice in enumerate(which):
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            if torch := sys.modules.get("torch"):
                torch.manual_seed(seed)
        kind.begin()
        update = shaped(vectors[choice], layout)
        told = losses[canary % len(losses)], examples[canary % len(examples)]
        for round in range(rounds):
            try:
                arrays, others = kind.release(Asked(update, round + 1, *told))
            except Exception as error:  # the target may raise anything
                gone[canary, round] = True
                if len(answer["errors"]) < _REPORTED:
                    answer["errors"].append(_in_words(error))
                continue
            left[canary, round] = _flat(arrays, layout)
            if canary < _REPORTED:
                answer["others"].append(others)
                answer["lacking"] = sorted({name for name, _, _ in layout} - arrays.keys())
        if canary == 0:
            answer["spent"] = kind.spent()
    return {**answer, "left": left.tolist(), "gone": gone.tolist()}


_distributions = cache(importlib.metadata.packages_distributions)


def _package(target: str) -> str:
    """Return the name and version of the installed package of a target; its module if it is not installed."""
    top = target.partition(":")[0].partition(".")[0]
    names = _distributions().get(top, [])
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else target.partition(":")[0]


def _in_words(error: Exception) -> str:
    """Return an error in words, with the last line of the target's own code that it passed."""
    installed = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.abspath(__file__)))
    lines = [
        line for line in traceback.extract_tb((error.__cause__ or error).__traceback__)
        if os.path.isfile(line.filename) and not line.filename.startswith(installed)
    ]  # fmt: skip
    where = f" ({os.path.basename(lines[-1].filename)}, line {lines[-1].lineno})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


def shaped(values: NDArray[Any], layout: list[Any]) -> Named:
    """Return a flat update (n,) as named arrays of a layout: name, shape and dtype of each."""
    arrays, at = {}, 0
    for name, shape, dtype in layout:
        size = int(np.prod(shape))
        arrays[name] = values[at : at + size].reshape(shape).astype(dtype)
        at += size
    return arrays


def _flat(arrays: Named, layout: list[Any]) -> NDArray[Any]:
    """Return named arrays as one vector (n,); 0 where an array does not leave."""
    parts = []
    for name, shape, _ in layout:
        size = int(np.prod(shape))
        value = np.asarray(arrays[name], np.float64).ravel() if name in arrays else np.zeros(size)
        if value.size != size:
            raise ValueError(f"array {name!r} comes back with {value.size} values, not {size}")
        parts.append(value)
    return np.concatenate(parts)


def serve() -> None:
    """Answer requests from standard input until it ends; modules in the folders of the command line come first."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of the target must not mix with replies
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.path[:0] = sys.argv[2:]
    bench = Bench()
    for line in sys.stdin:
        print(json.dumps(bench.answer(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    serve()
