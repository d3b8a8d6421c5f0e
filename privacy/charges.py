"""What a client pays for, what it may spend, and what it has spent: the words of every ledger."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from protocol.release import Release


@dataclass(frozen=True)
class Charge:
    """A release that each of some clients pays for.

    Attributes
    ----------
    run : str
    round : int
    release : Release
    """

    run: str
    round: int
    release: Release


@dataclass(frozen=True)
class Limits:
    """The most a client may give.

    Attributes
    ----------
    budget : Fraction or None
        The largest sum of n / nu.
    participations : int or None
        The largest number of releases, whatever they cost: with ever more noise a release costs
        ever less, but it may always tell a little.
    """

    budget: Fraction | None = None
    participations: int | None = None

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return self != Limits()

    def allow(self, spent: Fraction | float, times: int, cost: Fraction | None) -> bool:
        """Return whether a client may pay `cost` after having spent `spent` in `times` releases."""
        if self.participations is not None and times >= self.participations:
            return False
        return self.budget is None or (cost is not None and spent + cost <= self.budget)


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Account:
    """What a client has spent on releases of one kind and price.

    Attributes
    ----------
    client : int
    release : Release
        Without its radius, on which the price does not depend.
    times : int
        How often it paid.
    """

    client: int
    release: Release
    times: int

    @property
    def spent(self) -> Fraction | float:
        """The sum, exactly; infinite where nothing bounds it."""
        cost = self.release.cost
        return float("inf") if cost is None else cost * self.times
