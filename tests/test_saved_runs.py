"""Seven small runs give what they gave before the core was cut anew, number by number.

What they gave is in `saved_runs/runs.json.gz`: ledgers, histories without seconds, and of each array its
SHA-256 and up to 64 of its values. Another machine's arithmetic may differ in the last digits, so that the
digests are compared only where the environment says ``UMBEL_EXACT=1``, on a machine as that of the saved runs.
The recommender's were saved from another order of its sums, and are compared by value alone.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import umbel.client.app
from tests.helpers.runs import AppRun, run_app
from umbel.data import Manifest, offsets_of, write_dataset
from umbel.simulation.grid import InProcessGrid

pytestmark = pytest.mark.usefixtures("blank_figures", "one_thread", "looped")

SAVED = Path(__file__).with_name("saved_runs") / "runs.json.gz"
VALUES = 64
TOLERANCE = 1e-4

COMMON = {"device": "cpu"}
IMAGES = {"dataset": "images", "rounds": 3, "clients-per-round": 6, "noise-multiplier": 1.0}
RUNS: dict[str, dict[str, Any]] = {
    "synthetic": {"rounds": 8},
    "hospital": {
        "dataset": "hospital", "hypotheses": 5, "noise-multiplier": 3.0, "rounds": 8, "clients-per-round": 20,
        "restarts": 1, "step-size": 0.4, "local-epochs": 2, "batch-size": 3,
    },
    "images": {**IMAGES, "restarts": 1, "batch-size": 5},
    "per-layer": {**IMAGES, "noise-per": "layer", "restarts": 2, "validation": "every=2"},
    "recommender": {
        "dataset": "preferences", "strategy": "recommender", "hypotheses": 1, "rounds": 8, "clients-per-round": 12,
        "restarts": 1, "local-epochs": 0, "local-steps": 2, "noise-multiplier": 1.0, "clipping": "update floor=1e-6",
        "message-noise": 0.01,
    },
    "ifca": {"strategy": "ifca", "noise-multiplier": 0.0, "rounds": 6},
    "public": {"clipping": "public norm=1.5 decay=0.9 floor=0.1", "rounds": 6},
}  # fmt: skip
NOT_EXACT = {"recommender"}


def make_data(home: Path) -> None:
    """Write the two datasets that do not come with the app."""
    rng = np.random.default_rng(5)

    def make(name: str, x: NDArray[Any], y: NDArray[Any], lengths: NDArray[Any], train: int, **own: Any) -> None:
        split = {"train": train, "validation": len(lengths) - train}
        manifest = Manifest(name=name, clients=len(lengths), split=split, **own)
        write_dataset(home / "data" / name, manifest, x, y, offsets_of(lengths))

    lengths = rng.integers(2, 9, 60)
    x = rng.uniform(-1, 1, (int(lengths.sum()), 3)).astype(np.float32)
    kind = np.repeat(np.arange(60) % 3, lengths)
    y = np.where(kind == 0, x @ [1.0, 2.0, 0.5], x @ [-1.0, 0.3, 2]) + 0.5
    make("hospital", x, y.astype(np.float32)[:, None], lengths, 42, model="mlp", loss="rmse")
    lengths = rng.integers(6, 13, 14)
    n = int(lengths.sum())
    images, labels = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8), rng.integers(0, 10, n)
    for i in range(n):
        images[i, labels[i] * 2 : labels[i] * 2 + 3] = 255
    make("images", images, labels, lengths, 10, model="lenet10", feature_scale=1 / 255)


def told(value: NDArray[Any]) -> dict[str, Any]:
    """Return what is kept of an array."""
    flat = np.ascontiguousarray(value).ravel()
    some = np.unique(np.linspace(0, len(flat) - 1, min(VALUES, len(flat))).round().astype(int))
    digest = hashlib.sha256(flat.tobytes()).hexdigest()
    return {"shape": list(value.shape), "type": str(value.dtype), "sha256": digest, "values": flat[some].tolist()}


def summary(run: AppRun) -> dict[str, Any]:
    """Return what is kept of a run."""
    return {
        # When these were saved a ledger told the paper's budget alone.
        "ledger": "".join(
            f"{client},{often},{paper}\n".replace("paper_budget", "spent").replace("none", "inf")
            for client, often, _, paper in csv.reader((run.folder / "ledger.csv").open())
        ),
        "history": run.history,
        "arrays": {
            f"{file}.{name}": told(value)
            for file in ("hypotheses", "latest")
            for name, value in sorted(run.arrays(file).items())
            if not name.startswith("strategy/prior/")  # which was not estimated yet
        },
    }


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    runs: dict[str, Any] = json.loads(gzip.decompress(SAVED.read_bytes()))
    return runs


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_what_it_gave(
    name: str, saved: dict[str, Any], run_config: dict[str, Any], umbel_home: Path
) -> None:
    make_data(umbel_home)
    config = run_config | COMMON | RUNS[name]
    found, expected = summary(run_app(config, InProcessGrid(umbel.client.app.app, config, nodes=2))), saved[name]
    assert found["ledger"] == expected["ledger"]
    assert len(found["history"]) == len(expected["history"])
    for ours, theirs in zip(found["history"], expected["history"], strict=True):
        assert set(ours) >= set(theirs), "what was told is told"
        for key, value in theirs.items():
            if key in ("loss", "metric", "nearest") and value is not None:
                np.testing.assert_allclose(ours[key], value, rtol=TOLERANCE, err_msg=f"{key} of round {ours['number']}")
            else:
                assert ours[key] == value, f"{key} of round {ours['number']}"

    assert list(found["arrays"]) == list(expected["arrays"])
    for array, theirs in expected["arrays"].items():
        ours = found["arrays"][array]
        assert (ours["shape"], ours["type"]) == (theirs["shape"], theirs["type"])
        np.testing.assert_allclose(ours["values"], theirs["values"], rtol=TOLERANCE, atol=1e-7, err_msg=array)
        if os.environ.get("UMBEL_EXACT") == "1" and name not in NOT_EXACT:
            assert ours["sha256"] == theirs["sha256"], array
