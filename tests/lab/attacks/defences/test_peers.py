"""Audits of peers: the formula figures by the peers' own code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from umbel.privacy.accounting.accountant import compose
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.protocol.project import source

pytestmark = pytest.mark.rest

FOLDER = source("examples/audits")
STRATEGY = "DifferentialPrivacy{}Side{}Clipping"


def said(script: str) -> dict[str, float]:
    """Return the figures that a script prints."""
    command = [sys.executable, FOLDER / f"{script}.py"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    lines = [line.split() for line in done.stdout.splitlines() if len(line.split()) == 2]
    return {name: float(figure) for name, figure in lines}


@pytest.mark.slow
def test_flowers_own_code_gives_the_formula_figures() -> None:
    """A noise multiplier of 1 puts two updates two deviations apart. Adaptive clipping counts with a fourth of it."""
    local, fixed, adaptive = (
        compose({GaussianLoss(mu): 1}, 1e-5) for mu in (2 / (2 * 11.736) ** 0.5, 2.0, 2.0 * 0.75**0.5)
    )
    sides = [(side, kind) for side in ("Client", "Server") for kind in ("Fixed", "Adaptive")]
    wanted = {STRATEGY.format(*one): fixed if one[1] == "Fixed" else adaptive for one in sides}
    assert said("flower_figures") == pytest.approx({"LocalDpMod": local, **wanted}, rel=0.02)


@pytest.mark.slow
def test_umbels_own_code_gives_the_formula_figures() -> None:
    """Noise multiplier 8: of 8 values, Laplace noise costs 2 n / nu = 2."""
    wanted = {"gaussian": compose({GaussianLoss(0.25): 1}, 1e-5), "laplace": 2.0}
    assert said("umbel_figures") == pytest.approx(wanted, rel=0.02)
