"""Answers before a run: whether a model takes the data, and a first guess of the clip norm."""

from __future__ import annotations

import numpy as np

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.trial import try_out
from umbel.data import Dataset
from umbel.models import load
from umbel.models.fit import misfit
from umbel.models.model import Model
from umbel.models.optimizers import LocalOptimizer
from umbel.privacy.gate.randomness import streams
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.errors import DatasetError
from umbel.protocol.run_config import RunConfig

_MEASURED = 200  # clients


def check_fit(data: Dataset) -> None:
    """Raise `DatasetError` unless the model and the loss that a dataset names take it."""
    manifest = data.manifest
    if reason := misfit(load(manifest.model, manifest.loss), data):
        raise DatasetError(
            f"model {manifest.model!r} {reason}; give another --model or --loss, or leave both out",
            code="data.unfit-model",
        )


def first_update(run: RunConfig, model: Model, dataset: Dataset, hypotheses: Arrays) -> float:
    """Return the median norm of a client's first update, over some training clients.

    Nothing has been learnt before it, so that it is a first guess of the clip norm.
    """
    learner = try_out(model, dataset, run.device, run.engine)
    some = range(0, dataset.manifest.train, -(-dataset.manifest.train // _MEASURED))
    cohort = Cohort.gather(dataset, some, learner.device)
    local = model.initial_local(streams(run.seed, "local", 0, some))
    chosen = learner.choose(hypotheses, cohort, local)
    update = LocalUpdate(
        run.local_epochs, run.step_size, run.batch_size, run.local_steps, descent=LocalOptimizer.of(run)
    )
    trained, _ = learner.train(hypotheses, chosen, cohort, update, streams(run.seed, "shuffle", 1, some), local)
    moved = flatten(trained, np.float64) - flatten(hypotheses, np.float64)[chosen]
    return float(np.median(np.linalg.norm(moved, axis=1)))
