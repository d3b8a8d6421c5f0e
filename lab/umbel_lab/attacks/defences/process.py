"""The audit's end of a worker, which runs a target in its own process and environment."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import getsource
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.errors import ConfigError, NotApplicableError
from umbel.protocol.flower import identify
from umbel.protocol.project import OWN_PATH

Matrix = NDArray[np.float64]
Layout = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and dtype of each array of an update."""

LAYOUT: Layout = (("w", (2, 3), "<f4"), ("b", (2,), "<f4"))
TIMEOUT = 600.0
"""Seconds that a worker may take for one answer, if the user names no others."""

# By the path alone, so that the modules beside the worker do not hide the target's.
_START = f"""
import runpy, sys
{getsource(identify)}
runpy.run_path(sys.argv[1], {{"identify": identify}}, "__main__")
"""
_WORKER = Path(__file__).parent / "worker.py"
_TAIL = 400  # characters of a dead worker's last words


@dataclass(frozen=True)
class Target:
    """The thing under audit, by its import path ``package.module:Name``, and the arguments with which it is made.

    Without brackets there are no positional `arguments`, not even none, and an object that is no class is not called.
    """

    name: str
    arguments: tuple[Any, ...] | None = None
    named: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the target that a text names, ``package.module:Name`` or ``package.module:Name(key=literal, ...)``.

        Raises
        ------
        ConfigError
            If it names none, or an argument is no literal.
        """
        module, colon, rest = text.partition(":")
        if module.endswith(".py"):
            dotted = module.removesuffix(".py").replace("/", ".").lstrip(".")
            raise ConfigError(f"{text!r} names a file; name its module: {dotted}:{rest}", code="config.audit-target")
        try:
            tree = ast.parse(rest.strip(), mode="eval").body
            call = tree if isinstance(tree, ast.Call) else None
            name = call.func if call else tree
            if not (colon and all(map(str.isidentifier, module.split("."))) and _is_dotted(name)):
                raise ValueError
            arguments = tuple(map(ast.literal_eval, call.args)) if call else None
            named = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg} if call else {}
        except (SyntaxError, ValueError):
            raise ConfigError(
                f"{text!r} is not package.module:Name, or package.module:Name(key=1, ...) with literals; for other "
                "arguments, name a factory without any",
                code="config.audit-target",
            ) from None
        return cls(f"{module}:{ast.unparse(name)}", arguments, named)

    def __str__(self) -> str:
        return self.name

    def as_json(self) -> list[Any]:
        """Return name, arguments and named arguments."""
        return [self.name, None if self.arguments is None else list(self.arguments), dict(self.named)]


def _is_dotted(name: ast.expr) -> bool:
    return isinstance(name, ast.Name) or (isinstance(name, ast.Attribute) and _is_dotted(name.value))


@dataclass(frozen=True)
class Seen:
    """The releases of some canaries.

    Releases that `left` are (canaries, rounds, n), and NaN where nothing left, as `gone` (canaries, rounds) says;
    `errors` are the first reasons. `others` are the other numbers of the first messages, by record and key, `lacking`
    are the arrays that do not leave, and `spent` is the epsilon and delta in the target's own account after a canary's
    rounds.
    """

    left: Matrix
    gone: NDArray[np.bool_]
    errors: Sequence[str] = ()
    others: Sequence[Mapping[str, float]] = ()
    lacking: Sequence[str] = ()
    spent: Sequence[float] | None = None


class Worker:
    """A process that runs a target by the interpreter of its environment; the end of a ``with`` ends it.

    The clients of a strategy wrapper run the Mod, if one is given; messages carry the clip norm, for a Mod that reads
    it there. A request that has no answer after `timeout` seconds ends the process.

    Raises
    ------
    NotApplicableError
        If the interpreter does not start, or the target cannot be made or is of no known kind.
    """

    def __init__(
        self,
        target: Target,
        python: str = sys.executable,
        mod: Target | None = None,
        clip_norm: float | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self._target, self._timeout = target, timeout
        self._opening = {"target": target.as_json(), "mod": mod.as_json() if mod else None, "clip_norm": clip_norm}
        self._start(python)

    def _start(self, python: str) -> None:
        self._words = TemporaryFile()  # noqa: SIM115
        folders = [*filter(None, os.environ.get(OWN_PATH, "").split(os.pathsep))] or [os.getcwd()]
        command = [python, "-c", _START, str(_WORKER), *folders]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._words, text=True, encoding="utf-8"
            )
        except OSError as error:
            text = f"{python} does not start: {error.strerror or error}"
            raise NotApplicableError(text, code="attack.no-interpreter") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        with suppress(OSError):  # a request that was not read
            self._process.communicate()
        self._words.close()

    def open(self, **changed: Any) -> dict[str, Any]:
        """Make the target, with some named arguments changed, and return what its attributes tell."""
        return self._ask({**self._opening, "changed": changed})

    def run(
        self,
        updates: Matrix,
        which: Sequence[int] | NDArray[np.int64],
        rounds: int = 1,
        layout: Layout = LAYOUT,
        seed: int | None = None,
        losses: Sequence[float] = (0.5,),
        examples: Sequence[int] = (1,),
    ) -> Seen:
        """Return what leaves in so many rounds for canaries, each with its choice of the updates (choices, n).

        Before each canary, the global generators of Python, NumPy and PyTorch are seeded with a `seed`, as apps do.
        Canaries in turn report the `losses` and numbers of `examples` beside their arrays.
        """
        answer = self._ask({
            "updates": np.asarray(updates, np.float64).tolist(), "which": np.asarray(which).tolist(), "rounds": rounds,
            "layout": layout, "seed": seed, "losses": losses, "examples": examples,
        })  # fmt: skip
        left, gone = np.array(answer.pop("left"), np.float64), np.array(answer.pop("gone"), np.bool_)
        return Seen(left, gone, **answer)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = self._answer(request)
        if "error" not in answer:
            return answer
        if answer["missing"]:
            text = (
                f"{self._target} is not installed for this interpreter: {answer['error']}; run the command in the "
                "module's folder, or name the interpreter of its environment: --python"
            )
            raise NotApplicableError(text, code="attack.target-not-found")
        raise NotApplicableError(f"{self._target} cannot be audited: {answer['error']}", code="attack.target-fails")

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the worker's answer to a request."""
        assert self._process.stdin
        assert self._process.stdout
        timer = Timer(self._timeout, self._process.kill)
        timer.daemon = True
        end = time.monotonic() + self._timeout
        timer.start()
        line = ""
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if time.monotonic() >= end:
            text = f"{self._target} has not answered within {self._timeout:g} seconds; --timeout allows more"
            raise NotApplicableError(text, code="attack.target-hangs")
        self._words.seek(0)
        words = " ".join(self._words.read().decode(errors="replace").split())[-_TAIL:]
        raise NotApplicableError(f"the process of {self._target} ended: {words}", code="attack.worker-died")
