"""The list of mutants fits the tree: each can be made, and tests of `make test` are named that should kill it."""

from __future__ import annotations

import pytest

from tests.test_tiers import runs_in_first_tier
from tools import mutants
from tools.mutants import ROOT, Mutant


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
