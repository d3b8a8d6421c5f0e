"""How well hypotheses serve clients that did not take part: one by one, not on average alone.

In the papers a client picks the hypothesis of lowest loss on its rows and is measured on the same rows. Held out, it
picks (or trains by itself) on every other row and is measured on the rest, which leaves out clients of a single row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import contingency

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner, best_hypothesis
from umbel.client.personal import of_each, personal
from umbel.client.trial import try_out
from umbel.data import Dataset
from umbel.models.model import Model
from umbel.models.optimizers import LocalOptimizer
from umbel.privacy.gate.policy import Personal
from umbel.privacy.gate.randomness import streams
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.errors import DatasetError
from umbel.protocol.run_config import RunConfig
from umbel.server.rounds import draw_hypotheses

LOCAL_EPOCHS = 50  # of a client that trains by itself
_FRESH_SEED = 0  # of the local parameters that validation clients start from


def serve(
    learner: Learner, hypotheses: Arrays, chooses: Cohort, measured: Cohort
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return what each client picks on one cohort's rows and its metric on the other's, each (clients,)."""
    losses, metrics = learner.score(hypotheses, chooses)
    return _pick(losses, metrics if measured is chooses else learner.score(hypotheses, measured)[1])


def measure(model: Model, dataset: Dataset, hypotheses: Arrays, step_size: float) -> dict[str, Any]:
    """Measure hypotheses on all validation clients of a dataset.

    Of a model with local parameters each client first fits its own, with steps of `step_size`, and is measured on rows
    that it did not fit; ``held_out`` then counts no client.

    The dict has ``mean`` and ``worst_decile`` of the model's metric over clients; ``held_out``, the same held out;
    ``chosen``, how many clients pick each hypothesis; ``rand_index``, the adjusted Rand index of the choices against
    the manifest's groups, None where these are unknown; ``to_truth``, the distance from each true parameter vector to
    the nearest hypothesis, empty where it is unknown.
    """
    manifest, learner = dataset.manifest, try_out(model, dataset)
    cohort, held_out = validation_cohort(dataset, learner), np.zeros(0)
    if model.local_shapes:
        fresh = model.initial_local(streams(_FRESH_SEED, "local", 0, range(len(cohort))))
        chosen, metrics = _pick(*learner.score_newcomers(hypotheses, cohort, fresh, step_size))
    else:
        chosen, metrics = serve(learner, hypotheses, cohort, cohort)
        support, query = halves(cohort)
        if len(query):
            held_out = serve(learner, hypotheses, support, query)[1]
    vectors = flatten(hypotheses)
    truth = [np.asarray(vector) for vector in manifest.truth if len(vector) == vectors.shape[1]]
    groups = manifest.groups[manifest.train :]
    return {
        **_summary(model, metrics),
        "held_out": _summary(model, held_out),
        "chosen": np.bincount(chosen, minlength=len(vectors)).tolist(),
        "rand_index": float(rand_index(groups, chosen)) if groups else None,
        "to_truth": [float(np.linalg.norm(vectors - vector, axis=1).min()) for vector in truth],
    }


def local_only(model: Model, dataset: Dataset, run: RunConfig) -> dict[str, float]:
    """Return the held-out metric of validation clients that train by themselves, from a run's first hypothesis."""
    learner, support, query = _split(model, dataset)
    start, chosen = draw_hypotheses(model, 1, run.seed, 0), np.zeros(len(support), np.int64)
    update = LocalUpdate(LOCAL_EPOCHS, run.step_size, run.batch_size, descent=LocalOptimizer.of(run))
    clients = range(len(support))
    fresh = model.initial_local(streams(run.seed, "local", 0, clients))
    shuffles = streams(run.seed, "shuffle", 0, clients)
    trained, local = learner.train(start, chosen, support, update, shuffles, fresh)
    return _summary(model, _own_metrics(learner, query, trained, local))


