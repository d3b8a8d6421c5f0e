"""What can go wrong is one tree, in one file, and each error has a code that can be searched for."""

from __future__ import annotations

import builtins
import inspect
import re

from tests.helpers import codes
from tests.helpers.sources import APP, LAB, ROOT, files
from umbel.protocol import errors


def test_every_exception_of_the_app_is_in_one_tree() -> None:
    tree, alone = ROOT / "umbel" / "protocol" / "errors.py", ROOT / LAB / "attacks" / "defences" / "worker.py"

    def is_exception(name: str) -> bool:
        """Say whether a class of that name is one that can be raised, as far as names tell."""
        built_in = getattr(builtins, name, None)
        if inspect.isclass(built_in) and issubclass(built_in, BaseException):
            return True
        return hasattr(errors, name) or name.endswith(("Error", "Exception", "Exit"))

    assert not {
        f"{file.relative_to(ROOT)}: {name}"
        for file in files((*APP, LAB))
        if file not in (tree, alone)  # the other runs in environments without umbel
        for name, bases in re.findall(r"^ *class (\w+)\(([^)]*)\)", file.read_text(encoding="utf-8"), re.M)
        if any(is_exception(base.strip().rpartition(".")[2]) for base in bases.split(","))
    }
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]
    assert all(issubclass(kind, errors.UmbelError) for kind in kinds)


def test_every_error_has_a_code_that_begins_with_the_kind_of_its_class() -> None:
    for one in codes.made():
        assert one.codes, one.where
        for code in one.codes:
            match = codes.SHAPE.fullmatch(code)
            assert match, f"{one.where}: {code}"
            assert match[1] == codes.KINDS[one.kind].kind, f"{one.where}: {code}"
