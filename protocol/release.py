"""What a client gave away at once, and what that costs: one word for gate, ledger, accountant and report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache


class RadiusMode(StrEnum):
    """How large an update the noise hides."""

    UPDATE = "update"
    """The norm of the client's own update, at least a floor (the group privacy paper): a heuristic."""
    PUBLIC = "public"
    """A radius that everybody knows, to which the client clips its update: a guarantee."""


class Kind(StrEnum):
    """What is released."""

    TRAIN = "train"
    """A trained model."""
    REPORT = "report"
    """Loss and metric of a client that also trains."""


class NoisePer(StrEnum):
    """What is noised by itself, within a radius of its own."""

    VECTOR = "vector"
    """All parameters as one."""
    LAYER = "layer"
    """The parameters of each layer (group privacy paper, Sec. 5.3)."""
    ROW = "row"
    """Each row of each array, as an item of a recommender."""


@dataclass(frozen=True)
class RadiusSchedule:
    """The radius asked for in round t.

    Mode ``update``: `floor`. Mode ``public``: ``start * decay**(t - 1)``, at least `floor`.
    """

    mode: RadiusMode = RadiusMode.UPDATE
    floor: float = 0.01
    start: float = 1.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", RadiusMode(self.mode))

    def at(self, round: int) -> float:
        """Return the radius of a round, counted from 1."""
        public = self.mode is RadiusMode.PUBLIC
        return max(self.start * self.decay ** (round - 1), self.floor) if public else self.floor


@dataclass(frozen=True)
class Release:
    """One release of one client, as far as its price goes.

    Attributes
    ----------
    kind : Kind
    n : int
        Numbers released: the model's shared parameters, or 2 for a report.
    noise_multiplier : float
        nu; 0 for a release without noise.
    radius_mode : RadiusMode
    radius : float or None
        Only where it is public: the norm of an update is not for writing down. None as well where
        releases of different radii are counted together, which cost the same.
    """

    kind: Kind
    n: int
    noise_multiplier: float
    radius_mode: RadiusMode
    radius: float | None = None

    @property
    def cost(self) -> Fraction | None:
        """What it costs the client, exactly: n / nu within the radius (group privacy paper, Sec. 4.1.3).

        None, for no bound at all, without noise.
        """
        return _price(self.n, self.noise_multiplier)

    @property
    def formal(self) -> bool:
        """Whether the cost is a guarantee; otherwise it is the paper's heuristic, or nothing."""
        return self.radius_mode is RadiusMode.PUBLIC and self.noise_multiplier > 0

    def spend(self, times: float) -> float:
        """Return what so many releases cost together; infinite without noise."""
        if self.cost is None:
            return float("inf") if times else 0.0
        return float(Fraction(times) * self.cost)


@lru_cache(maxsize=64)
def _price(n: int, noise_multiplier: float) -> Fraction | None:
    return Fraction(n) / Fraction(noise_multiplier) if noise_multiplier > 0 else None
