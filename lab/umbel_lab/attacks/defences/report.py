"""The audit of one target: its figures and faults, as one report."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from umbel.protocol.errors import ConfigError, NotApplicableError
from umbel_lab.attacks.audit.bounds import most
from umbel_lab.attacks.audit.findings import CONFIDENCE, Verdict
from umbel_lab.attacks.defences import laws
from umbel_lab.attacks.defences.claims import Claim, Figures, claim_of, formula
from umbel_lab.attacks.defences.faults import Fault
from umbel_lab.attacks.defences.probes import LEVEL, OPENING, PROBES, N, Subject
from umbel_lab.attacks.defences.process import LAYOUT, TIMEOUT, Target, Worker
from umbel_lab.attacks.defences.trials import BEYOND, bound, directions, draw, judged

CANARIES, ROUNDS = 2000, 3
"""Canaries along each line; rounds of Flower's own template of an app."""

_LEAST = 200  # canaries


@dataclass(frozen=True)
class Options:
    """How a target is audited.

    Attributes
    ----------
    rounds : int
        A canary's releases in the second audit; in the first it makes one.
    canaries : int
        Canaries along each of two lines.
    clients : int
        Number of clients in all; 0 if not known.
    parameters : int
        Number of a model's parameters, for which the target's own account is also read; 0 for none.
    epsilon, delta, clip_norm : float, optional
        The claim, in place of the target's attributes.
    mod : Target, optional
        The Mod that the clients of a strategy wrapper run.
    python : str
        The interpreter of the target's environment.
    confidence : float
        Of proved and fitted figures.
    seed : int
        Of the audit's draws.
    timeout : float
        Maximum seconds for an answer of the target, which may be for all canaries at once.
    """

    rounds: int = ROUNDS
    canaries: int = CANARIES
    clients: int = 0
    parameters: int = 0
    epsilon: float | None = None
    delta: float | None = None
    clip_norm: float | None = None
    mod: Target | None = None
    python: str = sys.executable
    confidence: float = CONFIDENCE
    seed: int = 0
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        if self.rounds < 1 or not 0 < self.confidence < 1:
            text = (
                f"rounds must be at least 1 and confidence between 0 and 1, got {self.rounds} and {self.confidence:g}"
            )
            raise ConfigError(text, code="config.out-of-range")
        if not self.timeout > 0:
            raise ConfigError(f"timeout must be above 0, got {self.timeout:g}", code="config.out-of-range")
        if self.canaries < _LEAST:
            text = f"an audit needs at least {_LEAST} canaries, got {self.canaries}"
            raise ConfigError(text, code="config.too-few-canaries")


