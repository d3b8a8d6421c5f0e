"""What the experiment on methods under guarantees compares, and that its noise keeps what it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from umbel.privacy.accounting.guarantee import DELTA, guarantee
from umbel.privacy.accounting.rows import row_guarantee
from umbel.server.setup import Setup
from umbel.simulation.measured import Spec
from umbel.simulation.sweep import Result
from umbel_lab.experiments import methods

pytestmark = pytest.mark.rest

HOSPITALS = next(iter(methods.TASKS))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[Spec]:
    return methods.specs(tmp_path_factory.mktemp("methods"), [2000], True, "")


def test_every_release_has_the_programs_that_it_can_have(quick: list[Spec]) -> None:
    names = {release: [spec.arm[3] for spec in quick if spec.arm[1] == release] for release in methods.RELEASES}
    common = ["one model", "MR-MTL", "Algorithm 1"]
    assert names == {
        "no noise": [*common, "IFCA", "CFL"], "client": [*common, "CFL"], "site": common, "secure": common,
        "rows": [*common, "CFL"],
    }  # fmt: skip


def test_each_run_keeps_its_epsilon_and_wastes_little(quick: list[Spec]) -> None:
    """By the accounts of the gate, for the most participations, of a client or of a row."""
    for spec in quick:
        setup = Setup.parse(spec.config)
        spent = {setup.release: spec.config["max-participations"]}
        _, release, epsilon, _ = spec.arm
        found = row_guarantee(spent, DELTA) if release == methods.ROWS else guarantee(spent, DELTA)
        if release == methods.NONE:
            assert found is None
        else:
            assert found is not None
            assert 0.98 * float(epsilon) < found.epsilon <= float(epsilon)


def test_a_run_without_noise_has_no_guarantee_for_rows_either(quick: list[Spec]) -> None:
    plain = Setup.parse(quick[0].config)
    assert row_guarantee({plain.release: 1}, DELTA) is None


def test_each_method_is_measured_on_the_run_that_trained_for_it(quick: list[Spec], tmp_path: Path) -> None:
    chosen = [spec for spec in quick if spec.arm[1] == methods.ROWS]
    measures: list[dict[str, Any]] = [methods.play(spec.config).measures for spec in chosen]
    assert [[*one] for one in measures] == [
        ["alone", "one model", "Ditto", "APFL", "FedRep", "kNN-Per", "auto"],
        ["MR-MTL"],
        ["Algorithm 1", "Algorithm 1, auto"],
        ["CFL"],
    ]
    methods.page([Result(s, one, tmp_path) for s, one in zip(chosen, measures, strict=True)]).write(tmp_path)
    written = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert f"| {measures[1]['MR-MTL']['mean']:,.0f} |" in written
    assert "no pFedMe" in written


def test_a_seed_counts_for_a_method_that_beats_mr_mtl() -> None:
    """Dollars: lower is better. The second seed has no run of Ditto."""

    def one(mean: float, worst: float) -> dict[str, float]:
        return {"mean": mean, "worst_decile": worst, "seconds": 1.0}

    cells = {"MR-MTL": {1: one(5.0, 9.0), 2: one(5.0, 9.0)}, "Ditto": {1: one(4.0, 9.5)}}
    values = {(HOSPITALS, methods.ROWS, "4"): cells, (HOSPITALS, methods.CLIENT, "4"): cells}
    assert methods.count_wins(values, ["Ditto", "CFL"]) == [[HOSPITALS, "4", "1, 0 of 1", ""]]
