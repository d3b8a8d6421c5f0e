"""Hypotheses, and Flower's record of them: each array of a model k times, stacked along a first axis (k, \\*shape)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from umbel.protocol.arrays import Packed, flatten
from umbel.protocol.errors import ConfigError

ROUND, NUMBER = "server-round", "k"
"""Entries of the config in each message to a plain node: the round, as of Flower's strategies, and k."""
_INITIAL = 3  # separates the draws of initial hypotheses from a strategy's sampling
_SMALL = 0.1  # deviation of the draws around an array whose numbers are all the same


class Hypotheses(Packed):
    """k hypotheses: named arrays (k, \\*shape), the columns of one matrix (k, n), all read-only.

    The matrix has 32 bits. Only where arrays of a Flower app have more, it has 64; those with fewer are copies there.

    Parameters
    ----------
    arrays : mapping of ndarray
        They share their memory if they are columns of a matrix already.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        kind = np.result_type(np.float32, *(value.dtype for value in arrays.values()))
        matrix = arrays.matrix if isinstance(arrays, Packed) else flatten(arrays, kind)
        matrix.flags.writeable = False
        super().__init__(matrix, {name: value.shape[1:] for name, value in arrays.items()})
        for name, value in arrays.items():
            self[name] = self[name].astype(value.dtype, copy=False)
        self._columns, self.record = tuple(self.values()), getattr(arrays, "record", None)

    @property
    def k(self) -> int:
        """Number of hypotheses."""
        return len(self.matrix)


def stack(records: Sequence[ArrayRecord]) -> ArrayRecord:
    """Return k models of the same arrays as one record of k hypotheses.

    Parameters
    ----------
    records : sequence of ArrayRecord
        The models, each array of shape (\\*shape,).

    Returns
    -------
    ArrayRecord
        The same names, each array of shape (k, \\*shape).

    Raises
    ------
    ConfigError
        If there is no model, or if their names or shapes differ.
    """
    models = [{name: array.numpy() for name, array in record.items()} for record in records]
    kinds = {tuple((name, value.shape) for name, value in model.items()) for model in models}
    if len(kinds) != 1 or not models[0]:
        raise ConfigError("stack needs models with the same arrays, at least one", code="config.stack")
    return ArrayRecord({name: Array(np.stack([model[name] for model in models])) for name in models[0]})


def unstack(record: ArrayRecord) -> list[ArrayRecord]:
    """Return k hypotheses as k records, each array of shape (\\*shape,); the inverse of `stack`."""
    arrays = {name: array.numpy() for name, array in record.items()}
    return [
        ArrayRecord({name: Array(np.asarray(value[j])) for name, value in arrays.items()})
        for j in range(number_in(record))
    ]


def number_in(record: ArrayRecord) -> int:
    """Return k, the number of hypotheses in a record; raise `ConfigError` if its arrays are not stacked."""
    counts = {array.shape[0] if array.shape else 0 for array in record.values()}
    if len(counts) != 1 or not min(counts) >= 1:
        raise ConfigError(
            "hypotheses are one ArrayRecord whose arrays all have shape (k, ...); make it with umbel.hypotheses or "
            "umbel.stack",
            code="config.stack",
        )
    return int(counts.pop())


def hypotheses(start: Any, k: int, seed: int) -> ArrayRecord:
    """Return k different hypotheses to start from.

    Parameters
    ----------
    start : callable, ArrayRecord or mapping of ndarray
        Either makes a new model each time that it is called: a class of PyTorch modules, or a function that returns
        arrays by name, and may take a NumPy generator. Or the arrays of one model: the hypotheses are drawn around it,
        each number with the standard deviation of its array.
    k : int
        At least 1.
    seed : int
        The same seed gives the same hypotheses.

    Returns
    -------
    ArrayRecord
        Each array has shape (k, \\*shape).

    Raises
    ------
    ConfigError
        If `start` gives no arrays, or all hypotheses are equal: clients could not choose, and all would train one.
    """
    if k < 1:
        raise ConfigError(f"there is at least 1 hypothesis, not {k}", code="config.hypotheses")
    drawn = [_drawn(start, np.random.SeedSequence([seed, _INITIAL, j])) for j in range(k)]
    record = stack([ArrayRecord({name: Array(np.asarray(value)) for name, value in one.items()}) for one in drawn])
    if k > 1 and all(np.array_equal(one[name], drawn[0][name]) for one in drawn for name in one):
        text = "all hypotheses are equal; let the function take a generator (generator) and draw from it"
        raise ConfigError(text, code="config.stack")
    return record


def _drawn(start: Any, seed: np.random.SeedSequence) -> Mapping[str, NDArray[Any]]:
    """Return the arrays of one model."""
    generator = np.random.default_rng(seed)
    if callable(start):
        with _torch_seeded(int(seed.generate_state(1, np.uint64)[0] >> np.uint64(1))):
            return _arrays(start(generator) if _takes_one(start) else start())
    return {name: _around(value, generator) for name, value in _arrays(start).items()}


def _around(value: NDArray[Any], generator: np.random.Generator) -> NDArray[Any]:
    if value.dtype.kind != "f":
        return value
    return (value + generator.normal(0, float(value.std()) or _SMALL, value.shape)).astype(value.dtype)


def _arrays(model: Any) -> dict[str, NDArray[Any]]:
    """Return a model's arrays by name."""
    if hasattr(model, "state_dict"):
        model = model.state_dict()
    if isinstance(model, ArrayRecord):
        return {name: array.numpy() for name, array in model.items()}
    if isinstance(model, Sequence) and not isinstance(model, str):
        model = {str(i): value for i, value in enumerate(model)}
    if not isinstance(model, Mapping) or not model:
        raise ConfigError(f"a {type(model).__name__} has no arrays by name", code="config.stack")
    return {name: np.asarray(value) for name, value in model.items()}


def _takes_one(make: Callable[..., Any]) -> bool:
    """Return whether a function needs an argument, which is then a generator."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:
        return False
    return any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)


@contextmanager
def _torch_seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's own generator for a while, if PyTorch is in use: its modules draw their weights from it."""
    if (torch := sys.modules.get("torch")) is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(seed)
        yield
