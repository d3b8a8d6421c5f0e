"""A wanted guarantee, and the run that is planned for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.accounting.plan import impossible
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Clipping, Protect
from umbel.protocol.tasks import RowSettings

_STEPS = 5  # of a participation
_BATCH = 256  # rows of a step: smaller batches have more noise at the same epsilon, larger ones take longer


@dataclass(frozen=True)
class Wanted:
    """A wanted guarantee over the whole run; `ConfigError` if a figure is impossible."""

    epsilon: float  # between any two data sets of a client or, with `rows`, between two that differ by one row
    delta: float = DELTA  # 0 for a pure epsilon of clients
    rows: int | None = None
    """Rows of a typical client, to hide single rows. They decide the batch and not the guarantee."""

    def __post_init__(self) -> None:
        by_rows = self.rows is not None
        if not 0 < self.epsilon < math.inf:
            raise impossible("row-epsilon" if by_rows else "epsilon", "a finite number above 0", self.epsilon)
        if self.rows is not None and self.rows < 1:
            raise impossible("rows", "at least 1", self.rows)
        if not 0 <= self.delta < 1 or (by_rows and not self.delta):
            raise impossible("delta", f"{'above' if by_rows else 'at least'} 0 and below 1", self.delta)

    @classmethod
    def of(
        cls,
        epsilon: float | None = None,
        delta: float | None = None,
        row_epsilon: float | None = None,
        rows: int | None = None,
    ) -> Wanted | None:
        """Return the guarantee of a user's figures, or None without any.

        Raises `ConfigError` if one is impossible, missing, or one too many.
        """
        if (row_epsilon is None) is not (rows is None):
            text = "a plan for rows needs row-epsilon and rows, the number of rows of a typical client; give both"
            raise ConfigError(text, code="config.missing-figure")
        if epsilon is not None and row_epsilon is not None:
            raise ConfigError("epsilon is for clients and row-epsilon for rows; give one", code="config.both-ways")
        target = row_epsilon if epsilon is None else epsilon
        if target is not None:
            return cls(target, DELTA if delta is None else delta, rows)
        if delta is not None:
            raise ConfigError("delta needs a wanted epsilon; give --epsilon too", code="config.delta-alone")
        return None

    @property
    def settings(self) -> Mapping[str, Any]:
        """Entries of a run config that hides rows, with any noise; empty if clients are to be hidden."""
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


@dataclass(frozen=True)
class PlannedRun:
    """A run config, with lines that describe it."""

    values: dict[str, Any]
    """The run config's entries; others have their defaults."""
    words: list[str]
