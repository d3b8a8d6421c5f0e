"""The page of one report, and the table of several."""

from __future__ import annotations

import math
from collections.abc import Sequence

from umbel.privacy.accounting.guarantee import amount
from umbel_lab.attacks.defences.claims import Figures
from umbel_lab.attacks.defences.laws import GAUSSIAN, VECTOR
from umbel_lab.attacks.defences.report import Report
from umbel_lab.output import Page, Section

_NONE = "none"


def page(report: Report, confidence: float) -> Page:
    """Return the page of a report."""
    faults = [_faults(report)] if report.faults else []
    return Page(report.target, [_figures(report, confidence), *faults, Section("", verdict(report))], [])


def table(reports: Sequence[Report]) -> Page:
    """Return one table of several reports."""
    columns = ("target", "claimed", "formula", "fitted", "proved", "rounds", "faults")
    rows = []
    for one in reports:
        last = one.figures[-1]
        figures = (_amount(last.claimed), _amount(last.formula), _amount(last.fitted), _proved(last))
        rows.append((one.target, *figures, f"{last.rounds}", ", ".join(fault.code for fault in one.faults) or _NONE))
    return Page("Audits", [Section("Claimed, and found", "", columns, rows)], [])


def verdict(report: Report) -> str:
    """Return one sentence on a report."""
    if report.refuted:
        return "REFUTED: counted guesses prove more than is claimed, beyond chance."
    if report.faults:
        count = len(report.faults)
        return f"{count} fault{'s' if count > 1 else ''}. Mend them before you trust the claim."
    if report.claim.epsilon is None:
        return "Nothing is claimed, so nothing is refuted. " + (
            "" if report.noisy else "Without noise, nothing is private."
        )
    return "No fault found, and the claim is not refuted. That does not prove it."


def _figures(report: Report, confidence: float) -> Section:
    claim = report.claim
    columns = ("epsilon", "claimed", "formula", "fitted", "proved", "provable at most")
    rows = [
        (f"{one.rounds} round{'s' if one.rounds > 1 else ''}", _amount(one.claimed), _amount(one.formula), _fitted(one),
         _proved(one), f"{one.provable:.3g}")
        for one in report.figures
    ]  # fmt: skip
    whose = "row of a batch" if report.rows else "client"
    limit = f"norm {claim.clip_norm:g}" if claim.clip_norm else f"values up to {claim.box:g}" if claim.box else "norm 1"
    told = [
        f"{report.kind}, {report.package}.",
        f"Between any two updates of a {whose}, clipped to {limit}, at delta {claim.delta:g}."
        if claim.clip_norm or claim.box
        else f"Between updates of a {whose} of norm 1, at delta {claim.delta:g}.",
    ]
    if not (claim.clip_norm or claim.box):
        told.append("No clip norm is told; give --clip-norm.")
    if claim.epsilon is None:
        told.append("No epsilon is claimed; give --claim-epsilon to have it tested.")
    if report.trusted:
        told.append("Clients are taken to clip; name their Mod with --mod to audit both.")
    if report.accounted is not None:
        told.append(f"For a model of the given size, its own account says {amount(report.accounted)} a round.")
    told.append(_law(report))
    told.append(f"Proved: by counted guesses, at a confidence of {confidence:.4g}.")
    return Section(report.target, " ".join(told), columns, rows)


def _law(report: Report) -> str:
    if not report.noisy:
        return "There is no noise, so the formula is infinite."
    if report.law == GAUSSIAN and not report.claim.delta:
        return "Gaussian noise has no epsilon at delta 0; give --claim-delta."
    if report.law == VECTOR:
        return (
            "The norms of the noise passed a test for a Laplace law of vectors. The formula uses it; nothing is fitted."
        )
    if not report.law:
        return "The noise is of no law that passed a test, so nothing is fitted."
    return f"Fitted: the noise passed a test for a {report.law} law, which does not see its tails."


def _faults(report: Report) -> Section:
    rows = [(fault.code, fault.text, fault.mend) for fault in report.faults]
    return Section("Faults", "", ("fault", "seen", "how to mend"), rows)


def _amount(epsilon: float | None) -> str:
    return _NONE if epsilon is None else "infinite" if epsilon == math.inf else amount(epsilon)


def _fitted(one: Figures) -> str:
    if one.fitted is None or one.low is None or one.high is None:
        return _NONE
    return f"{amount(one.fitted)} ({amount(one.low)} to {amount(one.high)})"


def _proved(one: Figures) -> str:
    return f"{one.proved.shown:.3g}"
