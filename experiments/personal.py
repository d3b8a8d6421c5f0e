"""How well hypotheses serve clients that did not take part: one by one, not on average alone.

Two ways of measuring stand side by side. The papers': a client picks the hypothesis of lowest loss
on its rows and is measured on the same rows. And held out: it picks (or trains by itself) on
every other row and is measured on the rest, which leaves out clients of a single row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score

from client.cohort import Cohort, LocalUpdate, best_hypothesis, choose_engine, pick_device, score, train
from federation import Federation
from models.base import Model
from privacy.randomness import streams
from protocol.arrays import Arrays, flatten
from server.rounds import draw_hypotheses
from server.settings import Settings

LOCAL_EPOCHS = 50
"""How often a client that trains by itself goes through its rows."""


def serve(
    model: Model, hypotheses: Arrays, chooses: Cohort, measured: Cohort
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return what each client picks on one cohort's rows and its metric on the other's, each (clients,)."""
    engine = choose_engine("auto", model, chooses.features.device)
    losses, metrics = score(model, hypotheses, chooses, engine)
    chosen = best_hypothesis(losses)
    if measured is not chooses:
        _, metrics = score(model, hypotheses, measured, engine)
    return chosen, np.take_along_axis(metrics, chosen[None], 0)[0]


def measure(model: Model, federation: Federation, hypotheses: Arrays) -> dict[str, Any]:
    """Measure hypotheses on all validation clients of a federation.

    Returns
    -------
    dict
        ``mean`` and ``worst_decile`` of the model's metric over clients; ``held_out``, the same
        held out; ``chosen``, how many clients pick each hypothesis; ``rand_index``, the adjusted
        Rand index of the choices against the manifest's groups, None where these are unknown;
        ``to_truth``, the distance from each true parameter vector to the nearest hypothesis,
        empty where it is unknown.
    """
    manifest = federation.manifest
    cohort = _validation(federation)
    chosen, metrics = serve(model, hypotheses, cohort, cohort)
    support, query = halves(cohort)
    held_out = serve(model, hypotheses, support, query)[1] if len(query) else np.zeros(0)
    vectors = flatten(hypotheses)
    truth = [np.asarray(vector) for vector in manifest.truth if len(vector) == vectors.shape[1]]
    groups = manifest.groups[manifest.train :]
    return {
        **_summary(model, metrics),
        "held_out": _summary(model, held_out),
        "chosen": np.bincount(chosen, minlength=len(vectors)).tolist(),
        "rand_index": float(adjusted_rand_score(groups, chosen)) if groups else None,
        "to_truth": [float(np.linalg.norm(vectors - vector, axis=1).min()) for vector in truth],
    }


def local_only(settings: Settings, federation: Federation) -> dict[str, float]:
    """Return the held-out metric of validation clients that train by themselves, from a run's first hypothesis."""
    model = settings.model
    support, query = halves(_validation(federation))
    if not len(query):
        raise ValueError("no validation client has more than one row, so none can both train and be measured")
    start = draw_hypotheses(model, 1, settings.seed, 0)
    nobody = np.zeros(len(support), np.int64)
    config = settings.train_config
    update = LocalUpdate(LOCAL_EPOCHS, float(config["step_size"]), int(config["batch_size"]))  # type: ignore[arg-type]
    engine = choose_engine("auto", model, support.features.device)
    shuffles = streams(settings.seed, "shuffle", 0, range(len(support)))
    trained = train(model, start, nobody, support, update, shuffles, engine)
    metrics = np.empty(len(query))
    for c in range(len(query)):
        own = {name: value[c : c + 1] for name, value in trained.items()}
        metrics[c] = score(model, own, query.part(slice(c, c + 1)), engine)[1][0, 0]
    return _summary(model, metrics)


def halves(cohort: Cohort) -> tuple[Cohort, Cohort]:
    """Split the rows of each client: first, third, ... and second, fourth, ...; single rows are left out."""
    several = np.repeat(cohort.lengths > 1, cohort.lengths)
    position = np.arange(len(several)) - np.repeat(cohort.starts, cohort.lengths)
    lengths = cohort.lengths[cohort.lengths > 1]

    def part(odd: int) -> Cohort:
        rows = torch.from_numpy(np.flatnonzero(several & (position % 2 == odd))).to(cohort.features.device)
        return Cohort(cohort.features[rows], cohort.targets[rows], (lengths + 1 - odd) // 2)

    return part(0), part(1)


def worst_decile(values: NDArray[np.float64], higher_is_better: bool) -> float:
    """Return the mean over the tenth of the clients that fare worst, rounded up to whole clients."""
    ordered = np.sort(values) if higher_is_better else np.sort(values)[::-1]
    return float(ordered[: math.ceil(len(values) / 10)].mean())


def _validation(federation: Federation) -> Cohort:
    manifest = federation.manifest
    return Cohort.gather(federation, range(manifest.train, manifest.clients), pick_device("auto"))


def _summary(model: Model, metrics: NDArray[np.float64]) -> dict[str, float]:
    if not len(metrics):
        return {"mean": math.nan, "worst_decile": math.nan, "clients": 0}
    return {
        "mean": float(metrics.mean()),
        "worst_decile": worst_decile(metrics, model.metric.higher_is_better),
        "clients": len(metrics),
    }
