"""How well hypotheses serve clients outside the training: for each client, not only on average.

In the papers a client picks the hypothesis of lowest loss on its rows and is measured on the same rows. Held out means
that it picks (or trains alone) on a random half of them and is measured on the rest, which excludes clients with a
single row. A seed draws the halves: rows are often sorted, so taking every other row would separate kinds of rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner, arrays_of, best_hypothesis
from umbel.client.personal import Predictors, Task, as_regression, closed_form, method
from umbel.client.trial import try_out
from umbel.data import Dataset
from umbel.models.fit import traits_of
from umbel.models.model import Model
from umbel.models.optimizers import descent_of
from umbel.models.prior import Prior
from umbel.privacy.mechanisms.randomness import streams
from umbel.protocol.arrays import Arrays, flatten, unflatten
from umbel.protocol.errors import DatasetError
from umbel.protocol.run_config import RunConfig
from umbel.server.run import draw_hypotheses

LOCAL_EPOCHS = 50  # of a client that trains alone
PENALTIES = np.logspace(-4, 2, 13)
"""Of ridge regression."""
_FRESH_SEED = 0  # of validation clients' initial local parameters


def serve(
    learner: Learner, hypotheses: Arrays, chooses: Cohort, measured: Cohort
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return each client's choice on one cohort's rows and its metric on the other's, each (clients,)."""
    shared = learner.tensors(hypotheses)
    losses, metrics = learner.score(shared, chooses)
    return _pick(losses, metrics if measured is chooses else learner.score(shared, measured)[1])


def measure(model: Model, dataset: Dataset, hypotheses: Arrays, run: RunConfig) -> dict[str, Any]:
    """Measure hypotheses of a run on all validation clients of a dataset.

    If a model has local parameters, each client first fits them, with the run's step size, and is measured on other
    rows; ``held_out`` then contains no clients.

    The dict has ``mean`` and ``worst_decile`` of the model's metric over clients; ``held_out``, the same held out;
    ``chosen``, the number of clients for each hypothesis; ``rand_index``, the adjusted Rand index of the choices and
    the manifest's groups, None if these are unknown; ``to_truth``, the distance from each true parameter vector to the
    nearest hypothesis, empty if it is unknown.
    """
    manifest, learner = dataset.manifest, try_out(model, dataset)
    cohort, held_out = validation_cohort(dataset, learner), np.zeros(0)
    if model.local_shapes:
        fresh = learner.tensors(model.initial_local(streams(_FRESH_SEED, "local", 0, range(len(cohort)))))
        scores = learner.score_newcomers(learner.tensors(hypotheses), cohort, fresh, run.step_size)
        chosen, metrics = _pick(*scores)
    else:
        chosen, metrics = serve(learner, hypotheses, cohort, cohort)
        support, query = halves(cohort, run.seed)
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
    """Return the held-out metric of validation clients that train alone, from a run's first hypothesis."""
    learner, support, query = _split(model, dataset, run.seed)
    return _summary(model, next(train_alone(learner, support, run)).score(learner, query)[1])


def train_alone(learner: Learner, support: Cohort, run: RunConfig, smaller: float = 1.0) -> Iterator[Predictors]:
    """Yield the predictors of clients that train alone on their rows, again and again.

    They begin with a run's first hypothesis, and train with its step size divided by `smaller`. Before each predictor
    they train for `LOCAL_EPOCHS` more.
    """
    clients = range(len(support))
    update = LocalUpdate(LOCAL_EPOCHS, run.step_size / smaller, run.batch_size, descent=descent_of(run.optimizer))
    outputs = traits_of(learner.model, support.shape).outputs[-1]
    models = learner.tensors(draw_hypotheses(learner.model, 1, run.seed, 0))
    local = learner.tensors(learner.model.initial_local(streams(run.seed, "local", 0, clients)))
    chosen = torch.zeros(len(support), dtype=torch.int64)
    for number in itertools.count():
        shuffles = streams(run.seed, "shuffle", number, clients)
        trained = learner.train(models, chosen, support, update, shuffles, local)
        models, local = ({name: value.to(learner.device) for name, value in one.items()} for one in trained)
        chosen = torch.arange(len(support))
        networks = {name: value[:, None] for name, value in arrays_of(models | local).items()}
        yield Predictors.plain(networks, outputs)


def ridge(learner: Learner, support: Cohort) -> Predictors | None:
    """Return each client's ridge regression on its rows.

    Each client takes the penalty with the lowest leave-one-out error. None if the model is not linear, or its loss not
    a square.
    """
    model = learner.model
    if model.local_shapes or not closed_form(model):
        return None
    like = draw_hypotheses(model, 1, 0, 0)
    design, targets, lengths = as_regression(learner, like, support)
    ends = np.cumsum(lengths)[:-1]
    parts = zip(np.split(design.T, ends), np.split(targets, ends), strict=True)
    weights = np.stack([_ridge(rows, own) for rows, own in parts])
    networks = {name: value[:, None].astype(np.float32) for name, value in unflatten(weights, like).items()}
    return Predictors.plain(networks, traits_of(model, support.shape).outputs[-1])


