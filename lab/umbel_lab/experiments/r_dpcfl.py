"""Clusters of clients whose rows have a guarantee, one of them small (R-DPCFL: Malekmohammadi et al., TMLR 2025).

As in the paper's experiment on MNIST with covariate shift, 21 clients have 8,000 images each, drawn from the same
ones. Those of a client are all turned by 0, 90, 180 or 270 degrees; only three clients have upright ones. A first round
on all rows shows the clusters. Then each cluster has a run of federated averaging: its clients have nothing to choose,
so their guarantee covers all. The images are those of the dataset ``qmnist``; tests are of other writers. With fewer
rows the clusters are harder to find: there, only the first round is done.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from umbel.client.trial import try_out
from umbel.data import Dataset, find_dataset, offsets_of, open_dataset, write_dataset
from umbel.privacy.accounting.row_plan import RowTask, least_noise
from umbel.privacy.accounting.rows import row_guarantee
from umbel.protocol.plugins import parse_options
from umbel.protocol.run_config import RowSettings, RunConfig
from umbel.simulation import in_process
from umbel.simulation.baselines import rand_index, serve, validation_cohort
from umbel.simulation.measured import Finished, Spec
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.experiments.tables import by_arm, page
from umbel_lab.output import Columns, Section, numbers, spread
from umbel_lab.strategies.r_dpcfl import CLUSTERS

SEEDS = 4
SOURCE = "qmnist"
SIZES = (3, 6, 6, 6)
"""Clients of each cluster; those of cluster c have images turned c times by 90 degrees."""
ROWS, TESTED = 8000, 1000
"""Images of a client, for training and for tests."""
EPSILON, DELTA = 3.0, 1e-4
BATCH, STEP, CLIP_NORM = 32, 0.05, 1.0
ROUNDS = 20
"""Of one pass each, the first round included. The paper has 200, with a tenth of the step. The step here was chosen on
seed 100."""

ALL, SMALL = "all rows", "small batches"
MIXTURE, KMEANS, ONE, ORACLE = "mixture", "k-means", "one model", "true clusters"
_BY = {MIXTURE: "by=mixture", KMEANS: "by=kmeans"}
ARMS = ((MIXTURE, ALL), (KMEANS, ALL), (MIXTURE, SMALL), (KMEANS, SMALL))
"""How clusters are found, and the batches of the first round."""
MODELS = ((MIXTURE, ALL), (ONE, ""), (ORACLE, ""))
"""Arms with models. A cluster trains by itself: if k-means finds the mixture's clusters, it has its models."""
FEWER = (512, 1024, 2048)
"""Images of a client where no models are trained."""


