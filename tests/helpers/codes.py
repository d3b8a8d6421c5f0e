"""The codes of errors, with cause and remedy, read from the app's source without running it."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.helpers.sources import APP, LAB, ROOT, files
from umbel.protocol import errors

KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.UmbelError) and kind is not errors.UmbelError
}
"""The classes of errors, by name."""
_BY_KIND = {kind.kind: kind for kind in KINDS.values()}
_NEAR = 10  # lines before an error in which its text may be put together
SHAPE = re.compile(r"([a-z]+)\.[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Made:
    """A place (file and line) where the app makes an error of a class, by name, and the codes that may be given.

    `cause` and `remedy` are what the sentence says, with … for what is only known when the error is raised.
    """

    where: str
    kind: str
    codes: tuple[str, ...]
    cause: str
    remedy: str


@cache
def made(root: Path = ROOT) -> tuple[Made, ...]:
    """Return every place of the app that makes an error, but for those that take text and code of another (`of`)."""
    places = []
    for file in files([name for name in (*APP, LAB) if (root / name).is_dir()], root):
        inside = file.relative_to(root)
        nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
        calls = {node: None for node in nodes if isinstance(node, ast.Call)}
        bare = [node.exc for node in nodes if isinstance(node, ast.Raise) and node.exc not in calls]
        for node in [*calls, *bare]:
            call = node if isinstance(node, ast.Call) else None
            callee = call.func if call else node
            name = getattr(callee, "attr", getattr(callee, "id", ""))
            codes = tuple(
                code for one in (call.keywords if call else ()) if one.arg == "code" for code in _texts(one.value)
            )
            found = {name: codes} if name in KINDS else {}
            for code in codes if name not in KINDS else ():
                # A function that makes one of a code that it is given.
                if (kind := _BY_KIND.get(code.partition(".")[0])) and SHAPE.fullmatch(code):
                    found[kind.__name__] = (*found.get(kind.__name__, ()), code)
            for kind_name, own in found.items() if node is not None else ():
                cause, remedy = _sentence(call.args[0], nodes) if call and call.args else ("", "")
                places.append(Made(f"{inside}:{node.lineno}", kind_name, own, cause, remedy))
    return tuple(places)


def _texts(value: ast.expr) -> Iterator[str]:
    """Yield the constants that a value may be."""
    match value:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=one, orelse=other):
            yield from (*_texts(one), *_texts(other))
        case ast.JoinedStr(values=[ast.FormattedValue(), ast.Constant(value=str(text))]):
            # Of settings (`umbel.protocol.rules`), which raise an error of their own kind.
            yield from (kind + text for kind in ("config", "data", "protocol", "site"))


def _value(value: ast.expr, nodes: Iterable[ast.AST]) -> ast.expr:
    """Return what a name was given in the few lines before, if it was; else the value itself."""
    if isinstance(value, ast.Name):
        near = [one for one in nodes if isinstance(one, ast.Assign) and 0 < value.lineno - one.lineno <= _NEAR]
        for one in sorted(near, key=lambda one: -one.lineno):
            match one:
                case ast.Assign(targets=[ast.Name(id=value.id)]):
                    return one.value
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    for name, own in zip(names, values, strict=True):
                        if getattr(name, "id", "") == value.id:
                            return own
    return value


def _sentence(value: ast.expr, nodes: Iterable[ast.AST]) -> tuple[str, str]:
    """Return what is wrong and the remedy, which follows a semicolon, as far as the source says them."""
    cause, _, remedy = (" ".join(part.split()) for part in _said(value, nodes).partition(";"))
    cause, remedy = (re.sub(r"[\s…]*…[\s…]*…", " …", text).strip() for text in (cause, remedy))
    cause = re.sub(r"^(…: ?)+(?=.*\w)", "", cause)  # where it is: a file, a key
    return cause, remedy if re.search(r"\w", remedy) else ""


def _said(value: ast.expr, nodes: Iterable[ast.AST]) -> str:
    match _value(value, nodes):
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_said(part, nodes) for part in parts)
        case ast.FormattedValue(value=inner, conversion=-1):
            return _said(inner, nodes)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _said(left, nodes) + _said(right, nodes)
    return "…"


def rows() -> Iterator[tuple[str, int, str, str]]:
    """Yield each code with the exit code of a command, the cause and the remedy of one place, the longest."""
    places: dict[str, set[Made]] = defaultdict(set)
    for one in made():
        for code in one.codes:
            places[code].add(one)
    for code, several in sorted(places.items()):
        kind = _BY_KIND[code.partition(".")[0]]
        best = max(several, key=lambda one: (bool(one.remedy), sum(map(str.isalpha, one.cause)), one.cause))
        cause = best.cause
        if not re.search(r"\w", cause):
            cause = str(kind.__doc__).splitlines()[0].rstrip(".")
        yield code, kind.exit_code, cause, best.remedy
