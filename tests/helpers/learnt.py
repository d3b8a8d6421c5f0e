"""The folder of a run that learnt what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.helpers.history import a_round
from umbel.cli.runs import Run, load
from umbel.protocol.arrays import Arrays
from umbel.protocol.release import Clipping, Kind, Release
from umbel.server.history import State
from umbel.server.run_folder import RunFolder

RELEASE = Release(Kind.TRAIN, 2, 5.0, Clipping.UPDATE)


def learnt(
    path: Path,
    model: str,
    loss: str,
    best: Arrays,
    dataset: str = "",
    groups: Sequence[Sequence[int]] = (),
    kept: Arrays | None = None,
    **config: object,
) -> Path:
    """Write the folder of a run with these best hypotheses, how many releases each got a round, and what was kept."""
    folder = RunFolder(path)
    folder.write_config({"model": model, "loss": loss, "dataset": dataset, **config})
    history = [a_round(0), *(a_round(i, groups=list(one), best_round=i) for i, one in enumerate(groups, 1))]
    folder.write_round(State(best, best, history=history), np.array([1]), RELEASE, kept or {})
    return path


def learnt_from(path: Path, dataset: Path | str, *parameters: object, groups: Sequence[Sequence[int]] = ((3,),)) -> Run:
    """Return a run of a dataset whose best hypotheses have these parameters, in the order of its model's."""
    shapes = load(learnt(path, "", "", {"none": np.zeros(1)}, str(dataset))).model.shapes
    best = dict(zip(shapes, (np.array(value, np.float32) for value in parameters), strict=True))
    return load(learnt(path, "", "", best, str(dataset), groups))