@dataclass(frozen=True)
class Report:
    """The findings of an audit.

    Attributes
    ----------
    target, package, kind : str
        The import path, the package with its version, and the kind of target.
    claim : Claim
        The claim about one round.
    law : str
        The law of the noise that passed its test; empty if there is none.
    noisy : bool
        Whether there is any noise.
    rows : bool
        Whether the target protects a row of a batch.
    trusted : bool
        Whether clients are taken to keep the clip norm, since the target does not clip.
    accounted : float, optional
        The epsilon of one round in the target's own account, for the model of `Options.parameters`.
    figures : tuple of Figures
        For one round, and for several.
    faults : tuple of Fault
        All that were found.
    """

    target: str
    package: str
    kind: str
    claim: Claim
    law: str
    noisy: bool
    rows: bool
    trusted: bool
    accounted: float | None
    figures: tuple[Figures, ...]
    faults: tuple[Fault, ...]

    @property
    def refuted(self) -> bool:
        """Whether a proved figure exceeds what is claimed beyond chance."""
        return any(one.proved.verdict is Verdict.EXCEEDS for one in self.figures)

    @property
    def failed(self) -> bool:
        """Whether there is a fault, or a claim is refuted."""
        return bool(self.faults) or self.refuted

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON has it; an infinite figure is the text "inf"."""
        found: dict[str, Any] = _finite(asdict(self))
        for one, fault in zip(found["faults"], self.faults, strict=True):
            one["mend"] = fault.mend
        return {**found, "refuted": self.refuted, "failed": self.failed}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return "inf" if value == math.inf else value


def audit(target: Target, options: Options | None = None) -> Report:
    """Run a target in its own process, and return what is found.

    Raises
    ------
    ConfigError
        If the claim is out of range.
    NotApplicableError
        If the target cannot be run, or sends nothing.
    """
    options = options or Options()
    with ExitStack() as stack:
        worker, again = (
            stack.enter_context(Worker(target, options.python, options.mod, options.clip_norm, options.timeout))
            for _ in range(2)
        )
        facts = worker.open()
        again.open()
        claim = claim_of(facts, options.epsilon, options.delta, options.clip_norm)
        first = claim.unit * OPENING[None]
        opening, reopening = (one.run(first, [0] * 4, rounds=2) for one in (worker, again))
        if opening.gone[:, 0].all():
            raise NotApplicableError(f"{target} sends nothing: {opening.errors[0]}", code="attack.target-silent")
        if len(opening.lacking) == len(LAYOUT):
            text = f"{target} sends none of the arrays that it received ({', '.join(opening.lacking)})"
            raise NotApplicableError(f"{text}; keep their names", code="attack.target-renames")
        length = claim.unit * (BEYOND if facts["clips"] else 1.0)
        one, all_ = (
            draw(worker, unit, name, length, options.canaries, options.rounds, options.seed + at)
            for at, (name, unit) in enumerate(directions(N).items())
        )
        spent = {rounds: worker.run(first, [0], rounds=rounds).spent for rounds in {1, options.rounds}}
        accounted = _accounted(worker, options.parameters) if options.parameters else None
        if options.epsilon is None and (account := spent[1]) is not None:
            claim = replace(claim, epsilon=account[0], delta=account[1])
        subject = Subject(
            worker, again, target, claim, facts, (one, all_), opening, reopening, options.canaries, options.clients,
            options.seed,
        )  # fmt: skip
        fits = [laws.fit(*line.first, 1 - options.confidence) for line in subject.lines]
        figures = tuple(
            _figures(subject, fits, rounds, _claimed(claim, options, spent[rounds]), options)
            for rounds in sorted({1, options.rounds})
        )
        faults = [
            *_of_figures(subject, figures, spent[options.rounds]),
            *(f for probe in PROBES for f in probe(subject)),
        ]
    law = laws.VECTOR if subject.vector else next((one.law for one in fits if one), "")
    return Report(
        str(target), facts["package"], facts["kind"], claim, law, subject.noisy,
        facts["rows"], not facts["clips"], accounted, figures, tuple(faults),
    )  # fmt: skip


def _accounted(worker: Worker, parameters: int) -> float | None:
    """Return the epsilon of one release of a large model in the target's own account; None if it has none."""
    update = np.full((1, parameters), parameters**-0.5)
    spent = worker.run(update, [0], layout=(("w", (parameters,), "<f4"),)).spent
    return spent[0] if spent else None


def _claimed(claim: Claim, options: Options, spent: tuple[float, float] | None) -> float | None:
    """Return the epsilon that is claimed after some rounds: by the user, the target's account, or its attributes."""
    return spent[0] if spent is not None and options.epsilon is None else claim.epsilon


def _figures(
    subject: Subject, fits: list[laws.Fit | None], rounds: int, claimed: float | None, options: Options
) -> Figures:
    claim, released = subject.claim, subject.released(rounds)
    limit = math.inf if claimed is None else claimed
    # Two lines are looked at: each at half the level.
    confidence = 1 - (1 - options.confidence) / len(subject.lines)
    bounds = [
        bound(line.positions[:, :rounds].sum(axis=1), line.coins, claim.delta, limit, confidence)
        for line in subject.lines
    ]
    fitted: tuple[float | None, float | None, float | None] = (None, None, None)
    if found := _best(fits, claim.delta):
        value, low, high = (found.epsilon(claim.delta, released, one) for one in (found.apart, found.low, found.high))
        fitted = value, low, high
    analytic: float | None = math.inf
    if subject.noisy:
        known = subject.law(1 - options.confidence)
        reach = 2 * subject.claim.unit * subject.share
        if known:
            analytic = formula(claim, known.law, _stated(subject) or known.least, reach, N, released)
        elif subject.vector:
            scale = laws.vector_scale(subject.alike, 1 - options.confidence)
            analytic = formula(claim, laws.VECTOR, scale, reach, N, released)
        else:
            analytic = None
    return Figures(
        rounds, claimed, analytic, *fitted, max(bounds, key=lambda one: one.shown),
        most(judged(options.canaries), confidence),
    )  # fmt: skip


