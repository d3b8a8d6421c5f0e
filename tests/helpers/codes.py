"""The codes of errors, read from the app's source without running it,
and docs/reference/errors.md, the page that lists them.

    python -m tests.helpers.codes

writes that page.
"""

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

PAGE = ROOT / "docs" / "reference" / "errors.md"
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.UmbelError) and kind is not errors.UmbelError
}
"""The classes of errors, by name."""
_BY_KIND = {kind.kind: kind for kind in KINDS.values()}
_NEAR = 10  # lines before an error in which its text may be put together
SHAPE = re.compile(r"([a-z]+)\.[a-z0-9]+(-[a-z0-9]+)*")

_HEAD = """# Errors

Every error ends with a code in brackets. Sentences may change from one version to the next; codes do not. In the table,
… stands for words that differ from case to case, such as a file's name. If several sentences have the same code, the
table shows the longest.

The column *exit* is the exit code of the command: 2 for a wrong request, 3 for data, 4 for a refusal by sites, 5 under
`--strict` for a run that is not shown to be worth it, and 1 for the rest.

| code | class | exit | what is wrong |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Made:
    """A place where the app makes an error.

    Attributes
    ----------
    where : str
        File and line.
    room : str
    kind : str
        The name of the class.
    codes : tuple of str
        Those that may be given; none where a code is missing.
    text : str
        What the sentence says, with … for what is only known when it is raised.
    """

    where: str
    room: str
    kind: str
    codes: tuple[str, ...]
    text: str


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
                text = _sentence(call.args[0], nodes) if call and call.args else ""
                room = inside.parts[1].removesuffix(".py")
                places.append(Made(f"{inside}:{node.lineno}", room, kind_name, own, text))
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


def _sentence(value: ast.expr, nodes: Iterable[ast.AST]) -> str:
    """Return a text as far as the source says it: what is wrong, without the fix that follows a semicolon."""
    said = " ".join(_said(value, nodes).split(";")[0].split())
    said = re.sub(r"[\s…]*…[\s…]*…", " …", said)
    return re.sub(r"^(…: ?)+(?=.*\w)", "", said)  # where it is: a file, a key


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


def page() -> str:
    """Return docs/reference/errors.md as the source has it."""
    sentences: dict[str, set[str]] = defaultdict(set)
    for one in made():
        for code in one.codes:
            sentences[code].add(one.text)
    rows = []
    for code in sorted(sentences):
        kind = _BY_KIND[code.partition(".")[0]]
        said = max(sentences[code], key=lambda text: (sum(map(str.isalpha, text)), text))
        if not re.search(r"\w", said):
            said = str(kind.__doc__).splitlines()[0].rstrip(".")
        rows.append(f"| `{code}` | `{kind.__name__}` | {kind.exit_code} | {said.replace('|', chr(92) + '|')} |\n")
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
