"""The kinds of targets, told by what an object can do, and how each is asked for one release."""

from __future__ import annotations

import importlib
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Named = dict[str, NDArray[Any]]

EPSILONS = ("epsilon", "budget", "target_epsilon", "max_epsilon")
DELTAS = ("delta", "target_delta")
CLIP_NORMS = ("clipping_norm", "clip_norm", "max_grad_norm")
BOXES = ("gamma",)
ORDERS = ("clip_order",)
ACCOUNTS = ("privacy_spent", "get_privacy_spent")
"""Attributes in which a target tells what it claims, the clip norm, the bound of each value, the
order of the norm, and what is spent."""


class Refusal(Exception):
    """The target sends nothing this time."""


class Asked:
    """One release that is asked for.

    Attributes
    ----------
    update : dict from str to array
        The client's trained arrays, less those that it received.
    round : int
        From 1 on.
    loss : float
        The training loss, which only a client knows.
    examples : int
        The number of the client's rows.
    """

    def __init__(self, update: Named, round: int, loss: float = 0.5, examples: int = 1) -> None:
        self.update, self.round, self.loss, self.examples = update, round, loss, examples

    @property
    def received(self) -> Named:
        """The server's arrays, which are 0."""
        return {name: np.zeros_like(value) for name, value in self.update.items()}


class Left:
    """The contents of a release: arrays, and the other numbers of a message, by record and key."""

    def __init__(self, arrays: Named, others: dict[str, float] | None = None) -> None:
        self.arrays, self.others = arrays, others or {}


class Kind(ABC):
    """A kind of target.

    Attributes
    ----------
    name : str
        For people.
    share : float
        Distance by which a release moves for each unit of distance between two updates.
    baseline : float
        The value to which an update of 0 leads, by the updates of others.
    clips : bool
        Whether it limits updates itself. Otherwise each update already has at most the clip norm.
    rows : bool
        Whether it protects a row of a batch, not a client's update.
    """

    name = ""
    share = 1.0
    baseline = 0.0
    clips = True
    rows = False

    def __init__(self, make: Callable[[], Any], options: dict[str, Any]) -> None:
        self.make, self.options, self.target = make, options, make()
        self.begin()

    def begin(self) -> None:
        """Prepare for another client: a new target, if it can be made."""
        self.target = self.make()

    @abstractmethod
    def release(self, asked: Asked) -> Left:
        """Return what leaves."""

    def deviation(self) -> float | None:
        """Return the deviation of the noise in each value, as the target's attributes tell; None if they do not."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return what the target's attributes tell."""
        one = self.target
        return {
            "kind": self.name,
            "share": self.share,
            "baseline": self.baseline,
            "clips": self.clips,
            "rows": self.rows,
            "epsilon": number(one, EPSILONS),
            "delta": number(one, DELTAS),
            "clip_norm": number(one, CLIP_NORMS),
            "box": number(one, BOXES),
            "order": number(one, ORDERS),
            "noise_multiplier": number(one, ("noise_multiplier",)),
            "deviation": self.deviation(),
            "accounts": any(callable(getattr(one, name, None)) for name in ACCOUNTS),
        }

    def spent(self) -> list[float] | None:
        """Return the epsilon and delta that the target itself accounts for so far; None if it has no account."""
        for name in ACCOUNTS:
            account = getattr(self.target, name, None)
            if callable(account) and (found := account()) is not None:
                return [float(getattr(found, "epsilon", found)), float(getattr(found, "delta", 0.0))]
        return None


