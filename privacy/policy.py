"""What a site allows. The site's policy wins over the server's demand."""

from __future__ import annotations

from dataclasses import dataclass

from privacy.site import Site
from protocol import Demand


class Refused(Exception):
    """The site refuses a demand; the text is for the node's own log."""


@dataclass(frozen=True)
class Policy:
    """The limits a site sets.

    Attributes
    ----------
    least_noise_multiplier : float
        The lowest nu it accepts.
    radius_floor : float
        The least radius within which an update is hidden, whatever the server asks.
    allow_unsanitised : bool
        Whether nu = 0, and the disclosure of the chosen hypothesis, are accepted at all.
    """

    least_noise_multiplier: float
    radius_floor: float
    allow_unsanitised: bool

    @classmethod
    def of(cls, site: Site) -> Policy:
        """Return the policy of a site: a simulated node follows the experiment, others are strict."""
        if site.simulated:
            return cls(least_noise_multiplier=0.0, radius_floor=0.0, allow_unsanitised=True)
        return cls(least_noise_multiplier=1.0, radius_floor=0.01, allow_unsanitised=False)

    def check(self, demand: Demand) -> None:
        """Raise `Refused` when the demand goes below the policy."""
        if demand.noise_multiplier == 0 and not self.allow_unsanitised:
            raise Refused("the server asks for an unsanitised release (noise multiplier 0); this site allows none")
        if demand.noise_multiplier < self.least_noise_multiplier:
            raise Refused(
                f"the server asks for noise multiplier {demand.noise_multiplier}; "
                f"this site accepts no less than {self.least_noise_multiplier}"
            )
        if demand.disclose_choice and not self.allow_unsanitised:
            raise Refused("the server asks which hypothesis each client chose; this site does not tell")
