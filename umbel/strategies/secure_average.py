"""Averages of secure sums: the server reads the sums over all sites, with noise once, and no site's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from flwr.app import MessageType
from pydantic import Field

from umbel.models.model import Model
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import DISCRETE_GAUSSIAN, ReleaseBy
from umbel.protocol.releases import Sums
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import EvaluationSpec
from umbel.strategies.base import Outcome
from umbel.strategies.differences import add_sums
from umbel.strategies.site_average import Explore, SiteAverage


@dataclass(frozen=True)
class Parties(Explore):
    r"""Options of `SecureAverage`.

    Attributes
    ----------
    colluding : int
        Number of sites that may give all their secrets to the server; the noise holds without theirs.
    least : int
        Minimum number of sites in a sum.
    report_noise : float
        Above 0, validation clients' loss and metric are in the sum, too. It is the \nu of their noise, in diagonals of
        the square in which a report lies. At 0 they leave each site as its policy says.
    report_bound : float
        Loss and metric in a sum are clipped to lie between 0 and this.
    moments : bool
        Whether the sum also has the second moments of updates, from which the server estimates how clients differ
        (`umbel.models.prior`). They cost no privacy, but counts have 1.4 times the noise.
    """

    colluding: Annotated[int, Field(ge=0)] = 0
    least: Annotated[int, Field(ge=2)] = 3
    report_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    report_bound: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    moments: bool = False


class SecureAverage(SiteAverage):
    """Like `SiteAverage`, but noise is added once for all sites, and the server reads the sum over all of them.

    Each site adds a share of the noise, and masks that vanish in the sum of all sites alone
    (`umbel.privacy.channels.secure`). So there is as much less noise as there are sites, in variance.
    """

    Options: ClassVar[type] = Parties
    release_by: ClassVar[ReleaseBy] = ReleaseBy.SECURE
    merge = True

    def check(self, run: RunConfig, model: Model) -> None:
        """Refuse runs whose numbers cannot be added securely."""
        super().check(run, model)
        if run.mechanism != DISCRETE_GAUSSIAN:
            text = f'strategy {run.strategy!r} works only with mechanism = "{DISCRETE_GAUSSIAN}"'
            raise ConfigError(f'{text}, not "{run.mechanism}"', code="config.mechanism")
        if self.options.colluding > self.options.least - 2:
            text = f"with colluding={self.options.colluding}, at least {self.options.colluding + 2} sites are needed"
            raise ConfigError(f"{text}; set least", code="config.least")
        if self.reports.summed:
            for what, misfits, instead in (
                ("random initial sets, which clients score one by one", run.restarts > 1, "restarts = 1"),
                ("medians", run.validation.by != "mean", 'validation = "by=mean"'),
                ("runs without noise", not run.noise_multiplier > 0, "noise-multiplier, or leave report-noise out"),
            ):
                if misfits:
                    text = f"report-noise adds up losses, which does not work with {what}: set {instead}"
                    raise ConfigError(text, code="config.report-noise")

    @property
    def reports(self) -> EvaluationSpec:
        """How validation clients report."""
        noise, bound = self.options.report_noise, self.options.report_bound
        return EvaluationSpec(report_noise_multiplier=noise, report_bound=bound)

    @property
    def validates_alone(self) -> bool:
        """Not if reports are in the sum: a site takes part in one sum a round."""
        return not self.reports.summed

    def decisions(self, round: int) -> dict[str, Any]:
        """Return what the strategy decides of a task."""
        return super().decisions(round) | {"moments": self.options.moments}

    @property
    def report_decisions(self) -> dict[str, Any]:
        """How validation clients report, if in the sum."""
        noise, bound = self.reports.report_noise_multiplier, self.reports.report_bound
        return {"report_noise_multiplier": noise, "report_bound": bound} if self.reports.summed else {}

    @property
    def channel_options(self) -> dict[str, Any]:
        """Options of the sums."""
        return {"colluding": self.options.colluding, "least": self.options.least, "reports": self.reports}

    def learn_sums(self, round: int, sums: Sums) -> Outcome:
        """Move each hypothesis, and learn from second moments how clients differ."""
        if sums.moments is not None and len(sums.clients):
            add_sums(self.state, sums, self.asked[MessageType.TRAIN].task)
        return super().learn_sums(round, sums)
