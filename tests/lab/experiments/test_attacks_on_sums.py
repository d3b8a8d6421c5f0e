"""The experiment on secure sums under attack: every part is there, and seeds are added up."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from umbel.simulation.sweep import Result
from umbel_lab.attacks import sums
from umbel_lab.experiments import attacks_on_sums

pytestmark = pytest.mark.rest


def test_every_size_is_attacked_for_each_seed(tmp_path: Path) -> None:
    specs = attacks_on_sums.specs(tmp_path, seeds=2, first=5)
    assert len({spec.name for spec in specs}) == len(specs) == 2 * 2 * len(sums.SIZES)


def test_what_seeds_find_is_added_up(tmp_path: Path) -> None:
    specs = [spec for spec in attacks_on_sums.specs(tmp_path, seeds=2) if spec.arm[1] == "3 clients"]
    results = [
        Result(spec, {"found": [asdict(sums.Found(3, sums.SAME, 0.0, 1, 2, 0.25, None))]}, tmp_path / spec.name)
        for spec in specs
    ]
    attacks_on_sums.tables(results, tmp_path)
    page = (tmp_path / "table.md").read_text()
    assert page.count(f"| 3 | {sums.SAME} | 2 of 4, 0.25 |") == 2
    assert page.index("## Local vectors") < page.index("## Images")
