"""The audit's end of a worker, which runs a target in its own process and environment."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import getsource
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, Timer
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.errors import ConfigError, NotApplicableError
from umbel.protocol.flower import identify
from umbel.protocol.project import OWN_PATH
from umbel_lab.attacks.defences.worker.frames import Arrays, receive, send

Matrix = NDArray[np.float64]
Layout = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and dtype of each array of an update."""

LAYOUT: Layout = (("w", (2, 3), "<f4"), ("b", (2,), "<f4"))

# The worker's folder becomes a package under another name, so that umbel need not be installed where it runs.
_BOOT = f"""
import importlib, importlib.util, sys
{getsource(identify)}
folder, *own = sys.argv[1:]
name, start = "audit_worker", folder + "/__init__.py"
spec = importlib.util.spec_from_file_location(name, start, submodule_search_locations=[folder])
sys.modules[name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.identify = identify
importlib.import_module(name + ".serve").serve(own)
"""
_WORKER = Path(__file__).parent / "worker"
TIMEOUT = 600.0
"""Seconds that a worker may take for one answer, if the user names no others."""

_TAIL = 400  # characters of a dead worker's last words


@dataclass(frozen=True)
class Target:
    """The thing under audit, by its import path, and the arguments with which it is made.

    Attributes
    ----------
    name : str
        As ``package.module:Name``.
    arguments : tuple, optional
        Positional arguments; None without brackets, where an object that is no class is not called.
    named : mapping
        Named arguments.
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
        wrong = (
            f"{text!r} is not package.module:Name, or package.module:Name(key=1, ...) with literals; for other "
            "arguments, name a factory without any"
        )
        if module.endswith(".py"):
            dotted = module.removesuffix(".py").replace("/", ".").lstrip(".")
            raise ConfigError(f"{text!r} names a file; name its module: {dotted}:{rest}", code="config.audit-target")
        try:
            tree = ast.parse(rest.strip(), mode="eval").body
            called = isinstance(tree, ast.Call)
            name = tree.func if isinstance(tree, ast.Call) else tree
            if not (colon and all(map(str.isidentifier, module.split("."))) and _dotted(name)):
                raise ConfigError(wrong, code="config.audit-target")
            if not isinstance(tree, ast.Call):
                return cls(f"{module}:{ast.unparse(name)}")
            arguments = tuple(map(ast.literal_eval, tree.args))
            named = {one.arg: ast.literal_eval(one.value) for one in tree.keywords if one.arg}
        except (SyntaxError, ValueError):
            raise ConfigError(wrong, code="config.audit-target") from None
        return cls(f"{module}:{ast.unparse(name)}", arguments if called else None, named)

    def __str__(self) -> str:
        return self.name


def _dotted(name: ast.expr) -> bool:
    return isinstance(name, ast.Name) or (isinstance(name, ast.Attribute) and _dotted(name.value))


@dataclass(frozen=True)
class Seen:
    """The releases of some canaries.

    Attributes
    ----------
    left : array (canaries, rounds, n)
        Releases; NaN where nothing left.
    gone : array of bool (canaries, rounds)
        Where nothing left.
    errors : tuple of str
        The first reasons why nothing left.
    others : tuple of dict
        The other numbers of the first messages, by record and key.
    lacking : tuple of str
        The arrays that do not leave.
    spent : tuple of float, optional
        The epsilon and delta in the target's own account after a canary's rounds.
    """

    left: Matrix
    gone: NDArray[np.bool_]
    errors: tuple[str, ...] = ()
    others: tuple[dict[str, float], ...] = ()
    lacking: tuple[str, ...] = ()
    spent: tuple[float, float] | None = None


class Worker:
    """A process that runs a target; the end of a ``with`` ends it.

    Parameters
    ----------
    target : Target
        The thing under audit.
    python : str
        The interpreter of its environment.
    mod : Target, optional
        The Mod that the clients of a strategy wrapper run.
    clip_norm : float, optional
        The clip norm that a message carries, for a Mod that reads it there.
    timeout : float
        Seconds after which a request without an answer ends the process.

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
        self._target, self._mod, self._clip_norm, self._timeout = target, mod, clip_norm, timeout
        self._words = TemporaryFile()  # noqa: SIM115
        folders = [*filter(None, os.environ.get(OWN_PATH, "").split(os.pathsep))] or [os.getcwd()]
        command = [python, "-c", _BOOT, str(_WORKER), *folders]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words)
        except OSError as error:
            text = f"{python} does not start: {error.strerror or error}"
            raise NotApplicableError(text, code="attack.no-interpreter") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        with suppress(OSError):  # a request that was not read
            self._process.stdin.close()
        self._words.close()

    def open(self, **changed: Any) -> dict[str, Any]:
        """Make the target, with some named arguments changed, and return what its attributes tell."""
        target, mod = self._target, self._mod
        facts, _ = self._ask(
            {
                "do": "open",
                "changed": changed,
                "target": target.name,
                "arguments": None if target.arguments is None else list(target.arguments),
                "named": dict(target.named),
                "mod": [mod.name, None if mod.arguments is None else list(mod.arguments), dict(mod.named)]
                if mod
                else None,
                "clip_norm": self._clip_norm,
            },
            {},
        )
        return facts

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
        """Return what leaves for canaries with updates of the choice.

        Parameters
        ----------
        updates : array (choices, n)
            The possible updates.
        which : sequence of int
            Each canary's choice.
        rounds : int
            Releases of each canary.
        layout : Layout
            The arrays of an update.
        seed : int, optional
            Before each canary, seed the global generators of Python, NumPy and PyTorch with it, as apps do.
        losses, examples : sequence
            The figures that canaries in turn report beside their arrays.
        """
        header = {
            "do": "run", "layout": layout, "rounds": rounds, "seed": seed, "losses": list(losses),
            "examples": list(examples),
        }  # fmt: skip
        arrays = {"updates": np.asarray(updates, np.float64), "which": np.asarray(which, np.int64)}
        told, found = self._ask(header, arrays)
        spent = told["spent"]
        return Seen(
            found["left"], found["gone"], tuple(told["errors"]), tuple(told["others"]), tuple(told["lacking"]),
            (spent[0], spent[1]) if spent else None,
        )  # fmt: skip

    def _ask(self, header: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        reply = self._answer(header, arrays)
        if "error" not in reply[0]:
            return reply
        if reply[0]["missing"]:
            text = (
                f"{self._target} is not installed for this interpreter: {reply[0]['error']}; run the command in the "
                "module's folder, or name the interpreter of its environment: --python"
            )
            raise NotApplicableError(text, code="attack.target-not-found")
        text = f"{self._target} cannot be audited: {reply[0]['error']}"
        raise NotApplicableError(text, code="attack.target-fails")

    def _answer(self, header: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Return the worker's answer to a request."""
        assert self._process.stdin
        assert self._process.stdout
        late = Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = Timer(self._timeout, end)
        timer.daemon = True
        timer.start()
        try:
            send(self._process.stdin, header, arrays)  # type: ignore[arg-type]
            reply = receive(self._process.stdout)  # type: ignore[arg-type]
        except BrokenPipeError:
            reply = None
        finally:
            timer.cancel()
        if reply is None and late.is_set():
            text = f"{self._target} has not answered within {self._timeout:g} seconds; --timeout allows more"
            raise NotApplicableError(text, code="attack.target-hangs")
        if reply is None:
            self._words.seek(0)
            words = " ".join(self._words.read().decode(errors="replace").split())[-_TAIL:]
            raise NotApplicableError(f"the process of {self._target} ended: {words}", code="attack.worker-died")
        return reply
