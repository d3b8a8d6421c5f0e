"""A report keeps claimed, formula, fitted and proved figures apart, and its page and JSON have all of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from tests.helpers.defences import right
from tests.helpers.defences.bench import WorkerHere
from tests.helpers.errors import raises
from umbel.privacy.accounting.accountant import compose
from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.privacy.mechanisms.laplace_loss import LaplaceLoss
from umbel.protocol.errors import ConfigError, NotApplicableError
from umbel_lab.attacks.audit.bounds import Verdict
from umbel_lab.attacks.defences import command, report
from umbel_lab.attacks.defences.claims import Claim, claim_of, formula
from umbel_lab.attacks.defences.laws import GAUSSIAN, LAPLACE, VECTOR
from umbel_lab.attacks.defences.process import Target
from umbel_lab.attacks.defences.report import Options, audit

pytestmark = pytest.mark.rest

FEW = Options(rounds=2, canaries=300)
TOLD = {"epsilon": None, "delta": None, "clip_norm": None, "box": None, "order": None}
RIGHT = "tests.helpers.defences.right"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets run in this process, with noise from a seed."""
    monkeypatch.setattr(report, "Worker", WorkerHere)
    monkeypatch.setattr(right, "seeds", np.random.default_rng(30))


def as_it_is(arrays: list[Any]) -> list[Any]:
    return arrays


def silent(arrays: list[Any]) -> list[Any]:
    if np.abs(arrays[0]).max() >= 1:
        raise RuntimeError("too large")
    return arrays


@pytest.mark.parametrize(
    ("facts", "given", "claim"),
    [
        (TOLD, (), Claim(None, DELTA, None, None)),
        (TOLD | {"epsilon": 2.0}, (), Claim(2.0, 0.0, None, None)),
        (TOLD | {"epsilon": 2.0, "delta": 1e-6, "clip_norm": 3.0}, (), Claim(2.0, 1e-6, 3.0, None)),
        (TOLD | {"clip_norm": 3.0, "order": 1.0}, (), Claim(None, DELTA, 3.0, None, sums=True)),
        (TOLD | {"box": 0.5}, (), Claim(None, DELTA, None, 0.5)),
        (TOLD | {"epsilon": 2.0, "box": 0.5}, (1.0, 1e-3, 4.0), Claim(1.0, 1e-3, 4.0, None)),
        (TOLD | {"epsilon": 0.0}, (None, 0.0), Claim(0.0, 0.0, None, None)),
    ],
)
def test_a_claim_is_that_of_the_attributes_unless_the_user_gives_another(
    facts: dict[str, Any], given: tuple[float | None, ...], claim: Claim
) -> None:
    assert claim_of(facts, *given) == claim


@pytest.mark.parametrize("given", [(-1.0,), (math.inf,), (1.0, 1.0), (1.0, 0.1, -2.0), (math.nan,)])
def test_an_impossible_claim_is_refused(given: tuple[float, ...]) -> None:
    with raises(ConfigError, "config.audit-claim"):
        claim_of(TOLD, *given)


def test_formulas_are_the_accountants() -> None:
    """Two clip norms apart in Gaussian noise; corners of a box in Laplace noise of each value."""
    norm, box = Claim(None, 1e-5, 1.0, None), Claim(None, 1e-5, None, 0.5)
    assert formula(norm, GAUSSIAN, 4.0, 2.0, 8, 3) == compose({GaussianLoss(0.5): 3}, 1e-5)
    assert formula(box, GAUSSIAN, 4.0, 1.0, 9, 1) == compose({GaussianLoss(0.75): 1}, 1e-5)
    assert formula(box, LAPLACE, 4.0, 1.0, 8, 2) == compose({LaplaceLoss(1, 0.25): 16}, 1e-5)
    assert formula(norm, LAPLACE, 4.0, 2.0, 9, 2) == pytest.approx(0.5 * 3 * 2), "at most root n times the norm"
    sums = Claim(None, 0.0, 1.0, None, sums=True)
    assert formula(sums, LAPLACE, 4.0, 2.0, 9, 2) == pytest.approx(0.5 * 2)
    assert formula(norm, VECTOR, 4.0, 2.0, 8, 3) == compose({LaplaceLoss(8, 0.5): 3}, 1e-5)


def test_a_target_with_an_account_claims_what_it_says() -> None:
    found = audit(Target(f"{RIGHT}:LaplaceFunction", (2.0,)), FEW)
    assert [one.claimed for one in found.figures] == [2.0, 4.0]
    assert found.claim == Claim(2.0, 0.0, None, 0.5)
    assert (found.law, found.faults) == (LAPLACE, ())
    assert all(2 * one.rounds <= one.formula < 2.6 * one.rounds for one in found.figures if one.formula)


def test_rounds_after_the_end_of_a_budget_cost_nothing() -> None:
    """The Mod refuses a second round, so its account, and the figures, stay as after the first."""
    found = audit(Target(f"{RIGHT}:GaussianMod", (), {"rounds": 1}), replace(FEW, rounds=3))
    first, last = found.figures
    assert first.claimed == last.claimed == pytest.approx(20.0, rel=1e-6)
    assert (first.formula, first.fitted) == (last.formula, last.fitted)
    assert not found.faults


def test_counted_guesses_refute_a_claim_and_page_and_json_have_each_figure_and_fault() -> None:
    """Of a function that sends updates as they are: the formula is infinite, and nothing is fitted."""
    plain = audit(Target(f"{__name__}:as_it_is"), replace(FEW, epsilon=1.0))
    assert [one.proved.verdict for one in plain.figures] == [Verdict.EXCEEDS, Verdict.EXCEEDS]
    assert {(one.formula, one.fitted, one.low) for one in plain.figures} == {(math.inf, None, None)}
    assert (plain.refuted, plain.failed) == (True, True)
    codes = [fault.code for fault in plain.faults]
    assert "no-noise" in codes
    found = json.loads(json.dumps(plain.as_json(), allow_nan=False))
    assert (found["refuted"], found["failed"], found["figures"][0]["formula"]) == (True, True, "inf")
    assert [fault["code"] for fault in found["faults"]] == codes
    figures, faults, _ = command.page(plain, 0.95).sections
    assert len(figures.rows) == len(plain.figures)
    assert [row[0] for row in faults.rows] == codes
    silent_claim = audit(Target(f"{__name__}:as_it_is"), FEW)
    assert (silent_claim.claim.epsilon, silent_claim.faults, silent_claim.failed) == (None, (), False)


def renames(msg: Any, context: Any, call_next: Any) -> Any:
    reply = call_next(msg, context)
    reply.content["arrays"] = ArrayRecord({f"dp.{name}": one for name, one in reply.content["arrays"].items()})
    return reply


@pytest.mark.parametrize(
    ("name", "code", "part"),
    [
        ("silent", "attack.target-silent", "too large"),
        # Otherwise nothing of it would be seen, and it would pass as one without noise.
        ("renames", "attack.target-renames", "b, w"),
    ],
)
def test_a_target_of_which_nothing_is_seen_is_told(name: str, code: str, part: str) -> None:
    with raises(NotApplicableError, code, part):
        audit(Target(f"{__name__}:{name}"), FEW)
