"""The modes of release that attacks are tried on, each with the policy of a site that lets it through and no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.accounting.plan import Task, plan_for
from umbel.privacy.mechanisms import Gaussian
from umbel.protocol.release import LAPLACE, Clipping, NoisePer, ReleaseBy

SITE = 10
"""Clients of a site's sums; the policy's ``min-clients``, of which a malicious server asks no more than it must."""

NU, CHOICE_EPSILON, EPSILON = 3.0, 1.0, 8.0
"""Of the modes that are compared: the paper's noise multiplier, a private choice, and a guarantee at `DELTA`."""

PAPER, CHOICE, FORMAL, SUMS, FORMAL_SUMS = (
    f"paper's, ν = {NU:g}",
    f"paper's, choice-ε = {CHOICE_EPSILON:g}",
    f"formal, ε = {EPSILON:g}",
    f"site's sums, ν = {NU:g}",
    f"site's sums, ε = {EPSILON:g}",
)


NO_NOISE = "no noise"


@dataclass(frozen=True)
class Mode:
    """A mode of release.

    Attributes
    ----------
    name : str
    noise_multiplier : float
    choice_epsilon : float
        0 for an open choice.
    clipping : Clipping
    release_by : ReleaseBy
    mechanism : str
    noise_per : NoisePer
    releases : int
        Of each client that are attacked together.
    others_known : bool
        Of a site's sums, whether the server knows all clients but the one that it attacks.
    policy : mapping
        Entries of the site's policy.
    """

    name: str
    noise_multiplier: float
    choice_epsilon: float = 0.0
    clipping: Clipping = Clipping.UPDATE
    release_by: ReleaseBy = ReleaseBy.CLIENT
    mechanism: str = LAPLACE
    noise_per: NoisePer = NoisePer.VECTOR
    releases: int = 1
    others_known: bool = False
    policy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def by_site(self) -> bool:
        """Whether a site adds the noise, to sums."""
        return self.release_by is ReleaseBy.SITE

    @property
    def public(self) -> bool:
        """Whether the radius is public."""
        return self.clipping is Clipping.PUBLIC


def open_() -> Mode:
    """Return the mode that hides nothing, as a simulation allows it."""
    return Mode(NO_NOISE, 0.0, policy={"allow-unsanitised": True})


def compared(choosing: bool = False) -> tuple[Mode, ...]:
    """Return the modes that all attacks are tried on.

    The paper's, with noise on each layer as in its own attack (Sec. 5.3); the same with a private choice; a client's
    release that keeps (`EPSILON`, `DELTA`) for one participation, by Gaussian noise, which does as well as any for
    many parameters; a site's sums at the paper's noise multiplier; and a site's sums that keep as much.

    Parameters
    ----------
    choosing : bool
        Whether the server spends a part of a guarantee on a client's choice between two hypotheses, instead of all of
        it on the update.
    """
    task = Task(1, 2 if choosing else 1, 1, 1, Gaussian.name)
    formal = plan_for(task, EPSILON, DELTA, 1, CHOICE_EPSILON if choosing else 0).release.noise_multiplier
    open_policy = {"min-noise-multiplier": NU}
    paper = Mode(PAPER, NU, noise_per=NoisePer.LAYER, policy=open_policy)
    choice = Mode(
        CHOICE, NU, CHOICE_EPSILON, noise_per=NoisePer.LAYER, policy={**open_policy, "max-choice-epsilon": 1.0}
    )
    kept = {
        "clipping": "public",
        "mechanisms": Gaussian.name,
        "min-noise-multiplier": formal,
        "max-choice-epsilon": CHOICE_EPSILON,
        "budget": EPSILON,
        "delta": DELTA,
    }
    public, by_site = Clipping.PUBLIC, ReleaseBy.SITE
    sums = {"release": "site", "min-clients": SITE}
    return (
        paper,
        choice,
        Mode(FORMAL, formal, CHOICE_EPSILON, public, mechanism=Gaussian.name, policy=kept),
        Mode(SUMS, NU, CHOICE_EPSILON, public, by_site, policy={**open_policy, **sums}),
        Mode(FORMAL_SUMS, formal, CHOICE_EPSILON, public, by_site, Gaussian.name, policy={**kept, **sums}),
    )
