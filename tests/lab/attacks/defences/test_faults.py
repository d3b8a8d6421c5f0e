"""Each Mod that is wrong in one way is found, and six right targets pass.

False alarms: at most sixteen probes of a target rest on chance, each at `LEVEL` = 1e-4. So six right targets all pass
with a probability of at least 1 - 6 x 16 x 1e-4 = 99.0 %, where 95 % is wanted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.defences import right, wrong
from tests.helpers.defences.bench import WorkerHere
from umbel_lab.attacks.defences import report
from umbel_lab.attacks.defences.probes import LEVEL, MENDS, TESTS
from umbel_lab.attacks.defences.process import Target
from umbel_lab.attacks.defences.report import Options, Report, audit

CLIENTS = 50_000
CANARIES = {"TooLittleNoise": 400, "NoComposition": 400, "OtherDeviation": 400, "PureClaim": 400, "gate()": 60}
"""More than 200 where a law has to be told from another, fewer of the gate, which is slow."""

ALSO = {
    "Unclipped": {"too-little-noise"},
    "ClipFollowsData": {"too-little-noise"},
    "ClipPerArray": {"too-little-noise"},
    "NanOpens": {"nan-passes"},
}
"""Faults that follow from another."""
FIRST = "RecordsPass"
"""A Mod that is audited each time; `Quick` has other faults."""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets run in this process, with noise from a seed."""
    monkeypatch.setattr(report, "Worker", WorkerHere)
    monkeypatch.setattr(right, "seeds", np.random.default_rng(20))


def found(name: str) -> Report:
    canaries = CANARIES.get(name.partition(":")[2], 200)
    return audit(Target.parse(f"tests.helpers.defences.{name}"), Options(2, canaries, CLIENTS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == FIRST else pytest.mark.rest) for name in wrong.FAULTS]
)
def test_a_mod_that_is_wrong_in_one_way_is_found(name: str) -> None:
    codes = {fault.code for fault in found(f"wrong:{name}").faults}
    assert wrong.FAULTS[name] in codes
    assert codes <= {wrong.FAULTS[name]} | ALSO.get(name, set())


class Quick:
    """A function, which is asked faster than a Mod. Its noise gives an epsilon of 4.4 between any two updates."""

    delta, clip_norm = 1e-5, 1.0

    def __init__(self, epsilon: float = 8.0, clips: bool = True, grid: bool = True) -> None:
        self.epsilon, self._clips, self._grid = epsilon, clips, grid

    def __call__(self, update: np.ndarray) -> np.ndarray:
        """Return a release."""
        update = np.where(np.isfinite(update).all(), update, 0.0)
        clipped = update / max(1.0, float(np.linalg.norm(update)) if self._clips else 1.0)
        noise = right.seeds.normal(0, 2, update.shape)
        return np.rint(1024 * (clipped + noise)) / 1024 if self._grid else np.float32(clipped) + np.float32(noise)


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, set()),
        ({"epsilon": 1.0}, {"too-little-noise"}),
        ({"clips": False}, {"unclipped", "too-little-noise"}),
        ({"grid": False}, {"low-bits"}),
    ],
)
def test_a_function_that_is_wrong_in_one_way_is_found(changes: dict[str, Any], codes: set[str]) -> None:
    report = audit(Target(f"{__name__}:Quick", (), changes), Options(1, 400))
    assert {fault.code for fault in report.faults} == codes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gate()" else pytest.mark.rest) for name in right.TARGETS]
)
def test_a_right_target_passes(name: str) -> None:
    report = found(f"right:{name}")
    assert not report.faults
    assert not report.failed


def test_every_fault_has_a_mend_and_a_wrong_target() -> None:
    assert {*wrong.FAULTS.values()} == MENDS.keys()
    assert 1 - len(right.TARGETS) * TESTS * LEVEL > 0.95, "the stated probability"
