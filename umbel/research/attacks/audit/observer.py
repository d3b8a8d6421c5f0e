"""The audit as an observer: at a run's end, its own mechanism is audited in this process.

``observers = "umbel.research.attacks.audit:Audit canaries=20000"``.

The report gets what is claimed beside what canaries show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from logging import WARNING
from typing import Annotated

from pydantic import Field

from umbel.privacy.accounting.guarantee import amount, gap
from umbel.protocol.errors import UmbelError
from umbel.protocol.flower import log
from umbel.research.attacks.audit.bounds import most
from umbel.research.attacks.audit.findings import CONFIDENCE, Finding, Verdict, audit, settings_of
from umbel.server.observer import Observer, Run, Section

_TITLE = "Claimed beside audited"


@dataclass(frozen=True)
class AuditOptions:
    """How many canaries, and how many of the busiest client's participations are audited together at most."""

    canaries: Annotated[int, Field(ge=100)] = 20_000
    participations: Annotated[int, Field(ge=1)] = 10


class Audit(Observer):
    """Audits what the run asked of its clients: parameters, mechanism and its multiplier, choice.

    The canaries pass the gate of the umbel that the server runs from, in the server's process. They show what that
    gate does; a site's own gate they do not reach.
    """

    Options = AuditOptions
    options: AuditOptions

    def __init__(self, options: AuditOptions | None = None) -> None:
        super().__init__(options)
        self.findings: list[Finding] = []
        self.reason = ""

    def at_end(self, run: Run) -> None:
        """Audit, if anything is claimed."""
        release = run.setup.release
        if why := gap(release):
            self.reason = f"Nothing is claimed, since {why}. So there is nothing to audit."
            return
        # The price does not depend on the clip norm; the gate may.
        release = replace(release, radius=run.setup.config.schedule.at(1))
        most_often = max((entry.max_participations for entry in run.state.history), default=1)
        times = max(1, min(most_often, self.options.participations))
        try:
            for setting in settings_of(release, times):
                self.findings.append(audit(setting, self.options.canaries, run.setup.config.seed))
        except UmbelError as error:
            # The run is over and good; what it learnt must not be lost for this.
            log(WARNING, "the audit could not be made: %s", error)
            self.findings, self.reason = [], f"The audit could not be made: {error.text}."
        for finding in self.findings:
            if finding.verdict is Verdict.EXCEEDS:
                log(WARNING, "the audit of this run's mechanism (%s) exceeds what is claimed", finding.setting.name)

    def section(self) -> Section | None:
        """Return what is claimed, and what the canaries show."""
        return section_of(self.findings, self.reason)


def section_of(findings: Sequence[Finding], reason: str) -> Section | None:
    """Return the words for the report; None for a run that has not been audited."""
    if reason:
        return Section(_TITLE, (reason,))
    if not findings:
        return None
    return Section(_TITLE, (_lead(findings), *map(_sentence, findings)))


def _lead(findings: Sequence[Finding]) -> str:
    exceeding = sum(finding.verdict is Verdict.EXCEEDS for finding in findings)
    outcome = (
        f"{exceeding} of {len(findings)} EXCEED what is claimed: gate, mechanism or account have a fault."
        if exceeding
        else "None exceeds what is claimed, beyond chance."
    )
    return (
        "Canary clients with one of two opposite data sets went through the gate, with this run's mechanism, and an "
        f"auditor guessed from what left which data set each has. {outcome} What is shown is a lower bound on "
        f"epsilon, each at a confidence of {CONFIDENCE:.0%}; a low one does not prove that the claim holds. The gate "
        "is that of the machine that ran the server."
    )


def _sentence(finding: Finding) -> str:
    pure, other = finding.pure, finding.at_delta
    limit = most(other.guesses)
    beyond = f" So many guesses cannot show more than {limit:.3g}." if other.claimed > limit else ""
    name = finding.setting.name
    return (
        f"{name[:1].upper()}{name[1:]}: claimed epsilon {amount(other.claimed)} at delta "
        f"{other.delta:g}, shown {other.shown:.3g}; claimed pure {amount(pure.claimed)}, shown {pure.shown:.3g}. "
        f"{other.right:,} of {other.guesses:,} guesses among {finding.canaries:,} canaries were right: "
        f"{finding.verdict}.{beyond}"
    )
