"""`make test` guards every promise: what only `make test-all` has names its twin there, where it guards one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TWINS = {
    (str(file.relative_to(ROOT)), twin)
    for file in (ROOT / "tests").rglob("test_*.py")
    for twin in re.findall(r'mark\.rest\(\s*twin="([^"]+)"\s*\)', file.read_text(encoding="utf-8"))
}


def is_rest(marks: ast.AST) -> bool:
    """Return whether a decorator or a module's `pytestmark` keeps a test out of `make test`."""
    return "pytest.mark.rest" in ast.unparse(marks)


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def runs_in_first_tier(test: str) -> bool:
    """Return whether `make test` runs a test, named as FILE::TEST."""
    file, _, name = test.partition("::")
    for node in parsed(file).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and is_rest(node.value):
            return False
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return not any(map(is_rest, node.decorator_list))
    return False


@pytest.mark.parametrize(("file", "twin"), sorted(TWINS))
def test_a_twin_runs_in_the_first_tier(file: str, twin: str) -> None:
    assert runs_in_first_tier(twin), f"{file}: {twin} is not a test of make test"


def test_a_test_of_the_rest_is_no_twin() -> None:
    assert TWINS
    assert not runs_in_first_tier("tests/deploy/test_soak.py::test_a_year_loses_no_charge_and_leaves_no_site_behind")
    assert not runs_in_first_tier("tests/test_tiers.py::test_that_is_not_there")
