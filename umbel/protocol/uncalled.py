"""Methods of a user's class that nothing calls, such as one with a misspelt name."""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from umbel.protocol.errors import ConfigError
from umbel.protocol.project import PACKAGE

_CALLED = (PACKAGE.name, "flwr")  # the packages whose classes say which methods are called
_WRAPPED = (staticmethod, classmethod, property, cached_property)
_ANY = "*"  # in place of a name that code computes


def refuse_uncalled(what: str, kind: type[Any], base: type[Any], instead: Mapping[str, str] = {}) -> None:
    """Refuse a user's class with a public method, or property, that nothing calls.

    umbel calls the methods that its own classes, and Flower's, have. A class uses each further one in its own module,
    or in those of its parents, outside the method itself. Where the code cannot be read, no class is refused.

    Parameters
    ----------
    what : str
        The kind of class, for errors.
    base : type
        The class that all such classes are built on.
    instead : mapping from str to str
        Methods that umbel never calls, though Flower's classes have them or had them, and the nearest that it calls.

    Raises
    ------
    ConfigError
        With the name of the method, and the nearest one that is called.
    """
    package_of = {one: one.__module__.partition(".")[0] for one in kind.__mro__}
    users = [one for one, package in package_of.items() if package not in {*_CALLED, *sys.stdlib_module_names}]
    called = {name for one, package in package_of.items() if package in _CALLED for name in _methods(one)} - {*instead}
    further = {name: one for one in users if issubclass(one, base) for name in _methods(one) if name not in called}
    if not further:
        return
    used = {name for module in {one.__module__ for one in users} for name in _names_used(_code(module))}
    for name, owner in further.items():
        if name not in used and _ANY not in used:
            near = instead.get(name) or difflib.get_close_matches(name, sorted(called), 1, cutoff=0)[0]
            text = f"nothing calls {name}, a method of {what} {owner.__module__}:{owner.__qualname__}"
            fix = f"did you mean {near}? If not, call it in that module, or begin its name with an underscore"
            raise ConfigError(f"{text}; {fix}", code="config.uncalled-method")


def _methods(kind: type[Any]) -> list[str]:
    """Return the names of a class's own public methods and properties, in order."""
    public = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    return [
        name
        for name, value in public.items()
        if isinstance(value, _WRAPPED) or (callable(value) and not isinstance(value, type))
    ]


def _code(module: str) -> ast.AST:
    """Return a module's code; where it cannot be read, as if it were to use any name."""
    try:
        return ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return ast.Constant(_ANY)


def _names_used(node: ast.AST, inside: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield each name, attribute and text that code reads, but within a function not the function's own name."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            inside |= {name}
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()) | ast.Constant(str(name)):
            if name not in inside:
                yield name
        case ast.Call(ast.Name("getattr"), [_, attribute, *_]) if not isinstance(attribute, ast.Constant):
            yield _ANY
    for child in ast.iter_child_nodes(node):
        yield from _names_used(child, inside)