def personalised(
    model: Model, dataset: Dataset, hypotheses: Arrays, run: RunConfig, how: Personal, epochs: int = 0
) -> dict[str, float]:
    """Return the held-out metric of validation clients that make the hypothesis which fits them best their own.

    As a site does with what it keeps (`umbel.client.personal`), here on every other row, for `LOCAL_EPOCHS` by default.
    """
    learner, support, query = _split(model, dataset)
    update = LocalUpdate(epochs or LOCAL_EPOCHS, run.step_size, run.batch_size, descent=LocalOptimizer.of(run))
    draws = partial(streams, run.seed, "shuffle", 0, range(len(support)))
    start = of_each(hypotheses, learner.choose(hypotheses, support))
    own = personal(how, learner, start, support, update, draws)
    return _summary(model, _own_metrics(learner, query, own, {}))


def _split(model: Model, dataset: Dataset) -> tuple[Learner, Cohort, Cohort]:
    """Return a learner, and the two halves of the validation clients that have both."""
    learner = try_out(model, dataset)
    support, query = halves(validation_cohort(dataset, learner))
    if not len(query):
        text = "no validation client has more than one row, so none can both train and be measured"
        raise DatasetError(text, code="data.single-rows")
    return learner, support, query


def _own_metrics(learner: Learner, query: Cohort, shared: Arrays, local: Arrays) -> NDArray[np.float64]:
    """Return the metric of each client's own model, whose parameters are stacked by client."""
    metrics = np.empty(len(query))
    for c in range(len(query)):
        one, own = ({name: value[c : c + 1] for name, value in arrays.items()} for arrays in (shared, local))
        metrics[c] = learner.score(one, query.part(slice(c, c + 1)), own)[1][0, 0]
    return metrics


def halves(cohort: Cohort) -> tuple[Cohort, Cohort]:
    """Split the rows of each client: first, third, ... and second, fourth, ...; single rows are left out."""
    several = np.repeat(cohort.lengths > 1, cohort.lengths)
    position = np.arange(len(several)) - np.repeat(cohort.starts, cohort.lengths)
    lengths = cohort.lengths[cohort.lengths > 1]

    def part(odd: int) -> Cohort:
        rows = torch.from_numpy(np.flatnonzero(several & (position % 2 == odd))).to(cohort.features.device)
        return Cohort(cohort.features[rows], cohort.targets[rows], (lengths + 1 - odd) // 2)

    return part(0), part(1)


def rand_index(one: Sequence[int], other: Sequence[int] | NDArray[np.int64]) -> float:
    """Return the adjusted Rand index of two partitions: 1 if they agree (Hubert and Arabie, 1985)."""
    table: NDArray[np.int64] = contingency.crosstab(np.asarray(one), np.asarray(other)).count
    # Ordered pairs of items: together in both, in the first alone, in the second alone, and in neither.
    both, items = int(np.square(table).sum()), len(one)
    first, second = (int(np.square(table.sum(axis=axis)).sum()) - both for axis in (1, 0))
    both, neither = both - items, items**2 - first - second - both
    if not first and not second:
        return 1.0
    chance = (both + second) * (second + neither) + (both + first) * (first + neither)
    return 2.0 * (both * neither - second * first) / chance


def worst_decile(values: NDArray[np.float64], higher_is_better: bool) -> float:
    """Return the mean over the tenth of the clients that fare worst, rounded up to whole clients."""
    ordered = np.sort(values) if higher_is_better else np.sort(values)[::-1]
    return float(ordered[: math.ceil(len(values) / 10)].mean())


def validation_cohort(dataset: Dataset, learner: Learner) -> Cohort:
    """Return the validation clients of a dataset, where a learner computes."""
    manifest = dataset.manifest
    return Cohort.gather(dataset, range(manifest.train, manifest.clients), learner.device)


def _pick(losses: NDArray[np.float64], metrics: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the hypothesis that suits each client best, and the client's metric under it."""
    chosen = best_hypothesis(losses)
    return chosen, np.take_along_axis(metrics, chosen[None], 0)[0]


def _summary(model: Model, metrics: NDArray[np.float64]) -> dict[str, float]:
    if not len(metrics):
        return {"mean": math.nan, "worst_decile": math.nan, "clients": 0}
    return {
        "mean": float(metrics.mean()),
        "worst_decile": worst_decile(metrics, model.metric.higher_is_better),
        "clients": len(metrics),
    }
