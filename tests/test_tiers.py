"""`make test` guards every promise: what only `make test-all` has names its twin there, where it guards one.

And the list of mutants fits the tree: each can be made, and tests of `make test` are named that should kill it.
"""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tools import mutants
from tools.mutants import ROOT, Mutant

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


# --- mutants


def test_each_mutant_can_be_made_and_its_tests_run_in_the_first_tier() -> None:
    listed = mutants.mutants()
    assert len({mutant.name for mutant in listed}) == len(listed) >= 67
    for mutant in listed:
        mutant.made_in((ROOT / mutant.file).read_text(encoding="utf-8"))
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            assert runs_in_first_tier(test), f"{mutant.name}: {test} is not a test of make test"


@pytest.mark.parametrize(("text", "new"), [("a = 2", "b"), ("a = 1; a = 1", "b"), ("a = 1", "a = 1")])
def test_a_mutant_that_cannot_be_made_is_an_error(text: str, new: str) -> None:
    with pytest.raises(ValueError, match="not once"):
        Mutant("name", "file", "a = 1", new, []).made_in(text)


@pytest.mark.rest
def test_a_mistake_is_killed_in_a_copy_and_a_change_without_effect_survives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The killer starts another process, and only there PyTorch is missing."""
    file, first = "umbel/mods/laplace.py", "import math\n"
    test = "tests/strategies/test_plain.py::test_strategies_and_mods_need_flower_and_numpy_alone"
    one, other = (Mutant(f"{more} more", file, first, f"{first}import {more}\n", [test]) for more in ("torch", "cmath"))
    monkeypatch.setattr(mutants, "mutants", lambda: [one, other])
    assert mutants.main([]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "killed: torch more", f"    by {test}", "SURVIVED: cmath more", "1 of 2 mutants were killed",
    ]  # fmt: skip
    assert mutants.main(["torch more"]) == 0
    assert "torch" not in (ROOT / file).read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="no such mutant"):
        mutants.main(["a third"])
