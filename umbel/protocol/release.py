"""A release and its cost: the vocabulary that gate, ledger, accountant, planner and report share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

LEAST_CLIP_NORM = 0.01
"""The default of the smallest clip norm: an update of length 0 would get no noise."""
MAX_CHOICE_EPSILON = 30.0
"""Largest epsilon of a choice. Above it a choice is practically open, and its probabilities are finer than random
numbers."""

_LONGEST, _GRAIN = 1000, 2**32  # denominators


def exact(value: float) -> Fraction:
    """Return the decimal number that people wrote: .3 is 3/10, and not the nearest binary number."""
    return Fraction(repr(float(value)))


@lru_cache(maxsize=64)
def quotient(above: int, below: float) -> Fraction:
    """Return above / below: exact where the fraction is short, otherwise rounded up to a multiple of 2**-32.

    So sums of many prices stay cheap to compute and are never too small.
    """
    price = Fraction(above) / exact(below)
    if price.denominator <= _LONGEST:
        return price
    return Fraction(math.ceil(price * _GRAIN), _GRAIN)


LAPLACE = "laplace"
"""The mechanism of the group privacy paper, and the default."""
DISCRETE_GAUSSIAN = "discrete-gaussian"
"""The only mechanism of secure sums."""


class Clipping(StrEnum):
    """The size of update that the noise hides."""

    UPDATE = "update"
    """The norm of the client's own update, at least a floor (the group privacy paper): a heuristic."""
    PUBLIC = "public"
    """A public clip norm, to which the client clips its update: a guarantee."""


class Kind(StrEnum):
    """The kind of a release."""

    TRAIN = "train"
    """A trained model."""
    SITE = "site"
    """A site's sums over its clients' updates, and over their choices of hypotheses."""
    SECURE = "secure"
    """The same sums over the clients of several sites, which only the sites together can read."""
    REPORT = "report"
    """Loss and metric of a client that also trains, or of a client in a site's mean."""


class ReleaseBy(StrEnum):
    """The party that adds the noise."""

    CLIENT = "client"
    """Each client, to its own model. Others see the model only with noise."""
    SITE = "site"
    """A site, once, to the sums of its clients' updates: the clients trust it."""
    SECURE = "secure"
    """Several sites together, each a share, to a sum that the server reads only as a whole."""


CHANNELS = {
    "client": "umbel.privacy.channels.client:Client",
    "rows": "umbel.privacy.channels.rows:Rows",
    "site": "umbel.privacy.channels.site:SiteSums",
    "secure": "umbel.privacy.channels.secure.channel:Secure",
    "reports": "umbel.privacy.channels.reports:Reports",
}
"""The ways in which results may leave a site (`umbel.privacy.channels`), each as ``package.module:Class``."""
IMPLIED = {"rows", "reports"}
"""Those that follow from a task, so that no server asks for them by name."""


class Protect(StrEnum):
    """The data that a guarantee hides."""

    CLIENTS = "clients"
    """A client's whole data: noise on what leaves (`Release.noise_multiplier`)."""
    ROWS = "rows"
    """Each row of a client: noise in each step of its training (`RowPrivacy`)."""
    BOTH = "both"
    """Each row, and a client's whole data."""

    @property
    def clients(self) -> bool:
        """Whether clients are protected."""
        return self is not Protect.ROWS

    @property
    def rows(self) -> bool:
        """Whether rows are protected by noise in training."""
        return self is not Protect.CLIENTS


class NoisePer(StrEnum):
    """The unit that gets separate noise, within a separate radius."""

    VECTOR = "vector"
    """All parameters as one."""
    LAYER = "layer"
    """The parameters of each layer (group privacy paper, Sec. 5.3)."""
    ROW = "row"
    """Each row of each array, as an item of a recommender."""


@dataclass(frozen=True)
class RowPrivacy:
    """Local training with a guarantee for each row: DP-SGD (Abadi et al., CCS 2016, Algorithm 1).

    Each step draws each of a client's rows with probability `rate`, by the site's secret randomness. It clips the
    gradient of each drawn row, adds them up, adds normal noise, and divides by `batch`. So what training returns has a
    guarantee between any two data sets of a client that differ by one row, added or removed.
    """

    clip_norm: float  # C, the L2 norm to which the gradient of a row is clipped
    noise_multiplier: float  # sigma: the noise's standard deviation in each component, in clip norms
    rate: float  # q, between 0 and 1
    batch: float  # by which sums are divided; never the number of drawn rows, which says how many there are
    steps: int  # of a client in a round, for any rows


