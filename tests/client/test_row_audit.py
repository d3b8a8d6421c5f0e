"""An audit of rows through a site's own gate: what leaves shows no more about a row than the account says.

Each client flips a coin for a canary row, whose gradient is as long as the clip norm and points where no other row's
does. The auditor knows all other rows and the mechanism, and guesses the surest coins from the releases. A right bound
exceeds the truth with a chance of 1e-3 at most. At the claimed noise the auditor proves less than .2 with a chance of
4e-6, as 1,500 simulated runs show; at a tenth of it less than the claim with a chance of 3e-9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.datasets import manifest
from tests.helpers.messages import asked, releases, task_of
from tests.helpers.nodes import ask, serving
from umbel.privacy.accounting.rows import row_guarantee
from umbel.protocol.release import Clipping, Kind, Release, RowPrivacy
from umbel_lab.attacks.audit.bounds import best_guesses, count_right, lower_bound

pytestmark = pytest.mark.rest(
    twin="tests/client/test_dp_sgd.py::test_noise_has_the_deviation_that_it_says_and_an_empty_sample_steps_too"
)

CLIENTS, DELTA = 4000, 1e-5
SIGMA, RATE = 1.0, 0.5


@pytest.fixture
def coins() -> NDArray[np.int64]:
    """Whether each client has the canary row: 1 or -1."""
    return np.random.default_rng(11).choice([-1, 1], CLIENTS)


def released(tmp_path: Path, config: dict[str, Any], coins: NDArray[np.int64], sigma: float) -> NDArray[np.float64]:
    """Return the second number of each client's release of one step, in clip norms: only a canary row moves it."""
    lengths = 3 + (coins > 0)
    rows = [[[1.0, 0.0]] * 3 + [[0.0, 1.0]] * int(coin > 0) for coin in coins]
    features = np.array([row for own in rows for row in own], np.float32)
    folder, targets = tmp_path / str(sigma), np.full(len(features), -100, np.float32)
    folder.mkdir()
    policy = {"protect": "rows", "budget": "inf", "row_budget": f"1e6 delta={DELTA}", "rows": "noise=1e-3"}
    grid = serving(folder, config, manifest(CLIENTS, model="linear"), features, targets, lengths.tolist(), **policy)
    task = task_of(
        tuple(range(CLIENTS)), noise_multiplier=0.0, clipping="public", clip_norm=1e3, local_epochs=0, local_steps=1,
        step_size=1.0, row_clip_norm=1.0, row_noise_multiplier=sigma, row_rate=RATE, row_batch=1.0,
    )  # fmt: skip
    reply = ask(grid, asked({"weight": np.zeros((1, 1, 2), np.float32)}, task))
    assert not reply.has_error(), reply
    # The gradient of a row (0, 1) with the target -100 points up, so a step down it is negative.
    moved: NDArray[np.float64] = -releases(reply)["weight"][:, 0, 1].astype(np.float64)
    return moved


def proved(moved: NDArray[np.float64], coins: NDArray[np.int64], sigma: float) -> float:
    """Return the epsilon that the surest guesses prove, by the likelihood ratio for this noise."""

    def score(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.logaddexp(np.log1p(-RATE), np.log(RATE) + (values - 0.5) / sigma**2))

    generator = np.random.default_rng(5)
    pilots = generator.normal(scale=sigma, size=20_000) + (generator.random(20_000) < RATE / 2)
    # As many guesses as are best on average would often be more than there are canary rows in the sample.
    guesses = best_guesses(score(pilots), CLIENTS, DELTA, 0.999) * 9 // 10
    right = count_right(score(moved), coins, guesses)
    return lower_bound(CLIENTS, guesses, right, DELTA, 0.999)


@pytest.mark.slow
def test_a_row_shows_no_more_than_is_claimed_and_an_audit_finds_a_tenth_of_the_noise(
    tmp_path: Path, run_config: dict[str, Any], coins: NDArray[np.int64]
) -> None:
    release = Release(Kind.TRAIN, 2, 0.0, Clipping.PUBLIC).trained_by(RowPrivacy(1.0, SIGMA, RATE, 1.0, 1))
    claimed = row_guarantee({release: 1}, DELTA)
    assert claimed is not None
    found = proved(released(tmp_path, run_config, coins, SIGMA), coins, SIGMA)
    tenth = proved(released(tmp_path, run_config, coins, SIGMA / 10), coins, SIGMA / 10)
    assert 0.2 < found < claimed.epsilon < tenth
