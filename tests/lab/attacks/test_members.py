"""The membership audit: rows that a client trained on show in its release, and less once rows are protected."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy import special
from typer.testing import CliRunner

from tests.helpers.errors import ended, raises
from umbel.data import find_dataset
from umbel.privacy.accounting.accountant import compose
from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.protocol.errors import ConfigError, DatasetError, NotApplicableError
from umbel_lab.attacks.__main__ import app
from umbel_lab.attacks.members import (
    FALSE_ALARMS,
    Finding,
    Setting,
    _finding,
    allowed,
    audit,
    likelihood_ratios,
)
from umbel_lab.attacks.victims import NO_NOISE

pytestmark = pytest.mark.rest

CLIENTS = 40


@cache
def found() -> tuple[Finding, ...]:
    """Few rows, a wide network and many epochs: each client knows its rows by heart."""
    setting = Setting(
        str(find_dataset("hospital")), "mlp inputs=3 hidden=48 outputs=1", CLIENTS, 6, epochs=60, step_size=0.3,
        epsilons=(1.0,),
    )  # fmt: skip
    return tuple(audit(setting))


def test_rows_that_a_client_knows_by_heart_show_and_protected_rows_hardly_do() -> None:
    open_, protected = found()
    assert open_.training == NO_NOISE
    assert open_.claimed is None
    assert open_.at_most == 1
    assert open_.auc - open_.auc_half > 0.6
    assert protected.auc < open_.auc - 0.05


def test_what_is_found_stays_below_the_claim() -> None:
    protected = found()[1]
    assert protected.claimed is not None
    assert 0.9 < protected.claimed <= 1
    assert protected.at_most == allowed(protected.claimed)
    assert protected.found - protected.found_half < protected.at_most


@pytest.mark.parametrize("mu", [0.05, 0.25, 1.0, 5.0])
def test_the_claim_allows_what_the_best_test_finds_if_a_row_takes_the_place_of_another(mu: float) -> None:
    """One row more or less moves the mean of normal noise by mu deviations, and an exchange of rows by twice that."""
    claimed = compose({GaussianLoss(mu): 1}, DELTA)
    found = float(special.ndtr(2 * mu + special.ndtri(FALSE_ALARMS)))
    assert found <= allowed(claimed) <= 1


def test_a_score_is_the_distance_to_the_releases_of_clients_without_the_row() -> None:
    """One row of each of four clients. The first has its row in 5, the others see it with 1, 2 and 3."""
    confidence = np.zeros((4, 4, 1))
    confidence[:, 0, 0] = 5, 1, 2, 3
    confidence[:, 1:] = np.random.default_rng(0).normal(size=(4, 3, 1))
    scores = likelihood_ratios(confidence)
    assert scores[0, 0, 0] == pytest.approx((5 - 2) / math.sqrt(2 / 3))
    assert scores[1, 0, 0] == pytest.approx((1 - 2.5) / 0.5)  # judged by 2 and 3
    assert scores[3, 0, 0] == pytest.approx((3 - 1.5) / 0.5)


def test_without_a_difference_the_attacker_guesses() -> None:
    """A right 95 % interval is four times as wide as half of itself from .5 in one of 1e14 seeds."""
    scores = likelihood_ratios(np.random.default_rng(3).normal(size=(60, 60, 20)))
    one = _finding("none", None, scores, 0.0)
    assert abs(one.auc - 0.5) < 4 * one.auc_half
    assert abs(one.found - 0.01) < 4 * one.found_half


def test_members_that_stand_out_are_all_found() -> None:
    confidence = np.random.default_rng(3).normal(size=(20, 20, 5)) + 100 * np.eye(20)[:, :, None]
    one = _finding("none", None, likelihood_ratios(confidence), 0.0)
    assert (one.auc, one.found) == (1, 1)


@pytest.mark.parametrize(
    ("setting", "error", "code"),
    [
        (Setting("hospital", clients=9), ConfigError, "config.out-of-range"),
        (Setting("hospital", clients=10_000), DatasetError, "data.too-few-rows"),
        (Setting("hospital", epsilons=(0.0,)), ConfigError, "config.impossible-figure"),
        (Setting("preferences"), NotApplicableError, "attack.local-parameters"),
    ],
    ids=["clients", "rows", "epsilon", "local"],
)
def test_impossible_settings_are_refused_before_work(setting: Setting, error: type[Exception], code: str) -> None:
    with raises(error, code):
        audit(setting)


def test_the_command_writes_its_table(tmp_path: Path) -> None:
    words = ["members", "--clients", "12", "--rows", "3", "--epochs", "2", "--epsilon", "2", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert table.count("\n| rows, ε = 2 | ") == 1
    refused = CliRunner().invoke(app, [*words, "--model", "no-such-model"])
    ended(refused.exit_code, refused.output, "model.unknown")
