"""A client's charges, limits and past spending: the vocabulary of journal and totals.

`umbel.privacy.site.answer` charges, and `umbel.privacy.site.journal` keeps the charges; in simulation
`umbel.privacy.site.totals` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from umbel.privacy.accounting.guarantee import within_budget
from umbel.privacy.accounting.rows import within_row_budget
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.release import Clipping, Kind, Release

_KINDS = 256
"""Maximum number of kinds of release of a client where there is a limit. With extreme noise, different each time, a
server could request releases that cost almost nothing, and each kind stays in the ledger for ever."""

Account = Mapping[Release, int]
"""Number of a client's releases of each kind, without clip norms."""


@dataclass(frozen=True)
class Charge:
    """A release with which each of some clients is charged."""

    run: str
    round: int
    release: Release


@dataclass(frozen=True)
class Limits:
    """A client's limits; infinite for no limit.

    Attributes
    ----------
    budget : Fraction, or infinity
        Maximum epsilon between any two data sets of a client, over all its releases ever.
    delta : float
        Delta of that budget; 0 for a pure epsilon.
    paper_budget : Fraction, or infinity
        Maximum sum of n / nu: the paper's budget, a heuristic.
    participations : float
        Maximum number of releases at any cost.
    min_noise_multiplier, max_choice_epsilon : float
        The site's limits: see `umbel.privacy.accounting.guarantee.within_budget`.
    reports : bool
        Whether training clients report.
    row_budget, row_delta : Fraction or infinity, float
        As `budget` and `delta`, between two data sets of a client that differ by one row.
    dearest : Release, optional
        The participation that reveals most of a row among all that the site accepts: see
        `umbel.privacy.accounting.rows.within_row_budget`.
    """

    budget: Fraction | float = math.inf
    delta: float = 0.0
    paper_budget: Fraction | float = math.inf
    participations: float = math.inf
    min_noise_multiplier: float = 0.0
    max_choice_epsilon: float = math.inf
    reports: bool = False
    row_budget: Fraction | float = math.inf
    row_delta: float = 0.0
    dearest: Release | None = None

    @property
    def any(self) -> bool:
        """Whether there is any limit."""
        return min(self.budget, self.paper_budget, self.participations, self.row_budget) < math.inf

    def allow(self, account: Account, release: Release) -> bool:
        """Return whether a client with this account may make this release."""
        if not self.any:
            return True
        if sum(account.values()) >= self.participations:
            return False
        release = priced(release)
        after = {**account, release: account.get(release, 0) + 1}
        if len(after) > _KINDS:
            return False
        within = paper_spent(after) <= self.paper_budget and self.covers(after, self.budget)
        return within and self.covers_rows(after, self.row_budget)

    def paying(
        self,
        clients: Sequence[ClientInDataset],
        spent: Callable[[ClientInDataset], Hashable],
        account: Callable[[Any], Account],
        release: Release,
        at_least: int = 1,
    ) -> list[bool]:
        """Return for each client whether it may make one more release; none may if fewer than `at_least` may.

        ``account(spent(client))`` is a client's account. Those that have spent the same are asked for once.
        """
        allow = cache(lambda own: self.allow(account(own), release))
        paying = [allow(spent(client)) for client in clients] if self.any else [True] * len(clients)
        return paying if sum(paying) >= at_least else [False] * len(paying)

    def bounds(self, release: Release) -> bool:
        """Return whether a budget of any size could cover a release."""
        return self.covers({priced(release): 1}, _ANY)

    def bounds_rows(self, release: Release) -> bool:
        """Return whether a row budget of any size could cover a release."""
        return self.covers_rows({priced(release): 1}, _ANY)

    def covers(self, account: Account, budget: Fraction | float) -> bool:
        """Return whether a budget of this size, at the site's delta, covers all releases of an account."""
        if budget == math.inf:
            return True
        least = (self.min_noise_multiplier, self.max_choice_epsilon, self.reports)
        return within_budget(account, Fraction(budget), self.delta, *least)

    def covers_rows(self, account: Account, budget: Fraction | float) -> bool:
        """Return whether a row budget of this size, at the site's row delta, covers all releases of an account."""
        if budget == math.inf:
            return True
        return within_row_budget(account, Fraction(budget), self.row_delta, self.dearest, self.reports)


_ANY = Fraction(10**400)  # larger than any number in a policy
NO_LIMITS = Limits()


def priced(release: Release) -> Release:
    """Return a release as accounts keep it: without its clip norm, which does not affect the price."""
    return replace(release, radius=None)


def paper_spent(account: Account) -> Fraction | float:
    """Return the sum of n / nu, exactly; infinite after a release without noise."""
    if any(release.paper_cost is None for release in account):
        return math.inf
    return sum(((release.paper_cost or 0) * times for release, times in account.items()), Fraction(0))


def sort_of(release: Release) -> tuple[Hashable, ...]:
    """Return the sort of a release: of one sort, one release can be dearer than another in every number."""
    hidden = release.choice_epsilon > 0
    return release.kind, release.mechanism, release.clipping, release.chooses, hidden, release.by_rows


def dearer(one: Release, other: Release) -> Release:
    """Return a release of the same sort that reveals no less than either of two."""
    return replace(
        one,
        radius=None,
        n=max(one.n, other.n),
        noise_multiplier=min(one.noise_multiplier, other.noise_multiplier),
        hypotheses=2 if one.chooses else 1,  # a choice between two reveals most
        choice_epsilon=max(one.choice_epsilon, other.choice_epsilon),
        row_noise_multiplier=min(one.row_noise_multiplier, other.row_noise_multiplier),
        row_rate=max(one.row_rate, other.row_rate),
        row_steps=max(one.row_steps, other.row_steps),
    )


_WRITTEN = "kind", "n", "noise_multiplier", "clipping", "mechanism", "hypotheses", "choice_epsilon"
_FLOATS = "noise_multiplier", "choice_epsilon", "row_noise_multiplier", "row_rate"
OF_ROWS = "row_noise_multiplier", "row_rate", "row_steps"
"""Fields of a release that are written only where rows are protected."""


@lru_cache(maxsize=1024)
def written(release: Release) -> str:
    """Return the text of a release in ledgers, without its clip norm."""
    names = (*_WRITTEN, *(OF_ROWS if release.by_rows else ()))
    # Equal releases have one text: 3 is 3.0, and -0.0 is 0.0.
    values = {name: getattr(release, name) + 0.0 if name in _FLOATS else getattr(release, name) for name in names}
    return json.dumps(values, separators=(",", ":"))


@lru_cache(maxsize=1024)
def read(text: str) -> Release:
    """Return the release in a text from `written`; raise `ValueError` or `TypeError` for another text."""
    entries = json.loads(text)
    release = Release(**entries | {"kind": Kind(entries["kind"]), "clipping": Clipping(entries["clipping"])})
    if written(release) != text:
        raise ValueError(f"{text!r} is not a release")
    return release
