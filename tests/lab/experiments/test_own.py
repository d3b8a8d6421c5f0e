"""What the experiment on clients' own models compares."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from umbel.simulation import in_process
from umbel.simulation.sweep import Result
from umbel_lab.experiments import own, page

pytestmark = pytest.mark.rest


def test_each_method_is_measured_on_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "ARMS", {"synthetic": ("synthetic", {})})
    specs = own.specs(tmp_path, seeds=2, quick=True)
    assert [(spec.arm, spec.config["seed"], spec.config["rounds"]) for spec in specs] == [
        (("synthetic",), 2000, 2), (("synthetic",), 2001, 2)
    ]  # fmt: skip
    measures: dict[str, Any] = own.play(specs[0].config).measures
    assert [*measures] == ["no", "fine-tune", "calibrate", "mixture", "bayes", "auto", "alone"]
    assert all(one["worst_decile"] > one["mean"] > 0 for one in measures.values())
    own.tables([Result(spec, measures, tmp_path) for spec in specs], tmp_path)
    assert f"{measures['auto']['mean']:.3f} ± 0.000" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_auto_is_compared_with_the_better_of_hypothesis_and_own_training() -> None:
    errors = {"no": 2.0, "alone": 4.0, "auto": 2.02, "fine-tune": 1.0}
    assert own._behind(errors, higher=False) == pytest.approx(1.0)
    assert own._behind(errors, higher=True) == pytest.approx(49.5)


def test_its_runs_can_be_done() -> None:
    """Each seed of a hospital dataset draws which hospitals train."""
    for base, changes in own.ARMS.values():
        in_process.run_config(base, **{key.replace("-", "_"): value for key, value in changes.items()})


def test_auto_is_hardly_ever_behind() -> None:
    """On every dataset of the kept table, over ten seeds, in the mean and in the worst tenth."""
    table = (page.DOCS / "results" / "own" / "table.md").read_text(encoding="utf-8")
    _, _, rest = table.partition("## Behind the better of both")
    shares = [float(share) for share in re.findall(r"([+-][0-9.]+) %", rest)]
    assert len(shares) == 2 * len(own.ARMS)
    assert max(shares) <= 2
