"""How long a client's update is before anything has been learnt: a first guess of the clip norm."""

from __future__ import annotations

import numpy as np

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.trial import try_out
from umbel.models.optimizers import LocalOptimizer
from umbel.privacy.gate.randomness import streams
from umbel.protocol.arrays import flatten
from umbel.server.rounds import draw_hypotheses
from umbel.server.setup import Setup

_MEASURED = 200  # clients


def first_update(setup: Setup) -> float:
    """Return the median length of a client's first update, over some training clients of a dataset at hand."""
    run, dataset, model = setup.config, setup.open_dataset(), setup.model
    assert dataset is not None
    learner = try_out(model, dataset, run.device, run.engine)
    some = range(0, dataset.manifest.train, -(-dataset.manifest.train // _MEASURED))
    hypotheses = draw_hypotheses(model, setup.strategy.hypotheses, run.seed, 0)
    cohort = Cohort.gather(dataset, some, learner.device)
    local = model.initial_local(streams(run.seed, "local", 0, some))
    chosen = learner.choose(hypotheses, cohort, local)
    update = LocalUpdate(
        run.local_epochs, run.step_size, run.batch_size, run.local_steps, descent=LocalOptimizer.of(run)
    )
    trained, _ = learner.train(hypotheses, chosen, cohort, update, streams(run.seed, "shuffle", 1, some), local)
    moved = flatten(trained, np.float64) - flatten(hypotheses, np.float64)[chosen]
    return float(np.median(np.linalg.norm(moved, axis=1)))
