"""Each Mod that is wrong in one way is found, and six right targets pass.

False alarms: at most sixteen probes of a target rest on chance, each at `LEVEL` = 1e-4. So six right targets all pass
with a probability of at least 1 - 6 x 16 x 1e-4 = 99.0 %, where 95 % is wanted.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.helpers.defences import right, wrong
from tests.helpers.defences.bench import WorkerHere
from umbel_lab.attacks.defences import report
from umbel_lab.attacks.defences.probes import LEVEL, MENDS, TESTS
from umbel_lab.attacks.defences.process import Target
from umbel_lab.attacks.defences.report import Options, Report, audit

CLIENTS = 50_000
CANARIES = {"TooLittleNoise": 400, "NoComposition": 400, "OtherDeviation": 400, "PureClaim": 400}
"""More than 200 where a law has to be told from another."""

ALSO = {
    "Unclipped": {"too-little-noise"},
    "ClipFollowsData": {"too-little-noise"},
    "ClipPerArray": {"too-little-noise"},
    "NanOpens": {"nan-passes"},
}
"""Faults that follow from another."""
FIRST = {"TooLittleNoise", "SharedNoise", "Unclipped", "LowBits", "RecordsPass", "NanPasses"}
"""One fault of each kind: noise, its independence, clipping, the grid, what leaves, and numbers that are none."""


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
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.rest) for name in wrong.FAULTS]
)
def test_a_mod_that_is_wrong_in_one_way_is_found(name: str) -> None:
    codes = {fault.code for fault in found(f"wrong:{name}").faults}
    assert wrong.FAULTS[name] in codes
    assert codes <= {wrong.FAULTS[name]} | ALSO.get(name, set())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gate()" else pytest.mark.rest) for name in right.TARGETS]
)
def test_a_right_target_passes(name: str) -> None:
    report = found(f"right:{name}")
    assert not report.faults
    assert not report.failed


def test_six_right_targets_pass_together_with_the_stated_probability() -> None:
    assert len(right.TARGETS) == 6
    assert 1 - 6 * TESTS * LEVEL > 0.95


def test_every_fault_has_a_mend_and_a_wrong_target() -> None:
    assert {*wrong.FAULTS.values()} == MENDS.keys()
    assert all(re.fullmatch(r"[A-Z].*\.|.*: .*", mend) for mend in MENDS.values())