def number(one: Any, names: tuple[str, ...]) -> float | None:
    """Return the first of some attributes that is a number."""
    for name in names:
        value = getattr(one, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


class Function(Kind):
    """A function of a client's update: a list of arrays, a dictionary of arrays, or one flat array."""

    name = "function of arrays"

    def __init__(self, make: Callable[[], Any], options: dict[str, Any]) -> None:
        super().__init__(make, options)
        self._form = self._understood()

    def _understood(self) -> str:
        """Return the form of an update that the function understands."""
        trial = {"w": np.full((2, 3), 0.25, np.float32), "b": np.full(2, 0.25, np.float32)}
        failed: list[Exception] = []
        for form in ("list", "dict", "flat"):
            try:
                self._form = form
                left = self.release(Asked(trial, 1)).arrays
                if {name: np.shape(one) for name, one in left.items()} == {"w": (2, 3), "b": (2,)}:
                    self.begin()
                    return form
            except Exception as error:
                failed.append(error)
        raise TypeError(
            "it takes neither a list of arrays, nor a dictionary of arrays, nor one flat array, "
            f"and returns the like: {next(iter(failed), 'other shapes come back')}"
        ) from next(iter(failed), None)

    def release(self, asked: Asked) -> Left:
        update = {name: value.copy() for name, value in asked.update.items()}
        if self._form == "dict":
            found = self.target(update)
            return Left({name: np.asarray(value) for name, value in found.items()})
        if self._form == "list":
            found = self.target(list(update.values()))
            if not isinstance(found, list | tuple):
                raise TypeError("it returns no list")
            return Left(dict(zip(update, map(np.asarray, found), strict=True)))
        flat = np.concatenate([value.ravel() for value in update.values()])
        flat, left = np.asarray(self.target(flat)), {}
        for name, value in update.items():
            left[name], flat = flat[: value.size].reshape(value.shape), flat[value.size :]
        return Left(left)


def kind_of(make: Callable[[], Any], options: dict[str, Any]) -> Kind:
    """Return the kind of target that `make` makes."""
    from .flower import Mod, Wrapper
    from .nvflare import Filter
    from .opacus import Optimizer

    one = make()
    if hasattr(one, "configure_train") and hasattr(one, "aggregate_train"):
        return Wrapper(make, options)
    if hasattr(one, "process_dxo") or (hasattr(one, "process") and not callable(one)):
        return Filter(make, options)
    if hasattr(one, "max_grad_norm") and hasattr(one, "step"):
        return Optimizer(make, options)
    if callable(one):
        return Mod(make, options) if required(one) == 3 else Function(make, options)
    raise TypeError(f"{type(one).__name__} is no Mod, strategy, filter, optimizer or function of arrays")


def required(function: Callable[..., Any]) -> int:
    """Return how many positional arguments a function needs."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(one.kind in kinds and one.default is one.empty for one in parameters)


def maker(
    target: str, arguments: list[Any] | None, named: dict[str, Any], changed: dict[str, Any] | None = None
) -> tuple[Callable[[], Any], list[str]]:
    """Return a function that makes a target again and again, and the names of its given arguments.

    A class is called each time, as is a factory if there are arguments or an empty pair of brackets; other objects
    are what they are. Some arguments may be changed.

    Raises
    ------
    TypeError
        If arguments are missing.
    """
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if arguments is None and not inspect.isclass(found):
        return lambda: found, []
    signature = inspect.signature(found)
    given = signature.bind_partial(*(arguments or []), **named)
    given.arguments.update(changed or {})
    made = {one: by for one, by in MADE.items() if one in signature.parameters and one not in given.arguments}
    missing = [
        one.name
        for one in signature.parameters.values()
        if one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        and one.name not in given.arguments.keys() | made.keys()
    ]
    if missing:
        told = ", ".join(f"{one}=..." for one in missing)
        raise TypeError(f"{name} needs arguments; write {target}({told})")

    def make() -> Any:
        whole = signature.bind_partial()
        whole.arguments.update({one: by() for one, by in made.items()} | given.arguments)
        return found(*whole.args, **whole.kwargs)

    return make, list(given.arguments)


def _strategy() -> Any:
    from .flower import plain_strategy

    return plain_strategy()


def _optimizer() -> Any:
    from .opacus import plain_optimizer

    return plain_optimizer()


MADE: types.MappingProxyType[str, Callable[[], Any]] = types.MappingProxyType(
    {"strategy": _strategy, "optimizer": _optimizer}
)
"""Arguments that the worker makes where none is given: what a wrapper wraps."""
