"""Clusters of clients, one of them small: what the runs are, and that they measure what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from umbel.data import Dataset, Manifest, find_dataset, offsets_of, open_dataset, write_dataset
from umbel.protocol.plugins import parse_options
from umbel.protocol.run_config import RowSettings
from umbel.server.setup import Setup
from umbel.simulation.measured import Spec
from umbel.simulation.sweep import Result
from umbel_lab.experiments import r_dpcfl

pytestmark = pytest.mark.rest

CLIENTS = sum(r_dpcfl.SIZES)
CLUSTERS = np.repeat(np.arange(len(r_dpcfl.SIZES)), r_dpcfl.SIZES)


def source(writers: int = 4, rows: int = 600) -> Dataset:
    """Return images that are black but for the number of the image, in their upper left corner before they turn."""
    images = np.zeros((writers * rows, 28, 28), np.uint8)
    numbers = np.arange(len(images))
    images[:, 0, 0], images[:, 0, 1], images[:, 1, 1] = 255, numbers % 256, numbers // 256
    groups = [0, 1, 1, 0]
    images = np.stack([np.rot90(image, groups[i // rows]) for i, image in enumerate(images)])
    manifest = Manifest(name="qmnist", model="cnn10", loss="cross-entropy", clients=writers,
                        split={"train": 3, "validation": 1}, groups=groups, feature_scale=1 / 255)  # fmt: skip
    return Dataset(manifest, images, numbers % 10, offsets_of([rows] * writers))


@pytest.fixture
def quick(umbel_home: Path, tmp_path: Path) -> list[Spec]:
    found = source()
    write_dataset(umbel_home / "data" / "qmnist", found.manifest, found.features, found.targets, found.offsets)
    return r_dpcfl.specs(tmp_path, seeds=1, quick=True)


def test_a_clients_images_are_all_turned_like_its_cluster_and_drawn_once() -> None:
    found = r_dpcfl.rotated(source(), 1, 100, 50)
    assert found.manifest.groups == [*CLUSTERS, *CLUSTERS]
    for client, cluster in enumerate(found.manifest.groups):
        rows = slice(found.offsets[client], found.offsets[client + 1])
        upright = np.rot90(found.features[rows], -cluster, axes=(1, 2))
        numbers = upright[:, 0, 1].astype(int) + 256 * upright[:, 1, 1].astype(int)
        assert (upright[:, 0, 0] == 255).all()
        assert (numbers % 10 == found.targets[rows]).all()
        assert len(set(numbers)) == (100 if client < CLIENTS else 50)
        assert ((numbers < 1800) == (client < CLIENTS)).all(), "tests are of other writers"


def test_all_rounds_together_keep_the_epsilon_and_waste_little(quick: list[Spec]) -> None:
    for spec in quick:
        _, batches, rows = spec.arm
        spent = r_dpcfl.spent(
            rows, 2, batches == r_dpcfl.ALL, parse_options(RowSettings, spec.config["rows"], "rows").noise
        )
        assert 0.99 * r_dpcfl.EPSILON < spent <= r_dpcfl.EPSILON
    trained = [spec.arm[0] for spec in quick if spec.config["rounds"] > 1]
    assert trained == [r_dpcfl.MIXTURE, r_dpcfl.ONE, r_dpcfl.ORACLE]
    assert Setup.parse(quick[0].config).model.num_parameters == 28_938


def test_a_model_for_each_cluster_serves_its_clients(tmp_path: Path, quick: list[Spec]) -> None:
    # Blank images, and a label for each cluster: one model serves at most the 6 clients of a large cluster.
    both = np.concatenate([CLUSTERS, CLUSTERS])
    offsets, manifest = offsets_of([64] * len(both)), open_dataset(find_dataset(quick[0].config["dataset"])).manifest
    write_dataset(
        tmp_path / "blank", manifest, np.zeros((64 * len(both), 28, 28), np.uint8), np.repeat(both, 64), offsets
    )
    changes: dict[str, Any] = {
        "dataset": str(tmp_path / "blank"), "model": "mlp inputs=784 hidden=4 outputs=10", "rounds": 5,
        "validate-every": 5, "step-size": 1.0,
    }  # fmt: skip
    measures = {}
    for spec in quick:
        if spec.arm[0] != r_dpcfl.KMEANS:
            all_rows = {"rows": str(RowSettings(r_dpcfl.CLIP_NORM, 1e-3, 1.0, 64.0))}
            if spec.arm[1] != r_dpcfl.ALL:
                all_rows = r_dpcfl.by_batch(64, 1e-3)
            rounds = {"rounds": 1} if spec.arm[1] == r_dpcfl.SMALL else {}
            measures[spec.arm[:2]] = r_dpcfl.play(spec.config | changes | all_rows | rounds).measures
    apart, served = {"found": True, "rand_index": 1.0}, {"mean": 1.0, "minority": 1.0, "worst": 1.0}
    one = measures.pop((r_dpcfl.ONE, ""))
    assert (one["found"], one["rand_index"], one["worst"]) == (False, 0.0, 0.0)
    assert one["mean"] <= 6 / CLIENTS
    assert measures == {
        (r_dpcfl.MIXTURE, r_dpcfl.ALL): apart | served,
        (r_dpcfl.ORACLE, ""): apart | served,
        (r_dpcfl.MIXTURE, r_dpcfl.SMALL): apart,
    }


def test_the_table_counts_the_seeds_in_which_the_minority_was_found(quick: list[Spec], tmp_path: Path) -> None:
    made = [
        {"found": one, "rand_index": 0.5 + one / 2, "mean": 0.8, "minority": 0.7, "worst": 0.6} for one in (True, False)
    ]
    runs = [
        Result(
            spec, one if spec.config["rounds"] > 1 else {name: one[name] for name in ("found", "rand_index")}, tmp_path
        )
        for spec in quick
        for one in made
    ]
    r_dpcfl.tables(runs, tmp_path)
    table = (tmp_path / "table.md").read_text()
    assert table.count("| 1 of 2 | 0.75 ± 0.35 |") == 4
    assert table.count("| 0.800 ± 0.000 | 0.700 ± 0.000 | 0.600 ± 0.000 |") == 3
