"""Find what umbel uses of Flower that is not public: python tools/private.py exits with 1 if `private.toml` is untrue.

`private.toml` beside it lists the modules and the names that are assigned at run time, each with what it is for and
what Flower would have to offer instead. Two files alone may use them. With ``--write``, the requests in
``docs/project/flower.md`` are written from the list.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIST, PAGE = ROOT / "tools" / "private.toml", ROOT / "docs" / "project" / "flower.md"
FOLDERS = ("umbel", "lab")
PUBLIC = {"flwr", "flwr.app", "flwr.common", "flwr.simulation"} | {
    f"flwr.{side}" for side in ("clientapp", "clientapp.mod", "clientapp.typing", "serverapp", "serverapp.strategy")
}
"""The modules of Flower's documented interface, whose exported names are public."""
_MODULE = re.compile(r"(flwr(?:\.\w+)*)(?::[\w.]+)?")
_BEGIN, _END = "<!-- written by tools/private.py -->\n", "<!-- end of the table -->"

Found = set[tuple[str, str]]
"""Kinds, `modules` or `assigned`, with names."""


def found_in(source: str) -> Found:
    """Return Flower's private modules that a text names, and the names of Flower's that it assigns."""
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and _MODULE.fullmatch(node.module or "")
        for alias in node.names
    }
    found = {("modules", name) for node in ast.walk(tree) for name in _modules(node) if name not in PUBLIC}
    for block in tree.body:  # names inside a function or a class are its own
        known = imported | {
            target.id: path
            for node in ast.walk(block)
            for target, value in _bindings(node)
            if isinstance(target, ast.Name) and (path := _path(value, imported))
        }
        found |= {("assigned", name) for node in ast.walk(block) for name in _assigned(node, known)}
    return found


def _modules(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ImportFrom(module=str(name)) | ast.Constant(value=str(name)):
            names = [name]
        case ast.Import(names=aliases):
            names = [alias.name for alias in aliases]
        case _:
            names = []
    yield from (match[1] for name in names if (match := _MODULE.fullmatch(name)))


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case (
            ast.AnnAssign(target=target, value=ast.expr() as value)
            | ast.AugAssign(target=target, value=value)
            | ast.NamedExpr(target=target, value=value)
        ):
            yield target, value


def _path(node: ast.expr, known: dict[str, str]) -> str:
    """Return an expression's place in Flower as module:name.name; empty if it is not Flower's."""
    match node:
        case ast.Name(id=name):
            return known.get(name, "")
        case ast.Attribute(value=owner, attr=name) if of := _path(owner, known):
            return f"{of}{'.' if ':' in of else ':'}{name}"
        case ast.Call(args=[ast.Constant(value=str(module)), *_]) if _MODULE.fullmatch(module) and "." in module:
            return module  # by import_module, or from sys.modules
        case ast.Call(func=function) if of := _path(function, known):
            return f"{of}()"
    return ""


def _assigned(node: ast.AST, known: dict[str, str]) -> Iterator[str]:
    for target, _ in _bindings(node):
        for one in target.elts if isinstance(target, ast.Tuple) else [target]:
            path = _path(one, known) if isinstance(one, ast.Attribute) else ""
            if path and ("()" not in path or "._" in path):  # an object's public attributes are for everybody
                yield path
    match node:
        case ast.Call(func=ast.Name(id="_replace"), args=[module, *_], keywords=keywords):
            yield from (f"{_path(module, known)}:{one.arg}" for one in keywords if one.arg != "saves_time")
        case ast.Call(func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str(name)), _]):
            if path := _path(owner, known):
                yield f"{path}.{name}"
        case ast.Subscript(value=ast.Attribute(attr="__dict__"), slice=ast.Constant(value=str(name))) if name[0] == "_":
            yield name
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(attr="__dict__")), args=[ast.Constant(value=str(name)), *_]
        ) if name[0] == "_":
            yield name


def faults(listed: dict[str, Any], root: Path = ROOT) -> list[str]:
    """Return what differs from the list, and what exceeds its bounds."""
    wrong, inside = [], set[tuple[str, str]]()
    for file in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        found, name = found_in(file.read_text(encoding="utf-8")), file.relative_to(root).as_posix()
        if name in listed["files"]:
            inside |= found
        else:
            wrong += [f"{name} uses {what}; only {' and '.join(listed['files'])} may" for _, what in sorted(found)]
    for kind, most in listed["most"].items():
        names = {name for one, name in inside if one == kind}
        wrong += [f"{name} is {kind}, and not in {LIST.name}" for name in sorted(names - listed[kind].keys())]
        wrong += [f"{name} is in {LIST.name}, and not {kind}" for name in sorted(listed[kind].keys() - names)]
        wrong += [f"{len(names)} {kind}, of at most {most}"] if len(names) > most else []
    return wrong


def requests(listed: dict[str, Any]) -> str:
    """Return the requests to Flower as tables."""
    lines = []
    for kind, title in (("assigned", "name that umbel assigns"), ("modules", "module that umbel imports")):
        lines += [f"| {title} | what for | what Flower would have to offer |", "|---|---|---|"]
        lines += [f"| `{name}` | {why} | {offer} |" for name, (why, offer) in sorted(listed[kind].items())]
        lines += [""]
    return "\n".join(lines)


def written(page: str, listed: dict[str, Any]) -> str:
    """Return a page with the requests of a list."""
    before, _, rest = page.partition(_BEGIN)
    return f"{before}{_BEGIN}\n{requests(listed)}{rest[rest.index(_END) :]}"


if __name__ == "__main__":
    entries = tomllib.loads(LIST.read_text(encoding="utf-8"))
    if "--write" in sys.argv:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), entries), encoding="utf-8")
    wrong = faults(entries)
    if (text := PAGE.read_text(encoding="utf-8")) != written(text, entries):
        wrong += [f"{PAGE.name} differs from {LIST.name}; write it: python tools/private.py --write"]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))
