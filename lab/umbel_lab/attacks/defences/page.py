"""The report of an audit as a page: figures of each kind, faults and how to mend them, and a sentence."""

from __future__ import annotations

import math

from umbel.privacy.accounting.guarantee import amount
from umbel_lab.attacks.defences.laws import GAUSSIAN, VECTOR
from umbel_lab.attacks.defences.report import Report
from umbel_lab.output import Columns, Page, Section

_FIGURES: Columns = {
    "epsilon": lambda row: f"{row['rounds']} round{'s' if row['rounds'] > 1 else ''}",
    "claimed": lambda row: _amount(row["claimed"]),
    "formula": lambda row: _amount(row["formula"]),
    "fitted": lambda row: _interval(row["fitted"], row["low"], row["high"]),
    "proved": lambda row: f"{row['proved'].shown:.3g}",
    "provable at most": "provable:.3g",
}
_FAULTS: Columns = {"fault": "code", "seen": "text", "how to mend": "mend"}


def page(report: Report, confidence: float) -> Page:
    """Return the page of a report."""
    sections = [Section.of(report.target, " ".join(_notes(report, confidence)), _FIGURES, map(vars, report.figures))]
    if report.faults:
        faults = [{**vars(fault), "mend": fault.mend} for fault in report.faults]
        sections.append(Section.of("Faults", "", _FAULTS, faults))
    return Page(report.target, [*sections, Section("", verdict(report))], [])


def verdict(report: Report) -> str:
    """Return one sentence on a report."""
    if report.refuted:
        return "REFUTED: counted guesses prove more than is claimed, beyond chance."
    if report.faults:
        count = len(report.faults)
        return f"{count} fault{'s' if count > 1 else ''}. Mend them before you trust the claim."
    if report.claim.epsilon is None:
        bare = "" if report.noisy else " Without noise, nothing is private."
        return f"Nothing is claimed, so nothing is refuted.{bare}"
    return "No fault found, and the claim is not refuted. That does not prove it."


def _notes(report: Report, confidence: float) -> list[str]:
    """Return the sentences above the figures."""
    claim, whose = report.claim, "row of a batch" if report.rows else "client"
    limit = f"norm {claim.clip_norm:g}" if claim.clip_norm else f"values up to {claim.box:g}" if claim.box else ""
    notes = {
        f"{report.kind}, {report.package}.": True,
        f"Between any two updates of a {whose}, clipped to {limit}, at delta {claim.delta:g}.": limit,
        f"Between updates of a {whose} of norm 1, at delta {claim.delta:g}.": not limit,
        "No clip norm is told; give --clip-norm.": not limit,
        "No epsilon is claimed; give --claim-epsilon to have it tested.": claim.epsilon is None,
        "Clients are taken to clip; name their Mod with --mod to audit both.": report.trusted,
        f"For a model of the given size, its own account says {_amount(report.accounted)} a round.": report.accounted
        is not None,
        _law(report): True,
        f"Proved: by counted guesses, at a confidence of {confidence:.4g}.": True,
    }
    return [note for note, applies in notes.items() if applies]


def _law(report: Report) -> str:
    if not report.noisy:
        return "There is no noise, so the formula is infinite."
    if report.law == GAUSSIAN and not report.claim.delta:
        return "Gaussian noise has no epsilon at delta 0; give --claim-delta."
    if report.law == VECTOR:
        norms = "The norms of the noise passed a test for a Laplace law of vectors."
        return f"{norms} The formula uses it; nothing is fitted."
    if not report.law:
        return "The noise is of no law that passed a test, so nothing is fitted."
    return f"Fitted: the noise passed a test for a {report.law} law, which does not see its tails."


def _amount(epsilon: float | None) -> str:
    return "none" if epsilon is None else "infinite" if epsilon == math.inf else amount(epsilon)


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    return "none" if value is None else f"{_amount(value)} ({_amount(low)} to {_amount(high)})"
