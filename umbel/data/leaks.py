"""Features that give the target away: one cut of a feature's values tells the classes apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAK, FEWEST, SAMPLE = 0.98, 10, 20_000
"""A feature gives the target away from this balanced accuracy of one cut on; it is told from so many rows of either
side, and on so many rows at most."""
_MOST = 500  # features, and classes


def cut(values: NDArray[Any], classes: NDArray[Any], ordered: bool) -> float:
    """Return the balanced accuracy with which some values tell a class from the others, for the worst class.

    These are an interval if values are `ordered`, else any, of values that are few. Without two classes of several rows
    it is 0.
    """
    (kinds, place), (names, number) = (np.unique(one, return_inverse=True) for one in (values, classes))
    counts = np.bincount(place * len(names) + number, minlength=len(kinds) * len(names)).reshape(len(kinds), len(names))
    common = counts[:, counts.sum(0) >= FEWEST]
    if common.shape[1] < 2 or (not ordered and FEWEST * len(counts) > len(values)):
        return 0.0
    rest = counts.sum(1)[:, None] - common
    apart = common / common.sum(0) - rest / rest.sum(0)
    sums = apart.cumsum(0)
    best = sums.clip(min=0).max(0) - sums.clip(max=0).min(0) if ordered else apart.clip(min=0).sum(0)
    return float(1 + best.min()) / 2


def telling(features: NDArray[Any], targets: NDArray[Any], named: Sequence[str]) -> str:
    """Return the one of named features (rows, n) that alone nearly predicts targets (rows,); empty if none does.

    Targets of many values count as large or small. A feature that rows may lack is judged by those that have it. Images
    and rows of very many features are not looked at.
    """
    if features.ndim != 2 or targets.ndim > 1 or not 0 < len(named) <= _MOST:
        return ""
    step = max(1, len(targets) // SAMPLE)
    classes = (targets > np.median(targets) if len(np.unique(targets)) > _MOST else targets)[::step]
    of, scores = dict(zip(named, features[::step].T, strict=True)), dict[str, float]()
    for name, values in of.items():
        has = of[lacking] == 0 if (lacking := f"{name} is missing") in of else slice(None)
        scores[name] = cut(values[has], classes[has], ordered=True)
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] >= LEAK else ""
