"""`umbel demo` shows real hospitals what they get, with the guarantee that it says, and leaves its runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.cli import done
from tests.helpers.sources import ROOT
from umbel.cli.commands.demo import ONE, OPEN, SEVERAL
from umbel.cli.runs import Run
from umbel.server.worth import Way

PAGE = ROOT / "docs" / "start" / "first-run.md"


@pytest.mark.slow
def test_hospitals_are_better_off_with_a_pure_epsilon_of_4(umbel_home: Path) -> None:
    told = done("demo")
    assert told.exit_code == 0, told.output
    runs = {
        what: Run(Path(line)) for what, line in zip((OPEN, ONE, SEVERAL), told.stdout.splitlines()[-3:], strict=True)
    }
    assert {run.path.parent for run in runs.values()} == {umbel_home / "runs"}
    assert runs[OPEN].guarantee[0].startswith("Guarantee: none")
    for private in (ONE, SEVERAL):
        found = re.search(r"pure epsilon (\S+)\.$", runs[private].guarantee[0])
        assert found
        assert 3.9 < float(found[1]) <= 4
        assert runs[private].history["max_participations"].max() == 1
        means = runs[private].worth["mean"].set_axis(runs[private].worth["way"])
        assert means[Way.OWN] < 0.5 * means[Way.ALONE]
        assert means[Way.OWN] < 0.5 * means[Way.CONSTANT]
    assert runs[ONE].guarantee[0] in told.stdout
    printed, shown = (_words_and_numbers(text) for text in (told.stdout, PAGE.read_text(encoding="utf-8")))
    assert printed[0] == shown[0], "docs/start/first-run.md shows what the demo prints"
    assert printed[1] == pytest.approx(shown[1], rel=0.01), "other machines round otherwise"


def _words_and_numbers(text: str) -> tuple[list[str], list[float]]:
    """Return the lines from the demo's table on without their numbers, and these."""
    (found,) = re.findall(r"^RMSE.*?reported exact losses\.$", text, re.MULTILINE | re.DOTALL)
    numbers = re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?", found)
    words = re.split(r"\s*\d[\d,]*(?:\.\d+)?(?:e-\d+)?\s*", found)
    return words, [float(one.replace(",", "")) for one in numbers]