class Network(nn.Module):
    """The paper's network for 28x28 images: two convolutions, 28,938 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.fc = nn.Linear(32 * 7 * 7, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10) of images (batch, 28, 28)."""
        hidden = nn.functional.max_pool2d(self.conv1(images.reshape(-1, 1, 28, 28)), 2).relu()
        hidden = nn.functional.max_pool2d(self.conv2(hidden), 2).relu()
        logits: Tensor = self.fc(hidden.flatten(1))
        return logits


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs; a seed draws the images. Quick are two rounds of few images."""
    source, found = open_dataset(find_dataset(SOURCE)), list[Spec]()
    rounds, tested = (2, 50) if quick else (ROUNDS, TESTED)
    sizes = (8 * BATCH,) if quick else (ROWS, *FEWER)
    for seed in range(first, first + seeds):
        for rows in sizes:
            path = folder / "data" / f"rotated-{rows}-{seed}"
            data = rotated(source, seed, rows, tested)
            write_dataset(path, data.manifest, data.features, data.targets, data.offsets)
            base = RunConfig().entries() | {
                "dataset": str(path), "model": f"{__name__}:Network", "seed": seed, "hypotheses": len(SIZES),
                "restarts": 1, "patience": 0, "clients-per-round": sum(SIZES), "max-participations": 0,
                "choice-epsilon": 0.0, "clipping": "update", "noise-multiplier": 0.0, "step-size": STEP,
                "protect": "rows",
            }  # fmt: skip
            for how, batches in (*ARMS, *(((ONE, ""), (ORACLE, "")) if rows == sizes[0] else ())):
                trained = rows == sizes[0] and (how, batches) in MODELS
                config = (
                    base
                    | by_batch(rows, noise_for(rows, rounds, False))
                    | {"strategy": "fedavg"}
                    | ({"hypotheses": 1} if how == ONE else {})
                )
                if how in _BY:
                    config |= {"strategy": f"umbel_lab.strategies:RDPCFL {_BY[how]}"}
                noise = noise_for(rows, rounds, batches == ALL)
                if batches == ALL:
                    config |= {"rows": str(RowSettings(CLIP_NORM, noise, 1.0, float(rows))), "local-steps": 1}
                config["rounds"] = config["validate-every"] = rounds if trained else 1
                found.append(Spec.of((how, batches, rows), config))
    return found


def by_batch(rows: int, noise: float) -> dict[str, Any]:
    """Return the settings of a round in small batches, one pass over the rows of a client."""
    settings = RowSettings(CLIP_NORM, noise, BATCH / rows, float(BATCH))
    return {"rows": str(settings), "local-steps": rows // BATCH}


@lru_cache
def noise_for(rows: int, rounds: int, all_rows_first: bool) -> float:
    """Return the noise multiplier, the same in all rounds, with which they keep `EPSILON` at `DELTA`."""
    noise = least_noise(lambda sigma: spent(rows, rounds, all_rows_first, sigma), EPSILON)
    assert noise is not None, "nothing is chosen"
    return math.ceil(1000 * noise) / 1000


def spent(rows: int, rounds: int, all_rows_first: bool, noise_multiplier: float) -> float:
    """Return the epsilon at `DELTA` of a row, over all rounds."""
    small = RowTask(rows, BATCH / rows, rows // BATCH, rounds - all_rows_first)
    releases = {small.release(noise_multiplier): small.participations}
    if all_rows_first:
        releases[RowTask(rows, 1.0, 1, 1).release(noise_multiplier)] = 1
    found = row_guarantee(releases, DELTA)
    assert found is not None, "nothing is chosen"
    return found.epsilon


def rotated(source: Dataset, seed: int, rows: int, tested: int) -> Dataset:
    """Return clients of turned images: those that train, and as many validation clients, turned like them.

    Each draws images of the source's writers, training or validation, upright again, without regard to other clients.
    """
    manifest, generator = source.manifest, np.random.default_rng(seed)
    turned = np.repeat(manifest.groups, np.diff(source.offsets))
    ends = 0, source.offsets[manifest.train], source.offsets[-1]
    clusters = np.repeat(np.arange(len(SIZES)), SIZES).tolist()
    parts, targets = list[NDArray[Any]](), list[NDArray[Any]]()
    for begin, stop, size in ((ends[0], ends[1], rows), (ends[1], ends[2], tested)):
        for cluster in clusters:
            drawn = np.sort(generator.choice(np.arange(begin, stop), size, replace=False))
            images, quarters = np.asarray(source.features[drawn]), (cluster - turned[drawn]) % 4
            for quarter in range(1, 4):
                own = quarters == quarter
                images[own] = np.rot90(images[own], quarter, axes=(1, 2))
            parts.append(images)
            targets.append(np.asarray(source.targets[drawn]))
    changes = {
        "name": "rotated", "clients": 2 * len(clusters), "groups": clusters + clusters,
        "split": {"train": len(clusters), "validation": len(clusters)},
        "provenance": f"{manifest.provenance} Drawn and turned by umbel experiment r-dpcfl with seed {seed}.",
    }  # fmt: skip
    offsets = offsets_of([rows] * len(clusters) + [tested] * len(clusters))
    return Dataset(manifest.model_copy(update=changes), np.concatenate(parts), np.concatenate(targets), offsets)


def play(config: Mapping[str, Any]) -> Finished:
    """Find the clusters, and train a model for each, if there is more than one round.

    The measures are ``found``, whether the small cluster was found exactly, the ``rand_index`` of all, and the accuracy
    of each client's model on its tests: ``mean``, that of the ``minority``, and that of the ``worst`` client.
    """
    torch.set_num_threads(1)
    data = open_dataset(find_dataset(config["dataset"]))
    true, rounds = np.array(data.manifest.groups[: data.manifest.train]), config["rounds"]
    clusters = true if config["hypotheses"] > 1 else np.zeros_like(true)
    settings = RunConfig.parse(config).of_rows
    assert settings is not None
    if config["strategy"].startswith("umbel_lab.strategies:RDPCFL"):
        clusters = in_process.play({**config, "rounds": 1, "validate-every": 1}).strategy.state[CLUSTERS]
        rounds -= 1
    small = clusters == clusters[0]
    measures = {"found": bool((small == (true == true[0])).all()), "rand_index": rand_index(true.tolist(), clusters)}
    if rounds:
        rows = int(data.offsets[1])
        own = dict(config) | by_batch(rows, settings.noise) | {"strategy": "fedavg", "hypotheses": 1}
        own |= {"rounds": rounds, "validate-every": rounds}
        accuracy = np.zeros(len(true))
        for cluster in np.unique(clusters):
            clients = np.flatnonzero(clusters == cluster)
            accuracy[clients] = _trained(own, data, clients)
        measures |= {
            "mean": float(accuracy.mean()), "minority": float(accuracy[true == true[0]].mean()),
            "worst": float(accuracy.min()),
        }  # fmt: skip
    return Finished(measures)


def _trained(config: Mapping[str, Any], data: Dataset, clients: NDArray[np.int64]) -> NDArray[np.float64]:
    """Train a model for these clients alone; return its accuracy on the tests of each."""
    with tempfile.TemporaryDirectory() as folder:
        path, part = Path(folder) / "cluster", _part(data, clients)
        write_dataset(path, part.manifest, part.features, part.targets, part.offsets)
        run = in_process.play({**config, "dataset": str(path), "clients-per-round": len(clients)})
        learner = try_out(run.setup.model, part)
        cohort = validation_cohort(part, learner)
        return serve(learner, run.state.hypotheses, cohort, cohort)[1]


def _part(data: Dataset, clients: NDArray[np.int64]) -> Dataset:
    """Return these training clients of a dataset, with the validation clients that belong to them."""
    both = np.concatenate([clients, clients + data.manifest.train])
    rows = np.concatenate([np.arange(data.offsets[one], data.offsets[one + 1]) for one in both])
    changes = {
        "clients": len(both), "groups": [data.manifest.groups[one] for one in both],
        "split": {"train": len(clients), "validation": len(clients)},
    }  # fmt: skip
    manifest = data.manifest.model_copy(update=changes)
    return replace(
        data,
        manifest=manifest,
        features=data.features[rows],
        targets=data.targets[rows],
        offsets=offsets_of(np.diff(data.offsets)[both]),
    )


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write the table of the runs of `specs`."""
    rows = [_row(arm, runs) for arm, runs in by_arm(results).items()]
    text = (
        f"{sum(SIZES)} clients in {len(SIZES)} clusters, of which one has {SIZES[0]} clients. Each row has epsilon "
        f"{EPSILON:g} at delta {DELTA:g} over {ROUNDS} rounds, the first included, with the noise sigma per clip norm "
        f"in each step. The minority is found if a cluster has its {SIZES[0]} clients and no other. The adjusted Rand "
        "index is 1 if all clusters are found. Mean ± standard deviation over seeds, which draw the images."
    )
    columns: Columns = {
        "rows": "rows",
        "clusters": "how",
        "first round": "batches",
        "sigma": "sigma:.2f",
        "minority found": "found",
        "Rand index": lambda row: spread(row, "rand_index", 2),
    }
    trained = [row for row in rows if row["mean"] is not None]
    models = (
        "Models are trained for the clusters of a mixture; where k-means finds the same ones, it has the same models. "
        f"Accuracy of each client's model on {TESTED:,} images of other writers, turned like the client's: mean over "
        "clients, over the minority, and of the worst client. The paper has 200 rounds with a tenth of the step, "
        "MNIST's own tests, and a price for choices, of which there are none here."
    )
    shares: Columns = {
        "clusters": "how",
        "sigma": "sigma:.2f",
        "accuracy": lambda row: spread(row, "mean", 3),
        "of the minority": lambda row: spread(row, "minority", 3),
        "of the worst": lambda row: spread(row, "worst", 3),
    }
    found = [row for row in rows if row["batches"]]
    sections = [Section.of("Clusters", text, columns, found), Section.of("Models", models, shares, trained)]
    page("Clusters of clients, one of them small", sections, rows, results).write(folder)


def _noise(rows: str) -> float:
    return parse_options(RowSettings, rows, "rows").noise


def _row(arm: tuple[str, str, int], runs: Sequence[Result]) -> dict[str, Any]:
    how, batches, rows = arm
    row: dict[str, Any] = {
        "rows": rows,
        "how": how,
        "batches": batches,
        "runs": len(runs),
        "sigma": _noise(runs[0].spec.config["rows"]),
        "found": f"{sum(run.measures['found'] for run in runs)} of {len(runs)}",
        **numbers("rand_index", (run.measures["rand_index"] for run in runs)),
    }
    for name in ("mean", "minority", "worst"):
        trained = all(name in run.measures for run in runs)
        row |= numbers(name, (run.measures[name] for run in runs)) if trained else {name: None}
    return row
