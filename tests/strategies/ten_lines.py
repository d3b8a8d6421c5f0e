"""A strategy of one's own, as somebody who uses umbel writes it; it is named in the run config as any other."""

from dataclasses import dataclass

import numpy as np

from umbel.strategies.fedavg import FedAvg


@dataclass(frozen=True)
class Options:
    """Set behind the strategy's name."""

    trim: int = 0


class TrimmedMean(FedAvg):
    """Leave the `trim` largest and smallest values of each parameter out of the mean."""

    Options = Options

    def combine(self, group, hypothesis, index):  # type: ignore[no-untyped-def]
        trim = min(self.options.trim, (len(group) - 1) // 2)
        return np.sort(group, axis=0)[trim : len(group) - trim].mean(axis=0)
