"""A strategy of one's own, as somebody who uses umbel writes it; it is named in the run config as any other."""

from typing import Any

import numpy as np

from strategies.fedavg import FedAvg


class TrimmedMean(FedAvg):
    """Leave the `trim` largest and smallest values of each parameter out of the mean."""

    def prepare(self, options: Any, model: Any) -> None:
        self.trim = options.whole("trim", 0)

    def combine(self, group: Any, hypothesis: Any) -> Any:
        trim = min(self.trim, (len(group) - 1) // 2)
        return np.sort(group, axis=0)[trim : len(group) - trim].mean(axis=0)
