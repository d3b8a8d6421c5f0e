"""Claimed against audited: canaries at three sites that serve data, in one secure sum that the server reads.

Each canary's update points along a separate parameter, one way or the other by a coin. So one sum shows every coin
with the sum's noise, and the right guesses prove an epsilon from below (Steinke, Nasr and Jagielski, 2023).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.strategies.test_secure_average import CONFIG, keys
from umbel.data import Manifest, offsets_of, write_dataset
from umbel.privacy.accounting.guarantee import DELTA, guarantee
from umbel.privacy.channels.secure import party, sums
from umbel.privacy.site.journal import Journal
from umbel.protocol.arrays import flatten
from umbel.server.run import draw_hypotheses
from umbel.simulation.in_process import play, run_config
from umbel_lab.attacks.audit.bounds import best_guesses, count_right, lower_bound

EACH = 700
CANARIES = 3 * EACH
MODEL = f"linear inputs={CANARIES} outputs=1"


def sites(home: Path, coins: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Write the data of three sites; return their policies."""
    paths, listed = keys(home / "keys", "north", "south", "west")
    policies = []
    for place, (name, key) in enumerate(paths.items()):
        Journal.create(home / f"{name}.jsonl")
        own = slice(place * EACH, (place + 1) * EACH)
        manifest = Manifest(
            name=name, clients=EACH, split={"train": EACH, "validation": 0}, model=MODEL, loss="mse", metric="rmse",
            frozen="1.bias",
        )  # fmt: skip
        rows, targets = np.eye(CANARIES, dtype=np.float32)[own], 1000.0 * coins[own]
        write_dataset(home / name, manifest, rows, targets.astype(np.float32), offsets_of([1] * EACH))
        policy = {"role": "train", "release": "secure", "mechanisms": "discrete-gaussian", "budget": "inf"}
        policy |= {"data-path": str(home / name), "ledger-path": str(home / f"{name}.jsonl")}
        policies.append(policy | {"parties": listed, "party-key": key})
    return policies


def audited(home: Path, noise_multiplier: float) -> tuple[float, float]:
    """Return the claimed epsilon of a canary, and the one that a server proves."""
    coins = 2 * np.random.default_rng(3).integers(2, size=CANARIES) - 1
    home.mkdir()
    run = play(
        run_config(
            "synthetic", **CONFIG, model=MODEL, loss="mse", frozen="1.bias"
        ) | {
            "dataset": "", "hypotheses": 1, "rounds": 1, "clients-per-round": CANARIES, "wait": "nodes=3",
            "local-epochs": 1, "batch-size": 0, "noise-multiplier": noise_multiplier, "clipping": "public norm=1.0",
            "max-participations": 1,
        },
        node_configs=sites(home, coins),
    )  # fmt: skip
    account = Journal(home / "north.jsonl").account(0)
    claimed = guarantee(account)
    assert claimed is not None
    assert list(account.values()) == [1]
    sent = draw_hypotheses(run.setup.model, 1, run.setup.config.seed, 0)
    total = (flatten(run.state.hypotheses) - flatten(sent))[0] * CANARIES
    scores = 2 * total / noise_multiplier**2
    pilots, rest = np.split(np.random.default_rng(4).permutation(CANARIES), [CANARIES // 4])
    guesses = best_guesses(scores[pilots], len(rest), DELTA)
    right = count_right(scores[rest], coins[rest], guesses)
    return claimed.epsilon, lower_bound(len(rest), guesses, right, DELTA)


@pytest.mark.parametrize("noise_multiplier", [1.0, pytest.param(8.0, marks=pytest.mark.rest)])
def test_a_secure_sum_tells_no_more_than_its_account_claims(tmp_path: Path, noise_multiplier: float) -> None:
    """The proved epsilon is wrong in 1 of 20 audits at most; the claim is far above it, and it is not 0."""
    claimed, proved = audited(tmp_path / "audit", noise_multiplier)
    assert proved < claimed
    if noise_multiplier == 1.0:
        assert proved > 1.5


def test_an_audit_finds_sites_that_add_too_little_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of noise has a tenth of its deviation."""
    noise = party.noise
    for module in (party, sums):
        monkeypatch.setattr(module, "noise", lambda deviation, length, seed: noise(deviation / 10, length, seed))
    claimed, proved = audited(tmp_path / "audit", 8.0)
    assert proved > 1.5 * claimed
