"""Averages of secure sums: the server reads the sums over all sites, with noise once, and no site's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from pydantic import Field

from umbel.models.model import Model
from umbel.privacy.mechanisms.discrete_gaussian import DiscreteGaussian
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.strategies.base import Outcome
from umbel.strategies.site_average import Explore, SiteAverage


@dataclass(frozen=True)
class Parties(Explore):
    """Options of `SecureAverage`.

    Attributes
    ----------
    colluding : int
        Number of sites that may give all their secrets to the server; the noise holds without theirs.
    least : int
        Minimum number of sites in a sum.
    """

    colluding: Annotated[int, Field(ge=0)] = 0
    least: Annotated[int, Field(ge=2)] = 3


class SecureAverage(SiteAverage):
    """Like `SiteAverage`, but noise is added once for all sites, and the server reads the sum over all of them.

    Each site adds a share of the noise, and masks that vanish in the sum of all sites alone (`umbel.privacy.secure`).
    So there is as much less noise as there are sites, in variance.
    """

    Options: ClassVar[type] = Parties
    release_by: ClassVar[ReleaseBy] = ReleaseBy.SECURE

    def check(self, run: RunConfig, model: Model) -> None:
        """Refuse runs whose numbers cannot be added securely."""
        super().check(run, model)
        if run.mechanism != DiscreteGaussian.name:
            text = f'strategy {run.strategy!r} works only with mechanism = "{DiscreteGaussian.name}"'
            raise ConfigError(f'{text}, not "{run.mechanism}"', code="config.mechanism")
        if self.options.colluding > self.options.least - 2:
            text = f"with colluding={self.options.colluding}, at least {self.options.colluding + 2} sites are needed"
            raise ConfigError(f"{text}; set least", code="config.least")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask a sample of the training clients to train, and their sites to add their updates together."""
        messages = super().configure_train(server_round, arrays, config, grid)
        return self.fleet.together(server_round, messages, self.options.colluding, self.options.least)

    def train(self, round: int, replies: Iterable[Message]) -> Outcome:
        """Return the outcome of a round from the replies to its training messages; it takes two more exchanges."""
        return self.learn_sums(round, self.fleet.secure_sum(round, replies))
