"""A strategy in a package of its own, as somebody who uses umbel writes it; umbel knows nothing of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from umbel.strategies import GroupPrivacy


@dataclass(frozen=True)
class Options:
    """Set behind the strategy's name."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    rate: Annotated[float, Field(gt=0)] = 1.0


class Momentum(GroupPrivacy):
    """Each hypothesis goes on in the direction in which it went before."""

    Options = Options

    def combine(self, group: Any, hypothesis: Any, index: int) -> Any:
        """Return the hypothesis moved by the mean change and a share of its last step."""
        step = self.options.rate * (group.mean(axis=0) - hypothesis)
        step = step + self.options.momentum * self.state.get(f"step-{index}", 0.0)
        self.state[f"step-{index}"] = step
        return hypothesis + step