def _best(fits: list[laws.Fit | None], delta: float) -> laws.Fit | None:
    """Return the fit with the largest epsilon; a Gaussian law has none at a delta of 0, which only its tails decide."""
    some = [one for one in fits if one and (delta or one.law == laws.LAPLACE)]
    return max(some, key=lambda one: one.epsilon(delta), default=None)


def _stated(subject: Subject) -> float | None:
    """Return the deviation that the target's attributes tell, if measured noise agrees."""
    told = subject.facts["deviation"]
    return None if not told or _disagrees(subject, told) else float(told)


def _disagrees(subject: Subject, told: float) -> bool:
    """Return whether measured noise cannot have the told deviation."""
    found = subject.law(LEVEL)
    return found is not None and found.law == laws.GAUSSIAN and not found.least <= told <= found.greatest


def _of_figures(subject: Subject, figures: tuple[Figures, ...], spent: tuple[float, float] | None) -> Iterator[Fault]:
    """Yield the faults that show in figures: too little noise for one round, or for several."""
    told = subject.facts["deviation"]
    if told is not None and subject.noisy and _disagrees(subject, told):
        text = f"attributes promise a deviation of {told:.3g}; measured: {subject.deviation:.3g}"
        yield Fault("other-deviation", text)
    if _claimed_pure(subject):
        text = f"epsilon {subject.claim.epsilon:.3g} is claimed at delta 0; the noise is gaussian, which has none there"
        yield Fault("no-pure-epsilon", text)
    little = False
    for one in figures:
        if one.claimed is None or not subject.noisy:
            continue
        least, refuted = _least(subject, one.rounds), one.proved.verdict is Verdict.EXCEEDS
        if least <= one.claimed and not refuted:
            continue
        shown = f"proved {one.proved.shown:.3g}" if refuted else f"it is at least {least:.3g} by its measured noise"
        text = f"epsilon {one.claimed:.3g} is claimed at delta {subject.claim.delta:g}; {shown}"
        if one.rounds == 1 or spent is not None:
            if not little:
                yield Fault("too-little-noise", f"{text}, in {_rounds(one.rounds)}")
            little = True
        else:
            yield Fault("no-composition", f"{text}, in {_rounds(one.rounds)}, which it does not count")


def _claimed_pure(subject: Subject) -> bool:
    """Return whether a pure epsilon is claimed for Gaussian noise; a vector's noise can look so in each value."""
    found, claim = subject.law(LEVEL), subject.claim
    gaussian = found is not None and found.law == laws.GAUSSIAN
    return gaussian and claim.epsilon is not None and claim.delta == 0 and laws.joint(subject.alike) == laws.GAUSSIAN


def _least(subject: Subject, rounds: int) -> float:
    """Return what epsilon is at least, with noise of the tested law, but for one in 1/`LEVEL`."""
    claim, released = subject.claim, subject.released(rounds)
    fits = [laws.fit(*line.first, LEVEL) for line in subject.lines]
    best, known = _best(fits, claim.delta), subject.law(LEVEL)
    least = best.epsilon(claim.delta, released, best.low) if best else 0.0
    # With Laplace noise and a Euclidean clip norm, the formula is not what some two updates reach.
    if known and (claim.delta if known.law == laws.GAUSSIAN else claim.clip_norm is None):
        # No further apart than the clip norm has it, nor than releases were.
        reach = 2 * min(claim.unit * subject.share, subject.longest_step)
        least = max(least, formula(claim, known.law, known.greatest, reach, N, released))
    return least


def _rounds(rounds: int) -> str:
    return "one round" if rounds == 1 else f"{rounds} rounds"