@dataclass(frozen=True)
class Release:
    """One release of one client, as far as its cost depends on it.

    A site's release counts as one release of each client in it.
    """

    kind: Kind
    n: int  # values released: the model's shared parameters, or 2 for a report
    noise_multiplier: float  # nu; 0 without noise
    clipping: Clipping
    radius: float | None = None
    """The public clip norm. None in mode ``update``, since the norm of an update must not be written down, and where
    releases of different clip norms are counted together: they cost the same."""
    mechanism: str = LAPLACE
    hypotheses: int = 1  # that the client chose among; 0 where that is not on record
    choice_epsilon: float = 0.0
    """Epsilon that hides the choice: of randomised response, or in a site's release of the noise on how many clients
    chose each hypothesis. 0 where nothing hides it, as in the paper, or where that noise costs nothing extra."""
    # sigma, q and T of the `RowPrivacy` by which the client trained; 0 for training without it.
    row_noise_multiplier: float = 0.0
    row_rate: float = 0.0
    row_steps: int = 0

    @property
    def paper_cost(self) -> Fraction | None:
        """The paper's budget, a heuristic: n / nu within the radius (group privacy paper, Sec. 4.1.3).

        None, which means no bound at all, without noise or with another mechanism than the paper's.
        """
        counted = self.noise_multiplier > 0 and self.mechanism == LAPLACE
        return quotient(self.n, self.noise_multiplier) if counted else None

    @property
    def chooses(self) -> bool:
        """Whether the client chose among hypotheses, so that its release may reveal the choice."""
        return self.hypotheses != 1

    @property
    def formal(self) -> bool:
        """Whether the release has a guarantee between any two data sets of the client: clip norm and choice are
        covered.

        Sums always cover the choice.
        """
        covered = self.choice_epsilon > 0 or not self.chooses or self.kind in (Kind.SITE, Kind.SECURE)
        return self.clipping is Clipping.PUBLIC and self.noise_multiplier > 0 and covered

    @property
    def by_rows(self) -> bool:
        """Whether the client trained with a guarantee for each row."""
        return self.row_noise_multiplier > 0

    def trained_by(self, rows: RowPrivacy | None) -> Release:
        """Return the release with the row guarantee of its training; without one for None."""
        if rows is None:
            return replace(self, row_noise_multiplier=0.0, row_rate=0.0, row_steps=0)
        return replace(self, row_noise_multiplier=rows.noise_multiplier, row_rate=rows.rate, row_steps=rows.steps)

    def without_noise(self) -> Release:
        """Return the release as it is for a reader who can subtract all noise."""
        return replace(self, noise_multiplier=0.0).trained_by(None)

    def paper_spend(self, times: float) -> float:
        """Return the paper's budget of so many releases; infinite where the paper gives no bound."""
        if self.paper_cost is None:
            return float("inf") if times else 0.0
        return float(Fraction(times) * self.paper_cost)


def participation(
    n: int,
    hypotheses: int,
    noise_multiplier: float,
    clipping: Clipping = Clipping.PUBLIC,
    radius: float | None = None,
    mechanism: str = LAPLACE,
    choice_epsilon: float = 0.0,
    rows: RowPrivacy | None = None,
) -> Release:
    """Return the release of a participation: a model of n values, trained from one of so many hypotheses.

    From a single one there is no choice to hide. Without noise there is no mechanism, even if a server names one.
    """
    return Release(
        Kind.TRAIN,
        n,
        noise_multiplier,
        clipping,
        radius if clipping is Clipping.PUBLIC else None,
        mechanism if noise_multiplier > 0 else LAPLACE,
        hypotheses,
        choice_epsilon if hypotheses > 1 else 0.0,
    ).trained_by(rows)


def report_release(noise_multiplier: float, bound: float = 1.0, mechanism: str = LAPLACE) -> Release:
    """Return the release of a client's loss and metric, each from 0 to `bound`."""
    return Release(Kind.REPORT, 2, noise_multiplier, Clipping.PUBLIC, math.sqrt(2) * bound, mechanism)
