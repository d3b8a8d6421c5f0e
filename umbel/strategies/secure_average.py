"""Averages of secure sums: the server reads the sums over all sites, with noise once, and no site's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from pydantic import Field

from umbel.models.model import Model
from umbel.nodes.differences import look_at_sums
from umbel.nodes.secure import Joint
from umbel.privacy.mechanisms.discrete_gaussian import DiscreteGaussian
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec
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

    Each site adds a share of the noise, and masks that vanish in the sum of all sites alone (`umbel.privacy.secure`).
    So there is as much less noise as there are sites, in variance.
    """

    Options: ClassVar[type] = Parties
    release_by: ClassVar[ReleaseBy] = ReleaseBy.SECURE
    merge = True
    _joint: Joint | None = None
    """The secure sum of the last round."""

    def check(self, run: RunConfig, model: Model) -> None:
        """Refuse runs whose numbers cannot be added securely."""
        super().check(run, model)
        if run.mechanism != DiscreteGaussian.name:
            text = f'strategy {run.strategy!r} works only with mechanism = "{DiscreteGaussian.name}"'
            raise ConfigError(f'{text}, not "{run.mechanism}"', code="config.mechanism")
        if self.options.colluding > self.options.least - 2:
            text = f"with colluding={self.options.colluding}, at least {self.options.colluding + 2} sites are needed"
            raise ConfigError(f"{text}; set least", code="config.least")
        if self.reports.summed:
            for what, wrong, instead in (
                ("random initial sets, which clients score one by one", run.restarts > 1, "restarts = 1"),
                ("medians", run.validation.by != "mean", 'validation = "by=mean"'),
                ("runs without noise", not run.noise_multiplier > 0, "noise-multiplier, or leave report-noise out"),
            ):
                if wrong:
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

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask a sample of the training clients to train, and their sites to add their updates together."""
        super().configure_train(server_round, arrays, config, grid)
        asked = self.asked[MessageType.TRAIN]
        self._joint = Joint(server_round, asked, reports=self.reports)
        self._joint.messages = self.nodes.together(self._joint, asked, self.options.colluding, self.options.least)
        return self._joint.messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask a sample of the validation clients to score the hypotheses, and perhaps their sites to add the losses."""
        if not self.reports.summed:
            return super().configure_evaluate(server_round, arrays, config, grid)
        noise, bound = self.reports.report_noise_multiplier, self.reports.report_bound
        task = replace(EvaluationSpec.of_config(config), report_noise_multiplier=noise, report_bound=bound)
        asked = self.nodes.ask_evaluation(server_round + 1, self.opened(arrays), task, grid)
        if not asked.messages:
            return []
        if self._joint is None or self._joint.round != server_round + 1:
            last = TrainingSpec() if self._joint is None else self._joint.training.task
            nobody = replace(asked, clients=asked.clients[:0], positions={}, task=last)
            self._joint = Joint(server_round + 1, nobody, reports=self.reports)
        self._joint.reporting = asked
        return self.nodes.together(self._joint, asked, self.options.colluding, self.options.least)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next hypotheses and the round's counts; it takes two more exchanges."""
        assert self._joint is not None
        found = self.nodes.secure_sum(self._joint, replies).sums
        if found.moments is not None and len(found.clients):
            look_at_sums(self.state, found, self._joint.training.task)
        return self.conclude(self.learn_sums(server_round, found))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the mean of the validation clients' scores; None without valid replies."""
        if not self.reports.summed:
            return super().aggregate_evaluate(server_round, replies)
        scores = None if self._joint is None else self.nodes.secure_sum(self._joint, replies).scores
        return None if scores is None else MetricRecord(asdict(scores))
