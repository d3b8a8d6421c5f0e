"""The guarantee that a user wants of a whole run: of each client, or of each row of a client."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.accounting.plan import impossible
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Clipping, Protect
from umbel.protocol.run_config import RowSettings

_STEPS = 5  # of a participation
_BATCH = 256  # rows of a step: smaller batches have more noise at the same epsilon, larger ones take longer


@dataclass(frozen=True)
class Wanted:
    """A wanted guarantee over the whole run; none without any figure.

    Attributes
    ----------
    epsilon : float, optional
        Between any two data sets of a client.
    delta : float, optional
        0 for a pure epsilon of clients.
    row_epsilon, rows : float, int, optional
        In place of `epsilon`: between two data sets of a client that differ by one row, and the number of rows of a
        typical client, which decides the batch and not the guarantee.
    """

    epsilon: float | None = None
    delta: float | None = None
    row_epsilon: float | None = None
    rows: int | None = None

    def check(self) -> None:
        """Raise `ConfigError` if a figure is impossible, missing, or one too many."""
        if (self.row_epsilon is None) is not (self.rows is None):
            text = "a plan for rows needs row-epsilon and rows, the number of rows of a typical client; give both"
            raise ConfigError(text, code="config.missing-figure")
        if self.epsilon is not None and self.row_epsilon is not None:
            text = "epsilon is for clients and row-epsilon for rows; give one"
            raise ConfigError(text, code="config.both-ways")
        for name, one in (("epsilon", self.epsilon), ("row-epsilon", self.row_epsilon)):
            if one is not None and not 0 < one < math.inf:
                raise impossible(name, "a finite number above 0", one)
        if self.rows is not None and self.rows < 1:
            raise impossible("rows", "at least 1", self.rows)
        if self.delta is not None and not self.any:
            raise ConfigError("delta needs a wanted epsilon; give --epsilon too", code="config.delta-alone")
        if not 0 <= self.at_delta < 1:
            raise impossible("delta", "at least 0 and below 1", self.at_delta)

    @property
    def any(self) -> bool:
        """Whether there is a guarantee."""
        return self.epsilon is not None or self.row_epsilon is not None

    @property
    def at_delta(self) -> float:
        """The delta, by default `umbel.privacy.accounting.guarantee.DELTA`."""
        return DELTA if self.delta is None else self.delta

    @property
    def settings(self) -> Mapping[str, Any]:
        """Entries of a run config that hides rows, with any noise; empty if no guarantee of rows is wanted."""
        if self.rows is None:
            return {}
        rate = min(1.0, float(f"{_BATCH / self.rows:.2g}"))
        return {
            "protect": str(Protect.ROWS),
            "noise-multiplier": 0.0,
            "clipping": str(Clipping.UPDATE),
            "choice-epsilon": 1.0,
            "rows": str(RowSettings(1.0, 1.0, rate, float(f"{rate * self.rows:.4g}"))),
            "local-steps": _STEPS,
        }


NOTHING = Wanted()
