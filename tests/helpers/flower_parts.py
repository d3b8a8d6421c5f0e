"""The parts of Flower that umbel replaces or calls, found in the source of the files that do, and their digests."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from textwrap import dedent
from typing import Any


def parts(door: Path) -> dict[str, set[str]]:
    """Return the names of Flower's parts, as ``module:attribute``, by the function or class that uses them.

    These are read from a module that it imports when called, or put into one by `_replace`.
    """
    used: dict[str, set[str]] = {}
    for node in ast.parse(door.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (names := {*_used(node)}):
            # Of a class, the methods that are used.
            used[node.name] = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
    return used


def _used(block: ast.AST) -> Iterator[str]:
    called: dict[str, str] = {}

    def name(node: ast.AST) -> str:
        match node:
            case ast.Name(id=local):
                return called.get(local, "")
            case ast.Attribute(value=owner, attr=attribute):
                of = name(owner)
                return f"{of}{'' if of.endswith(':') else '.'}{attribute}" if of else ""
            case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=module)]):
                return f"{module}:"
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=module)]):  # of sys.modules
                return f"{module}:"
            case ast.Call(func=function) if (of := name(function)) and inspect.isclass(found(of)):
                return of  # an object goes by the name of its class
        return ""

    for node in ast.walk(block):
        match node:
            case ast.Assign(targets=[ast.Name(id=local)], value=value):
                called[local] = name(value)
            case (
                ast.NamedExpr(target=ast.Name(id=local), value=value)
                | ast.AnnAssign(target=ast.Name(id=local), value=ast.expr() as value)
            ):
                called[local] = name(value)
    for node in ast.walk(block):
        names = []
        match node:
            case ast.Attribute(ctx=ast.Load()):
                names = [name(node)]
            case ast.Call(func=ast.Name(id="_replace"), args=[module, _], keywords=replaced):
                names = [
                    f"{name(module)}{'' if name(module).endswith(':') else '.'}{one.arg}"
                    for one in replaced
                    if one.arg != "saves_time"
                ]
        yield from (one for one in names if one.startswith("flwr.") and _is_flowers(found(one)))


def _is_flowers(part: Any) -> bool:
    """Return whether a part has its source in Flower, or is a constant."""
    where = str(getattr(part, "__module__", ""))
    return isinstance(part, str | int | tuple) or (where.startswith("flwr.") and not where.startswith("flwr.proto."))


def found(name: str) -> Any:
    """Return what is called ``module:attribute.attribute``."""
    module, _, inside = name.partition(":")
    return attrgetter(inside)(importlib.import_module(module))


def digest(name: str) -> str:
    """Return the beginning of the SHA-256 of the source of a part, or of a constant's value."""
    part = found(name)
    source = repr(part) if isinstance(part, str | int | tuple) else dedent(inspect.getsource(part))
    return hashlib.sha256(source.encode()).hexdigest()[:12]
