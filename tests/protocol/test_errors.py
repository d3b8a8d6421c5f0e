"""What can go wrong is one tree, in one file, and the docstring on top of it is the tree."""

from __future__ import annotations

import builtins
import inspect
import re
from pathlib import Path

from tests.helpers import codes
from tests.helpers.sources import APP, LAB, ROOT, files
from umbel.protocol import errors

CLASSES = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]
"""Rooms that still make errors without a code."""


def is_exception(name: str) -> bool:
    """Say whether a class of that name is one that can be raised, as far as names tell."""
    known = {kind.__name__ for kind in CLASSES}
    kind = getattr(builtins, name, None)
    built_in = inspect.isclass(kind) and issubclass(kind, BaseException)
    return name in known or built_in or name.endswith(("Error", "Exception", "Exit"))


ALONE = ROOT / "lab" / "umbel_lab" / "attacks" / "defences" / "worker.py"
"""Runs in environments without umbel."""


def test_every_exception_of_the_app_is_in_the_tree() -> None:
    elsewhere = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in files((*APP, LAB))
        if file != ROOT / "umbel" / "protocol" / "errors.py" and not file.is_relative_to(ALONE)
        for name, bases in re.findall(r"^ *class (\w+)\(([^)]*)\)", file.read_text(encoding="utf-8"), re.M)
        if any(is_exception(base.strip().rpartition(".")[2]) for base in bases.split(","))
    }
    assert not elsewhere


def test_all_is_under_one_root() -> None:
    assert all(issubclass(kind, errors.UmbelError) for kind in CLASSES)
    assert errors.UmbelError.__bases__ == (Exception,)


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    drawn: list[tuple[str, str]] = []
    above = [""]
    for line in str(errors.__doc__).splitlines():
        if match := re.fullmatch(r" {4}([│ ]*)(?:[├└]── )?(\w+)(?: {2,}.*)?", line):
            # Four characters a step down: "├── ", or "│   " for the branches beside it.
            depth = (len(line) - len(line.lstrip(" │├└─")) - 4) // 4
            above[depth + 1 :] = [match[2]]
            drawn.append((match[2], above[depth]))
    is_ = [(kind.__name__, kind.__bases__[0].__name__ if kind is not errors.UmbelError else "") for kind in CLASSES]
    assert drawn == is_


def test_every_error_has_a_code() -> None:
    assert not {one.where for one in codes.made() if not one.codes}


def test_a_code_begins_with_the_kind_of_its_class_and_is_for_a_search() -> None:
    odd = {
        f"{one.where}: {code}"
        for one in codes.made()
        for code in one.codes
        if not (match := codes.SHAPE.fullmatch(code)) or match[1] != codes.KINDS[one.kind].kind
    }
    assert not odd


def test_errors_are_found_in_the_source(tmp_path: Path) -> None:
    folder = tmp_path / "umbel" / "room"
    folder.mkdir(parents=True)
    (folder / "module.py").write_text(
        """
raise ConfigError(f"there is no {key}; did you mean {near}?", code="config.unknown-key")
raise errors.ConfigError("a" + "b", code="log.a" if new == "x" else "log.b") from None
raise Refused
DatasetError(told)
self._refuse(f"no {what}", code="refused.task")
open(path, code="utf.8")
SiteError.of(error, "prefix: ")
""",
        encoding="utf-8",
    )
    found = {(one.where.rpartition(":")[2], one.room, one.kind, one.codes, one.cause) for one in codes.made(tmp_path)}
    assert found == {
        ("2", "room", "ConfigError", ("config.unknown-key",), "there is no …"),
        ("3", "room", "ConfigError", ("log.a", "log.b"), "ab"),
        ("4", "room", "Refused", (), ""),
        ("5", "room", "DatasetError", (), "…"),
        ("6", "room", "Refused", ("refused.task",), "no …"),
    }