def _ridge(rows: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights (n,) of the penalty with the lowest leave-one-out error on rows (m, n)."""
    left, sizes, right = np.linalg.svd(rows, full_matrices=False)
    shares = np.square(sizes) / (np.square(sizes) + PENALTIES[:, None])  # (penalties, components)
    known = left.T @ targets
    residuals = targets - (shares * known) @ left.T
    errors = np.square(residuals / np.maximum(1 - shares @ np.square(left).T, 1e-9)).mean(1)
    best = PENALTIES[np.argmin(errors)]
    found: NDArray[np.float64] = (known * sizes / (np.square(sizes) + best)) @ right
    return found


def personalised(
    model: Model,
    dataset: Dataset,
    hypotheses: Arrays,
    run: RunConfig,
    how: str,
    epochs: int = 0,
    prior: Prior | None = None,
) -> dict[str, float]:
    """Return the held-out metric of validation clients that personalise their best hypothesis.

    They do what a site does with a kept model (`umbel.client.personal`), on half of the rows, by default for
    `LOCAL_EPOCHS`.
    """
    learner, support, query = _split(model, dataset, run.seed)
    return _summary(model, own(learner, support, hypotheses, run, how, epochs, prior).score(learner, query)[1])


def own(
    learner: Learner,
    support: Cohort,
    hypotheses: Arrays,
    run: RunConfig,
    how: str,
    epochs: int = 0,
    prior: Prior | None = None,
) -> Predictors:
    """Return the predictors that clients make from hypotheses and their rows."""
    update = LocalUpdate(epochs or LOCAL_EPOCHS, run.step_size, run.batch_size, descent=descent_of(run.optimizer))
    draws = partial(streams, run.seed, "shuffle", 0, range(len(support)))
    return method(how)(Task(learner, hypotheses, support, update, draws, prior))


def _split(model: Model, dataset: Dataset, seed: int) -> tuple[Learner, Cohort, Cohort]:
    """Return a learner, and two halves of the rows of those validation clients that have both."""
    learner = try_out(model, dataset)
    support, query = halves(validation_cohort(dataset, learner), seed)
    if not len(query):
        text = "no validation client has more than one row, so none can both train and be measured"
        raise DatasetError(text, code="data.single-rows")
    return learner, support, query


def halves(cohort: Cohort, seed: int) -> tuple[Cohort, Cohort]:
    """Split the rows of each client at random; the first half has the odd row. Clients with a single row are left
    out."""
    owners = np.repeat(np.arange(len(cohort)), cohort.lengths)
    drawn = streams(seed, "held out", 0, [0])[0].random(len(owners))
    # A client's rows stay together, in the order drawn.
    rows = np.lexsort((drawn, owners))
    position, several = np.arange(len(rows)) - np.repeat(cohort.starts, cohort.lengths), cohort.lengths[owners] > 1
    first = position < (cohort.lengths[owners] + 1) // 2
    lengths = cohort.lengths[cohort.lengths > 1]

    def part(mine: NDArray[np.bool_], lengths: NDArray[np.int64]) -> Cohort:
        # In the order of the data, which does not matter for the metric.
        own = torch.from_numpy(np.sort(rows[several & mine])).to(cohort.features.device)
        return Cohort(cohort.features[own], cohort.targets[own], lengths)

    return part(first, (lengths + 1) // 2), part(~first, lengths // 2)


def rand_index(one: Sequence[int], other: Sequence[int] | NDArray[np.int64]) -> float:
    """Return the adjusted Rand index of two partitions: 1 if they agree (Hubert and Arabie, 1985)."""
    from scipy.stats import contingency  # the import takes half a second

    table: NDArray[np.int64] = contingency.crosstab(np.asarray(one), np.asarray(other)).count
    # Ordered pairs of items: together in both, only in the first, only in the second, and in neither.
    both, items = int(np.square(table).sum()), len(one)
    first, second = (int(np.square(table.sum(axis=axis)).sum()) - both for axis in (1, 0))
    both, neither = both - items, items**2 - first - second - both
    if not first and not second:
        return 1.0
    chance = (both + second) * (second + neither) + (both + first) * (first + neither)
    return 2.0 * (both * neither - second * first) / chance


def worst_decile(values: NDArray[np.float64], higher_is_better: bool) -> float:
    """Return the mean over the worst tenth of the clients, rounded up to whole clients."""
    ordered = np.sort(values) if higher_is_better else np.sort(values)[::-1]
    return float(ordered[: math.ceil(len(values) / 10)].mean())


def validation_cohort(dataset: Dataset, learner: Learner) -> Cohort:
    """Return the validation clients of a dataset on a learner's device."""
    manifest = dataset.manifest
    return Cohort.gather(dataset, range(manifest.train, manifest.clients), learner.device)


def _pick(losses: NDArray[np.float64], metrics: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return each client's best hypothesis, and the client's metric under it."""
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
