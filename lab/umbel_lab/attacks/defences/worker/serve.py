"""Requests to the worker: open a target, and run it for many canaries."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import random
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from .frames import Arrays, receive, send
from .kinds import Asked, Kind, Named, kind_of, maker

_TOLD = 8  # canaries whose other records are told


def serve(folders: Sequence[str]) -> None:
    """Answer requests from standard input until it ends; modules in `folders` come first."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of the target must not mix with replies
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.path[:0] = folders
    bench = Bench()
    while (frame := receive(sys.stdin.buffer)) is not None:
        send(replies, *bench.answer(*frame))


class Bench:
    """The target that is open, if any."""

    def __init__(self) -> None:
        self._kind: Kind | None = None

    def answer(self, header: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Return the answer to a request; an error of the target is an answer too."""
        try:
            if header["do"] == "open":
                return self._open(header), {}
            assert self._kind is not None, "a target is opened first"
            return _run(self._kind, header, arrays)
        except Exception as error:  # the target may raise anything
            return {"error": _told(error), "missing": isinstance(error, ImportError)}, {}

    def _open(self, header: dict[str, Any]) -> dict[str, Any]:
        make, given = maker(header["target"], header["arguments"], header["named"], header["changed"])
        self._kind = kind_of(make, {"mod": header["mod"], "clip_norm": header["clip_norm"]})
        return {**self._kind.facts(), "package": _package(header["target"]), "given": given}


def _package(target: str) -> str:
    """Return the name and version of the installed package of a target; its module if it is not installed."""
    top = target.partition(":")[0].partition(".")[0]
    names = importlib.metadata.packages_distributions().get(top, [])
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else target.partition(":")[0]


def _run(kind: Kind, header: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    """Return what leaves (canaries, rounds, n); NaN in its place where nothing does, with the first error."""
    layout, rounds = header["layout"], header["rounds"]
    updates, which = arrays["updates"], arrays["which"]
    left = np.full((len(which), rounds, updates.shape[1]), np.nan)
    gone = np.zeros((len(which), rounds), np.bool_)
    told: dict[str, Any] = {"errors": [], "others": [], "lacking": [], "spent": None}
    for canary, choice in enumerate(which):
        if (seed := header["seed"]) is not None:
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            if torch := sys.modules.get("torch"):
                torch.manual_seed(seed)
        kind.begin()
        update = _shaped(updates[choice], layout)
        losses, examples = header["losses"], header["examples"]
        for round in range(rounds):
            loss = losses[canary % len(losses)]
            try:
                found = kind.release(Asked(update, round + 1, loss, examples[canary % len(examples)]))
            except Exception as error:  # the target may raise anything
                gone[canary, round] = True
                if len(told["errors"]) < _TOLD:
                    told["errors"].append(_told(error))
                continue
            left[canary, round] = _flat(found.arrays, layout)
            if canary < _TOLD:
                told["others"].append(found.others)
                told["lacking"] = sorted({name for name, _, _ in layout} - found.arrays.keys())
        if canary == 0:
            told["spent"] = kind.spent()
    return told, {"left": left, "gone": gone}


def _told(error: Exception) -> str:
    """Return an error in words, with the last line of the target's own code that it passed."""
    installed = (sys.prefix, sys.base_prefix, os.path.dirname(__file__))
    lines = [
        one for one in traceback.extract_tb((error.__cause__ or error).__traceback__)
        if os.path.isfile(one.filename) and not one.filename.startswith(installed)
    ]  # fmt: skip
    where = f" ({os.path.basename(lines[-1].filename)}, line {lines[-1].lineno})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


def _shaped(values: Any, layout: list[list[Any]]) -> Named:
    """Return a flat update (n,) as named arrays."""
    found, at = {}, 0
    for name, shape, kind in layout:
        size = int(np.prod(shape))
        found[name] = values[at : at + size].reshape(shape).astype(kind)
        at += size
    return found


def _flat(arrays: Named, layout: list[list[Any]]) -> Any:
    """Return named arrays as one vector (n,); 0 where an array does not leave."""
    parts = []
    for name, shape, _ in layout:
        size = int(np.prod(shape))
        value = np.asarray(arrays[name], np.float64).ravel() if name in arrays else np.zeros(size)
        if value.size != size:
            raise ValueError(f"array {name!r} comes back with {value.size} values, not {size}")
        parts.append(value)
    return np.concatenate(parts)
